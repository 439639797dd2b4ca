"""All frames of a recording, with objects and edits at the frames that they are meant for.

What a job does with a recording: its actions in order, and the settings that they are done with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..bags.bag import open_bag
from ..bags.formats.mcap_stream import count_messages
from ..bags.native.layout import NODE
from ..bags.native.reader import RecordedMasks, RecordingReader, is_recorded
from ..bags.samples import natural_order
from ..errors import ReplayError
from ..node.operations import CHANGES
from ..types import Closeable, Frame, MaskFrame
from ..wire import Event, encode_mask
from .actions import Action, Edit, Notes, Step
from .davis_png import read_mask
from .event_log import Planned, Stepped, planned, with_frames
from .job import Job, ObjectOnFrame, settings_for

Place = tuple[str, int]
"""Camera and seq of a frame."""


class Edits:
    """Edits by the frame that they take effect on: before its step, or on it once it is stepped."""

    def __init__(self) -> None:
        self.before: defaultdict[Place, list[Edit]] = defaultdict(list)
        self.on: defaultdict[Place, list[Edit]] = defaultdict(list)


def every_frame(frames: Iterable[Frame], edits: Edits) -> Iterator[Action]:
    """A step on each frame, with the edits at theirs."""
    for frame in frames:
        place = frame.camera, frame.seq
        yield from edits.before.pop(place, ())
        received_ns = frame.sent_ns or frame.capture_ns
        yield Step(frame, received_ns, edits=tuple(edits.on.pop(place, ())))


def with_objects(
    actions: Iterable[Action], objects: Sequence[ObjectOnFrame], notes: Notes
) -> Iterator[Action]:
    """The actions, with each object added on its frame. Notes an object whose frame does not come."""
    waiting = list(objects)
    indices: defaultdict[str, int] = defaultdict(int)
    for action in actions:
        if isinstance(action, Step) and waiting:
            shown = [one for one in waiting if _is_on(one, action.frame, indices[action.frame.camera])]
            waiting = [one for one in waiting if one not in shown]
            action = action._replace(edits=(*action.edits, *(_added(one, action.frame) for one in shown)))
            indices[action.frame.camera] += 1
        yield action
    for one in waiting:
        place = f"seq {one.seq}" if one.seq is not None else f"frame {one.index}"
        notes.tell(f"object {one.label}: expected {place} of {one.camera or 'a camera'}, found no such frame")


def edits_of(log: Iterable[RecordedMasks | Event]) -> Edits:
    """What a live node was asked, by the frames that it took effect on; what came after the last frame is left out."""
    edits = Edits()
    waiting: list[Edit] = []
    last: dict[str, int] = {}
    for item in log:
        if isinstance(item, RecordedMasks):
            place = item.masks.camera, item.masks.seq
            last[place[0]] = place[1]
            edits.before[place] += [edit for edit in waiting if _is_for(edit, place[0])]
            waiting = [edit for edit in waiting if not _is_for(edit, place[0])]
        elif item.op in CHANGES:
            edit = Edit(item.op, item.args)
            frame = _prompted_frame(edit, last)
            edits.on[frame].append(edit) if frame else waiting.append(edit)
    return edits


def _prompted_frame(edit: Edit, last: dict[str, int]) -> Place | None:
    """The past frame that an edit is on, None for one that takes effect on the next."""
    camera = edit.args.get("camera") or (next(iter(last)) if len(last) == 1 else None)
    seq = edit.args.get("seq")
    if seq is None and edit.op == "refine_object" and camera in last:
        seq = last[camera]
    return None if seq is None or camera is None else (camera, seq)


def _is_for(edit: Edit, camera: str) -> bool:
    return edit.args.get("camera") in (None, camera)


def _is_on(shown: ObjectOnFrame, frame: Frame, index: int) -> bool:
    at = frame.seq == shown.seq if shown.seq is not None else index == shown.index
    return at and shown.camera in (None, frame.camera)


def _added(shown: ObjectOnFrame, frame: Frame) -> Edit:
    given: dict[str, Any] = {"points": shown.points, "labels": shown.labels, "box": shown.box}
    args = {name: _lists(value) for name, value in given.items() if value is not None}
    if shown.mask is not None:
        args["mask"] = encode_mask(read_mask(Path(shown.mask), shown.value))
    return Edit("add_object", {**args, "camera": frame.camera, "seq": frame.seq, "label": shown.label})


def _lists(value: object) -> object:
    return list(map(_lists, value)) if isinstance(value, tuple) else value


class Schedule(Closeable):
    """A job on its one recording, which is at `path`, opened. Each call of `actions` or `frames` begins again. A
    context manager.

    Raises BagError for what is no recording, ReplayError where it cannot be replayed as it was recorded.
    """

    def __init__(self, job: Job, path: Path) -> None:
        self.job = job
        self.notes = Notes(job.allow_gaps)
        self._files = sorted(path.glob("*.mcap"), key=natural_order) if path.is_dir() else [path]
        self._recorded = _recorded(self._files)
        if job.mode == "as-recorded" and not (self._recorded and self._recorded.has_actions()):
            raise ReplayError(
                f"as-recorded: expected a recording that sam3-node record made, found another at {path}; "
                "use --every"
            )
        self.description = _description(self._recorded)
        self.settings = settings_for(job, self.description)
        self._bag = open_bag(path, job.topics)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Those that are replayed."""
        return self._bag.cameras

    @property
    def lost(self) -> str | None:
        """What of the recording could not be read, None where all was; so far."""
        return self._bag.lost or (self._recorded.lost if self._recorded else None)

    def actions(self) -> Iterator[Action]:
        """Steps and edits in their order."""
        if self.job.mode == "as-recorded":
            plan = planned(self._log(), self.description)
            yield from with_frames(_of_cameras(plan, self.cameras), self._bag, self.notes)
            return
        if self.job.names:
            yield Edit("set_prompts", {"prompts": list(self.job.names)})
        asked = bool(self.job.names or self.job.objects)
        edits = Edits() if asked or self._recorded is None else edits_of(self._recorded.actions())
        yield from with_objects(every_frame(self.frames(), edits), self.job.objects, self.notes)

    def count(self) -> int | None:
        """How many frames are about to be stepped, where the recording's index tells."""
        if self.job.stop is not None:
            return self.job.stop - self.job.start
        roots = ("masks/{}",) if self.job.mode == "as-recorded" else ("/{}/header", "frame/{}")
        topics = [root.format(camera) for root in roots for camera in self.cameras]
        return count_messages(self._files, topics) or None

    def frames(self) -> Iterator[Frame]:
        """Those of the job, in the order of the recording."""
        return islice(self._bag, self.job.start, self.job.stop)

    def recorded_masks(self) -> Iterator[MaskFrame]:
        """What the live node found on these cameras; nothing where that is not recorded."""
        for item in self._log():
            if isinstance(item, MaskFrame) and item.camera in self.cameras:
                yield item

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        self._bag.close()

    def _log(self) -> Iterator[MaskFrame | Event]:
        for item in self._recorded.actions() if self._recorded else ():
            yield item.masks if isinstance(item, RecordedMasks) else item


def _recorded(files: Sequence[Path]) -> RecordingReader | None:
    files = [file for file in files if is_recorded(file)]
    return RecordingReader(files) if files else None


def _description(recorded: RecordingReader | None) -> Mapping[str, Any] | None:
    """What the node told of itself first."""
    found = recorded.metadata().get(NODE) if recorded else None
    return found[0] if found else None


def _of_cameras(plan: Iterable[Planned], cameras: Collection[str]) -> Iterator[Planned]:
    """Without what is done on other cameras. They are served all the same: who is asked may depend on how many are."""
    for item in plan:
        if isinstance(item, Stepped):
            wanted = item.camera in cameras
        elif isinstance(item, Edit):
            wanted = item.op not in CHANGES or item.args.get("camera") in (None, *cameras)
        else:
            wanted = True
        if wanted:
            yield item
