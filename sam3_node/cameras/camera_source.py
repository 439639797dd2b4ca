"""Defines a camera source: its interface, its images, and the modes that a camera offers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..settings import CameraSettings
from ..types import Depth, Frame, Image, Intrinsics, RobotMessage
from ..wire import decode_image

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CapturedImage:
    """One captured image. `capture_ns` is the Unix time of the capture.

    `image` is BGR [h, w, 3], or a Frame if it came encoded. `times` are the device's own stamps. A source with several
    cameras names each in `camera`; "" is the name in the settings.
    """

    image: Image | Frame
    capture_ns: int
    depth: Depth | None = None
    intrinsics: Intrinsics | None = None
    times: Mapping[str, int | float] = field(default_factory=dict)
    camera: str = ""
    robot: Sequence[RobotMessage] = ()
    """What a recorded robot published up to the capture, and shortly after it, on the clock of `capture_ns`."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        if isinstance(self.image, Frame):
            return self.image.height, self.image.width
        return self.image.shape[0], self.image.shape[1]

    def pixels(self) -> Image:
        """Return the image as BGR [h, w, 3]; WireError if it cannot be decoded."""
        if isinstance(self.image, Frame):
            return decode_image(self.image)
        return self.image


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
        """Images that were lost before they were yielded, as far as the source knows."""

    def __iter__(self) -> Iterator[CapturedImage]: ...

    def close(self) -> None:
        """Release the device or file. Idempotent."""


class Mode(NamedTuple):
    """Size in pixels, rate in images a second and pixel format that a camera offers."""

    width: int
    height: int
    fps: float
    form: str

    def __str__(self) -> str:
        return f"{self.width}x{self.height} at {self.fps:g} fps, {self.form}"


def wanted_mode(settings: CameraSettings) -> Mode:
    """Return the mode that the settings ask for; 640x480 at 30 fps where they leave it open."""
    return Mode(settings.width or 640, settings.height or 480, settings.fps or 30.0, "")


def warn_about_mode(name: str, mode: Mode, wanted: Mode) -> None:
    """Log a warning if a camera has only another size than the wanted one, or a lower rate."""
    # drivers say 29.97 for 30
    if mode[:2] != wanted[:2] or mode.fps < wanted.fps - 0.5:
        _log.warning(
            "%s: expected %dx%d at %g fps, the camera has %s; frames are resized if camera.width or height is set",
            name,
            wanted.width,
            wanted.height,
            wanted.fps,
            mode,
        )


def choose_mode(modes: Iterable[Mode], wanted: Mode, forms: Sequence[str]) -> Mode | None:
    """Return the offered mode nearest to `wanted`, in the first format of `forms` that it has.

    The size comes before the rate. The best size is the smallest that is not smaller than wanted, else the largest. The
    best of its rates is the slowest that is not slower, else the fastest. None if no mode has a format of `forms`.
    """
    usable = [mode for mode in modes if mode.form in forms]

    # the smallest tuple wins: sizes and rates below the wanted ones come last, the nearest of them first
    def cost(mode: Mode) -> tuple[bool, int, bool, float, int]:
        is_small = mode.width < wanted.width or mode.height < wanted.height
        area = mode.width * mode.height
        if is_small:
            area = -area
        is_slow = mode.fps < wanted.fps - 0.5
        fps = mode.fps
        if is_slow:
            fps = -fps
        return is_small, area, is_slow, fps, forms.index(mode.form)

    return min(usable, key=cost, default=None)
