"""What to track, from a file: a list of objects in JSON or TOML, or the first annotation of a DAVIS sequence.

Each object is a map {camera?, frame?, label?, box | points and labels | mask, value?}: `frame` a seq or "first", which
it is without one; `box` [x0, y0, x1, y1] and `points` [[x, y], ...] in frame pixels, `labels` 1 inside and 0 outside;
`mask` a palette or grey PNG of the frame's size, relative to the file, whose pixels of `value` (without it: all but 0)
are the object. JSON has the list at the top or as "objects", TOML as [[objects]].
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
    """The objects of a .json or .toml file, of a palette PNG (on the first frame, one for each index), or of a folder.

    A folder is a DAVIS sequence's, of whose PNGs the first counts, or has such folders in it, each named as its camera.
    Raises ReplayError, which names the object and what was expected of it, also for a mask that is not there.
    """
    if path.is_dir():
        return tuple(_of_folder(path))
    if path.suffix.lower() == ".png":
        return tuple(_of_annotation(path, None))
    return tuple(
        _object(f"{path}, object {number}", path.parent, entry) for number, entry in enumerate(_entries(path))
    )


def _of_folder(folder: Path) -> Iterator[ObjectOnFrame]:
    if first := _first_png(folder):
        yield from _of_annotation(first, None)
        return
    sequences = {inner.name: _first_png(inner) for inner in sorted(folder.iterdir()) if inner.is_dir()}
    if not any(sequences.values()):
        raise ReplayError(f"{folder}: expected palette PNGs, or folders of them named as cameras, found none")
    for camera, first in sequences.items():
        if first is not None:
            yield from _of_annotation(first, camera)


def _first_png(folder: Path) -> Path | None:
    return min(folder.glob("*.png"), key=natural_order, default=None)


def _of_annotation(path: Path, camera: str | None) -> Iterator[ObjectOnFrame]:
    indices = np.unique(read_labels(path))
    if not indices.any():
        raise ReplayError(f"{path}: expected at least one object, found only background")
    for index in indices[indices > 0]:
        yield ObjectOnFrame(camera=camera, mask=str(path), value=int(index))


def _entries(path: Path) -> list[Any]:
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
    found = content.get("objects") if isinstance(content, dict) else content
    if not isinstance(found, list) or not found:
        raise ReplayError(f"{path}: expected a list of objects, or one named 'objects', found none")
    return found


def _object(what: str, folder: Path, entry: object) -> ObjectOnFrame:
    try:
        shown = _shown(Fields(entry, what), folder)
    except WireError as error:
        raise ReplayError(str(error)) from error
    try:
        if shown.mask is not None:
            read_mask(Path(shown.mask), shown.value)
    except ReplayError as error:
        raise ReplayError(f"{what}: {error}") from error
    return shown


def _shown(fields: Fields, folder: Path) -> ObjectOnFrame:
    _check_names(fields)
    return ObjectOnFrame(
        camera=fields.text("camera") if fields.has("camera") else None,
        seq=_seq(fields),
        label=fields.text("label") if fields.has("label") else "object",
        points=_points(fields) if fields.has("points") else None,
        labels=_point_labels(fields) if fields.has("labels") else None,
        box=_box(fields) if fields.has("box") else None,
        mask=str(folder / fields.text("mask")) if fields.has("mask") else None,
        value=fields.integer("value", 1, 255) if fields.has("value") else None,
    )


def _check_names(fields: Fields) -> None:
    unknown = sorted(set(fields.names()) - set(NAMES))
    if unknown:
        raise WireError(f"{fields.what}: expected some of {', '.join(NAMES)}, found {unknown[0]!r:.60}")
    drawn = fields.has("points") or fields.has("box")
    if drawn == fields.has("mask"):
        found = "both" if drawn else "neither"
        raise WireError(f"{fields.what}: expected points or a box, or else a mask, found {found}")


def _seq(fields: Fields) -> int | None:
    """None for the first frame."""
    if not fields.has("frame") or fields.any("frame") == "first":
        return None
    if isinstance(fields.any("frame"), str):
        raise fields.wrong("frame", 'a seq or "first"')
    return fields.integer("frame")


def _points(fields: Fields) -> tuple[tuple[float, float], ...]:
    pairs = [Fields({"point": pair}, fields.what).numbers("point", 2) for pair in fields.sequence("points")]
    if not 1 <= len(pairs) <= MAX_POINTS or any(len(pair) != 2 for pair in pairs):
        raise fields.wrong("points", f"1 to {MAX_POINTS} pairs [x, y]")
    return tuple((x, y) for x, y in pairs)


def _point_labels(fields: Fields) -> tuple[int, ...]:
    if not fields.has("points"):
        raise fields.wrong("labels", "beside points")
    labels, points = fields.sequence("labels"), fields.sequence("points")
    if len(labels) != len(points) or not all(type(label) is int and label in (0, 1) for label in labels):
        raise fields.wrong("labels", f"{len(points)} of 1 (inside) or 0 (outside), one for each point")
    return tuple(labels)


def _box(fields: Fields) -> tuple[float, float, float, float]:
    numbers = fields.numbers("box", 4)
    if len(numbers) != 4 or not (numbers[0] < numbers[2] and numbers[1] < numbers[3]):
        raise WireError(
            f"{fields.what}: expected 'box' to be [x0, y0, x1, y1] with x0 < x1 and y0 < y1, found {list(numbers)}"
        )
    x0, y0, x1, y1 = numbers
    return x0, y0, x1, y1
