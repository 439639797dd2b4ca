"""What results belong to: a job, its settings and the weights; kept beside them, so that no others are mixed in.

The end of a job: its outputs, then its summary, whose presence says that all is there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ReplayError
from ..settings import Settings
from .job import SECTIONS, Job
from .merge import results
from .outputs import write_outputs
from .schedule import Schedule
from .shards import FIRST, SECOND, Shards
from .store import Store
from .summary import Summary

IDENTITY = "job.json"
FREE = ("out", "outputs", "allow_gaps")
"""Of a job: what may be another when it is gone on with."""
DIGESTS = ("model_digest", "detector_digest")


def identity_of(job: Job, settings: Settings, path: Path) -> dict[str, Any]:
    """What must be the same for masks to be the same, as JSON has it, but for the weights. `path`: the recording's."""
    kept = {name: value for name, value in asdict(job).items() if name not in FREE}
    sections = {name: getattr(settings, name).model_dump(mode="json") for name in SECTIONS}
    size = path.stat().st_size if path.is_file() else None
    found: dict[str, Any] = json.loads(json.dumps({"job": kept, "settings": sections, "bytes": size}))
    return found


def digests_of(description: Mapping[str, Any]) -> dict[str, Any]:
    """Of the weights, from what a Perception tells of itself."""
    return {name: description.get(name, "") for name in DIGESTS}


def keep_identity(store: Store, identity: Mapping[str, Any]) -> None:
    """Keep it, or where one is kept hold it against that. Raises ReplayError, which says what differs."""
    known = known_identity(store)
    if not all(name in known for name in identity):
        store.write(IDENTITY, json.dumps({**known, **identity}, indent=2).encode())
    different = list(_differences("", {name: known.get(name, identity[name]) for name in identity}, identity))
    if different:
        raise ReplayError(
            f"the folder holds results of another job: {'; '.join(different[:4])}; choose another folder, or begin "
            "anew with --again"
        )


def known_identity(store: Store) -> dict[str, Any]:
    """What is kept; empty where nothing is."""
    if not store.exists(IDENTITY):
        return {}
    try:
        found = json.loads(store.read(IDENTITY))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ReplayError(
            f"{IDENTITY}: expected that of a replay, found other bytes; begin anew with --again"
        )
    return found


def _differences(name: str, known: Any, found: Any) -> list[str]:
    if isinstance(known, dict) and isinstance(found, dict):
        keys = dict.fromkeys([*known, *found])
        inside = [_differences(f"{name}.{key}", known.get(key), found.get(key)) for key in keys]
        return [line for lines in inside for line in lines]
    return [] if known == found else [f"{name.strip('.')} was {known!r:.80}, is {found!r:.80}"]


SUMMARY = "summary.json"

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how many frames of it are done, and of how many where that is known."""


class StoppedError(ReplayError):
    """A replay was told to stop. What it has done is kept."""

    def __init__(self, frames: int, then: str = "goes on from there") -> None:
        super().__init__(f"stopped after {frames} frames, which are kept; the same command {then}")


@dataclass(frozen=True, slots=True)
class Finish:
    """Writes what a job leaves in `store`. Raises StoppedError soon after `stop` is set."""

    schedule: Schedule
    store: Store
    progress: Progress
    stop: threading.Event

    def write(self, summary: Summary) -> Summary:
        """The outputs that are not there yet, then the summary."""
        missing = [kind for kind in self.schedule.job.outputs if kind not in summary.outputs]
        if missing:
            doubt = self.schedule.settings.detector.min_track_score
            masks, told = partial(results, self.store, doubt), partial(self._told, summary)
            self.store.keep(write_outputs(self.store.folder, missing, masks, self.schedule.frames, told))
        if missing or not self.store.exists(SUMMARY):
            summary = replace(summary, outputs=[*summary.outputs, *missing])
            self.store.write(SUMMARY, summary.to_json().encode())
        for folder in (FIRST, SECOND):
            Shards(self.store, folder).finish()
        return summary

    def _told(self, summary: Summary, kind: str, done: int) -> None:
        self.progress(f"writing {kind}", done, sum(summary.cameras.values()))
        if self.stop.is_set():
            raise StoppedError(summary.frames)


def clear(store: Store) -> None:
    """Forget all results, what says that they are complete first."""
    store.delete(SUMMARY)
    for folder in (SECOND, FIRST):
        Shards(store, folder).clear()
    store.delete(IDENTITY)
