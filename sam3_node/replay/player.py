"""Carries out actions on what sees, as the node does it; what it has come to can be kept and taken up again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import ReplayError, Sam3NodeError
from ..node.operations import CHANGES, carry_out
from ..perception.checkpoint import pack_state, unpack_state
from ..perception.perception import Perception
from ..types import Instance, MaskFrame, TrackState
from ..wire import DROPPED, SERVED, decode_mask
from .actions import FORGOTTEN, RESTARTED, Action, Edit, Step

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """An action that was carried out, and of a step that did not fail its masks."""

    action: Action
    masks: MaskFrame | None


class Player:
    """Steps frames and makes edits on one Perception, whose cameras it drops first.

    `counts` since the first action: frames, failed (whose step raised), refused (edits that were not possible).
    """

    def __init__(self, perception: Perception) -> None:
        self.counts: Counter[str] = Counter()
        self.stages_us: Counter[str] = Counter()
        """Time of each stage, over all frames since this was made."""
        self._perception = perception
        self._looked_for: dict[str, Any] | None = None
        self._restart()

    def play(self, action: Action) -> MaskFrame | None:
        """Carry out one action. Whatever is wrong with a frame or an edit is logged and counted, and costs no more."""
        if isinstance(action, Edit):
            self._edit(action)
            return None
        masks = self._step(action)
        for edit in action.edits:
            found = self._edit(edit)
            masks = masks and with_answer(masks, edit, found)
        return masks

    def checkpoint(self) -> bytes:
        """What `resume` takes."""
        cameras = {camera: one.state() for camera, one in self._perception.pipelines.items()}
        paused = self._perception.paused
        return pack_state({"looked_for": self._looked_for, "paused": paused, "cameras": cameras})

    def resume(self, checkpoint: bytes, counts: Mapping[str, int]) -> None:
        """Go on from where another player was. Raises ReplayError where model or settings are others than its."""
        state = unpack_state(checkpoint)
        self._restart()
        if state["looked_for"] is not None:
            self._carry_out(Edit("set_prompts", state["looked_for"]))
        for camera, one in state["cameras"].items():
            self._perception.serve(camera).restore(one)
        self._perception.paused = state["paused"]
        self.counts = Counter(counts)

    def _step(self, step: Step) -> MaskFrame | None:
        frame = step.frame
        self.counts["frames"] += 1
        try:
            masks = self._perception.serve(frame.camera).step(frame, step.received_ns, step.skipped)
        except Exception as error:  # as in the node, one bad frame does not end it
            self.counts["failed"] += 1
            foreseen = isinstance(error, Sam3NodeError)
            log.error("camera %s: frame %d failed: %s", frame.camera, frame.seq, error, exc_info=not foreseen)
            return None
        self.stages_us.update(masks.stages_us)
        if step.failed:
            self.counts["not_failed"] += 1
            log.warning("camera %s: frame %d failed in the node, and not here", frame.camera, frame.seq)
            return None
        # times of this run have no place in results: the same job gives the same bytes
        return replace(masks, stages_us={})

    def _edit(self, edit: Edit) -> Any:
        """What the operation answers, None where it was refused."""
        try:
            return self._carry_out(edit)
        except Exception as error:
            self.counts["refused"] += 1
            foreseen = isinstance(error, Sam3NodeError)
            log.warning("%s was refused: %s", edit.op, error, exc_info=not foreseen)
            return None

    def _carry_out(self, edit: Edit) -> Any:
        perception = self._perception
        if edit.op == RESTARTED:
            return self._restart()
        if edit.op == SERVED:
            return perception.serve(edit.args["camera"])
        if edit.op == DROPPED:
            return perception.drop(edit.args["camera"])
        if edit.op == FORGOTTEN:
            return self._forget(**edit.args)
        if edit.op not in CHANGES:
            raise ReplayError(f"expected an operation of {', '.join(CHANGES)}, found {edit.op!r:.60}")
        answer = carry_out(perception, edit.op, edit.args)
        if edit.op == "set_prompts":
            self._looked_for = dict(edit.args)
        return answer

    def _forget(self, camera: str, label: str) -> None:
        pipeline = self._perception.serve(camera)
        for known in pipeline.objects:
            if known.label == label:
                pipeline.remove(known.id)

    def _restart(self) -> None:
        perception = self._perception
        for camera in list(perception.pipelines):
            perception.drop(camera)
        perception.paused = False
        prompts = perception.settings.detector.prompts
        if perception.prompts or prompts:
            perception.set_prompts(prompts)
        self._looked_for = None


def forward(actions: Iterable[Action], player: Player) -> Iterator[Outcome]:
    """The strategy that a live node has: each action once, in order."""
    for action in actions:
        yield Outcome(action, player.play(action))


def with_answer(masks: MaskFrame, edit: Edit, found: Any) -> MaskFrame:
    """The masks of a frame once an object was shown or corrected on it."""
    if not isinstance(found, dict) or found.get("seq") != masks.seq or "mask" not in found:
        return masks
    mask, score = decode_mask(found["mask"]), found["score"]
    others = {instance.id: instance for instance in masks.instances}
    known = others.get(found["id"])
    if known is None:
        state: TrackState = "tracked" if mask.area else "occluded"
        known = Instance(found["id"], edit.args.get("label", "object"), score, state, 0, 0, mask)
    others[known.id] = replace(known, score=score, mask=mask)
    return replace(masks, instances=tuple(others.values()))
