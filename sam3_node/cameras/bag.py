"""bag:FILE - a recording, played at its own pace; scene:tabletop - the one that is bundled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..bags.bag import open_bag
from ..bags.native.labelled_clip import TABLETOP
from ..errors import BagError
from ..types import Frame
from .base import CapturedImage
from .pacing import Pacer, StampPacer

__all__ = ["TABLETOP", "BagSource"]

_log = logging.getLogger(__name__)
_CAMERA = "?camera="


class BagSource:
    """The frames of one camera of a recording, in order, captured anew: of FILE?camera=NAME that one, of FILE the
    first.

    Colour and depth stay encoded as they were recorded, intrinsics and device times come along, and `times`
    carries `media_ns`, the time since the first frame. `fps` 0 keeps the recorded pace. A recording that loops
    starts again at its first frame: the image of `seq` is that of seq % its length. One that is damaged is
    played as far as it is whole. Raises BagError where there is no frame at all.
    """

    def __init__(self, name: str, path: Path, fps: float, loop: bool, stop: threading.Event) -> None:
        self.name = name
        file, _, camera = (str(path), "", "") if path.exists() else str(path).partition(_CAMERA)
        try:
            self._bag = open_bag(Path(file), (camera or _first_camera(Path(file)),))
            first = next(iter(self._bag), None)
        except BagError as error:
            raise BagError(f"{name}: {error}") from error
        if first is None:
            raise BagError(f"{name}: expected frames, found none that is whole ({self._bag.lost})")
        self._start_ns = first.capture_ns
        self._loop = loop
        self._closed = False
        self._grid = Pacer(fps, stop) if fps else None
        self._pacer = StampPacer(stop)

    def __iter__(self) -> Iterator[CapturedImage]:
        while not self._closed:
            yield from self._play()
            self._closed |= not self._loop

    def close(self) -> None:
        self._closed = True
        self._bag.close()

    def _play(self) -> Iterator[CapturedImage]:
        """One pass; a damaged file ends where the damage begins."""
        for frame in self._bag:
            self._closed |= not self._wait(frame.capture_ns)
            if self._closed:
                return
            yield self._capture(frame)
        if self._bag.lost:
            _log.warning("%s: %s", self.name, self._bag.lost)

    def _wait(self, stamp_ns: int) -> bool:
        return self._grid.wait() if self._grid is not None else self._pacer.wait(stamp_ns)

    def _capture(self, frame: Frame) -> CapturedImage:
        times = {**frame.times, "media_ns": frame.capture_ns - self._start_ns}
        return CapturedImage(
            frame, time.time_ns(), depth=frame.depth, intrinsics=frame.intrinsics, times=times
        )


def _first_camera(path: Path) -> str:
    with open_bag(path) as bag:
        return bag.cameras[0]
