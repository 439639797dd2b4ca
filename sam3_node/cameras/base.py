"""What a camera is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..types import Intrinsics

Image = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CapturedImage:
    """One image as a camera gave it. `capture_ns` is Unix time, read when the image was taken.

    `depth`, where there is one, is registered to the image and in units of `depth_scale_m` metres, 0 unknown.
    `times` are the device's own stamps.
    """

    image: Image  # BGR [h, w, 3]
    capture_ns: int
    depth: npt.NDArray[np.uint16] | None = None  # [h, w]
    depth_scale_m: float = 0.001
    intrinsics: Intrinsics | None = None
    times: Mapping[str, int | float] = field(default_factory=dict)


class CameraSource(Protocol):
    """Iterates images at its own pace until it ends, is closed or its stop event is set."""

    @property
    def name(self) -> str:
        """The uri it was opened by."""

    def __iter__(self) -> Iterator[CapturedImage]: ...

    def close(self) -> None:
        """Let go of the device or file; more than once does no harm."""
