"""The actions of a replay: steps on frames, edits between them, and notes on what the recording lacks.

`read_event_log` reads the steps and edits of a live node from its recorded masks and events, in their order, and finds
the gaps of the recording. `match_frames` then finds the frames of these steps in one pass over the recording, with few
frames in memory.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from ..bags.native.reader import RecordedMasks
from ..errors import ReplayError, RequestError, WireError
from ..schema.fields import convert
from ..schema.operations import CHANGES, EPISODE_MARKS, Change
from ..types import Frame, MaskFrame, RobotState, StepDecisions, count_missing_frames
from ..wire import (
    AMBIGUOUS,
    CAUGHT_UP,
    DROPPED,
    FAILED,
    GRASPED,
    RECALLED,
    REGROUPED,
    RELEASED,
    RESTORED,
    SERVED,
    THREADS,
    Event,
    Fields,
)
from ..wire.messages import read_joints, read_pose
from ..wire.requests import read_operation
from .edits import CatchUpEnded, Dropped, Edit, Restarted, Served, SetThreads, Unreadable

log = logging.getLogger(__name__)

FOUND_BY_STEPS = (GRASPED, RELEASED, REGROUPED, RECALLED, AMBIGUOUS)
"""Events that a replay finds itself, from the frames"""
MAX_NOTES = 20
"""Number of notes that are kept. Later ones are logged only."""
WINDOW = 256
"""Number of steps to look ahead. The recorded orders of steps and of frames may differ by as many steps."""


class Step(NamedTuple):
    """A frame to track on, with the fields of its masks message other than the masks."""

    frame: Frame
    received_ns: int
    skipped: int = 0
    failed: bool = False
    """True if the live node's step on this frame raised an exception."""
    withheld: bool = False
    """True if the live node did not publish the masks of this frame, because they were too old."""
    edits: tuple[Edit, ...] = ()
    """Edits to make on the frame after its step. Masks that they return become the frame's masks."""
    robot: RobotState = RobotState()
    """What the live node knew of the robot on this frame."""
    decisions: StepDecisions = StepDecisions()
    """What the live node decided for this step."""


Action = Step | Edit


class Notes:
    """Remarks on a recording. A gap raises ReplayError unless the notes are `lenient`."""

    def __init__(self, lenient: bool) -> None:
        self.lines: list[str] = []
        self._lenient = lenient

    def add_gap(self, text: str) -> None:
        """Note that something cannot be repeated. Raises ReplayError unless lenient."""
        if not self._lenient:
            raise ReplayError(
                f"{text}; earlier results are kept. --allow-gaps goes on, with masks that may differ after this point; "
                "--every needs no recorded steps"
            )
        self.add(text)

    def add(self, text: str) -> None:
        """Log a remark, and keep it if there are fewer than MAX_NOTES."""
        log.warning("%s", text)
        if len(self.lines) < MAX_NOTES:
            self.lines.append(text)


class LoggedStep(NamedTuple):
    """A frame that the live node stepped. If its masks were not published, only camera and seq are recorded."""

    camera: str
    seq: int
    capture_ns: int | None = None
    received_ns: int = 0
    skipped: int = 0
    withheld: bool = False
    """True if the masks were too old to publish."""
    robot: RobotState = RobotState()
    decisions: StepDecisions = StepDecisions()

    @property
    def failed(self) -> bool:
        """True if the step raised an exception."""
        return self.capture_ns is None and not self.withheld

    def matches(self, frame: Frame) -> bool:
        """Return True if this step was on this frame."""
        same = (frame.camera, frame.seq) == (self.camera, self.seq)
        return same and self.capture_ns in (None, frame.capture_ns)


class Gap(NamedTuple):
    """Something that the recording lacks, so that a replay after it may differ from the live run."""

    text: str


LogEntry = LoggedStep | Edit | Gap


def read_event_log(
    items: Iterable[RecordedMasks | Event], description: Mapping[str, Any] | None
) -> Iterator[LogEntry]:
    """Yield steps, edits and gaps in the node's order.

    `description` is the node's own, from when the recording began. A gap comes before the first action after it. Gaps
    are changes before the recording began, and events and masks that are missing in it.
    """
    reader = _LogReader(description or {})
    for item in items:
        if isinstance(item, Event):
            yield from reader.read_event(item)
        else:
            yield from reader.read_masks(item.masks)


@dataclass(slots=True)
class _LogReader:
    """Turns recorded events and masks into log entries, and compares their numbers to find gaps."""

    description: Mapping[str, Any]
    has_begun: bool = False
    next_event: int | None = None
    node: str | None = None
    """The node of the last masks. None if it is unknown, or was started again since."""
    last_seq: dict[str, int | None] = field(default_factory=dict)
    """The last frame taken of each served camera. None if it is unknown."""

    def read_event(self, event: Event) -> Iterator[LogEntry]:
        # the event's number tells whether others are missing, or the node was restarted
        yield from self._check_event_order(event)
        if event.op == FAILED:
            yield self._read_failed(Fields(event.args, "event failed"))
            return
        # a node that was restored continues from a state that is not in the recording
        if event.op == RESTORED:
            self.last_seq.clear()
            yield Restarted()
            yield _describe_restore(event.args)
            return
        # a replay finds these itself, from the steps; marks of episodes change nothing
        if event.op in (*FOUND_BY_STEPS, *EPISODE_MARKS):
            return
        edit = read_edit(event)
        if isinstance(edit, Served):
            # a camera that is served anew has no frame before
            self.last_seq[edit.camera] = None
        elif isinstance(edit, Dropped):
            self.last_seq.pop(edit.camera, None)
        yield edit

    def _read_failed(self, args: Fields) -> LoggedStep:
        """Read the step of a frame without published masks: its event has what their message would have."""
        camera = args.text("camera")
        seq = args.integer("seq")
        self.last_seq[camera] = seq
        # recordings of earlier versions lack some of these
        withheld = args.has("withheld") and args.flag("withheld")
        pose = read_pose(args.fields("robot_pose")) if args.has("robot_pose") else None
        joints = read_joints(args.fields("joints")) if args.has("joints") else None
        decisions = convert(args.whole(), StepDecisions, args.what)
        robot = RobotState(pose, joints)
        return LoggedStep(camera, seq, withheld=withheld, robot=robot, decisions=decisions)

    def read_masks(self, masks: MaskFrame) -> Iterator[LogEntry]:
        yield from self._begin(self.description.get("events", 1))

        # another node has no objects, and its first events were not recorded
        if None not in (masks.node, self.node) and masks.node != self.node:
            self.last_seq.clear()
            yield Restarted()
            yield Gap(
                f"camera {masks.camera}: expected masks of node {self.node}, found masks of {masks.node}: it was "
                "started again, and its first events are not in the recording"
            )
        self.node = masks.node

        # the number of skipped frames since the camera's last one shows whether masks are missing
        if masks.camera not in self.last_seq:
            yield Served(masks.camera)
        last = self.last_seq.get(masks.camera)
        if last is not None:
            yield from self._check_seq(masks, last)
        self.last_seq[masks.camera] = masks.seq
        yield LoggedStep(
            masks.camera,
            masks.seq,
            masks.capture_ns,
            masks.received_ns,
            masks.skipped,
            robot=RobotState(masks.robot_pose, masks.joints),
            decisions=masks.decisions,
        )

    def _begin(self, first_event: int) -> Iterator[Gap]:
        """Yield a gap if the node had been changed before the recording, which begins with event `first_event`."""
        if self.has_begun or first_event == 0:
            self.has_begun = True
            return
        self.has_begun = True
        if restored := self.description.get("restored"):
            yield _describe_restore(restored)

        # one event for each served camera is no change: a camera begins without objects
        cameras: Mapping[str, Any] = self.description.get("cameras", {})
        changes = self.description.get("events", first_event) - len(cameras)
        if changes or self.description.get("prompts") or not self.description:
            objects = sum(camera.get("objects", 0) for camera in cameras.values())
            yield Gap(
                "expected a recording from the node's start, found one that begins later: requests had changed the "
                f"node {changes} times, and it had {objects} objects; they are not in the recording"
            )

    def _check_event_order(self, event: Event) -> Iterator[LogEntry]:
        expected = self.next_event
        if expected is None:
            # the recorder received masks before it got the description: events in between are in both
            described = self.description.get("events", event.n)
            yield from self._begin(min(event.n, described))
            expected = min(event.n, described)
        elif event.n < expected:
            # a restarted node counts from 0 again
            yield Restarted()
            self.last_seq.clear()
            self.node = None
            expected = 0
        # the recorder was too slow, or began late
        if event.n > expected:
            yield Gap(
                f"expected event {expected} of the node, found {event.n} ({event.op}): the events in between are not "
                "in the recording"
            )
        self.next_event = event.n + 1

    def _check_seq(self, masks: MaskFrame, last: int) -> Iterator[Gap]:
        # frames that the node skipped have no masks; others that are missing had
        missing = count_missing_frames(last, masks.seq)
        if masks.seq > last and missing != masks.skipped:
            yield Gap(
                f"camera {masks.camera}: expected the masks of all frames that the node stepped between {last} and "
                f"{masks.seq}, found that {missing - masks.skipped} of them are not in the recording"
            )


def read_edit(event: Event) -> Edit:
    """Return the edit of an event. Raises WireError for a camera that is served or dropped and has no name.

    An event of another version, whose operation or arguments this one does not know, is an Unreadable.
    """
    what = f"event {event.op}"
    if event.op == SERVED:
        return convert(event.args, Served, what)
    if event.op == DROPPED:
        return convert(event.args, Dropped, what)
    if event.op == THREADS:
        return convert(event.args, SetThreads, what)
    if event.op not in (*CHANGES, CAUGHT_UP):
        expected = ", ".join(CHANGES)
        return Unreadable(event.op, f"expected an operation of {expected}, found {event.op!r:.60}")
    try:
        if event.op == CAUGHT_UP:
            return convert(event.args, CatchUpEnded, what)
        change = read_operation(event.op, event.args)
    except (RequestError, WireError) as error:
        # with its camera, because a replay of other cameras ignores it
        camera = event.args.get("camera")
        return Unreadable(event.op, str(error), camera if isinstance(camera, str) else None)
    assert isinstance(change, Change)
    return change


def _describe_restore(restored: Mapping[str, Any]) -> Gap:
    """Return the gap of a node that continued from a snapshot: its state is not in the recording."""
    return Gap(
        "expected a node that began without objects, found that it continued from a snapshot (SHA-256 "
        f"{restored.get('sha256')!s:.64}), which is not in the recording"
    )


def match_frames(entries: Iterable[LogEntry], frames: Iterable[Frame], notes: Notes) -> Iterator[Action]:
    """Yield the log's actions, with the recorded frame of each step. A step without a frame is skipped and noted.

    `frames` come from all cameras, in order for each camera. Memory holds only the frames read ahead that
    the next WINDOW steps need.
    """
    upcoming = deque[LogEntry]()
    source = iter(entries)
    matcher = _FrameMatcher(iter(frames))
    while True:
        # fill the window, so that the matcher keeps the frames of the steps in it
        for entry in islice(source, WINDOW - len(upcoming)):
            upcoming.append(entry)
            matcher.expect(entry)
        if not upcoming:
            return

        entry = upcoming.popleft()
        if isinstance(entry, Gap):
            notes.add_gap(entry.text)
            continue
        if not isinstance(entry, LoggedStep):
            yield entry
            continue

        frame = matcher.find(entry)
        if frame is None:
            notes.add_gap(
                f"camera {entry.camera}: expected frame {entry.seq}, which the node stepped, found that it is not in "
                "the recording"
            )
            continue
        step = Step(frame, entry.received_ns, entry.skipped, entry.failed, entry.withheld)
        yield step._replace(robot=entry.robot, decisions=entry.decisions)


class _FrameMatcher:
    """Reads frames until it finds the one of a step, and keeps the frames that later steps expect."""

    def __init__(self, frames: Iterator[Frame]) -> None:
        self._frames = frames
        self._expected: defaultdict[str, deque[LoggedStep]] = defaultdict(deque)
        self._kept: defaultdict[str, deque[Frame]] = defaultdict(deque)

    def expect(self, entry: LogEntry) -> None:
        """Keep the frame of this step when it is read."""
        if isinstance(entry, LoggedStep):
            self._expected[entry.camera].append(entry)

    def find(self, step: LoggedStep) -> Frame | None:
        """Return the frame of an expected step, None if the recording does not have it."""
        kept = self._kept[step.camera]
        self._expected[step.camera].popleft()
        while kept or self._read_to(step.camera):
            frame = kept[0]
            # a camera's frames are in order: if a later step needs this one, this step's is missing
            if not step.matches(frame) and self._is_expected(frame):
                return None
            kept.popleft()
            if step.matches(frame):
                return frame
        return None

    def _read_to(self, camera: str) -> bool:
        """Keep the next frame of this camera, and those before it that are expected. Return False without one."""
        for frame in self._frames:
            # frames that no step in the window expects were skipped by the node
            if frame.camera == camera or self._is_expected(frame):
                self._kept[frame.camera].append(frame)
            if frame.camera == camera:
                return True
        return False

    def _is_expected(self, frame: Frame) -> bool:
        return any(step.matches(frame) for step in self._expected[frame.camera])
