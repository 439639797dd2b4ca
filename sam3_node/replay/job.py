"""Defines a replay job: the recordings, the options, and the settings that the model is loaded with.

A job is a plain value, so that it can be sent to other machines. Its settings are the recorded node's, overridden by
what the user set for the replay. `read_prompts` reads the objects to track from a file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import numpy as np
from pydantic import ValidationError

from ..bags.pairing import TimeSpan
from ..bags.samples import natural_order
from ..calibration import Calibration
from ..detection.phrases import clean_label, clean_prompts
from ..errors import ReplayError, RequestError, WireError
from ..files import explain_os_error, parse_json, parse_toml, read_regular, safe_file_name
from ..settings import Settings, describe_faults
from ..wire import Fields
from ..wire.codec import Schema, integer
from ..wire.frame_prompt import FramePrompt, check_parts
from .davis_png import VOID, find_objects, read_labels, read_mask
from .outputs import find_output
from .outputs.output import Doubtful

Mode = Literal["as-recorded", "every"]
Strategy = Literal["forward", "bidirectional"]
MODES: tuple[Mode, ...] = get_args(Mode)
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
STDIN = Path("-")
"""Path that means standard input."""
MAX_OBJECTS_BYTES = 16 << 20
"""Size of the largest file with objects on frames. A larger one is refused."""
MAX_STRIDE = 1000
"""Largest distance between frames that are stepped."""
NAMES = ("camera", "frame", "label", "box", "points", "labels", "mask", "value")
"""Fields that an object in a file of prompts (`--objects`) may have."""
SECTIONS = ("model", "tracker", "detector", "engine", "spatial", "robot")
"""Sections of the settings on which masks depend. They identify a job."""

Sections = dict[str, dict[str, object]]
"""Settings by section and field. `Settings` checks the values."""


@dataclass(frozen=True, slots=True)
class ObjectOnFrame:
    """An object marked on one frame of a camera, in pixels of that frame.

    `seq` selects the frame. Without it, `index` counts the camera's frames from 0. `points` [n](x, y) with `labels` [n]
    (1 inside, 0 outside; all 1 when absent), a `box` (x0, y0, x1, y1), or both mark the object. Instead, `mask` may
    name an image file of the frame's size: pixels of this `value` (default: all nonzero pixels) are inside.

    With `like`, the box is an exemplar, on the frame or on a `photo`. `like` 1 marks an example of what to find, and
    `like` 0 a counterexample. The detector searches for what resembles the examples. What it finds gets the label.
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
    like: int | None = None
    photo: str | None = None
    frame_name: str | None = None
    """Name of an annotation without its suffix: that of its frame's image, or the frame's number."""


@dataclass(frozen=True, slots=True)
class Job:
    """Recordings to replay, how to replay them, and the outputs to write. Paths may be URLs.

    `settings` are what the user set, by section and field. They override the recording's own settings in
    `as-recorded`, and the defaults otherwise. `names` and `objects` select what to track. Without both, `every` repeats
    the recorded edits. `topics` are the cameras or topics to read; empty means all.

    In `every`, `begin_ns` and `end_ns` (exclusive) limit the recording to a `TimeSpan`. `start` to `stop` (exclusive;
    None for the end) select frames of it, counted from 0 over all these cameras. With `allow_gaps`, a replay continues
    where the recording lacks data. `depth_aligned` states that depth is registered to colour. `calibrations`, each a
    calibration file as JSON, replace the recorded node's.
    """

    bags: tuple[str, ...]
    out: str
    mode: Mode = "every"
    strategy: Strategy = "forward"
    names: tuple[str, ...] = ()
    objects: tuple[ObjectOnFrame, ...] = ()
    topics: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("mcap",)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    allow_gaps: bool = False
    start: int = 0
    stop: int | None = None
    begin_ns: int | None = None
    end_ns: int | None = None
    calibrations: tuple[str, ...] = ()
    depth_aligned: bool = False
    everything: bool = False
    """Segment everything on the first frame of each camera, and track it."""
    requires_objects: bool = False
    """Refuse a name that the detector lacks, and a job that follows no object, before the first frame."""
    doubtful: Doubtful = "marked"
    """Treatment of doubtful objects in the outputs."""
    stride: int = 1
    """Step frames whose number is a multiple of it; also the first one of each camera and those with marks or edits."""

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, MODES)
        _check_choice("strategy", self.strategy, STRATEGIES)
        _check_choice("doubtful", self.doubtful, get_args(Doubtful))
        for output in self.outputs:
            find_output(output)
        for section in self.settings:
            _check_choice("settings", section, SECTIONS)
        _check_objects(self.names, self.objects)
        if not self.bags:
            raise ReplayError("bags: expected at least one recording, found none")

        # what as-recorded repeats is the whole run of a node, in its order
        is_part = self.start != 0 or self.stop is not None or not self.span.is_whole
        if is_part and self.mode != "every":
            raise ReplayError(
                "a part of the recording: expected the mode every with it; as-recorded repeats the recording as a whole"
            )
        if not 1 <= self.stride <= MAX_STRIDE:
            raise ReplayError(f"stride: expected 1 to {MAX_STRIDE}, found {self.stride}")
        if self.stride > 1 and (self.mode, self.strategy) != ("every", "forward"):
            raise ReplayError("stride: expected the mode every and the strategy forward with it")
        if self.begin_ns is not None and self.end_ns is not None and self.begin_ns >= self.end_ns:
            raise ReplayError("a part of the recording: expected an end after the beginning, found none")
        if self.mode == "as-recorded" and (self.names or self.objects or self.everything):
            raise ReplayError(
                "as-recorded repeats the requests that the recorded node got: expected no names or objects beside it; "
                "use every with them"
            )
        if self.mode == "as-recorded" and self.strategy != "forward":
            raise ReplayError(
                "as-recorded repeats the node's steps in their order: expected the strategy forward, found "
                f"{self.strategy}; use every with it"
            )

    @property
    def span(self) -> TimeSpan:
        """The part of the recording, by time."""
        return TimeSpan(self.begin_ns, self.end_ns)

    def split_by_recording(self) -> tuple[Job, ...]:
        """Return one job for each recording. Several recordings get a folder each in `out`, named like the file."""
        if len(self.bags) == 1:
            return (self,)
        names = []
        for bag in self.bags:
            stem = PurePosixPath(bag.rstrip("/")).stem
            # a name of dots alone would lead out of the folder
            names.append(safe_file_name(stem) if stem.strip(".") else "bag")
        out = self.out.rstrip("/")
        # the results of a recording of this name have another folder
        folders = _make_unique(names, [output for output in self.outputs if find_output(output).is_joined])
        return tuple(
            replace(self, bags=(bag,), out=f"{out}/{folder}")
            for bag, folder in zip(self.bags, folders, strict=True)
        )


def _check_objects(names: Sequence[str], objects: Sequence[ObjectOnFrame]) -> None:
    """Raise ReplayError for a name, box or points that no frame can have."""
    # before a long job begins; what needs the frame's size is checked when the recording is open
    try:
        clean_prompts(names)
        for marked in objects:
            if marked.points is not None or marked.box is not None:
                FramePrompt(marked.points, marked.labels, marked.box)
            if marked.box is not None and min(marked.box[2:]) <= 0:
                raise RequestError(f"box: expected a part inside the frame, found {list(marked.box)}")
    except RequestError as error:
        raise ReplayError(str(error)) from error


def _check_choice(what: str, value: str, expected: Sequence[str]) -> None:
    if value not in expected:
        raise ReplayError(f"{what}: expected one of {', '.join(expected)}, found {value!r:.60}")


def _make_unique(names: Sequence[str], reserved: Sequence[str]) -> list[str]:
    """Append a number to each repeated or reserved name."""
    taken = list(reserved)
    for name in names:
        count = 2
        unique = name
        # a recording may itself be named like another one with a number
        while unique in taken:
            unique = f"{name}-{count}"
            count += 1
        taken.append(unique)
    return taken[len(reserved) :]


def chosen_settings(settings: Settings) -> Sections:
    """Return the settings that masks depend on and that a profile, the environment or the command line set."""
    # fields at their defaults would override those of the recording
    chosen: Sections = {}
    for name in SECTIONS:
        section = getattr(settings, name)
        if section.model_fields_set:
            chosen[name] = section.model_dump(mode="json", include=section.model_fields_set)
    return chosen


def settings_for(job: Job, description: Mapping[str, Any] | None) -> Settings:
    """Build the settings of a job. `description` is the recorded node's own, None if the recording has none.

    In `as-recorded`, device, data type and threads are the recorded node's: on a CPU the number of threads
    changes how sums are rounded. Raises ReplayError if the settings are not valid.
    """
    base: Sections = _recorded_sections(description, job) if description else {}
    tree = {name: {**base.get(name, {}), **job.settings.get(name, {})} for name in SECTIONS}

    # the contents of calibration files are in the description or in the job
    tree["spatial"].pop("calibration", None)
    if recorded_name_calibration(job, description) is not None:
        tree["detector"].pop("name_calibration", None)
    # each prompt is made on the newest frame, so checkpoints need not hold many
    if job.mode == "every":
        tree["tracker"]["feature_cache_s"] = 0.0
    with _checking("recording's settings do"):
        return Settings(**tree)


def calibrations_for(job: Job, description: Mapping[str, Any] | None) -> tuple[Calibration, ...]:
    """Return the calibrations of a job: its own, else the recorded node's. Raises ReplayError."""
    # an older recording has none
    recorded = (description or {}).get("calibrations", ())
    with _checking("calibration does"):
        # the recorded ones become text like the job's, so that one validator reads both
        texts = job.calibrations or map(json.dumps, recorded)
        return tuple(map(Calibration.model_validate_json, texts))


def recorded_name_calibration(job: Job, description: Mapping[str, Any] | None) -> object:
    """Return how sure names were on the recorded node, as recorded; None if unknown, or if the job has its own."""
    if "name_calibration" in job.settings.get("detector", {}):
        return None
    return (description or {}).get("name_calibration")


@contextmanager
def _checking(what: str) -> Iterator[None]:
    """Turn a failed validation into ReplayError."""
    try:
        yield
    except ValidationError as error:
        raise ReplayError(f"the {what} not fit this version: {describe_faults(error)}") from error


def _recorded_sections(description: Mapping[str, Any], job: Job) -> Sections:
    """Return the recorded node's settings, as far as a job in its mode takes them over."""
    recorded = description.get("settings", {})
    sections = {name: dict(recorded.get(name, {})) for name in SECTIONS}

    # bit for bit: the description has the values that the node resolved from `auto`
    if job.mode == "as-recorded":
        for name in ("device", "dtype", "threads"):
            if description.get(name):
                sections["model"][name] = description[name]
        return sections

    # bit-exact results are not needed here, so this machine's device and engines are used
    model = sections["model"]
    sections["model"] = {name: model[name] for name in ("name", "image_size") if name in model}
    del sections["engine"]
    # names of the job replace the names that the node looked for
    if job.names or job.objects or job.everything:
        sections["detector"].pop("prompts", None)
    return sections


def have_equal_sections(first: Settings, second: Settings) -> bool:
    """Return True if both settings give the same masks."""
    return all(getattr(first, name) == getattr(second, name) for name in SECTIONS)


def describe_differences(replayed: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """Describe how a replay differs from the recorded node in anything that masks depend on, a line for each.

    `replayed` and `recorded` are descriptions of a Perception.
    """
    before = _collect_facts(recorded)
    now = _collect_facts(replayed)
    lines = []
    for name, value in now.items():
        # a fact that an older recording lacks tells nothing
        if name in before and before[name] != value:
            lines.append(f"{name} was {before[name]!r} in the recording, is {value!r}")
    return lines


def _collect_facts(description: Mapping[str, Any]) -> dict[str, object]:
    """Return the resolved values, the versions, and the settings that masks depend on."""
    resolved = ("model", "device", "device_name", "dtype", "threads", "name_calibration")
    facts: dict[str, object] = {name: description.get(name) for name in resolved}
    settings = description.get("settings", {})
    for section in SECTIONS:
        facts |= {f"{section}.{name}": value for name, value in settings.get(section, {}).items()}
    # resolved values are compared under their own names; of paths, the description has what the files hold
    hidden = (
        "model.device",
        "model.dtype",
        "model.threads",
        "spatial.calibration",
        "detector.name_calibration",
        "engine.folder",
    )
    shown = {name: value for name, value in facts.items() if name not in hidden}
    return {**shown, **description.get("versions", {})}


def read_prompts(path: Path) -> tuple[ObjectOnFrame, ...]:
    """Read the objects of a .json or .toml file, of a palette PNG (one object for each index), or of a folder.

    `-` reads JSON from standard input, where masks have paths relative to the working directory.

    JSON has a list or "objects", TOML [[objects]]. Each object is a map {camera?, frame?, label?,
    box | points and labels | mask, value?}. `frame` is a seq or "first", the default. `box` [x0, y0, x1, y1] and
    `points` [[x, y], ...] are in frame pixels. `labels` are 1 inside and 0 outside. `mask` is a palette or grey PNG of
    the frame's size, with a path relative to the file. Its pixels of this `value` (default: all nonzero pixels) are the
    object. In a PNG with a transparent part, the opaque part is the object.

    A folder is a sequence of DAVIS or YouTube-VOS, or holds such folders, each named like its camera. A PNG belongs to
    the frame of its name. Each object begins on the first PNG that has it. 255, void, is no object. Raises
    ReplayError that names the object, also for a missing mask.
    """
    if path == STDIN:
        return _read_objects("standard input", Path(), _read_stdin())
    if path.is_dir():
        return tuple(_read_folder(path))
    if path.suffix.lower() == ".png":
        return tuple(_read_sequence([path], None))
    return _read_objects(str(path), path.parent, _read_file(path))


def _read_objects(what: str, folder: Path, content: Any) -> tuple[ObjectOnFrame, ...]:
    # TOML has no list at its top
    entries: Any = content.get("objects") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ReplayError(f"{what}: expected a list of objects, or one named 'objects', found none")
    return tuple(
        _read_object(f"{what}, object {number}", folder, entry) for number, entry in enumerate(entries)
    )


def _read_folder(folder: Path) -> Iterator[ObjectOnFrame]:
    # a sequence of DAVIS itself, else one for each camera
    pictures = _list_pngs(folder)
    if pictures:
        yield from _read_sequence(pictures, None)
        return
    sequences = {inner.name: _list_pngs(inner) for inner in sorted(folder.iterdir()) if inner.is_dir()}
    if not any(sequences.values()):
        raise ReplayError(
            f"{folder}: expected palette PNGs, or folders of them named like cameras, found none"
        )
    for camera, pictures in sequences.items():
        if pictures:
            yield from _read_sequence(pictures, camera)


def _list_pngs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png"), key=natural_order)


def _read_sequence(pictures: Sequence[Path], camera: str | None) -> Iterator[ObjectOnFrame]:
    """Yield the objects of label images in their order, each on the first image that has it."""
    # void is an object only where no image of the sequence has any other: all are read first
    found_on: dict[Path, list[int]] = {}
    void_alone: set[Path] = set()
    for path in pictures:
        labels = read_labels(path)
        found_on[path] = find_objects(labels)
        if labels.dtype == np.uint8 and found_on[path] == [VOID]:
            void_alone.add(path)
    if any(found for path, found in found_on.items() if path not in void_alone):
        found_on = {path: found for path, found in found_on.items() if path not in void_alone}

    known: set[int] = set()
    for path, found in found_on.items():
        for value in found:
            if value not in known:
                yield ObjectOnFrame(camera=camera, mask=str(path), value=value, frame_name=path.stem)
        known.update(found)
    if not known:
        raise ReplayError(f"{pictures[0]}: expected at least one object, found only background")


def _read_stdin() -> Any:
    """Return what standard input has in JSON, unchecked."""
    # one byte more shows that there is more
    data = sys.stdin.buffer.read(MAX_OBJECTS_BYTES + 1)
    if len(data) > MAX_OBJECTS_BYTES:
        raise ReplayError(f"standard input: expected at most {MAX_OBJECTS_BYTES} bytes of JSON, found more")
    return _parse("standard input", "JSON", parse_json, data)


def _read_file(path: Path) -> Any:
    """Return what a JSON or TOML file has, unchecked."""
    readers = {".json": parse_json, ".toml": parse_toml}
    if path.suffix.lower() not in readers:
        raise ReplayError(
            f"{path}: expected a .json, .toml or .png file, or a folder of PNGs, found another kind"
        )
    with explain_os_error(ReplayError, f"cannot read {path}"):
        data = read_regular(path, MAX_OBJECTS_BYTES)
    return _parse(str(path), path.suffix[1:].upper(), readers[path.suffix.lower()], data)


def _parse(what: str, kind: str, parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except ValueError as error:
        raise ReplayError(f"{what}: expected {kind}, found {error}") from error


def _read_object(what: str, folder: Path, entry: object) -> ObjectOnFrame:
    # points and boxes are checked as those of a request are; a mask must be there and hold the object
    try:
        marked = _parse_object(Fields(entry, what), folder)
        if marked.mask is None:
            FramePrompt(marked.points, marked.labels, marked.box)
        else:
            read_mask(Path(marked.mask), marked.value)
        return marked
    except WireError as error:
        raise ReplayError(str(error)) from error
    except (RequestError, ReplayError) as error:
        raise ReplayError(f"{what}: {error}") from error


def _parse_object(fields: Fields, folder: Path) -> ObjectOnFrame:
    """Return the object, its points, labels and box unchecked."""
    # a misspelt field would be ignored, and the object marked elsewhere
    unknown = sorted(set(fields.names()) - set(NAMES))
    if unknown:
        raise WireError(f"{fields.what}: expected some of {', '.join(NAMES)}, found {unknown[0]!r:.60}")
    check_parts(*map(fields.any, ("points", "box", "mask")))
    values = fields.read(_OBJECT)
    mask = str(folder / values.pop("mask")) if "mask" in values else None
    return ObjectOnFrame(
        seq=values.pop("frame", None),
        label=clean_label(values.pop("label", "")),
        mask=mask,
        **{name: _to_tuples(fields.any(name)) for name in ("points", "labels", "box")},
        **values,
    )


def _read_frame(fields: Fields, name: str) -> int | None:
    """Return the seq of the object's frame, None for the first frame."""
    if fields.any(name) == "first":
        return None
    if isinstance(fields.any(name), str):
        raise fields.wrong(name, 'a seq or "first"')
    return fields.integer(name)


_OBJECT = Schema(
    {
        "camera?": Fields.text,
        "label?": Fields.text,
        "mask?": Fields.text,
        "frame?": _read_frame,
        "value?": integer(1, 65535),
    }
)


def _to_tuples(value: object) -> Any:
    """Return a value whose lists are tuples, so that a job is hashable and cannot be changed."""
    if isinstance(value, list):
        return tuple(map(_to_tuples, value))
    return value
