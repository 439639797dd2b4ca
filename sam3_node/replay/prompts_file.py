"""Reads the objects to track from a file: a JSON or TOML list, or the first annotation of a DAVIS sequence.

Each object is a map {camera?, frame?, label?, box | points and labels | mask, value?}. `frame` is a seq or "first", the
default. `box` [x0, y0, x1, y1] and `points` [[x, y], ...] are in frame pixels; `labels` are 1 inside and 0 outside.
`mask` is a palette or grey PNG of the frame's size, with a path relative to the file; its pixels of this `value`
(default: all nonzero pixels) are the object. JSON has the list at the top level or as "objects", TOML as [[objects]].
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..bags.samples import natural_order
from ..detection.phrases import clean_label
from ..errors import ReplayError, RequestError, WireError
from ..tracking.slots import MAX_POINTS, check_box, check_labels, check_parts, check_points
from ..wire import Fields
from .davis_png import read_labels, read_mask
from .job import ObjectOnFrame

NAMES = ("camera", "frame", "label", "box", "points", "labels", "mask", "value")


def read_prompts(path: Path) -> tuple[ObjectOnFrame, ...]:
    """Read the objects of a .json or .toml file, of a palette PNG (one object for each index), or of a folder.

    A folder is a DAVIS sequence, of which the first PNG is read, or holds such folders, each named like its camera.
    Objects of a PNG are on the first frame. Raises ReplayError with the object and the expectation that it fails, also
    for a missing mask file.
    """
    if path.is_dir():
        return tuple(_read_folder(path))
    if path.suffix.lower() == ".png":
        return tuple(_read_annotation(path, None))
    return tuple(
        _read_object(f"{path}, object {number}", path.parent, entry)
        for number, entry in enumerate(_read_entries(path))
    )


def _read_folder(folder: Path) -> Iterator[ObjectOnFrame]:
    if first := _first_png(folder):
        yield from _read_annotation(first, None)
        return
    sequences = {inner.name: _first_png(inner) for inner in sorted(folder.iterdir()) if inner.is_dir()}
    if not any(sequences.values()):
        raise ReplayError(
            f"{folder}: expected palette PNGs, or folders of them named like cameras, found none"
        )
    for camera, first in sequences.items():
        if first is not None:
            yield from _read_annotation(first, camera)


def _first_png(folder: Path) -> Path | None:
    return min(folder.glob("*.png"), key=natural_order, default=None)


def _read_annotation(path: Path, camera: str | None) -> Iterator[ObjectOnFrame]:
    indices = np.unique(read_labels(path))
    if not indices.any():
        raise ReplayError(f"{path}: expected at least one object, found only background")
    for index in indices[indices > 0]:
        yield ObjectOnFrame(camera=camera, mask=str(path), value=int(index))


def _read_entries(path: Path) -> list[Any]:
    readers = {".json": json.loads, ".toml": tomllib.loads}
    if path.suffix.lower() not in readers:
        raise ReplayError(
            f"{path}: expected a .json, .toml or .png file, or a folder of PNGs, found another kind"
        )
    try:
        content = readers[path.suffix.lower()](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReplayError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ReplayError(f"{path}: expected {path.suffix[1:].upper()}, found {error}") from error
    entries = content.get("objects") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ReplayError(f"{path}: expected a list of objects, or one named 'objects', found none")
    return entries


def _read_object(what: str, folder: Path, entry: object) -> ObjectOnFrame:
    try:
        marked = _parse_object(Fields(entry, what), folder)
    except WireError as error:
        raise ReplayError(str(error)) from error
    try:
        if marked.mask is not None:
            read_mask(Path(marked.mask), marked.value)
    except ReplayError as error:
        raise ReplayError(f"{what}: {error}") from error
    return marked


def _parse_object(fields: Fields, folder: Path) -> ObjectOnFrame:
    _check_names(fields)
    return ObjectOnFrame(
        camera=fields.text("camera") if fields.has("camera") else None,
        seq=_parse_seq(fields),
        label=_parse_label(fields),
        points=_parse_points(fields) if fields.has("points") else None,
        labels=_parse_labels(fields) if fields.has("labels") else None,
        box=_parse_box(fields) if fields.has("box") else None,
        mask=str(folder / fields.text("mask")) if fields.has("mask") else None,
        value=fields.integer("value", 1, 255) if fields.has("value") else None,
    )


def _parse_label(fields: Fields) -> str:
    try:
        return clean_label(fields.text("label") if fields.has("label") else "")
    except RequestError as error:
        raise WireError(f"{fields.what}: {error}") from error


def _check_names(fields: Fields) -> None:
    unknown = sorted(set(fields.names()) - set(NAMES))
    if unknown:
        raise WireError(f"{fields.what}: expected some of {', '.join(NAMES)}, found {unknown[0]!r:.60}")
    given = {name: fields.any(name) if fields.has(name) else None for name in ("points", "box", "mask")}
    try:
        check_parts(**given)
    except RequestError as error:
        raise WireError(f"{fields.what}: {error}") from error


def _parse_seq(fields: Fields) -> int | None:
    """Return the seq of the object's frame, None for the first frame."""
    if not fields.has("frame") or fields.any("frame") == "first":
        return None
    if isinstance(fields.any("frame"), str):
        raise fields.wrong("frame", 'a seq or "first"')
    return fields.integer("frame")


def _parse_points(fields: Fields) -> tuple[tuple[float, float], ...]:
    points = [Fields({"point": pair}, fields.what).numbers("point", 2) for pair in fields.sequence("points")]
    if any(len(point) != 2 for point in points):
        raise fields.wrong("points", "pairs [x, y]")
    _check(fields, check_points, points)
    return tuple((x, y) for x, y in points)


def _parse_labels(fields: Fields) -> tuple[int, ...]:
    if not fields.has("points"):
        raise fields.wrong("labels", "beside points")
    labels = fields.numbers("labels", MAX_POINTS)
    _check(fields, check_labels, labels, len(fields.sequence("points")))
    return tuple(map(int, labels))


def _parse_box(fields: Fields) -> tuple[float, float, float, float]:
    box = fields.numbers("box", 4)
    _check(fields, check_box, box)
    x0, y0, x1, y1 = box
    return x0, y0, x1, y1


def _check(fields: Fields, check: Callable[..., None], values: object, *others: int) -> None:
    """Apply a check of prompts to numbers of the file. Raises WireError with the object's place in the file."""
    try:
        check(np.asarray(values, np.float64), *others)
    except RequestError as error:
        raise WireError(f"{fields.what}: {error}") from error
