"""Checks what a job asks for before its first frame, and plans a replay of many recordings without stepping a frame.

A job that costs hours of machines is refused at its beginning: a name that the detector lacks, a part that is behind
the recording's end, no object at all. `plan_recording` reads a recording to its end, as the replay will.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ..bags.samples import UNIX_SINCE_NS
from ..detection.loading import load_vocabulary
from ..errors import BagError, ReplayError, Sam3NodeError, UnknownPhraseError
from ..perception.step import GRIPPER
from ..settings import DetectorSettings
from ..types import NANOSECONDS, Frame, JointState
from .completion import ProgressCallback, read_complete_summary
from .job import Job, calibrations_for
from .outputs import find_output
from .schedule import NOTHING_ASKED, Schedule, open_schedule
from .store import Summary, local_path, open_store

HOUR_S = 3600.0
MAX_GAP_S = 10.0
"""Longest time between two frames of a camera that counts as recorded. Longer ones are pauses."""
MASK_BYTES = 4000
"""Bytes of a frame's masks message, with about five objects at 1080p. Work files hold it a second time."""
MAX_JOINTS_SHOWN = 8
"""Names of joints that a plan lists."""


class NothingToFollowError(ReplayError):
    """Raised before the first frame of a job that would follow nothing, or not all that it names."""


class EmptyPartError(ReplayError):
    """Raised before the first frame of a part that has no frames."""


def check_request(schedule: Schedule) -> None:
    """Check before the first frame that there are frames, and that the detector knows the names.

    With `requires_objects`, raises NothingToFollowError for a name that the detector lacks, and for a job that begins
    no object. Else the schedule skips unknown names, if it has others, and notes them. Raises EmptyPartError for a
    part behind the recording's end.
    """
    job = schedule.job
    _check_part(schedule)
    unknown = skip_unknown_names(schedule)
    if unknown is not None:
        if job.requires_objects:
            raise NothingToFollowError(f"--prompt: {unknown.reason}; --allow-unfound goes on without")
        if unknown.known:
            schedule.notes.add(f"skipped names: {unknown.reason}")
    if job.requires_objects and not schedule.begins_objects():
        raise NothingToFollowError(f"{NOTHING_ASKED}; --allow-unfound replays it all the same")


def skip_unknown_names(schedule: Schedule) -> UnknownNames | None:
    """Have a schedule look for the names that its detector knows, if there are any. Return the others.

    Outputs number the names that are looked for, so outputs that are written later also need this.
    """
    unknown = find_unknown_names(schedule.job.names, schedule.settings.detector)
    # without any name, the recorded edits would be repeated: a refused request is nearer to what was asked
    if unknown is not None and unknown.known:
        schedule.names = unknown.known
    return unknown


def check_jobs(jobs: Sequence[Job], again: bool = False) -> None:
    """Check the requests of all jobs with a recording on this machine before the first one begins.

    A finished job, unless it is done `again`, and a recording that cannot be opened or has no such part, are left to
    their replay, which tells it.
    """
    for job in jobs:
        if local_path(job.bags[0]) is None:
            continue
        try:
            if not again and _read_finished(job) is not None:
                continue
            with open_schedule(job) as schedule:
                check_request(schedule)
        except NothingToFollowError as error:
            raise NothingToFollowError(f"{job.bags[0]}: {error}") from error
        except (Sam3NodeError, OSError):
            continue


@dataclass(frozen=True, slots=True)
class UnknownNames:
    """Names that a detector lacks: the others of the same job, and a sentence about them."""

    known: tuple[str, ...]
    reason: str


def find_unknown_names(names: Sequence[str], settings: DetectorSettings) -> UnknownNames | None:
    """Return the names that a detector with these settings lacks; None if it has them all, or takes any name."""
    if not names:
        return None
    if settings.kind == "none":
        return UnknownNames((), "expected a detector for names, found detector.kind none")
    vocabulary = load_vocabulary(settings)
    if vocabulary is None:
        return None
    try:
        vocabulary.encode(names)
    except UnknownPhraseError as error:
        return UnknownNames(tuple(name for name in names if name in vocabulary), str(error))
    return None


def _check_part(schedule: Schedule) -> None:
    """Raise EmptyPartError for a part that begins behind the last frame. Reads to the part's first frame."""
    job = schedule.job
    if job.begin_ns is None or next(schedule.frames(), None) is not None:
        return
    # read without limits, which takes a while, but the answer is what the user needs
    whole = replace(job, begin_ns=None, end_ns=None, start=0, stop=None, objects=())
    with Schedule(whole, schedule.path) as other:
        stamps_ns = [frame.capture_ns for frame in other.frames()]
    # the replay itself reports a part in a pause of the recording, where it finds no frame
    if not stamps_ns or _resolve(job.begin_ns, min(stamps_ns)) <= max(stamps_ns):
        return
    length_s = (max(stamps_ns) - min(stamps_ns)) / NANOSECONDS
    raise EmptyPartError(
        f"no frame was replayed: expected --from before the last frame, which is {length_s:.1f} s after the first "
        f"(captured at {max(stamps_ns)} ns), found {_describe_begin(job.begin_ns)}"
    )


def _resolve(begin_ns: int, first_ns: int) -> int:
    """Return the beginning of a part in the time of the recording, whose first frame is at `first_ns`."""
    if begin_ns < UNIX_SINCE_NS:
        return first_ns + begin_ns
    return begin_ns


def _describe_begin(begin_ns: int) -> str:
    if begin_ns < UNIX_SINCE_NS:
        return f"{begin_ns / NANOSECONDS:.1f} s"
    return f"{begin_ns} ns"


@dataclass(slots=True)
class RecordingPlan:
    """The reads and writes of one recording's replay."""

    bag: str
    cameras: dict[str, int]
    """Frames by camera."""
    seconds: float = 0.0
    """Recorded time of the longest camera."""
    bytes: int = 0
    """Size of the results, about."""
    robot: str = "no joints or poses"
    """Joints and poses in the recording, and whether the replay uses them."""
    topics: tuple[str, ...] = ()
    """Topics that the frames are made of."""
    lost: str | None = None
    """Parts that cannot be read."""
    error: str | None = None
    """Reason why the recording cannot be replayed."""
    refused: str | None = None
    """Reason why the job would follow nothing in it."""

    @property
    def frames(self) -> int:
        """Frames of all cameras."""
        return sum(self.cameras.values())


def plan_recording(job: Job, progress: ProgressCallback = lambda *_: None) -> RecordingPlan:
    """Read a job's recording to its end, and return what its replay will do. Writes nothing and loads no model.

    Errors of the recording and of the request are in the plan.
    """
    plan = RecordingPlan(job.bags[0], {})
    try:
        with open_schedule(job) as schedule:
            plan.topics = schedule.topics
            try:
                check_request(schedule)
            except NothingToFollowError as error:
                plan.refused = str(error)
            _count_frames(plan, job, _report(schedule.frames(), progress, schedule.count_frames()))
            # before the robot's messages are read, whose losses would replace those of the frames
            plan.lost = schedule.lost
            plan.robot = _describe_robot(schedule)
            if not plan.frames:
                raise BagError("expected frames, found none")
    except Sam3NodeError as error:
        plan.error = str(error)
    except OSError as error:
        plan.error = f"cannot read it: {error.strerror or error}"
    except Exception as error:  # a reader that fails in a new way must not hide the other recordings
        plan.error = f"{type(error).__name__}: {error}"
    return plan


def _report(frames: Iterator[Frame], progress: ProgressCallback, total: int | None) -> Iterator[Frame]:
    for count, frame in enumerate(frames, start=1):
        progress("reading", count, total)
        yield frame


def _count_frames(plan: RecordingPlan, job: Job, frames: Iterator[Frame]) -> None:
    """Count the frames, their time, and the bytes of the results."""
    counts = Counter[str]()
    seconds = defaultdict[str, float](float)
    last_ns: dict[str, int] = {}
    size = 0.0
    for frame in frames:
        counts[frame.camera] += 1
        # pauses, and the step back at the beginning of an episode, are no recorded time
        step_s = (frame.capture_ns - last_ns.get(frame.camera, frame.capture_ns)) / NANOSECONDS
        if 0 < step_s <= MAX_GAP_S:
            seconds[frame.camera] += step_s
        last_ns[frame.camera] = frame.capture_ns
        size += _estimate_bytes(frame, job.outputs)
        plan.cameras = dict(counts)
    plan.seconds = max(seconds.values(), default=0.0)
    # of each frame that is stepped
    plan.bytes = round(size / job.stride)


def _estimate_bytes(frame: Frame, outputs: Sequence[str]) -> float:
    # the shards are always written, and deleted at the end
    size: float = MASK_BYTES
    for output in map(find_output, outputs):
        size += output.frame_bytes + output.pixel_bytes * frame.width * frame.height
        if output.has_frames:
            size += len(frame.colour)
    return size


def _describe_robot(schedule: Schedule) -> str:
    """Say which poses and joints the recording has, and which of them the replay uses."""
    messages = Counter[str]()
    joints: dict[str, None] = {}
    for message in schedule.robot():
        if isinstance(message, JointState):
            messages["joints"] += 1
            joints |= dict.fromkeys(message.positions)
        else:
            messages["poses"] += 1
    calibrations = calibrations_for(schedule.job, schedule.description)
    on_gripper = any(found.parent == GRIPPER for found in calibrations)
    has_base = any(found.hand_eye is not None for found in calibrations)
    parts = []
    if messages["joints"]:
        shown = ", ".join(list(joints)[:MAX_JOINTS_SHOWN])
        if len(joints) > MAX_JOINTS_SHOWN:
            shown += ", …"
        use = "used for robot.urdf" if schedule.settings.robot.urdf else "not used: robot.urdf is empty"
        parts.append(f"{messages['joints']} messages of {len(joints)} joints ({shown}), {use}")
    elif schedule.settings.robot.urdf:
        parts.append("no joints, though robot.urdf is set: no pixels of the robot will be known")
    if messages["poses"]:
        use = "not used: no hand-eye calibration of a camera"
        if on_gripper:
            use = "used"
        elif has_base:
            # beside a fixed camera, they tell which object is held
            use = "used for what the gripper holds"
        parts.append(f"{messages['poses']} poses, {use}")
    elif on_gripper:
        parts.append("no poses, though a camera is on the gripper: no positions in the base")
    return "; ".join(parts) or "no joints or poses"


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The plans of all recordings of a job, and what they cost."""

    recordings: tuple[RecordingPlan, ...]
    frames_per_s: float | None
    """Rate of recordings of this job that are finished; None before the first."""
    price_per_hour: float | None
    free_bytes: int | None
    """Space on the disk of the results; None for a URL."""
    stride: int = 1
    """Distance between frames that are stepped."""

    @property
    def frames(self) -> int:
        """Frames of all recordings."""
        return sum(plan.frames for plan in self.recordings)

    @property
    def seconds(self) -> float:
        """Recorded time of all recordings."""
        return sum(plan.seconds for plan in self.recordings)

    @property
    def bytes(self) -> int:
        """Size of all results, about."""
        return sum(plan.bytes for plan in self.recordings)

    @property
    def bad(self) -> tuple[RecordingPlan, ...]:
        """Recordings that cannot be replayed."""
        return tuple(plan for plan in self.recordings if plan.error)

    @property
    def refused(self) -> tuple[RecordingPlan, ...]:
        """Recordings in which the job would follow nothing."""
        return tuple(plan for plan in self.recordings if plan.refused)

    def lines(self) -> list[str]:
        """Return the plan as text, the recordings first."""
        lines = []
        for plan in self.recordings:
            lines += _describe_recording(plan)
        count = len(self.recordings)
        lines.append(
            f"all: {count} recordings, {len(self.bad)} of them bad, {self.frames} frames, "
            f"{self.seconds / HOUR_S:.2f} hours of recording"
        )
        lines.append(self._describe_disk())
        lines.append(self._describe_work())
        return lines

    def _describe_disk(self) -> str:
        text = f"disk: about {_format_bytes(self.bytes)} of results"
        if self.free_bytes is None:
            return text
        text += f", {_format_bytes(self.free_bytes)} are free"
        if self.bytes > self.free_bytes:
            text += ": expected more space; choose another folder, or fewer outputs"
        return text

    def _describe_work(self) -> str:
        # nobody knows the speed of a machine that has not worked yet
        if self.frames_per_s:
            hours = self.frames / self.stride / self.frames_per_s / HOUR_S
            source = f"at {self.frames_per_s:.1f} frames/s, the rate of this folder's finished recordings"
        else:
            hours = self.seconds / self.stride / HOUR_S
            source = "if a worker is as fast as the recording; replay one recording to measure it"
        if self.stride > 1:
            source += f", each frame of {self.stride} stepped"
        text = f"work: {hours:.2f} hours of one worker, {source}"
        if self.price_per_hour is None:
            return text
        return f"{text}; price {hours * self.price_per_hour:.2f}"


def plan_jobs(
    jobs: Sequence[Job], price_per_hour: float | None = None, progress: ProgressCallback = lambda *_: None
) -> ReplayPlan:
    """Plan jobs of one recording each; see `plan_recording`."""
    plans = tuple(plan_recording(job, progress) for job in jobs)
    free = _find_free_bytes(jobs[0].out)
    return ReplayPlan(plans, _measure_rate(jobs), price_per_hour, free, jobs[0].stride)


def _measure_rate(jobs: Sequence[Job]) -> float | None:
    frames = 0
    seconds = 0.0
    for job in jobs:
        summary = None
        # a damaged summary tells no rate; its replay tells what is wrong with it
        with suppress(Sam3NodeError, OSError):
            summary = _read_finished(job)
        if summary is not None:
            frames += summary.frames
            seconds += summary.seconds
    if not seconds:
        return None
    return frames / seconds


def _read_finished(job: Job) -> Summary | None:
    """Return the summary of a finished job in a folder on this machine, else None. Makes no folder."""
    path = local_path(job.out)
    if path is None or not path.is_dir():
        return None
    return read_complete_summary(open_store(job.out))


def _find_free_bytes(out: str) -> int | None:
    path = local_path(out)
    if path is None:
        return None
    path = path.absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free


def _describe_recording(plan: RecordingPlan) -> list[str]:
    if plan.error:
        return [f"{plan.bag}: bad: {plan.error}"]
    cameras = ", ".join(f"{camera} {count}" for camera, count in plan.cameras.items())
    lines = [
        f"{plan.bag}: {plan.frames} frames ({cameras}), {plan.seconds:.1f} s, about {_format_bytes(plan.bytes)}"
    ]
    if plan.topics:
        lines.append(f"  topics: {', '.join(plan.topics)}")
    lines.append(f"  robot: {plan.robot}")
    if plan.lost:
        lines.append(f"  lost: {plan.lost}")
    if plan.refused:
        lines.append(f"  refused: {plan.refused}")
    return lines


def _format_bytes(size: int) -> str:
    exponent = min(int(math.log10(size) // 3), 4) if size else 0
    return f"{size / 1000**exponent:.1f} {('B', 'kB', 'MB', 'GB', 'TB')[exponent]}"
