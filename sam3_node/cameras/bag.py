"""bag:FILE - a recording of this package, played at its own pace; scene:tabletop - the one that is bundled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..bags import read_frames
from ..bags.recording import TABLETOP
from ..errors import BagError
from ..types import Frame
from .base import CapturedImage
from .pacing import Pacer, StampPacer

__all__ = ["TABLETOP", "BagSource"]

_log = logging.getLogger(__name__)


class BagSource:
    """The frames of a recording, in order, captured anew; of several cameras those of the first.

    Colour and depth stay encoded as they were recorded, intrinsics and device times come along, and `times`
    carries `media_ns`, the time since the first frame. `fps` 0 keeps the recorded pace. A recording that loops
    starts again at its first frame: the image of `seq` is that of seq % its length. One that is damaged is
    played as far as it is whole. Raises BagError where there is no frame at all.
    """

    def __init__(self, name: str, path: Path, fps: float, loop: bool, stop: threading.Event) -> None:
        self.name = name
        self._path = path
        if not path.is_file():
            raise BagError(f"{name}: expected a recording, found no file at {path}")
        self._first = next(read_frames(path))
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

    def _play(self) -> Iterator[CapturedImage]:
        """One pass; a damaged file ends where the damage begins."""
        played = False
        try:
            for frame in read_frames(self._path):
                if frame.camera != self._first.camera:
                    continue
                self._closed |= not self._wait(frame.capture_ns)
                if self._closed:
                    return
                yield self._capture(frame)
                played = True
        except BagError as error:
            if not played:
                raise
            _log.warning("%s: %s", self.name, error)

    def _wait(self, stamp_ns: int) -> bool:
        return self._grid.wait() if self._grid is not None else self._pacer.wait(stamp_ns)

    def _capture(self, frame: Frame) -> CapturedImage:
        times = {**frame.times, "media_ns": frame.capture_ns - self._first.capture_ns}
        return CapturedImage(
            frame, time.time_ns(), depth=frame.depth, intrinsics=frame.intrinsics, times=times
        )
