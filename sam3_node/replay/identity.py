"""What results belong to: a job, its settings and the weights; kept beside them, so that no others are mixed in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import ReplayError
from ..settings import Settings
from .job import SECTIONS, Job
from .store import Store

NAME = "job.json"
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
        store.write(NAME, json.dumps({**known, **identity}, indent=2).encode())
    different = list(_differences("", {name: known.get(name, identity[name]) for name in identity}, identity))
    if different:
        raise ReplayError(
            f"the folder holds results of another job: {'; '.join(different[:4])}; choose another folder, or begin "
            "anew with --again"
        )


def known_identity(store: Store) -> dict[str, Any]:
    """What is kept; empty where nothing is."""
    if not store.exists(NAME):
        return {}
    try:
        found = json.loads(store.read(NAME))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ReplayError(f"{NAME}: expected that of a replay, found other bytes; begin anew with --again")
    return found


def _differences(name: str, known: Any, found: Any) -> list[str]:
    if isinstance(known, dict) and isinstance(found, dict):
        keys = dict.fromkeys([*known, *found])
        inside = [_differences(f"{name}.{key}", known.get(key), found.get(key)) for key in keys]
        return [line for lines in inside for line in lines]
    return [] if known == found else [f"{name.strip('.')} was {known!r:.80}, is {found!r:.80}"]
