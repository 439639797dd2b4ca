"""Runs a job through a live node, with each edit on its frame. The results are those of a replay without a node."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ReplayError, Sam3NodeError, TransportError, WireError
from ...transport import Security
from ...transport.security import SecuritySettings
from ...types import MaskFrame
from ..actions import ADD_EVERYTHING, Action, Edit, Step
from ..completion import (
    Completion,
    ProgressCallback,
    StoppedError,
    build_identity,
    check_identity,
    clear_results,
    read_digests,
)
from ..job import SECTIONS, Job
from ..player import PlayedAction, add_everything, note_refusal, update_masks
from ..schedule import Schedule
from ..shards import ShardLimits, Shards, ShardWriter
from ..store import Store, local_bag, open_store
from ..summary import ReplayCounts, Summary
from .node import LiveNode, StoppedWaitingError

log = logging.getLogger(__name__)

LIMITS = ShardLimits()
TIMING_EDITS = ("pause", "resume")
"""Edits that change when a node steps frames, but not the masks."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Endpoints of a node: `control`, and `frames` and `masks` if they differ from the node's own settings.

    The default of `security` is that of the environment.
    """

    control: str
    frames: str | None = None
    masks: str | None = None
    security: SecuritySettings | None = None


def run_live(
    job: Job,
    endpoints: Endpoints,
    progress: ProgressCallback = lambda *_: None,
    stop: threading.Event | None = None,
    again: bool = False,
    limits: ShardLimits = LIMITS,
) -> Summary:
    """Push every frame of a job's first recording through a running node, and write results to the folder `job.out`.

    The node's state cannot be kept, so a job that ended early starts over. A finished job does not need the node.
    After `stop` is set, outputs of what is done are written, and StoppedError is raised. Raises ReplayError for a job
    that a live node cannot run, or if the folder has results of another job; SettingsError and TransportError as
    LiveNode does; and the exceptions of reading and writing. Complete shards are kept.
    """
    _check_job(job)
    stop, store = stop or threading.Event(), open_store(job.out)
    with store.held(), local_bag(job.bags[0]) as path, Schedule(job, path) as schedule:
        completion = Completion(schedule, store, progress, stop)
        if again:
            clear_results(store)
        identity = build_identity(job, schedule.settings, path)
        identity = {**identity, "job": {**identity["job"], "live": True}}
        check_identity(store, {"job": identity["job"], "bytes": identity["bytes"]})
        if finished := completion.read_finished():
            return completion.write(finished)
        security = Security.from_settings(endpoints.security) if endpoints.security else None
        with LiveNode(endpoints.control, endpoints.frames, endpoints.masks, stop, security) as node:
            _check_settings(job, node.description["settings"])
            _clear_unfinished(store, schedule, {**identity, **_read_node_identity(node.description)})
            summary = _push_frames(node, completion, limits)
        summary = completion.write(summary)
        if not summary.complete:
            raise StoppedError(summary.frames, "starts over, as the node's state cannot be kept")
        return summary


def _check_job(job: Job) -> None:
    if job.mode != "every" or job.strategy != "forward":
        raise ReplayError(
            f"a live node steps every frame, forward: expected that, found {job.mode}, {job.strategy}; replay without "
            "--connect"
        )

    if job.calibrations:
        raise ReplayError(
            "--calibration: a live node has its own calibrations; start it with spatial.calibration, or replay without "
            "--connect"
        )


def _check_settings(job: Job, node_settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ReplayError if a setting of the job differs from the node's."""
    for section, chosen in job.settings.items():
        for name, value in chosen.items():
            node_value = node_settings[section].get(name)
            if node_value != value:
                raise ReplayError(
                    f"{section}.{name}: the node has {node_value!r:.60}, found {value!r:.60} for this replay; a live "
                    "node has its own settings: leave this setting out, or start the node with it"
                )


def _read_node_identity(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node's part of the identity of results: its settings and weights."""
    settings = {name: description["settings"][name] for name in SECTIONS}
    return {"settings": settings, **read_digests(description)}


def _clear_unfinished(store: Store, schedule: Schedule, identity: Mapping[str, Any]) -> None:
    """Delete the results of a run that ended early, and store the identity of this run."""
    frames = ReplayCounts.from_dict(Shards(store).cursor().totals).counts["frames"]
    if frames:
        schedule.notes.add(
            f"{frames} frames of a run that ended early are pushed again: the node's state of that run is lost"
        )
    clear_results(store)
    check_identity(store, identity)


def _push_frames(node: LiveNode, completion: Completion, limits: ShardLimits) -> Summary:
    """Push all frames, up to a stop, and write their masks to shards."""
    schedule, player = completion.schedule, LivePlayer(node)
    served_before, total = node.begin(schedule.cameras), schedule.count_frames()
    if served_before:
        schedule.notes.add(
            f"the node had frames of {', '.join(served_before)} before: object ids continue from those it gave then"
        )
    writer = ShardWriter(Shards(completion.store), player, limits)
    try:
        with suppress(StoppedWaitingError):  # raised only after a stop: the summary says so
            for outcome in player.play(_take_until(completion.stop, schedule.actions())):
                writer.add(outcome)
                completion.progress("pushing", writer.frames, total)
    finally:
        writer.flush()
    summary = _make_summary(schedule, writer, player, node.description)
    problems = node.read_spatial_problems(schedule.cameras)
    summary = replace(summary, notes=[*summary.notes, *problems])
    if completion.stop.is_set():
        return replace(summary, complete=False)
    return replace(summary, unfound=writer.totals.describe_unfound(node.request("status")))


def _take_until(stop: threading.Event, actions: Iterable[Action]) -> Iterator[Action]:
    for action in actions:
        if stop.is_set():
            return
        yield action


def _make_summary(
    schedule: Schedule, writer: ShardWriter, player: LivePlayer, description: Mapping[str, Any]
) -> Summary:
    job, stepped = schedule.job, max(sum(writer.totals.frames.values()), 1)
    return Summary.from_counts(
        writer.totals,
        bag=job.bags[0],
        mode=job.mode,
        strategy=job.strategy,
        model=description["model"],
        device=description["device"],
        resumed_from=0,
        lost=schedule.lost,
        notes=[*schedule.remarks, *player.notes],
        stages_ms={name: round(us / stepped / 1e3, 3) for name, us in player.stages_us.items()},
    )


class LivePlayer:
    """Pushes frames through a node, and sends the edits between them as control requests."""

    def __init__(self, node: LiveNode) -> None:
        self.counts: Counter[str] = Counter()
        """Counts like those of a `Player`."""
        self.stages_us: Counter[str] = Counter()
        """Time of each stage in the node, over all frames."""
        self.notes: list[str] = []
        """Notes like those of a `Player`."""
        self._node = node
        self._steps: deque[Step] = deque()

    def play(self, actions: Iterable[Action]) -> Iterator[PlayedAction]:
        """Apply actions and yield the outcome of each. Outcomes of steps are in order, and a few frames late.

        Before an edit, this waits for the masks of all earlier frames. An error of a frame or an edit is logged and
        counted, and has no other effect. Raises TransportError if the node fails, after the outcomes until then.
        """
        try:
            for action in actions:
                yield from self._edit_between(action) if isinstance(action, Edit) else self._push(action)
            self._node.settle()
            self._node.check()
        except TransportError:
            yield from self._take_settled()
            raise
        yield from self._take_settled()

    def checkpoint(self) -> bytes:
        """Return no bytes: the state of a live node stays in the node."""
        return b""

    def resume(self, checkpoint: bytes, counts: Mapping[str, int]) -> None:
        """Raise ReplayError: a live node's state cannot be restored."""
        raise ReplayError("the state of the live node is lost: start over with --again")

    def _push(self, step: Step) -> Iterator[PlayedAction]:
        try:
            self._node.push(step.frame)
        except WireError as error:
            log.error("camera %s: frame %d cannot be sent: %s", step.frame.camera, step.frame.seq, error)
            self._node.settle()
            yield from self._take_settled()
            yield self._make_outcome(step, None)
            return
        self._steps.append(step)
        if step.edits:
            self._node.settle()
        yield from self._take_settled()

    def _edit_between(self, edit: Edit) -> Iterator[PlayedAction]:
        self._node.settle()
        yield from self._take_settled()
        self._request(edit)
        yield PlayedAction(edit, None)

    def _take_settled(self) -> Iterator[PlayedAction]:
        while self._node.settled:
            yield self._make_outcome(self._steps.popleft(), self._node.settled.popleft().masks)

    def _make_outcome(self, step: Step, masks: MaskFrame | None) -> PlayedAction:
        """Make the outcome of a step and its edits; a step with edits is the last one sent."""
        self.counts["frames"] += 1
        if masks is None:
            self.counts["failed"] += 1
        else:
            self.stages_us.update(masks.stages_us)
            # as in a replay without a node, the same job gives the same bytes
            masks = replace(
                masks,
                received_ns=step.received_ns,
                published_ns=0,
                skipped=step.skipped,
                stages_us={},
                node=None,
                epoch=None,
            )
        for edit in step.edits:
            reply = self._request(edit)
            masks = masks and update_masks(masks, edit, reply)
        return PlayedAction(step, masks)

    def _request(self, edit: Edit) -> Any:
        """Return the node's reply, None if the node refuses."""
        if edit.op in TIMING_EDITS:
            return None
        try:
            if edit.op == ADD_EVERYTHING:
                return add_everything(edit, self._node.request, self.notes)
            return self._node.request(edit.op, **edit.args)
        except TransportError:
            raise
        except Sam3NodeError as error:
            self.counts["refused"] += 1
            log.warning("%s was refused: %s", edit.op, error)
            note_refusal(edit, error, self.notes)
            return None
