"""What a camera is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..types import Depth, Frame, Intrinsics
from ..wire import decode_depth, decode_image

Image = npt.NDArray[np.uint8]
DepthImage = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class CapturedImage:
    """One image as a camera gave it. `capture_ns` is Unix time, read when the image was taken.

    A recorded `image` may be the Frame that it was, and a recorded `depth` a Depth, both still encoded. Depth as
    an array is registered to the image and in units of `depth_scale_m` metres, 0 unknown.
    `times` are the device's own stamps.
    """

    image: Image | Frame  # BGR [h, w, 3]
    capture_ns: int
    depth: DepthImage | Depth | None = None  # [h, w]
    depth_scale_m: float = 0.001
    intrinsics: Intrinsics | None = None
    times: Mapping[str, int | float] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        if isinstance(self.image, Frame):
            return self.image.height, self.image.width
        return self.image.shape[0], self.image.shape[1]

    def pixels(self) -> Image:
        """The image as BGR [h, w, 3]; WireError where it cannot be decoded."""
        return decode_image(self.image) if isinstance(self.image, Frame) else self.image

    def depth_pixels(self) -> DepthImage | None:
        """The depth as an array; WireError where it cannot be decoded."""
        return decode_depth(self.depth) if isinstance(self.depth, Depth) else self.depth


class CameraSource(Protocol):
    """Iterates images at its own pace until it ends, is closed or its stop event is set."""

    @property
    def name(self) -> str:
        """The uri it was opened by."""

    def __iter__(self) -> Iterator[CapturedImage]: ...

    def close(self) -> None:
        """Let go of the device or file; more than once does no harm."""
