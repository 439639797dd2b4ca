"""What has come to a recorder, and what has not: counted from the numbers that messages carry."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import WireError
from ..types import Frame, MaskFrame
from ..wire import DROPPED, FAILED, SERVED, Event

MAX_CAMERAS = 64


@dataclass
class CameraTally:
    """Counts of one camera. `skipped`: frames that the node has passed over, as its masks tell."""

    frames: int = 0
    frames_lost: int = 0
    masks: int = 0
    masks_lost: int = 0
    skipped: int = 0


@dataclass
class _Numbers:
    """The last seq of a camera's frames, and of those that the node has stepped."""

    frame: int | None = None
    stepped: int | None = None


@dataclass
class Tally:
    """Counts what is recorded, and by the gaps what is lost.

    A frame is lost where seq leaves it out. Masks are where `skipped` does not reach back to the frame stepped before:
    one at least. Numbers that begin anew are a camera's or a node's that was started again.
    """

    cameras: dict[str, CameraTally] = field(default_factory=dict)
    events: int = 0
    node_starts: int = 0
    """How often the node was started again meanwhile."""
    rejected: int = 0
    last_error: str | None = None
    _numbers: dict[str, _Numbers] = field(default_factory=dict)
    _gaps: int = 0
    _first: int | None = None
    _last: int | None = None
    _told: int | None = None

    def admit(self, camera: str) -> None:
        """Make room for a camera; WireError where there are too many."""
        if camera in self.cameras:
            return
        if len(self.cameras) >= MAX_CAMERAS:
            raise WireError(f"expected at most {MAX_CAMERAS} cameras, found another: {camera}")
        self.cameras[camera], self._numbers[camera] = CameraTally(), _Numbers()

    def add_frame(self, frame: Frame) -> None:
        """A frame of an admitted camera was recorded."""
        counts, numbers = self.cameras[frame.camera], self._numbers[frame.camera]
        counts.frames += 1
        if numbers.frame is not None:
            counts.frames_lost += max(0, frame.seq - numbers.frame - 1)
        numbers.frame = frame.seq

    def add_masks(self, masks: MaskFrame) -> None:
        """Masks of an admitted camera were recorded."""
        counts, numbers = self.cameras[masks.camera], self._numbers[masks.camera]
        counts.masks += 1
        counts.skipped += masks.skipped
        if numbers.stepped is not None and masks.seq - masks.skipped - 1 > numbers.stepped:
            counts.masks_lost += 1
        numbers.stepped = masks.seq

    def add_event(self, event: Event) -> bool:
        """An event was recorded; True where it is of a node that was started again."""
        self.events += 1
        again = self._last is not None and event.n <= self._last
        if again:
            self.node_starts += 1
            self._numbers = {camera: _Numbers(known.frame) for camera, known in self._numbers.items()}
        elif self._last is not None:
            self._gaps += event.n - self._last - 1
        if self._first is None:
            self._first = event.n
        self._last = event.n
        self._follow(event)
        return again

    def add_description(self, events: int) -> None:
        """The node has told how many events there were until then."""
        if self._told is None:
            self._told = events

    def reject(self, error: Exception) -> None:
        """A message could not be recorded."""
        self.rejected += 1
        self.last_error = (str(error) or repr(error))[:200]

    @property
    def events_lost(self) -> int:
        """Events that are missing: between those recorded, and before them since the node told their number."""
        missed = self._first - self._told if self._first is not None and self._told is not None else 0
        return self._gaps + max(0, missed)

    @property
    def lost(self) -> int:
        """All that is missing."""
        return self.events_lost + sum(known.frames_lost + known.masks_lost for known in self.cameras.values())

    def describe(self) -> dict[str, Any]:
        """The counts, as the metadata of a recording has them."""
        return {
            "cameras": {camera: asdict(known) for camera, known in self.cameras.items()},
            "events": self.events,
            "events_lost": self.events_lost,
            "node_starts": self.node_starts,
            "rejected": self.rejected,
            "last_error": self.last_error,
        }

    def _follow(self, event: Event) -> None:
        """A frame that failed was stepped as well; a camera served anew has no frame before its first."""
        numbers = self._numbers.get(str(event.args.get("camera")))
        if numbers is None:
            return
        if event.op in (SERVED, DROPPED):
            numbers.stepped = None
        elif event.op == FAILED and isinstance(event.args.get("seq"), int):
            numbers.stepped = event.args["seq"]
