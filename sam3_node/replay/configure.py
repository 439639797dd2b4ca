"""The settings of a replay: those of the recording's node, and over them what was chosen for the replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ..errors import ReplayError
from ..settings import Settings
from .job import SECTIONS, Job

Sections = dict[str, dict[str, Any]]


def settings_for(job: Job, description: Mapping[str, Any] | None) -> Settings:
    """What to load for a job on a recording whose node has told `description` of itself, None where none has.

    As recorded, device, arithmetic and threads are those that the node had: on a CPU the number of threads is a part
    of how sums are rounded. Raises ReplayError where they do not validate.
    """
    base = _recorded(description, job) if description else {}
    tree = {name: {**base.get(name, {}), **job.settings.get(name, {})} for name in SECTIONS}
    try:
        return Settings(**tree)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ReplayError(
            f"the recording's settings do not fit this version: {error.errors()[0]['loc']}, {error.errors()[0]['msg']}"
        ) from error


def same_sections(first: Settings, second: Settings) -> bool:
    """Whether masks may be the same with both."""
    return all(getattr(first, name) == getattr(second, name) for name in SECTIONS)


def differences(settings: Settings, here: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """In what, of all that masks depend on, a replay is another than the recorded node was, a line each.

    `here` and `recorded` are what a Perception tells of itself.
    """
    before, now = _facts(recorded), _facts(here)
    for name in SECTIONS:
        section = getattr(settings, name).model_dump(mode="json")
        before |= {
            f"{name}.{key}": value for key, value in recorded.get("settings", {}).get(name, {}).items()
        }
        now |= {f"{name}.{key}": value for key, value in section.items()}
    for name in ("device", "dtype", "threads"):  # told resolved, under their own names
        before.pop(f"model.{name}", None)
    return [
        f"{name} was {before[name]!r} in the recording, is {now[name]!r}"
        for name in now
        if name in before and before[name] != now[name]
    ]


def _facts(description: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: description.get(name) for name in ("model", "device", "device_name", "dtype", "threads")}
    return {**plain, **description.get("versions", {})}


def _recorded(description: Mapping[str, Any], job: Job) -> Sections:
    recorded = description.get("settings", {})
    sections = {name: dict(recorded.get(name, {})) for name in SECTIONS}
    if job.mode == "as-recorded":
        sections["model"] |= _resolved(description)
        return sections
    # every frame anew: by what this machine has
    sections["model"] = {
        name: value for name, value in sections["model"].items() if name in ("name", "image_size")
    }
    del sections["engine"]
    if job.names or job.objects:
        sections["detector"].pop("prompts", None)
    return sections


def _resolved(description: Mapping[str, Any]) -> dict[str, Any]:
    """What the node had made of `auto`."""
    names = {"device": "device", "dtype": "dtype", "threads": "threads"}
    return {name: description[key] for name, key in names.items() if description.get(key)}
