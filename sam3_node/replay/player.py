"""Applies replay actions to a `Perception`, as the node does, and checkpoints its state."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from ..engines.oom import find_device_error
from ..errors import CapacityError, ReplayError, Sam3NodeError
from ..node.operations import carry_out
from ..perception.checkpoint import MALFORMED, pack_state, unpack_state
from ..perception.joint_encoding import JointEncoding
from ..perception.perception import Perception
from ..perception.step import StepFrame
from ..perception.thread_choice import use_threads
from ..schema.operations import (
    PROMPT,
    AddLike,
    AddObject,
    Change,
    RefineObject,
    SegmentEverything,
    SegmentFrame,
)
from ..schema.replies import PromptedObject
from ..types import Instance, Mask, MaskFrame, TrackState
from ..wire.masks import open_mask
from .edits import (
    AddEverything,
    CatchUpEnded,
    Dropped,
    Edit,
    MarkLabelled,
    RemoveLabelled,
    Restarted,
    Served,
    SetThreads,
    Unreadable,
)
from .event_log import MAX_NOTES, Action, Step
from .store import NO_3D, WITH_DEPTH

log = logging.getLogger(__name__)

KEPT = frozenset({"confidence", "world_id", "name_confidence", "hidden_by"})
"""Values of an instance that may be None and outlive a correction of its mask."""
MEASURED_FIELDS = tuple(
    name
    for name, default in zip(
        reversed(Instance.__struct_fields__), reversed(Instance.__struct_defaults__), strict=False
    )
    if default is None and name not in KEPT
)
"""The other ones, which were measured on the mask."""
MAX_COUNTS = 100
"""Number of counts from which on no new reason for missing 3-D is counted. Reasons may hold figures."""

EVERYTHING_SETTINGS = "see tracker.everything_min_iou and tracker.everything_min_stability"


class Player:
    """Steps frames, makes edits on one Perception, and counts them. It drops the Perception's cameras first.

    With `joins_recorded`, objects that were prompted on past frames join at CatchUpEnded edits, else at once.
    """

    def __init__(self, perception: Perception, joins_recorded: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        """Counts since the first action: frames, failed (the step raised), refused (the edit was not possible), and
        for each camera the frames with depth and those without 3-D."""
        self.notes: list[str] = []
        """Why edits were refused, and why searches for everything found nothing."""
        self.stages_us: Counter[str] = Counter()
        """Time of each stage, over all frames since this was created."""
        self._perception = perception
        self._joins_recorded = joins_recorded
        self._restart()

    def play(self, action: Action, encoding: JointEncoding | None = None) -> MaskFrame | None:
        """Apply one action, and return the masks of a step that did not fail.

        encoding: of the step's frame, if it has been encoded ahead or with others. An error of a frame or an edit is
        logged and counted, and has no other effect.
        """
        if isinstance(action, Step):
            return self._edit_on(action, self._step(action, encoding))
        self._edit(action)
        return None

    def checkpoint(self) -> bytes:
        """Return the state for `resume`."""
        return pack_state(self._perception.state())

    def resume(self, checkpoint: bytes, counts: Mapping[str, int]) -> None:
        """Continue from another player's checkpoint.

        Raises ReplayError if model or settings differ from its own, or if it holds anything else.
        """
        state = unpack_state(checkpoint)
        try:
            self._perception.restore(state)
        except MALFORMED as error:
            if lost := find_device_error(error):
                raise lost from error
            raise ReplayError(
                f"expected a checkpoint that fits, found {type(error).__name__}: {error!s:.400}; start the replay again"
            ) from error
        self.counts = Counter(counts)

    def _step(self, step: Step, encoding: JointEncoding | None) -> MaskFrame | None:
        frame = step.frame
        self.counts["frames"] += 1
        try:
            pipeline = self._perception.serve(frame.camera)
            taken = StepFrame(frame, step.received_ns, step.skipped, step.decisions, step.robot)
            if encoding is not None:
                taken.prepared = encoding.find(frame)
                taken.encoding = encoding
            masks = self._perception.link(pipeline.step(taken))
        except Exception as error:  # as in the node, one bad frame does not end the run, but a lost GPU does
            if lost := find_device_error(error):
                raise lost from error
            self.counts["failed"] += 1
            foreseen = isinstance(error, Sam3NodeError)
            log.error("camera %s: frame %d failed: %s", frame.camera, frame.seq, error, exc_info=not foreseen)
            return None
        # also of frames whose masks are not kept, because they took time
        self.stages_us.update(masks.stages_us)
        if frame.depth is not None or pipeline.finds_robot:
            self._count_depth(frame.camera, taken.problem)
        # the live node stepped the frame but published nothing, so the state goes on and no masks come
        if step.withheld:
            return None
        if step.failed:
            self.counts["not_failed"] += 1
            log.warning("camera %s: frame %d failed in the node, but not here", frame.camera, frame.seq)
            return None
        # without this run's times, the same job gives the same bytes
        return replace(masks, stages_us={})

    def _count_depth(self, camera: str, problem: str | None) -> None:
        self.counts[f"{WITH_DEPTH} {camera}"] += 1
        name = f"{NO_3D} {camera} {problem}"
        if problem is not None and (name in self.counts or len(self.counts) < MAX_COUNTS):
            self.counts[name] += 1

    def _edit_on(self, step: Step, masks: MaskFrame | None) -> MaskFrame | None:
        """Make the edits of a step; return its masks together with the masks that the edits return."""
        for edit in step.edits:
            for prompted in self._edit(edit):
                masks = masks and update_masks(masks, edit, prompted)
        return masks

    def _edit(self, edit: Edit) -> Sequence[PromptedObject]:
        """Make an edit; return the objects that it added or corrected, none if it was refused."""
        try:
            return self._carry_out(edit)
        except Exception as error:
            if lost := find_device_error(error):
                raise lost from error
            self._refuse(edit, error)
            return ()

    def _refuse(self, edit: Edit, error: Exception) -> None:
        """Count and log a refused edit, and note why, once for equal reasons."""
        self.counts["refused"] += 1
        log.warning("%s was refused: %s", edit.op, error, exc_info=not isinstance(error, Sam3NodeError))
        line = f"{edit.op} was refused: {error}"
        if line not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(line)

    def _carry_out(self, edit: Edit) -> Sequence[PromptedObject]:
        perception = self._perception
        match edit:
            case Restarted():
                self._restart()
            case Served(camera):
                perception.serve(camera)
            case Dropped(camera):
                perception.drop(camera)
            case SetThreads(count):
                use_threads(count)
            case CatchUpEnded():
                catch_ups = perception.serve(edit.camera).catch_ups
                catch_ups.end(edit.id, failed=edit.error is not None)
            case RemoveLabelled():
                self._remove(edit)
            case MarkLabelled():
                return self._mark(edit)
            case AddEverything():
                return self._add_everything(edit.search)
            case Unreadable():
                raise ReplayError(edit.reason)
            case _:
                return self._change(edit)
        return ()

    def _change(self, change: Change) -> Sequence[PromptedObject]:
        reply = carry_out(self._perception, change)
        # nothing recorded says when the object joined, so it joins before the next frame
        if not self._joins_recorded:
            for pipeline in self._perception.pipelines.values():
                pipeline.catch_ups.end_all()
        return [reply] if isinstance(reply, PromptedObject) else []

    def _remove(self, edit: RemoveLabelled) -> None:
        pipeline = self._perception.serve(edit.camera)
        for tracked in pipeline.objects:
            if tracked.label == edit.label:
                pipeline.remove(tracked.id)

    def _mark(self, edit: MarkLabelled) -> Sequence[PromptedObject]:
        """Correct or add the object with a label."""
        given = edit.prompt
        for tracked in self._perception.serve(str(given.camera)).objects:
            if tracked.label == edit.label:
                return self._change(self._correct(tracked.id, given))
        return self._change(structs.replace(given, label=edit.label))

    def _correct(self, object_id: int, given: AddObject) -> RefineObject:
        """Return the correction of an object by a prompt; by a box, with the mask that it has without its memory.

        A person draws a box where the tracker is wrong. With its memory, the mask would keep a part of what it is wrong
        about.
        """
        correction = RefineObject(id=object_id, camera=given.camera, seq=given.seq)
        prompt = {name: getattr(given, name) for name in PROMPT}
        if given.box is not None:
            found = carry_out(self._perception, SegmentFrame(camera=given.camera, seq=given.seq, **prompt))
            if open_mask(found.mask, "mask").area:
                return structs.replace(correction, mask=found.mask)
        return structs.replace(correction, **prompt)

    def _add_everything(self, search: SegmentEverything) -> list[PromptedObject]:
        """Add an object for each mask that is found. Where nothing is found, the reason goes to the notes."""
        found = carry_out(self._perception, search)
        if not found.masks and len(self.notes) < MAX_NOTES:
            reason = found.note or "nothing was found"
            self.notes.append(f"{search.camera}, frame {search.seq}: {reason}: {EVERYTHING_SETTINGS}")
            log.warning("%s", self.notes[-1])
        added = []
        for one in found.masks:
            addition = AddObject(mask=one.mask, camera=search.camera, seq=search.seq)
            try:
                added.append(carry_out(self._perception, addition))
            except CapacityError:
                # every further mask would also be refused
                break
        return added

    def _restart(self) -> None:
        perception = self._perception
        for camera in list(perception.pipelines):
            perception.drop(camera)
        perception.forget_things()
        perception.paused = False
        # a phrase keeps its exemplar, so the exemplars of the run before go only with all phrases
        for prompts in ((), perception.settings.detector.prompts):  # first without exemplars
            if perception.prompts or prompts:
                perception.set_prompts(prompts)


def update_masks(masks: MaskFrame, edit: Edit, prompted: PromptedObject) -> MaskFrame:
    """Return a frame's masks with that of an object that the edit added or corrected, if it was on this frame."""
    if prompted.seq != masks.seq or prompted.mask is None:
        return masks
    mask = open_mask(prompted.mask, "mask")
    score = prompted.score or 0.0
    instances = {instance.id: instance for instance in masks.instances}
    # an object that was added on this frame is not in its masks yet
    edited = instances.get(prompted.id)
    if edited is None:
        state: TrackState = "tracked" if mask.area else "occluded"
        label = "object"
        if isinstance(edit, AddObject | AddLike | MarkLabelled) and edit.label is not None:
            label = edit.label
        edited = Instance(prompted.id, label, score, state, 0, 0, mask)
    instances[edited.id] = change_mask(edited, mask, score)
    return replace(masks, instances=tuple(instances.values()))


def change_mask(instance: Instance, mask: Mask, score: float) -> Instance:
    """Return an instance with another mask and score, without what was measured on the old mask."""
    stale: dict[str, Any] = dict.fromkeys(MEASURED_FIELDS)
    return replace(instance, score=score, mask=mask, **stale)
