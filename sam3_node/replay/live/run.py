"""A job through a live node, from beginning to end; it leaves what a replay without a node leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ReplayError
from ..actions import Action
from ..completion import (
    SUMMARY,
    Finish,
    Progress,
    StoppedError,
    clear,
    digests_of,
    identity_of,
    keep_identity,
)
from ..job import SECTIONS, Job
from ..schedule import Schedule
from ..shards import ShardLimits, Shards, ShardWriter
from ..store import Store
from ..summary import Summary, Tally, of_tally
from ..url_store import local_bag, open_store
from .node import LiveNode, StoppedWaitingError
from .player import LivePlayer

LIMITS = ShardLimits()


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Of a node: `control`, and `frames` and `masks` where they are not as its own settings have them."""

    control: str
    frames: str | None = None
    masks: str | None = None


def run_live(
    job: Job,
    endpoints: Endpoints,
    progress: Progress = lambda *_: None,
    stop: threading.Event | None = None,
    again: bool = False,
    limits: ShardLimits = LIMITS,
) -> Summary:
    """Push every frame of a job's first recording through a running node, into the folder `job.out`.

    What the node remembers cannot be kept: a job that was ended early begins anew. A finished one does not need the
    node. Raises StoppedError soon after `stop` is set; ReplayError for a job that a live node cannot do, or results of
    another job in the folder; SettingsError and TransportError as a LiveNode, and what reading and writing raise. The
    parts that were complete by then are kept.
    """
    _check_job(job)
    stop, store = stop or threading.Event(), open_store(job.out)
    with store.held(), local_bag(job.bags[0]) as path, Schedule(job, path) as schedule:
        finish = Finish(schedule, store, progress, stop)
        if again:
            clear(store)
        identity = identity_of(job, schedule.settings, path)
        identity = {**identity, "job": {**identity["job"], "live": True}}
        keep_identity(store, {"job": identity["job"], "bytes": identity["bytes"]})
        if store.exists(SUMMARY):
            return finish.write(Summary.from_json(store.read(SUMMARY)))
        with LiveNode(endpoints.control, endpoints.frames, endpoints.masks, stop) as node:
            _check_settings(job, node.description["settings"])
            _begin(store, schedule, {**identity, **_of_node(node.description)})
            summary = _push(node, finish, limits)
        return finish.write(summary)


def _check_job(job: Job) -> None:
    if job.mode != "every" or job.strategy != "forward":
        raise ReplayError(
            f"a live node steps every frame, forward: expected that, found {job.mode}, {job.strategy}; replay without "
            "--connect"
        )


def _check_settings(job: Job, of_node: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ReplayError where another setting was chosen than the node has."""
    for section, chosen in job.settings.items():
        for name, value in chosen.items():
            found = of_node[section].get(name)
            if found != value:
                raise ReplayError(
                    f"{section}.{name}: the node has {found!r:.60}, found {value!r:.60} for this replay; a live node "
                    "has its own settings: leave this one out, or start the node with it"
                )


def _of_node(description: Mapping[str, Any]) -> dict[str, Any]:
    """The part of what results belong to that the node is."""
    settings = {name: description["settings"][name] for name in SECTIONS}
    return {"settings": settings, **digests_of(description)}


def _begin(store: Store, schedule: Schedule, identity: Mapping[str, Any]) -> None:
    """Forget what a run has left that was ended early."""
    frames = Tally.of(Shards(store).standing().tally).counts["frames"]
    if frames:
        schedule.notes.tell(
            f"{frames} frames of a run that was ended early were pushed anew: what a live node remembered then is gone"
        )
    clear(store)
    keep_identity(store, identity)


def _push(node: LiveNode, finish: Finish, limits: ShardLimits) -> Summary:
    """All frames, into parts."""
    schedule, player = finish.schedule, LivePlayer(node)
    known, total = node.begin(schedule.cameras), schedule.count()
    if known:
        schedule.notes.tell(
            f"the node had frames of {', '.join(known)} before: ids of objects go on from those that it gave then"
        )
    work = ShardWriter(Shards(finish.store), player, limits)
    try:
        for outcome in player.play(_until(finish.stop, schedule.actions())):
            work.take(outcome)
            finish.progress("pushing", work.frames, total)
    except StoppedWaitingError:
        pass
    finally:
        work.end_part()
    if finish.stop.is_set():
        raise StoppedError(work.frames, "begins anew, as what a live node remembers cannot be kept")
    return _summary(schedule, work, player, node.description)


def _until(stop: threading.Event, actions: Iterable[Action]) -> Iterator[Action]:
    for action in actions:
        if stop.is_set():
            return
        yield action


def _summary(
    schedule: Schedule, work: ShardWriter, player: LivePlayer, description: Mapping[str, Any]
) -> Summary:
    job, stepped = schedule.job, max(sum(work.tally.frames.values()), 1)
    return of_tally(
        work.tally,
        bag=job.bags[0],
        mode=job.mode,
        strategy=job.strategy,
        model=description["model"],
        device=description["device"],
        resumed_from=0,
        lost=schedule.lost,
        notes=schedule.notes.lines,
        stages_ms={name: round(us / stepped / 1e3, 3) for name, us in player.stages_us.items()},
    )
