"""Layouts of detectors in ONNX: how an export is recognised, fed and read, and where its classes have their names."""

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ModelError, RequestError
from ..files import explain_os_error, parse_toml, read_json, read_regular
from ..models.pixels import Resize, to_corners
from ..models.weight_files import CONFIG, IMAGENET, MAX_JSON_BYTES, Deviation, Mean, Normalisation
from .phrases import clean_phrase

MAX_NOTES_BYTES = 1 << 20
"""Size of the largest TOML or text file beside an ONNX file. A larger one is refused."""
MAX_CLASSES = 16_384
"""Classes of a detector."""
MIN_SIDE = 32
"""Shortest side of an input, in pixels."""
MAX_SIDE = 4096
"""Longest side of an input, in pixels."""
STRIDES = ((8, 16, 32), (8, 16, 32, 64))
"""Pixels of a cell on each map of YOLO networks, and of those for large inputs."""
MAX_RAW_OFFSET = 8.0
"""Cells up to which the centres of boxes usually lie from their own cell; in pixels they would lie further."""
BACKGROUND = "__background__"
"""What torchvision's lists of names begin with."""
CLASS_FILES = ("classes.txt", "data.yaml", CONFIG)
"""Files beside an ONNX file that may name its classes: one a line, of a YOLO dataset, of transformers."""

Values = npt.NDArray[Any]
Fit = Literal["letterbox", "corner", "stretch", "shortest", "frame"]
"""How a frame becomes the input: with padding around or at one side, stretched, or (where the input's size is free) as
DETR scales it, or as it is"""
Side = Annotated[int, msgspec.Meta(ge=MIN_SIDE, le=MAX_SIDE)]


class OnnxNotes(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a TOML file beside an ONNX file may say of it. What it does not say is recognised."""

    layout: Literal["rf-detr", "detr", "yolov8", "yolo-end2end", "yolox", "torchvision"] | None = None
    outputs: list[str] = []
    """names of the outputs, in the order of `ExportLayout.outputs`"""
    size: Annotated[list[Side], msgspec.Meta(min_length=2, max_length=2)] | None = None
    """[height, width] in pixels of an input whose size is free"""
    mean: Mean | None = None
    std: Deviation | None = None
    """of red, green and blue, for pixels in 0..1"""
    classes: list[str] = []
    """names, in the order of the network's classes"""


class ExportLayout(NamedTuple):
    """One kind of export."""

    outputs: tuple[str, ...]
    """names that its exporter gives, in the order in which `read` takes their values"""
    find: Callable[[Mapping[str, Values], tuple[int, int]], tuple[str, ...] | None]
    """returns the names of the outputs among values by name, for an input (H, W); None if they are of another layout"""
    read: Callable[[Sequence[Tensor], tuple[int, int], int], tuple[Tensor, Tensor]]
    """returns boxes (x0, y0, x1, y1) [A, 4] in pixels of the input, and scores [A, C], of the outputs' values, an input
    (H, W) and C classes; raises ValueError for another number of classes"""
    fit: Fit
    free_fit: Fit | None = None
    """how a frame becomes an input whose size is free, if no size is known"""
    resize: Resize = "bilinear"
    normalisation: Normalisation | None = None
    is_bgr: bool = False


def _find_named(*wanted: str) -> Callable[[Mapping[str, Values], tuple[int, int]], tuple[str, ...] | None]:
    """Return what finds boxes [1, N, 4] and logits [1, N, C] by their names."""

    def find(values: Mapping[str, Values], size: tuple[int, int]) -> tuple[str, ...] | None:
        boxes, logits = (values.get(name) for name in wanted)
        if boxes is None or logits is None or boxes.ndim != 3 or logits.ndim != 3:
            return None
        return wanted if boxes.shape == (1, logits.shape[1], 4) else None

    return find


def _find_single(values: Mapping[str, Values]) -> tuple[str, int, int] | None:
    """Return the name and axes of the one output [1, A, B]; prototypes of masks may stand beside it."""
    tables = [(name, value.shape) for name, value in values.items() if value.ndim == 3]
    if len(tables) != 1 or tables[0][1][0] != 1 or any(value.ndim not in (3, 4) for value in values.values()):
        return None
    name, (_, first, second) = tables[0]
    return name, first, second


def _count_cells(size: tuple[int, int]) -> tuple[int, ...]:
    return tuple(sum((size[0] // s) * (size[1] // s) for s in strides) for strides in STRIDES)


def _find_yolov8(values: Mapping[str, Values], size: tuple[int, int]) -> tuple[str, ...] | None:
    found = _find_single(values)
    return tuple(values) if found and found[1] > 4 and found[2] in _count_cells(size) else None


def _find_yolox(values: Mapping[str, Values], size: tuple[int, int]) -> tuple[str, ...] | None:
    found = _find_single(values)
    return (found[0],) if found and found[2] > 5 and found[1] in _count_cells(size) else None


def _find_end2end(values: Mapping[str, Values], size: tuple[int, int]) -> tuple[str, ...] | None:
    found = _find_single(values)
    # coefficients of masks follow the class
    return (found[0],) if found and (found[2] == 6 or (found[2] > 6 and len(values) == 2)) else None


def _find_torchvision(values: Mapping[str, Values], size: tuple[int, int]) -> tuple[str, ...] | None:
    by_kind: dict[str, str] = {}
    for name, value in values.items():
        if value.ndim == 2 and value.shape[1] == 4 and value.dtype.kind == "f":
            by_kind["boxes"] = name
        elif value.ndim == 1:
            by_kind["labels" if value.dtype.kind == "i" else "scores"] = name
    return tuple(by_kind[kind] for kind in ("boxes", "labels", "scores")) if len(by_kind) == 3 else None


def _scale(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Convert boxes from fractions of centre and size to corners in pixels."""
    height, width = size
    return to_corners(boxes) * boxes.new_tensor((width, height, width, height))


def _read_rf_detr(values: Sequence[Tensor], size: tuple[int, int], count: int) -> tuple[Tensor, Tensor]:
    boxes, logits = (value[0] for value in values)
    # one more column, of no class, has never been trained
    _check_count(logits.shape[1], (count, count + 1), count)
    return _scale(boxes, size), logits.sigmoid()[:, :count]


def _read_detr(values: Sequence[Tensor], size: tuple[int, int], count: int) -> tuple[Tensor, Tensor]:
    boxes, logits = (value[0] for value in values)
    _check_count(logits.shape[1], (count, count + 1), count)
    # DETR has a last class for "no object"; its descendants score each class alone
    scores = logits.softmax(dim=1)[:, :count] if logits.shape[1] > count else logits.sigmoid()
    return _scale(boxes, size), scores


def _read_yolov8(values: Sequence[Tensor], size: tuple[int, int], count: int) -> tuple[Tensor, Tensor]:
    table = next(value[0].T for value in values if value.ndim == 3)
    # behind the scores, a coefficient for each prototype of a mask
    coefficients = sum(value.shape[1] for value in values if value.ndim == 4)
    _check_count(table.shape[1] - 4 - coefficients, (count,), count)
    return to_corners(table[:, :4]), table[:, 4 : 4 + count]


def _read_end2end(values: Sequence[Tensor], size: tuple[int, int], count: int) -> tuple[Tensor, Tensor]:
    table = values[0][0]
    return table[:, :4], _spread(table[:, 4], table[:, 5].long(), count)


def _read_yolox(values: Sequence[Tensor], size: tuple[int, int], count: int) -> tuple[Tensor, Tensor]:
    table = values[0][0]
    _check_count(table.shape[1] - 5, (count,), count)
    centres = table[:, :2]
    sides = table[:, 2:4]
    # exported as the network gives them, unless --decode_in_inference was set
    if centres.abs().median() < MAX_RAW_OFFSET:
        corners, strides = _list_cells(size, len(table))
        centres = (centres + corners) * strides
        sides = sides.exp() * strides
    return to_corners(torch.cat([centres, sides], dim=1)), table[:, 4:5] * table[:, 5:]


def _read_torchvision(values: Sequence[Tensor], size: tuple[int, int], count: int) -> tuple[Tensor, Tensor]:
    boxes, labels, scores = values
    # class 0 is the background, which RetinaNet and FCOS may name
    return boxes, _spread(torch.where(labels > 0, scores, 0), (labels - 1).clamp(min=0), count)


def _list_cells(size: tuple[int, int], count: int) -> tuple[Tensor, Tensor]:
    """Return column and row [A, 2] and stride [A, 1] of each of `count` cells, map by map, row by row."""
    cells = []
    strides = []
    for stride in STRIDES[_count_cells(size).index(count)]:
        rows, columns = torch.meshgrid(*(torch.arange(side // stride) for side in size), indexing="ij")
        cells.append(torch.stack([columns, rows], dim=-1).flatten(0, 1))
        strides.append(torch.full((len(cells[-1]), 1), stride))
    return torch.cat(cells), torch.cat(strides)


def _spread(scores: Tensor, classes: Tensor, count: int) -> Tensor:
    """Return scores [A, count] of boxes that have one class each, with 0 for all others."""
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < count:
        _check_count(int(classes.max()) + 1, (count,), count)
        raise ValueError(f"expected numbers of {count} classes, found {int(classes.min())}")
    return torch.nn.functional.one_hot(classes, count) * scores[:, None]


def _check_count(found: int, allowed: Sequence[int], count: int) -> None:
    if found not in allowed:
        raise ValueError(f"expected {count} classes, as many as it has names, found {found}")


LAYOUTS = {
    "rf-detr": ExportLayout(
        ("dets", "labels"),
        _find_named("dets", "labels"),
        _read_rf_detr,
        "stretch",
        resize="unrounded",
        normalisation=IMAGENET,
    ),
    "detr": ExportLayout(
        ("pred_boxes", "logits"),
        _find_named("pred_boxes", "logits"),
        _read_detr,
        "stretch",
        "shortest",
        resize="antialias",
        normalisation=IMAGENET,
    ),
    "torchvision": ExportLayout(
        ("boxes", "labels", "scores"),
        _find_torchvision,
        _read_torchvision,
        "letterbox",
        "frame",
        resize="unrounded",
    ),
    "yolov8": ExportLayout(("output0",), _find_yolov8, _read_yolov8, "letterbox"),
    # its pixels are whole numbers to 255
    "yolox": ExportLayout(
        ("output",),
        _find_yolox,
        _read_yolox,
        "corner",
        normalisation=Normalisation([0.0] * 3, [1 / 255] * 3),
        is_bgr=True,
    ),
    "yolo-end2end": ExportLayout(("output0",), _find_end2end, _read_end2end, "letterbox"),
}
"""Layouts by name, in the order in which they are looked for."""


def read_notes(path: Path) -> OnnxNotes:
    """Read a TOML file about an ONNX file; without one, nothing is known. Raises ModelError that names the file."""
    try:
        with explain_os_error(ModelError, f"cannot read {path}"):
            return msgspec.convert(parse_toml(read_regular(path, MAX_NOTES_BYTES)), OnnxNotes)
    except ModelError:
        if not os.path.lexists(path):
            return OnnxNotes()
        raise
    except (ValueError, msgspec.ValidationError) as error:
        raise ModelError(
            f"{path}: expected a TOML file with some of layout ({', '.join(LAYOUTS)}), outputs, size, mean, std and "
            f"classes, found {error}"
        ) from error


def find_layout(
    values: Mapping[str, Values], size: tuple[int, int], notes: OnnxNotes
) -> tuple[str, tuple[str, ...]] | None:
    """Return the name of the layout of values by name, and the names of its outputs; None if none fits."""
    if notes.layout is None:
        for name, layout in LAYOUTS.items():
            if found := layout.find(values, size):
                return name, found
        return None
    given = notes.outputs or LAYOUTS[notes.layout].outputs
    # a single output needs no name
    names = tuple(values) if len(given) == len(values) == 1 else tuple(given)
    return (notes.layout, names) if set(names) <= set(values) else None


def find_classes(path: Path, notes: OnnxNotes, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the classes: of the TOML file, the ONNX file, or a file beside it. Raises ModelError."""
    names: object = notes.classes or _parse_names(metadata.get("names", ""))
    for file in map(path.with_name, (f"{path.stem}.txt", *CLASS_FILES)):
        if not names and file.is_file():
            names = _read_names(file)
    if not isinstance(names, list | tuple) or not 0 < len(names) <= MAX_CLASSES:
        raise ModelError(
            f"{path}: expected the names of 1 to {MAX_CLASSES} classes, found none; write them into "
            f'{path.with_name(CLASS_FILES[0])}, one a line, or as classes = ["…"] into {path.with_suffix(".toml")}'
        )
    try:
        return tuple(map(clean_phrase, names))
    except RequestError as error:
        raise ModelError(f"{path}: a class's name: {error}") from error


def _read_names(file: Path) -> object:
    if file.name == CONFIG:
        return _list_by_number(read_json(file, MAX_JSON_BYTES, ModelError, "a map in JSON").get("id2label"))
    with explain_os_error(ModelError, f"cannot read {file}"):
        lines = read_regular(file, MAX_NOTES_BYTES).decode(errors="replace").splitlines()
    if file.suffix == ".txt":
        return [line for line in lines if line.strip()]
    # a list in one line, as this package's datasets and others have it
    return _parse_names(next((line.partition(":")[2] for line in lines if line.startswith("names:")), ""))


def _parse_names(text: str) -> object:
    """Return the names in a list, or a map from numbers, as Python and YAML write them."""
    try:
        return _list_by_number(ast.literal_eval(text[:MAX_NOTES_BYTES].strip() or "None"))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _list_by_number(names: object) -> object:
    if not isinstance(names, dict):
        return names
    try:
        numbered = {int(number): name for number, name in names.items()}
    except (ValueError, TypeError):
        return None
    # a number without a name would move all names behind it
    return [numbered.get(number) for number in range(len(numbered))] if numbered else None


def describe_values(values: Mapping[str, Values]) -> str:
    """Name values with their types and shapes, for an error."""
    return ", ".join(f"{name} {value.dtype} {list(value.shape)}" for name, value in values.items()) or "none"


def is_all_finite(values: Sequence[Values]) -> bool:
    """Return True if no value is infinite or NaN."""
    return all(bool(np.isfinite(value).all()) for value in values)
