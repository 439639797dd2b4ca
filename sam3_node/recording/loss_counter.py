"""Counting of recorded and lost messages, from the numbers that messages carry."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import WireError
from ..types import Frame, MaskFrame, count_missing_frames
from ..wire import DROPPED, FAILED, SERVED, Event

MAX_CAMERAS = 64


@dataclass
class CameraCounts:
    """Counts of one camera. `skipped` are the frames that the node passed over, as its masks report."""

    frames: int = 0
    frames_lost: int = 0
    masks: int = 0
    masks_lost: int = 0
    skipped: int = 0


@dataclass
class _LastSeqs:
    """Last seq of a camera's frames, and of the frames that the node stepped."""

    frame: int | None = None
    stepped: int | None = None


@dataclass
class LossCounter:
    """Counts recorded messages, and lost ones by the gaps in their numbers.

    A frame is lost if seq leaves it out. At least one masks message is lost if `skipped` does not reach back to the
    frame that was stepped before. Numbers that start again mean that a camera or a node was restarted.
    """

    cameras: dict[str, CameraCounts] = field(default_factory=dict)
    events: int = 0
    poses: int = 0
    """Number of recorded poses of the robot, of at most MAX_CAMERAS frames."""
    node_starts: int = 0
    """Number of restarts of the node during the recording."""
    rejected: int = 0
    last_error: str | None = None
    _posed: set[str] = field(default_factory=set)
    _seqs: dict[str, _LastSeqs] = field(default_factory=dict)
    _event_gaps: int = 0
    _first_event: int | None = None
    _last_event: int | None = None
    _described_events: int | None = None

    def admit(self, camera: str) -> None:
        """Add a camera if it is new; WireError if there are too many."""
        if camera in self.cameras:
            return
        if len(self.cameras) >= MAX_CAMERAS:
            raise WireError(f"expected at most {MAX_CAMERAS} cameras, found another: {camera}")
        self.cameras[camera], self._seqs[camera] = CameraCounts(), _LastSeqs()

    def admit_pose(self, frame: str) -> None:
        """Add the name of a frame of the robot if it is new; WireError if there are too many."""
        if frame not in self._posed and len(self._posed) >= MAX_CAMERAS:
            raise WireError(f"expected poses of at most {MAX_CAMERAS} frames, found another: {frame}")
        self._posed.add(frame)

    def add_frame(self, frame: Frame) -> None:
        """Count a recorded frame of an admitted camera."""
        counts, seqs = self.cameras[frame.camera], self._seqs[frame.camera]
        counts.frames += 1
        if seqs.frame is not None:
            counts.frames_lost += count_missing_frames(seqs.frame, frame.seq)
        seqs.frame = frame.seq

    def add_masks(self, masks: MaskFrame) -> None:
        """Count recorded masks of an admitted camera."""
        counts, seqs = self.cameras[masks.camera], self._seqs[masks.camera]
        counts.masks += 1
        counts.skipped += masks.skipped
        if seqs.stepped is not None and count_missing_frames(seqs.stepped, masks.seq) > masks.skipped:
            counts.masks_lost += 1
        seqs.stepped = masks.seq

    def add_event(self, event: Event) -> bool:
        """Count a recorded event; return True if it comes from a node that was restarted."""
        self.events += 1
        is_restart = self._last_event is not None and event.n <= self._last_event
        if is_restart:
            self.node_starts += 1
            self._seqs = {camera: _LastSeqs(seqs.frame) for camera, seqs in self._seqs.items()}
        elif self._last_event is not None:
            self._event_gaps += event.n - self._last_event - 1
        if self._first_event is None:
            self._first_event = event.n
        self._last_event = event.n
        self._follow(event)
        return is_restart

    def add_description(self, events: int) -> None:
        """Note the number of events that the node had published when it first described itself."""
        if self._described_events is None:
            self._described_events = events

    def reject(self, error: Exception) -> None:
        """Count a message that could not be recorded."""
        self.rejected += 1
        self.last_error = (str(error) or repr(error))[:200]

    @property
    def events_lost(self) -> int:
        """Number of missing events: between the recorded ones, and before them since the node's description."""
        missed = 0
        if self._first_event is not None and self._described_events is not None:
            missed = self._first_event - self._described_events
        return self._event_gaps + max(0, missed)

    @property
    def lost(self) -> int:
        """Number of all missing messages."""
        return self.events_lost + sum(
            counts.frames_lost + counts.masks_lost for counts in self.cameras.values()
        )

    def describe(self) -> dict[str, Any]:
        """Return the counts as they are stored in the metadata of a recording."""
        return {
            "cameras": {camera: asdict(counts) for camera, counts in self.cameras.items()},
            "events": self.events,
            "poses": self.poses,
            "events_lost": self.events_lost,
            "node_starts": self.node_starts,
            "rejected": self.rejected,
            "last_error": self.last_error,
        }

    def _follow(self, event: Event) -> None:
        """Update the last stepped seq: a failed frame was stepped, too; a camera that is served again starts anew."""
        seqs = self._seqs.get(str(event.args.get("camera")))
        if seqs is None:
            return
        if event.op in (SERVED, DROPPED):
            seqs.stepped = None
        elif event.op == FAILED and isinstance(event.args.get("seq"), int):
            seqs.stepped = event.args["seq"]
