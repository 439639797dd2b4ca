"""The interface of a camera source, and the images that it gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..types import Depth, DepthImage, Frame, Image, Intrinsics
from ..wire import decode_depth, decode_image


@dataclass(frozen=True, slots=True)
class CapturedImage:
    """One captured image. `capture_ns` is the Unix time of the capture.

    A recorded `image` may be its Frame and a recorded `depth` its Depth, both still encoded. Depth as an array is
    registered to the image, in units of `depth_scale_m` metres; 0 is unknown. `times` are the device's own stamps.
    `camera` is the name to publish it under, of a source with several cameras; "" for that of the settings.
    """

    image: Image | Frame  # BGR [h, w, 3]
    capture_ns: int
    depth: DepthImage | Depth | None = None  # [h, w]
    depth_scale_m: float = 0.001
    intrinsics: Intrinsics | None = None
    times: Mapping[str, int | float] = field(default_factory=dict)
    camera: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        if isinstance(self.image, Frame):
            return self.image.height, self.image.width
        return self.image.shape[0], self.image.shape[1]

    def pixels(self) -> Image:
        """Return the image as BGR [h, w, 3]; WireError if it cannot be decoded."""
        return decode_image(self.image) if isinstance(self.image, Frame) else self.image

    def depth_pixels(self) -> DepthImage | None:
        """Return the depth as an array [h, w]; WireError if it cannot be decoded."""
        return decode_depth(self.depth) if isinstance(self.depth, Depth) else self.depth


class CameraSource(Protocol):
    """Iterates images at its own pace until it ends, is closed or its stop event is set."""

    @property
    def name(self) -> str:
        """The uri that opened it."""

    @property
    def is_finite(self) -> bool:
        """True if the source ends by itself."""

    @property
    def lost(self) -> int:
        """Images that were lost before they were given, as far as the source knows."""

    def __iter__(self) -> Iterator[CapturedImage]: ...

    def close(self) -> None:
        """Release the device or file. Idempotent."""
