"""Carries out a replay's actions on a live node, each edit on its frame."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...errors import ReplayError, Sam3NodeError, TransportError, WireError
from ...types import MaskFrame
from ..actions import Action, Edit, Step
from ..player import Outcome, with_answer
from .node import LiveNode

log = logging.getLogger(__name__)

OF_TIME = ("pause", "resume")
"""Edits that change when a node steps frames, and none of their masks."""


class LivePlayer:
    """Pushes frames through a node, and asks it between them what edits say. `counts` are those of a `Player`."""

    def __init__(self, node: LiveNode) -> None:
        self.counts: Counter[str] = Counter()
        self.stages_us: Counter[str] = Counter()
        """Time of each stage in the node, over all frames."""
        self._node = node
        self._steps: deque[Step] = deque()

    def play(self, actions: Iterable[Action]) -> Iterator[Outcome]:
        """Carry out actions -> what came of each, of steps in their order and a few frames later.

        Where an edit is, the masks of all frames before it are waited for. What is wrong with a frame or an edit is
        logged and counted, and costs no more. Raises TransportError where the node does not go on, after the outcomes
        that there were.
        """
        try:
            for action in actions:
                yield from self._between(action) if isinstance(action, Edit) else self._push(action)
            self._node.settle()
            self._node.check()
        except TransportError:
            yield from self._settled()
            raise
        yield from self._settled()

    def checkpoint(self) -> bytes:
        """Nothing: what a live node remembers stays in it."""
        return b""

    def resume(self, checkpoint: bytes, counts: Mapping[str, int]) -> None:
        """Raises ReplayError: it cannot be done."""
        raise ReplayError("what a live node remembered is gone with it: begin anew with --again")

    def _push(self, step: Step) -> Iterator[Outcome]:
        try:
            self._node.push(step.frame)
        except WireError as error:
            log.error("camera %s: frame %d cannot be sent: %s", step.frame.camera, step.frame.seq, error)
            self._node.settle()
            yield from self._settled()
            yield self._outcome(step, None)
            return
        self._steps.append(step)
        if step.edits:
            self._node.settle()
        yield from self._settled()

    def _between(self, edit: Edit) -> Iterator[Outcome]:
        self._node.settle()
        yield from self._settled()
        self._ask(edit)
        yield Outcome(edit, None)

    def _settled(self) -> Iterator[Outcome]:
        while self._node.settled:
            yield self._outcome(self._steps.popleft(), self._node.settled.popleft().masks)

    def _outcome(self, step: Step, masks: MaskFrame | None) -> Outcome:
        """Of a step, with its edits, which are the last thing sent."""
        self.counts["frames"] += 1
        if masks is None:
            self.counts["failed"] += 1
        else:
            self.stages_us.update(masks.stages_us)
            # as of a replay without a node: the same job gives the same bytes
            masks = replace(
                masks, received_ns=step.received_ns, published_ns=0, skipped=step.skipped, stages_us={}
            )
        for edit in step.edits:
            found = self._ask(edit)
            masks = masks and with_answer(masks, edit, found)
        return Outcome(step, masks)

    def _ask(self, edit: Edit) -> Any:
        """What the node answers, None where it refuses."""
        if edit.op in OF_TIME:
            return None
        try:
            return self._node.ask(edit.op, **edit.args)
        except TransportError:
            raise
        except Sam3NodeError as error:
            self.counts["refused"] += 1
            log.warning("%s was refused: %s", edit.op, error)
            return None
