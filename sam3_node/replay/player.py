"""Applies replay actions to a `Perception`, as the node does, and checkpoints its state."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..engines.oom import find_device_error
from ..errors import CapacityError, ReplayError, Sam3NodeError
from ..node.operations import carry_out
from ..perception.checkpoint import MALFORMED, pack_state, unpack_state
from ..perception.perception import Perception
from ..perception.step import StepFrame
from ..types import Instance, MaskFrame, TrackState
from ..wire import CAUGHT_UP, DROPPED, SERVED, decode_mask
from ..wire.frame_prompt import FramePrompt
from ..wire.messages import DEPTH_FIELDS
from ..wire.operations import AddObject, SegmentEverything
from .event_log import ADD_EVERYTHING, MAX_NOTES, REMOVED, RESTARTED, Action, Edit, Step
from .store import NO_3D, WITH_DEPTH

log = logging.getLogger(__name__)

MAX_COUNTS = 100
"""Number of counts from which on no new reason for missing 3-D is counted. Reasons may hold figures."""

EVERYTHING_SETTINGS = "see tracker.everything_min_iou and tracker.everything_min_stability"


class Player:
    """Steps frames, makes edits on one Perception, and counts them. It drops the Perception's cameras first.

    With `joins_recorded`, objects that were prompted on past frames join at CAUGHT_UP edits, else at once.
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

    def play(self, action: Action) -> MaskFrame | None:
        """Apply one action, and return the masks of a step that did not fail.

        An error of a frame or an edit is logged and counted, and has no other effect.
        """
        if isinstance(action, Edit):
            self._edit(action)
            return None
        return self._edit_on(action, self._step(action))

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

    def _step(self, step: Step) -> MaskFrame | None:
        frame = step.frame
        self.counts["frames"] += 1
        try:
            pipeline = self._perception.serve(frame.camera)
            taken = StepFrame(frame, step.received_ns, step.skipped, step.shed_level, step.robot)
            masks = self._perception.link(pipeline.step(taken))
        except Exception as error:  # as in the node, one bad frame does not end the run, but a lost GPU does
            if lost := find_device_error(error):
                raise lost from error
            self.counts["failed"] += 1
            foreseen = isinstance(error, Sam3NodeError)
            log.error("camera %s: frame %d failed: %s", frame.camera, frame.seq, error, exc_info=not foreseen)
            return None
        # also of frames whose masks are not kept: they took time, too
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
        """Make the edits of a step; return its masks with those that the edits return."""
        for edit in step.edits:
            reply = self._edit(edit)
            masks = masks and update_masks(masks, edit, reply)
        return masks

    def _edit(self, edit: Edit) -> Any:
        """Return the operation's reply, None if it was refused."""
        try:
            return self._carry_out(edit)
        except Exception as error:
            if lost := find_device_error(error):
                raise lost from error
            self._refuse(edit, error)
            return None

    def _refuse(self, edit: Edit, error: Exception) -> None:
        """Count and log a refused edit, and note why, once for equal reasons."""
        self.counts["refused"] += 1
        log.warning("%s was refused: %s", edit.op, error, exc_info=not isinstance(error, Sam3NodeError))
        line = f"{edit.op} was refused: {error}"
        if line not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(line)

    def _carry_out(self, edit: Edit) -> Any:
        perception = self._perception
        if edit.op == RESTARTED:
            return self._restart()
        if edit.op == SERVED:
            return perception.serve(edit.args["camera"])
        if edit.op == DROPPED:
            return perception.drop(edit.args["camera"])
        if edit.op == REMOVED:
            return self._remove(**edit.args)
        if edit.op == ADD_EVERYTHING:
            return add_everything(edit, partial(carry_out, perception), self.notes)
        if edit.op == CAUGHT_UP:
            catch_ups = perception.serve(edit.args["camera"]).catch_ups
            return catch_ups.end(edit.args["id"], failed="error" in edit.args)
        reply = carry_out(perception, edit.read_change())
        # nothing recorded says when the object joined, so it joins before the next frame
        if not self._joins_recorded:
            for pipeline in perception.pipelines.values():
                pipeline.catch_ups.end_all()
        return reply

    def _remove(self, camera: str, label: str) -> None:
        pipeline = self._perception.serve(camera)
        for tracked in pipeline.objects:
            if tracked.label == label:
                pipeline.remove(tracked.id)

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


def add_everything(
    edit: Edit, request: Callable[[AddObject | SegmentEverything], Any], notes: list[str]
) -> list[Any]:
    """Make an edit ADD_EVERYTHING by `request`, which carries out an operation; return the replies.

    Where nothing is found, the reason goes to `notes`.
    """
    search = SegmentEverything.read(edit.args)
    reply = request(search)
    if not reply["masks"] and len(notes) < MAX_NOTES:
        reason = reply.get("note", "nothing was found")
        notes.append(f"{search.camera}, frame {search.seq}: {reason}: {EVERYTHING_SETTINGS}")
        log.warning("%s", notes[-1])
    replies = []
    for found in reply["masks"]:
        prompt = FramePrompt(mask=decode_mask(found["mask"]))
        try:
            replies.append(request(AddObject(prompt=prompt, camera=search.camera, seq=search.seq)))
        except CapacityError:
            # every further mask would be refused, too
            break
    return replies


def update_masks(masks: MaskFrame, edit: Edit, reply: Any) -> MaskFrame:
    """Return a frame's masks with those in the reply to an edit, if the edit added or corrected objects on it."""
    if isinstance(reply, list):
        for one in reply:
            masks = update_masks(masks, edit, one)
        return masks
    if not isinstance(reply, dict) or reply.get("seq") != masks.seq or "mask" not in reply:
        return masks
    mask = decode_mask(reply["mask"])
    score = reply["score"]
    instances = {instance.id: instance for instance in masks.instances}
    # an object that was added on this frame is not in its masks yet
    edited = instances.get(reply["id"])
    if edited is None:
        state: TrackState = "tracked" if mask.area else "occluded"
        edited = Instance(reply["id"], edit.args.get("label", "object"), score, state, 0, 0, mask)
    stale: dict[str, Any] = dict.fromkeys(DEPTH_FIELDS)  # they belong to the old mask
    instances[edited.id] = replace(edited, score=score, mask=mask, **stale)
    return replace(masks, instances=tuple(instances.values()))
