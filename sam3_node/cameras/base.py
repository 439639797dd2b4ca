"""What a camera is, and the one door to all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import CameraError
from ..settings import CameraSettings
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


def open_camera(uri: str, settings: CameraSettings, stop: threading.Event | None = None) -> CameraSource:
    """Open scene:shapes, video:FILE or webcam:INDEX with the rate and looping that `settings` asks for.

    Setting `stop` ends the iteration, a wait for the next image included. Raises CameraError for an unknown
    scheme, and for a device or file that cannot be opened or read.
    """
    # each source is imported by its own scheme only, so that its dependencies are its own affair
    scheme, separator, address = uri.partition(":")
    stop = stop or threading.Event()
    if separator and scheme == "scene":
        from .scene import SceneSource

        return SceneSource(uri, settings.fps, settings.loop, stop)
    if separator and scheme == "video":
        from .video import VideoSource

        return VideoSource(address, settings.fps, settings.loop, stop)
    if separator and scheme == "webcam":
        from .webcam import open_webcam

        return open_webcam(address, settings, stop)
    raise CameraError(f"expected scene:shapes, video:FILE or webcam:INDEX as a camera source, found {uri!r}")
