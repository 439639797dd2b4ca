"""Reads the objects to track from a file: a JSON or TOML list, or the first annotation of a DAVIS sequence.

Each object is a map {camera?, frame?, label?, box | points and labels | mask, value?}. `frame` is a seq or "first", the
default. `box` [x0, y0, x1, y1] and `points` [[x, y], ...] are in frame pixels; `labels` are 1 inside and 0 outside.
`mask` is a palette or grey PNG of the frame's size, with a path relative to the file; its pixels of this `value`
(default: all nonzero pixels) are the object. JSON has the list at the top level or as "objects", TOML as [[objects]].
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..bags.samples import natural_order
from ..errors import ReplayError, WireError
from ..perception.prompts import MAX_POINTS
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
        label=fields.text("label") if fields.has("label") else "object",
        points=_parse_points(fields) if fields.has("points") else None,
        labels=_parse_labels(fields) if fields.has("labels") else None,
        box=_parse_box(fields) if fields.has("box") else None,
        mask=str(folder / fields.text("mask")) if fields.has("mask") else None,
        value=fields.integer("value", 1, 255) if fields.has("value") else None,
    )


def _check_names(fields: Fields) -> None:
    unknown = sorted(set(fields.names()) - set(NAMES))
    if unknown:
        raise WireError(f"{fields.what}: expected some of {', '.join(NAMES)}, found {unknown[0]!r:.60}")
    has_geometry = fields.has("points") or fields.has("box")
    if has_geometry == fields.has("mask"):
        given = "both" if has_geometry else "neither"
        raise WireError(f"{fields.what}: expected either points or a box, or a mask, found {given}")


def _parse_seq(fields: Fields) -> int | None:
    """Return the seq of the object's frame, None for the first frame."""
    if not fields.has("frame") or fields.any("frame") == "first":
        return None
    if isinstance(fields.any("frame"), str):
        raise fields.wrong("frame", 'a seq or "first"')
    return fields.integer("frame")


def _parse_points(fields: Fields) -> tuple[tuple[float, float], ...]:
    pairs = [Fields({"point": pair}, fields.what).numbers("point", 2) for pair in fields.sequence("points")]
    if not 1 <= len(pairs) <= MAX_POINTS or any(len(pair) != 2 for pair in pairs):
        raise fields.wrong("points", f"1 to {MAX_POINTS} pairs [x, y]")
    return tuple((x, y) for x, y in pairs)


def _parse_labels(fields: Fields) -> tuple[int, ...]:
    if not fields.has("points"):
        raise fields.wrong("labels", "beside points")
    labels, points = fields.sequence("labels"), fields.sequence("points")
    if len(labels) != len(points) or not all(type(label) is int and label in (0, 1) for label in labels):
        raise fields.wrong("labels", f"{len(points)} of 1 (inside) or 0 (outside), one for each point")
    return tuple(labels)


def _parse_box(fields: Fields) -> tuple[float, float, float, float]:
    numbers = fields.numbers("box", 4)
    if len(numbers) != 4 or not (numbers[0] < numbers[2] and numbers[1] < numbers[3]):
        raise WireError(
            f"{fields.what}: expected 'box' to be [x0, y0, x1, y1] with x0 < x1 and y0 < y1, found {list(numbers)}"
        )
    x0, y0, x1, y1 = numbers
    return x0, y0, x1, y1
