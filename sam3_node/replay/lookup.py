"""The frames of a plan, found while a recording is read once, with few held at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import islice

from ..types import Frame
from .actions import Action, Edit, Notes, Step
from .plan import Gap, Planned, Stepped

WINDOW = 256  # planned steps looked ahead at: by how many the order of steps and that of frames may differ


def with_frames(plan: Iterable[Planned], frames: Iterable[Frame], notes: Notes) -> Iterator[Action]:
    """The plan with the frame of each step; a step whose frame is not among `frames` is left out, and a gap.

    `frames` are those of all cameras, each camera's in its order; of those read ahead only such are held as one of the
    next WINDOW steps needs.
    """
    waiting, source = deque[Planned](), iter(plan)
    finder = _Finder(iter(frames))
    while True:
        for item in islice(source, WINDOW - len(waiting)):
            waiting.append(item)
            finder.want(item)
        if not waiting:
            return
        item = waiting.popleft()
        if isinstance(item, Edit):
            yield item
        elif isinstance(item, Gap):
            notes.gap(item.text)
        elif (frame := finder.find(item)) is not None:
            yield Step(frame, item.received_ns, item.skipped, item.failed)
        else:
            notes.gap(
                f"camera {item.camera}: expected frame {item.seq}, which the node stepped, found that it is not in "
                "the recording"
            )


class _Finder:
    """Takes frames from a source until it finds the one that is asked for; keeps on the way what is wanted later."""

    def __init__(self, frames: Iterator[Frame]) -> None:
        self._frames = frames
        self._wanted: Counter[tuple[str, int]] = Counter()
        self._held: dict[tuple[str, int], deque[Frame]] = {}

    def want(self, item: Planned) -> None:
        if isinstance(item, Stepped):
            self._wanted[item.camera, item.seq] += 1

    def find(self, item: Stepped) -> Frame | None:
        key = item.camera, item.seq
        frame = self._take_held(item) or self._read_until(item)
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]
            self._held.pop(key, None)
        return frame

    def _take_held(self, item: Stepped) -> Frame | None:
        held = self._held.get((item.camera, item.seq), deque())
        while held:
            frame = held.popleft()
            if _is_of(item, frame):
                return frame
        return None

    def _read_until(self, item: Stepped) -> Frame | None:
        if self._is_passed(item):
            return None
        for frame in self._frames:
            key = frame.camera, frame.seq
            if _is_of(item, frame):
                return frame
            if key in self._wanted:
                self._held.setdefault(key, deque()).append(frame)
                if frame.camera == item.camera and key != (item.camera, item.seq):
                    return None  # a camera's frames are in order: this one is needed later
        return None

    def _is_passed(self, item: Stepped) -> bool:
        """Whether a frame that is needed later from the same camera has been read already."""
        return any(held and camera == item.camera for (camera, _), held in self._held.items())


def _is_of(item: Stepped, frame: Frame) -> bool:
    """A frame is known by its time of capture too, as seq begins again where a camera was started again."""
    same = (frame.camera, frame.seq) == (item.camera, item.seq)
    return same and item.capture_ns in (None, frame.capture_ns)
