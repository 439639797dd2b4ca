"""Schedules a job on one recording: its settings, and its actions in their order.

Actions repeat the steps of the recorded node, or step all frames with objects and edits on the frames that they belong
to. The recording's index gives the number of frames, for progress.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import structs

from ..bags.bag import open_bag
from ..bags.formats.mcap import count_messages
from ..bags.native import COLOUR, NODE, RING
from ..bags.native.reader import RecordedMasks, RecordingReader, is_recorded
from ..bags.samples import natural_order
from ..errors import BagError, ReplayError, RequestError
from ..files import explain_os_error, read_regular
from ..node.cameras import RobotTracks
from ..perception.step import GRIPPER
from ..resources import Closeable, closed_on_error
from ..robot.robot_model import read_joint_names
from ..schema.operations import (
    CHANGES,
    AddExemplar,
    AddLike,
    AddObject,
    Change,
    PinFrame,
    RefineObject,
    Reset,
    SegmentEverything,
    SetPrompts,
)
from ..types import ROBOT, Frame, MaskFrame, RobotMessage, RobotState
from ..wire import Event
from ..wire.frame_prompt import FramePrompt, describe_clipping
from ..wire.requests import read_box, write_prompt
from . import event_log
from .davis_png import MAX_IMAGE_FILE, read_mask
from .edits import AddEverything, CatchUpEnded, Edit, Unreadable
from .job import Job, ObjectOnFrame, calibrations_for, settings_for
from .outputs import find_output
from .outputs.output import Dataset
from .store import local_bag

FramePlace = tuple[str, int]
"""Camera and seq of a frame."""


MAX_FIRST_FRAMES = 300
"""Number of frames, of all cameras, among which each camera's first one is looked for."""
MAX_MESSAGES = 1_000_000
"""Number of poses, and of joints, that the robot's motion is made of: 16 minutes at 1000 Hz."""
MAX_VALUES = 64 * MAX_MESSAGES
"""Numbers of those poses, and of those joints: 512 MB. Beyond it, the first of the recording are forgotten."""
NOTHING_ASKED = (
    "no object will be followed, because the job names no object: name what to detect with --prompt NAME, mark objects "
    "with --box or --objects FILE, follow all there is with --everything, or repeat a recorded node with --as-recorded"
)


@contextmanager
def open_schedule(job: Job) -> Iterator[Schedule]:
    """Open a job's first recording, which is copied to this machine if it is at a URL."""
    with local_bag(job.bags[0]) as path, Schedule(job, path) as schedule:
        yield schedule


class Schedule(Closeable):
    """A job on its recording, which is open at `path`. A context manager.

    Each call of `actions` or `frames` starts at the beginning. Raises BagError for a file that is not a recording,
    ReplayError if the recording cannot be replayed in the job's mode, or an object is not on the frames of its camera.
    """

    def __init__(self, job: Job, path: Path) -> None:
        self.job = job
        self.path = path
        self.names = job.names
        """Names to look for: the job's, without skipped ones."""
        # before hours of work whose output could not be written
        for output in job.outputs:
            find_output(output).check(path)
        self.notes = event_log.Notes(job.allow_gaps)
        self._files = sorted(path.glob("*.mcap"), key=natural_order) if path.is_dir() else [path]
        self._recorded = _open_recorded(self._files)
        self._edits: FrameEdits | None = None
        if job.mode == "as-recorded" and not (self._recorded and self._recorded.has_actions()):
            raise ReplayError(
                f"as-recorded: expected a recording made by sam3-node record, found another at {path}; use --every"
            )
        self.description = _read_description(self._recorded)
        self.settings = settings_for(job, self.description)

        # the first frames show the size of each camera's images, which objects must fit
        self._bag = open_bag(path, job.topics, job.span, job.depth_aligned)
        with closed_on_error(self):
            self.objects = tuple(self._find_annotated_frames(job.objects))
            check_extents(self.objects, islice(self.frames(), MAX_FIRST_FRAMES))

    def _find_annotated_frames(self, objects: Sequence[ObjectOnFrame]) -> Iterator[ObjectOnFrame]:
        """Yield the objects, those of an annotation on the frame of its name.

        An annotation whose name is neither that of an image nor a number is on the first frame. So is the number 0.
        Raises ReplayError for a later one of a sequence.
        """
        unnamed: dict[str | None, str | None] = {}
        for item in objects:
            name = item.frame_name
            if name is None:
                yield item
                continue
            # the images of a folder have names, which need not count from 0 or by 1
            camera = item.camera
            if camera is None and len(self.cameras) == 1:
                camera = self.cameras[0]
            names = self._bag.frame_names(camera) if camera else ()
            if name in names:
                yield replace(item, seq=names.index(name))
            elif name.isdecimal():
                number = int(name)
                yield replace(item, seq=number or None)
            elif unnamed.setdefault(item.camera, item.mask) == item.mask:
                yield item
            else:
                raise ReplayError(
                    f"{item.mask}: expected the name of an image, or a frame's number, found neither"
                )

    @property
    def cameras(self) -> tuple[str, ...]:
        """The cameras to replay."""
        return self._bag.cameras

    @property
    def dataset(self) -> Dataset:
        """The recording as a dataset to write masks into."""
        shown = dict.fromkeys(marked.label for marked in self.job.objects if marked.like is not None)
        return Dataset(self.path, (*self.names, *shown) or self.settings.detector.prompts)

    @property
    def episode_starts(self) -> tuple[int, ...]:
        """Numbers of the first frames of episodes; empty for a recording without them."""
        return self._bag.episode_starts

    @property
    def lost(self) -> str | None:
        """Parts of the recording that could not be read so far; None if there are none."""
        if self._bag.lost or self._recorded is None:
            return self._bag.lost
        return self._recorded.lost

    @property
    def remarks(self) -> list[str]:
        """The notes on the schedule and, so far, on the recording."""
        return [*self.notes.lines, *self._bag.notes]

    def actions(self) -> Iterator[event_log.Action]:
        """Yield steps and edits in their order."""
        # the node's own steps and edits, in its order
        if self.job.mode == "as-recorded":
            self._note_inexact_recording()
            log = self._recorded.actions() if self._recorded else ()
            entries = event_log.read_event_log(log, self.description)
            yield from event_log.match_frames(_select_cameras(entries, self.cameras), self._bag, self.notes)
            return
        if self.names:
            yield SetPrompts(prompts=self.names)
        yield from (_make_exemplar_edit(marked) for marked in self.objects if marked.photo)

        # what the job asks for replaces the recorded edits
        has_prompts = bool(self.job.names or self.job.objects or self.job.everything)
        edits = FrameEdits()
        if not has_prompts:
            # steps take the edits out
            edits = self._group_edits().copy()
        if not (has_prompts or self.settings.detector.prompts or edits.begin_objects()):
            self.notes.add(NOTHING_ASKED)

        # edits before the beginning of a part have no frame
        frames = self.frames()
        find_robot = self.make_robot_finder()
        if self.job.start or self.job.begin_ns is not None:
            frames = self._skip_edits(frames, edits)
        yield from step_all_frames(
            frames,
            self.notes,
            edits,
            objects=self.objects,
            everything=self.job.everything,
            episode_starts=self.episode_starts,
            prompts=self.dataset.prompts,
            find_robot=find_robot,
            stride=self.job.stride,
        )

    def begins_objects(self) -> bool:
        """Return True if the job, its settings or a recorded edit makes an object begin. May read all edits."""
        job = self.job
        if job.mode == "as-recorded" or job.names or job.objects or job.everything:
            return True
        if self.settings.detector.prompts:
            return True
        return self._group_edits().begin_objects()

    def _group_edits(self) -> FrameEdits:
        """Return the recorded edits by their frames. The recording is read for them once."""
        if self._edits is None:
            self._edits = FrameEdits()
            if self._recorded is not None:
                self._edits = group_edits(self._recorded.actions())
        return self._edits

    def robot(self) -> Iterator[RobotMessage]:
        """Yield the recorded poses and joints of the robot."""
        return self._bag.robot()

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics that the frames are made of. Empty for a recording of this package."""
        return self._bag.topics

    def select_topics(self, camera: str) -> tuple[str, ...]:
        """Return the topics of a job that reads this camera alone: all of this job but those of its other cameras."""
        others = set[str]()
        for name, topic in self._bag.colour_topics.items():
            if name != camera:
                others |= {name, topic}
        return tuple(dict.fromkeys([camera, *(name for name in self.job.topics if name not in others)]))

    def make_robot_finder(self) -> Callable[[Frame], RobotState]:
        """Return a function that gives the robot at a frame.

        It is interpolated between the recorded messages of the robot, or between those in the recorded masks.
        """
        settings = self.settings.robot
        on_gripper = any(found.parent == GRIPPER for found in calibrations_for(self.job, self.description))

        # all messages are known here, so no pose needs to be predicted
        spatial = self.settings.spatial.model_copy(update={"max_pose_ahead_ms": 0.0})
        # readers of other formats name each robot ROBOT
        name = settings.name if self._recorded else ROBOT
        # also beside a fixed camera: the gripper's poses tell what it holds
        known_joints = frozenset[str]()
        if settings.urdf is not None:
            known_joints = read_joint_names(settings.urdf)
        tracks = RobotTracks(spatial, name if settings.urdf else None, MAX_MESSAGES, MAX_VALUES, known_joints)
        needs_robot = on_gripper or settings.urdf is not None
        try:
            # without the robot's model its joints say nothing: a recording is not read for them
            for message in self._bag.robot(joints=settings.urdf is not None):
                tracks.add(message)
        except BagError as error:
            # masks can be made without the robot where no setting asks for it
            if needs_robot:
                raise
            self.notes.add(f"the robot's messages are left out: {error}")

        if tracks.restarts:
            self.notes.add(
                f"the robot's clock steps back {tracks.restarts} times: its poses and joints before the last step are "
                "not used"
            )

        # the masks hold what the live node knew of the robot on each frame, one camera after the other
        tracks.max_back_ns = None
        lacks_poses = not tracks.poses and (on_gripper or bool(spatial.poses))
        lacks_joints = settings.urdf and not tracks.joints
        if lacks_poses or lacks_joints:
            for masks in self.recorded_masks():
                if lacks_poses and masks.robot_pose is not None:
                    tracks.add(masks.robot_pose)
                if lacks_joints and masks.joints is not None:
                    tracks.add(masks.joints)

        if on_gripper and not tracks.poses:
            self.notes.add(
                "a camera is on the gripper, and the recording has no poses of the gripper in the base: objects of "
                "that camera have no positions in the base"
            )
        if settings.urdf and not tracks.joints:
            self.notes.add(f"the recording has no joints of {name}: no pixels of the robot are known")
        return tracks.find

    def _note_inexact_recording(self) -> None:
        """Note what makes masks differ from the live node's: compressed colour, or a ring's late beginning."""
        if self._recorded is None:
            return
        metadata = self._recorded.metadata()
        if any(record.get("exact") is False for record in metadata.get(COLOUR, ())):
            self.notes.add(
                "the recorder compressed raw colour as JPEG: the masks are not bit-exact with the live node's; "
                "record with record.colour raw or png for that"
            )
        if any(record.get("dropped") for record in metadata.get(RING, ())):
            self.notes.add_gap(
                "expected a recording from the node's start, found one of a ring, whose earlier messages were dropped"
            )

    def _skip_edits(self, frames: Iterator[Frame], edits: FrameEdits) -> Iterator[Frame]:
        """Yield the frames. Before a camera's first one, skip recorded edits that belong to earlier frames."""
        begun: set[str] = set()
        for frame in frames:
            if frame.camera not in begun:
                begun.add(frame.camera)
                dropped = edits.skip_to(frame.camera, frame.seq)
                if dropped:
                    self.notes.add(
                        f"skipped {dropped} recorded edits of {frame.camera} before the beginning: objects that "
                        "were marked on earlier frames are not followed"
                    )
            yield frame

    def count_frames(self) -> int | None:
        """Return the number of frames to step, or its upper limit; None if the recording's index does not tell."""
        wanted = self.job.stop - self.job.start if self.job.stop is not None else None
        # the index counts the frames of the whole recording, not of a span
        if not self.job.span.is_whole:
            return wanted

        topic = "masks/{}" if self.job.mode == "as-recorded" else "/{}/header"
        counted = count_messages(self._files, [topic.format(camera) for camera in self.cameras]) or None
        if counted is None or wanted is None:
            return wanted or counted
        return max(0, min(wanted, counted - self.job.start))

    def count_steps(self) -> int | None:
        """Return the number of steps, as `count_frames` does of frames."""
        count = self.count_frames()
        return None if count is None else -(-count // self.job.stride)

    def frames(self) -> Iterator[Frame]:
        """Yield the job's frames in the order of the recording."""
        return islice(self._bag, self.job.start, self.job.stop)

    def recorded_masks(self) -> Iterator[MaskFrame]:
        """Yield the live node's masks of the job's cameras, if they are recorded."""
        if self._recorded is None:
            return iter(())
        return (masks for masks in self._recorded.masks() if masks.camera in self.cameras)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._bag.close()


def _open_recorded(files: Sequence[Path]) -> RecordingReader | None:
    """Open those files that this package recorded; None if there are none."""
    files = [file for file in files if is_recorded(file)]
    if not files:
        return None
    return RecordingReader(files)


def _read_description(recorded: RecordingReader | None) -> Mapping[str, Any] | None:
    """Return the first description of the node in the recording."""
    if recorded is None:
        return None
    descriptions = recorded.metadata().get(NODE)
    if not descriptions:
        return None
    return descriptions[0]


def _select_cameras(
    entries: Iterable[event_log.LogEntry], cameras: Collection[str]
) -> Iterator[event_log.LogEntry]:
    """Skip steps and edits of other cameras.

    Other cameras are still served: an edit that names no camera depends on how many cameras are served.
    """
    for entry in entries:
        camera = entry.camera if isinstance(entry, event_log.LoggedStep) else None
        if isinstance(entry, Change | CatchUpEnded | Unreadable):
            camera = _camera_of(entry)
        if camera in (None, *cameras):
            yield entry


class FrameEdits:
    """Edits by the frame that they take effect on: before its step, or on the frame after its step."""

    def __init__(self) -> None:
        self.before: defaultdict[FramePlace, list[Edit]] = defaultdict(list)
        self.on: defaultdict[FramePlace, list[Edit]] = defaultdict(list)

    def copy(self) -> FrameEdits:
        """Return the same edits. What is taken out of the copy stays in this one."""
        copied = FrameEdits()
        copied.before.update(self.before)
        copied.on.update(self.on)
        return copied

    def begin_objects(self) -> bool:
        """Return True if any edit makes objects begin: an addition, or names to detect."""
        edits = (edit for group in (self.before, self.on) for found in group.values() for edit in found)
        return any(_begins_objects(edit) for edit in edits)

    def skip_to(self, camera: str, seq: int) -> int:
        """Skip edits of the camera's frames before `seq`, but for the last names to detect.

        Return the number of skipped edits.
        """
        keys = [key for key in (*self.before, *self.on) if key[0] == camera and key[1] < seq]
        skipped = [edit for group in (self.before, self.on) for key in keys for edit in group.pop(key, ())]
        # names stay in force on later frames, so the last ones are needed from the beginning on
        prompts = [edit for edit in skipped if isinstance(edit, SetPrompts)]
        if prompts:
            self.before[camera, seq] = [prompts[-1], *self.before.pop((camera, seq), ())]
        return len(skipped) - len(prompts)


def step_all_frames(
    frames: Iterable[Frame],
    notes: event_log.Notes,
    edits: FrameEdits | None = None,
    *,
    objects: Sequence[ObjectOnFrame] = (),
    everything: bool = False,
    episode_starts: Sequence[int] = (),
    prompts: Sequence[str] = (),
    find_robot: Callable[[Frame], RobotState] = lambda _: RobotState(),
    stride: int = 1,
) -> Iterator[event_log.Action]:
    """Yield a step on each frame, with its `edits`, and with the addition of each object that is marked on it.

    With a `stride`, step frames whose number is a multiple of it, the first one of each camera and episode, and those
    with edits or objects. The numbers do not depend on where a part of the recording begins.

    An object whose frame does not come is noted. With `everything`, all that can be segmented on the first frame of
    each camera and episode is added on it. Between two episodes, whose first frames have the numbers `episode_starts`,
    all objects are removed, and `prompts` are detected anew; ids go on over all episodes.
    """
    edits = edits or FrameEdits()
    remaining = [item for item in objects if not item.photo]
    indices = Counter[str]()
    skipped: dict[str, int] = {}
    begun = set[str]()
    episode = None
    for frame in frames:
        key = frame.camera, frame.seq
        is_edited = key in edits.before or key in edits.on
        # taken out, because a seq comes again after a restart of the camera
        yield from edits.before.pop(key, ())
        before = episode
        episode = bisect_right(episode_starts, frame.seq)
        if before not in (None, episode):
            begun.clear()
            skipped.clear()
            yield Reset()
            if prompts:
                yield SetPrompts(prompts=tuple(prompts))
        marked = [item for item in remaining if _is_on(item, frame, indices[frame.camera])]
        remaining = [item for item in remaining if item not in marked]
        indices[frame.camera] += 1
        is_first = frame.camera not in skipped
        if frame.seq % stride and not (is_edited or marked or is_first):
            skipped[frame.camera] += 1
            continue
        on_frame: list[Edit] = [
            *edits.on.pop(key, ()),
            *(_make_add_edit(item, frame, notes) for item in marked),
        ]
        if everything and frame.camera not in begun:
            begun.add(frame.camera)
            on_frame.append(AddEverything(SegmentEverything(camera=frame.camera, seq=frame.seq)))
        # the time of a recorded frame, not of this run, so that a repeated replay gives the same bytes
        received_ns = frame.sent_ns or frame.capture_ns
        left_out = skipped.pop(frame.camera, 0)
        skipped[frame.camera] = 0
        yield event_log.Step(frame, received_ns, left_out, edits=tuple(on_frame), robot=find_robot(frame))
    for item in remaining:
        wanted = f"seq {item.seq}" if item.seq is not None else f"frame {item.index}"
        notes.add(
            f"object {item.label}: expected {wanted} of {item.camera or 'a camera'}, found no such frame"
        )


def check_extents(objects: Sequence[ObjectOnFrame], frames: Iterable[Frame]) -> None:
    """Raise ReplayError for an object that is not on a frame of the size of its camera's first one.

    An object of any camera is taken for one of the camera that comes first. Reads no more frames than are needed.
    """
    # an exemplar on a photo has no frame
    waiting = [item for item in objects if not item.photo]
    if not waiting:
        return
    for frame in frames:
        own = [item for item in waiting if item.camera in (None, frame.camera)]
        for item in own:
            # only the first frame of its camera is compared: a camera keeps its size
            waiting.remove(item)
            mask = read_mask(Path(item.mask), item.value) if item.mask is not None else None
            try:
                FramePrompt(item.points, item.labels, item.box, mask).within((frame.height, frame.width))
            except RequestError as error:
                raise ReplayError(f"object {item.label!r} of camera {frame.camera}: {error}") from error
        if not waiting:
            return


def _is_on(marked: ObjectOnFrame, frame: Frame, index: int) -> bool:
    """Return True if an object is marked on a frame, which is the `index`-th of its camera."""
    if marked.camera not in (None, frame.camera):
        return False
    if marked.seq is not None:
        return frame.seq == marked.seq
    return index == marked.index


def _make_add_edit(marked: ObjectOnFrame, frame: Frame, notes: event_log.Notes) -> Edit:
    """Return the edit that adds an object on its frame. A box that reaches beyond the frame is noted."""
    if clipped := describe_clipping(marked.box, (frame.height, frame.width)):
        notes.add(f"object {marked.label}: {clipped}")
    if marked.like is not None:
        return _make_exemplar_edit(marked, frame)
    mask = None if marked.mask is None else read_mask(Path(marked.mask), marked.value)
    prompt = FramePrompt(marked.points, marked.labels, marked.box, mask)
    return AddObject(**write_prompt(prompt), label=marked.label, seq=frame.seq, camera=frame.camera)


def _make_exemplar_edit(marked: ObjectOnFrame, frame: Frame | None = None) -> AddExemplar:
    """Return the edit of a box on a frame, or on its photo."""
    shown = AddExemplar(
        name=marked.label,
        boxes=(read_box(FramePrompt(box=marked.box)),),
        labels=None if marked.like is None else (marked.like,),
    )
    if frame is not None:
        return structs.replace(shown, camera=frame.camera, seq=frame.seq)
    with explain_os_error(ReplayError, f"cannot read {marked.photo}"):
        photo = read_regular(Path(str(marked.photo)), MAX_IMAGE_FILE)
    return structs.replace(shown, photo=photo)


def group_edits(log: Iterable[RecordedMasks | Event]) -> FrameEdits:
    """Group a live node's edits by the frames that they took effect on. Edits after the last frame are dropped."""
    edits = FrameEdits()
    pending: list[Edit] = []
    last: dict[str, int] = {}
    for item in log:
        if isinstance(item, RecordedMasks):
            key = item.masks.camera, item.masks.seq
            last[key[0]] = key[1]
            own = [edit for edit in pending if _applies_to(edit, key[0])]
            # most frames have no edit, and would fill the memory
            if own:
                edits.before[key] += own
            pending = [edit for edit in pending if not _applies_to(edit, key[0])]
        elif item.op in CHANGES:
            edit = event_log.read_edit(item)
            frame = _find_prompted_frame(edit, last)
            edits.on[frame].append(edit) if frame else pending.append(edit)
    return edits


def _find_prompted_frame(edit: Edit, last: dict[str, int]) -> FramePlace | None:
    """Return the past frame of an edit, None if the edit takes effect on the next frame."""
    if not isinstance(edit, AddObject | RefineObject | AddExemplar | PinFrame):
        return None
    camera = edit.camera or (next(iter(last)) if len(last) == 1 else None)
    seq = edit.seq
    if seq is None and isinstance(edit, RefineObject | AddExemplar) and camera in last:
        seq = last[camera]
    return None if seq is None or camera is None else (camera, seq)


def _applies_to(edit: Edit, camera: str) -> bool:
    return _camera_of(edit) in (None, camera)


def _camera_of(edit: Edit) -> str | None:
    """Return the camera that an edit names; None if it applies to all, or to the one that there is."""
    return getattr(edit, "camera", None)


def _begins_objects(edit: Edit) -> bool:
    """Return True if an edit makes objects begin. One that cannot be read may have been such an edit."""
    if isinstance(edit, SetPrompts):
        return bool(edit.prompts)
    return isinstance(edit, AddObject | AddLike | AddExemplar | Unreadable)
