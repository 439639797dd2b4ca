"""What to replay, how, and what to write: a value that travels as JSON.

The settings of a replay: those of the recording's node, and over them what was chosen for the replay."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import PurePosixPath
from typing import Any, Literal, Self, get_args

from pydantic import ValidationError

from ..errors import ReplayError
from ..settings import Settings

Mode = Literal["as-recorded", "every"]
Strategy = Literal["forward", "bidirectional", "multi-shot"]
Output = Literal["mcap", "coco", "png", "overlay"]
MODES: tuple[Mode, ...] = get_args(Mode)
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
OUTPUTS: tuple[Output, ...] = get_args(Output)
SECTIONS = ("model", "tracker", "detector", "engine")
"""Of the settings: those that masks depend on."""


@dataclass(frozen=True, slots=True)
class ObjectOnFrame:
    """An object as it is shown on one frame of a camera, in pixels of that frame.

    The frame is the one of this `seq`, without it the `index`-th of the camera, from 0. `points` [n](x, y) with
    `labels` [n] (1 inside, 0 outside; all 1 when absent) and/or a `box` (x0, y0, x1, y1); or `mask`, an image file of
    the frame's size, whose pixels of this `value` are inside (without it: all that are not zero).
    """

    camera: str | None = None
    seq: int | None = None
    index: int = 0
    points: tuple[tuple[float, float], ...] | None = None
    labels: tuple[int, ...] | None = None
    box: tuple[float, float, float, float] | None = None
    mask: str | None = None
    value: int | None = None
    label: str = "object"

    @classmethod
    def from_json(cls, value: object) -> Self:
        """That of a map with these names; ReplayError for another one."""
        known = _known(cls, value, "object")
        lists = {name: _tuples(known[name]) for name in ("points", "labels", "box") if known.get(name)}
        shown = cls(**{**known, **lists})
        if not (shown.points or shown.box or shown.mask):
            raise ReplayError(f"object: expected points, a box or a mask file, found none in {value!r:.200}")
        return shown


@dataclass(frozen=True, slots=True)
class Job:
    """Recordings to replay, how, and the results wanted. Paths may be URLs.

    `settings` are those that were chosen, by section and field: over the recording's own in `as-recorded`, else over
    the defaults. `names` and `objects` are what to look for; `every` repeats the recording's own edits where neither
    is given. `topics` are the cameras or topics to take, empty for all. `start` and `stop` (exclusive, None for the
    end) are the frames to take in `every`, counted from 0 over all these cameras. `allow_gaps`: go on where a recording
    lacks what would be needed to repeat it.
    """

    bags: tuple[str, ...]
    out: str
    mode: Mode = "every"
    strategy: Strategy = "forward"
    names: tuple[str, ...] = ()
    objects: tuple[ObjectOnFrame, ...] = ()
    topics: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ("mcap",)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    allow_gaps: bool = False
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        _among("mode", self.mode, MODES)
        _among("strategy", self.strategy, STRATEGIES)
        for output in self.outputs:
            _among("output", output, OUTPUTS)
        for section in self.settings:
            _among("settings", section, SECTIONS)
        if not self.bags:
            raise ReplayError("bags: expected at least one recording, found none")
        if (self.start, self.stop) != (0, None) and self.mode != "every":
            raise ReplayError("start, stop: expected the mode every; as-recorded has to begin at the start")
        if self.mode == "as-recorded" and (self.names or self.objects):
            raise ReplayError(
                "as-recorded repeats what the node was asked while it was recorded: expected no names or objects "
                "beside it; use every with them"
            )
        if self.mode == "as-recorded" and self.strategy != "forward":
            raise ReplayError(
                "as-recorded does what the node did, in its order: expected the strategy forward, found "
                f"{self.strategy}; use every with it"
            )

    def to_json(self) -> str:
        """As JSON, keys in a fixed order."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The job of `to_json`; ReplayError for anything else."""
        try:
            known = _known(cls, json.loads(text), "job")
        except ValueError as error:
            raise ReplayError(f"job: expected JSON, found {error}") from error
        objects = tuple(map(ObjectOnFrame.from_json, known.pop("objects", ())))
        values: dict[str, Any] = {
            name: tuple(one) if isinstance(one, list) else one for name, one in known.items()
        }
        return cls(objects=objects, **values)

    def each(self) -> tuple[Job, ...]:
        """A job for each recording: with one, this; of several, each in a folder of `out` named as the recording."""
        if len(self.bags) == 1:
            return (self,)
        folders = _distinct([PurePosixPath(bag.rstrip("/")).stem or "bag" for bag in self.bags])
        out = self.out.rstrip("/")
        return tuple(
            replace(self, bags=(bag,), out=f"{out}/{folder}")
            for bag, folder in zip(self.bags, folders, strict=True)
        )


def chosen_settings(settings: Settings) -> dict[str, dict[str, Any]]:
    """What was set on purpose, by profile, environment or command line, in the sections that matter here."""
    found = {}
    for name in SECTIONS:
        section = getattr(settings, name)
        if section.model_fields_set:
            found[name] = section.model_dump(mode="json", include=section.model_fields_set)
    return found


def _known(kind: type, value: object, what: str) -> dict[str, Any]:
    """The map, if all its names are fields of `kind`."""
    names = [one.name for one in fields(kind)]
    if not isinstance(value, dict) or not set(value) <= set(names):
        raise ReplayError(f"{what}: expected a map of {', '.join(names)}, found {value!r:.200}")
    return dict(value)


def _among(what: str, found: str, expected: Sequence[str]) -> None:
    if found not in expected:
        raise ReplayError(f"{what}: expected one of {', '.join(expected)}, found {found!r:.60}")


def _tuples(value: object) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def _distinct(names: Sequence[str]) -> list[str]:
    """Those that come again with a number behind them."""
    taken: list[str] = []
    for name in names:
        count, other = 2, name
        while other in taken:
            other, count = f"{name}-{count}", count + 1
        taken.append(other)
    return taken


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
