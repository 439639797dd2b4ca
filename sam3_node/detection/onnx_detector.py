"""A detector that was exported to ONNX, run by onnxruntime. Its classes are the names that it knows."""

import ast
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import (
    MissingExtraError,
    ModelError,
    UnknownPhraseError,
    install_advice,
    require,
    summarize_error,
)
from ..files import check_regular, explain_os_error
from ..models.pixels import Letterbox, input_size, letterbox, resize_frame, select, to_detections
from ..models.weight_files import (
    IMAGENET,
    Normalisation,
    explain_sizes,
    pick_device,
    read_normalisation,
    read_preprocessing,
)
from ..types import Detection, Image
from .detectors import MAX_DETECTIONS, MAX_IOU
from .guarded import GuardedDetector
from .onnx_layouts import (
    BACKGROUND,
    LAYOUTS,
    MAX_SIDE,
    MIN_SIDE,
    ExportLayout,
    OnnxNotes,
    Values,
    describe_values,
    find_classes,
    find_layout,
    is_all_finite,
    read_notes,
)
from .phrases import describe_unknown, phrase_key

EXTRA = "onnxruntime"
CUDA = "CUDAExecutionProvider"
"""onnxruntime's name of what runs networks on a GPU"""
MIN_RUNTIME = (1, 24)
"""The first onnxruntime that reads no weights from outside the folder of an ONNX file."""
MAX_FILE_BYTES = 2 << 30
"""Size of the largest ONNX file; more than that is no valid one. Weights may lie in further files beside it."""
MAX_BOXES = 1 << 19
"""Boxes that a network may give for a frame. An input of 4096 x 4096 has 344,064 cells at stride 8 and above."""
DEFAULT_SIDE = 640
"""Side in pixels of an input whose size is free, where nothing says it."""
SHORT_SIDE = 800
"""Shorter side in pixels of DETR's input, where its size is free."""
MAX_LONG_SIDE = 1333
"""Longest side in pixels of that input."""
ERRORS_ONLY = 4
"""onnxruntime's log severity; its exceptions give the details"""
TASKS = ("detect", "segment")
"""Tasks of Ultralytics whose exports have upright boxes."""

_log = logging.getLogger(__name__)


class ClassQuery(NamedTuple):
    """Phrases, and for each class the index of the phrase that names it, or -1: int64 [C]."""

    phrases: tuple[str, ...]
    owners: Tensor


class OnnxNetwork:
    """An ONNX file whose input is one image. Raises ModelError for any other."""

    def __init__(self, path: Path, device: str | torch.device) -> None:
        runtime = _require_runtime()
        with explain_os_error(ModelError, f"cannot read {path}"):
            check_regular(path, MAX_FILE_BYTES)
        self._path = path
        chosen = pick_device(device)
        with _explain(f"{path}: expected a network in ONNX, with all of its data in the folder of the file"):
            # without the fallback, which prints
            self._session = runtime.InferenceSession(
                str(path), _make_options(runtime), _list_providers(runtime, chosen), enable_fallback=0
            )
            self.metadata: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map
        if chosen.type == "cuda" and CUDA not in self._session.get_providers():
            _log.warning(
                "%s runs on the CPU: this onnxruntime finds no CUDA; install onnxruntime-gpu in its place",
                path,
            )
        inputs = self._session.get_inputs()
        images = [one for one in inputs if one.name != "pixel_mask"]
        described = ", ".join(f"{one.name} {one.type} {one.shape}" for one in inputs)
        image = images[0] if len(images) == 1 else None
        dtypes = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        if image is None or image.type not in dtypes or not _is_image(image.shape):
            raise ModelError(f"{path}: expected an input of one image, float [1, 3, H, W], found {described}")
        self._image = image
        self._has_mask = len(inputs) > 1
        self._dtype = dtypes[image.type]
        height, width = (side if isinstance(side, int) else 0 for side in image.shape[-2:])
        self.size = (height, width) if height and width else None
        """(H, W) of the input; None if it is free"""
        if self.size and not all(MIN_SIDE <= side <= MAX_SIDE for side in self.size):
            raise ModelError(
                f"{path}: expected sides of {MIN_SIDE} to {MAX_SIDE} pixels, found {list(self.size)}"
            )

    def run(self, pixels: Tensor, names: Sequence[str] = ()) -> dict[str, Values]:
        """Return the outputs with these names, by default all, for pixels [1, 3, H, W]. Raises ModelError."""
        batch = pixels.numpy().astype(self._dtype)
        feeds = {self._image.name: batch if len(self._image.shape) == 4 else batch[0]}
        if self._has_mask:
            feeds["pixel_mask"] = np.ones((1, *batch.shape[-2:]), np.int64)
        names = names or [one.name for one in self._session.get_outputs()]
        with _explain(f"{self._path}: the network failed"):
            values = dict(zip(names, self._session.run(list(names), feeds), strict=True))
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


class OnnxDetector:
    """Finds the classes of an exported network by their names; see `Detector`. Works on the CPU but for the network.

    A box has the class with its highest score, whether that was asked for or not: what is most likely a bowl is no mug
    because nobody asked for bowls. Of overlapping boxes of one name, only the best is returned.
    """

    def __init__(self, network: OnnxNetwork, path: Path, notes: OnnxNotes) -> None:
        self.name = path.name
        self.classes = find_classes(path, notes, network.metadata)
        self._network = network
        size = network.size or _find_size(path, notes, network.metadata)
        blank = torch.zeros(1, 3, *(size or (DEFAULT_SIDE, DEFAULT_SIDE)))
        # also the first run, which takes longer than those on frames
        values = network.run(blank)
        self._layout, self._outputs = _recognise(path, values, blank, notes, network.metadata)
        if self._layout is LAYOUTS["torchvision"] and self.classes[0] == BACKGROUND:
            self.classes = self.classes[1:]
        self._size = size
        if size is None and self._layout.free_fit is None:
            self._size = (DEFAULT_SIDE, DEFAULT_SIDE)
        self._normalisation = _find_normalisation(path, self._layout, notes)
        # classes and names that do not fit are refused here, and not on a frame
        self._read(values, blank)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its classes."""
        return tuple(self.classes)

    def prepare(self, phrases: Sequence[str]) -> ClassQuery:
        """Return the classes with these names. Raises UnknownPhraseError, which names the nearest, for others."""
        keys = [phrase_key(name) for name in self.classes]
        if unknown := [phrase for phrase in phrases if phrase_key(phrase) not in keys]:
            raise UnknownPhraseError(
                f"not among the {len(keys)} classes of {self.name}: {describe_unknown(unknown, self.classes)}; choose "
                "one of them"
            )
        index = {phrase_key(phrase): number for number, phrase in enumerate(phrases)}
        return ClassQuery(tuple(phrases), torch.tensor([index.get(key, -1) for key in keys]))

    @torch.inference_mode()
    def detect(self, image: Image, query: ClassQuery, threshold: float) -> list[Detection]:
        """Detect objects on a frame; see `Detector.detect`."""
        pixels, frame = self._fit(image)
        boxes, scores = self._read(self._network.run(pixels, self._outputs), pixels)
        best, classes = scores.max(dim=1)
        owners = query.owners[classes]
        index = ((best > threshold) & (owners >= 0)).nonzero()[:, 0]
        table = torch.zeros(len(index), len(query.phrases))
        table[torch.arange(len(index)), owners[index]] = best[index]
        chosen = select(boxes[index], table, threshold, iou=MAX_IOU, limit=MAX_DETECTIONS)
        return to_detections(chosen, frame, query.phrases)

    def _fit(self, image: Image) -> tuple[Tensor, Letterbox]:
        """Return the network's input [1, 3, H, W] for a frame, and the frame's position in it."""
        layout = self._layout
        height, width = image.shape[:2]
        size = self._size
        if size is None:
            size = (height, width)
            if layout.free_fit == "shortest":
                size = input_size(size, SHORT_SIDE, MAX_LONG_SIDE)
        if self._size is not None and layout.fit != "stretch":
            centred = layout.fit == "letterbox"
            pixels, frame = letterbox(image, size, rgb=layout.is_bgr, resize=layout.resize, centred=centred)
        else:
            pixels = resize_frame(image, size, "cpu", rgb=layout.is_bgr, resize=layout.resize)
            frame = Letterbox(width, height, (size[1] / width, size[0] / height), (0, 0))
        if self._normalisation is not None:
            mean, std = self._normalisation.to_tensors()
            pixels = (pixels - mean) / std
        return pixels, frame

    def _read(self, values: Mapping[str, Values], pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return boxes [A, 4] in pixels of the input, and scores [A, C]. Raises ModelError."""
        chosen = [values[name] for name in self._outputs]
        if max(max(value.shape[:3], default=0) for value in chosen) > MAX_BOXES or not is_all_finite(chosen):
            raise ModelError(
                f"{self.name}: expected at most {MAX_BOXES} boxes of finite numbers, found {describe_values(values)}"
            )
        with explain_sizes(
            f"{self.name}: its outputs, {describe_values(values)}, do not fit:", "name its layout"
        ):
            tensors = [torch.from_numpy(value) for value in chosen]
            tensors = [one.float() if one.is_floating_point() else one.long() for one in tensors]
            size = (pixels.shape[2], pixels.shape[3])
            boxes, scores = self._layout.read(tensors, size, len(self.classes))
            return boxes.reshape(-1, 4), scores.reshape(len(boxes), len(self.classes)).clamp(0, 1)


def load_onnx(path: Path, *, device: str | torch.device = "cpu") -> GuardedDetector:
    """Load a detector that was exported to ONNX, with what FILE.toml beside it says.

    Raises ModelError for a file that is none, MissingExtraError without onnxruntime.
    """
    notes = read_notes(path.with_suffix(".toml"))
    return GuardedDetector(OnnxDetector(OnnxNetwork(path, device), path, notes), path.name)


def _require_runtime() -> Any:
    """Import and return onnxruntime. Raises MissingExtraError without it, and for an older one."""
    runtime = require("onnxruntime", EXTRA)
    found = tuple(int(part) for part in runtime.__version__.split(".")[:2])
    if found < MIN_RUNTIME:
        raise MissingExtraError(
            f"onnxruntime: expected version {'.'.join(map(str, MIN_RUNTIME))} or later, which reads no weights from "
            f"outside a file's folder, found {runtime.__version__}: {install_advice(EXTRA)}"
        )
    return runtime


def _make_options(runtime: Any) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = ERRORS_ONLY
    options.intra_op_num_threads = torch.get_num_threads()
    # waiting threads would take the processor from the tracker
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _list_providers(runtime: Any, device: torch.device) -> list[Any]:
    on_cuda = (CUDA, {"device_id": device.index or 0})
    is_there = device.type == "cuda" and CUDA in runtime.get_available_providers()
    return [*([on_cuda] if is_there else []), "CPUExecutionProvider"]


def _is_image(shape: Sequence[object]) -> bool:
    """Return True for the shape of one RGB image, with a batch or without. A free axis is a text or None."""
    leading = zip(reversed(shape[:-2]), (3, 1), strict=False)
    return len(shape) in (3, 4) and all(
        side == wanted or not isinstance(side, int) for side, wanted in leading
    )


def _find_size(path: Path, notes: OnnxNotes, metadata: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (H, W) of an input whose size is free: of the TOML file, Ultralytics' metadata or transformers' file."""
    size: Any = notes.size
    if size is None:
        try:
            size = ast.literal_eval(metadata.get("imgsz", "None")[:100])
        except (ValueError, SyntaxError):
            size = None
    if size is None:
        named = read_preprocessing(str(path.parent)).get("size")
        size = [named.get("height"), named.get("width")] if isinstance(named, dict) else None
    sides = [size, size] if isinstance(size, int) else size
    if isinstance(sides, list | tuple) and len(sides) == 2:
        height, width = sides
        if all(isinstance(side, int) and MIN_SIDE <= side <= MAX_SIDE for side in sides):
            return height, width
    return None


def _find_normalisation(path: Path, layout: ExportLayout, notes: OnnxNotes) -> Normalisation | None:
    """Return mean and deviation: of the TOML file, of transformers' file beside the network, or of the layout."""
    chosen = layout.normalisation
    if layout is LAYOUTS["detr"]:
        folder = str(path.parent)
        chosen = read_normalisation(folder, IMAGENET)
        if read_preprocessing(folder).get("do_normalize") is False:
            chosen = None
    mean, std = chosen or ([0.0] * 3, [1.0] * 3)
    if notes.mean or notes.std:
        chosen = Normalisation(notes.mean or mean, notes.std or std)
        # the file has them of red, green and blue
        return Normalisation(chosen.mean[::-1], chosen.std[::-1]) if layout.is_bgr else chosen
    return chosen


def _recognise(
    path: Path, values: Mapping[str, Values], blank: Tensor, notes: OnnxNotes, metadata: Mapping[str, str]
) -> tuple[ExportLayout, tuple[str, ...]]:
    """Return the layout of a network's outputs, and their names. Raises ModelError that says what was found."""
    found = find_layout(values, (blank.shape[2], blank.shape[3]), notes)
    kind = metadata.get("task", TASKS[0])
    if "rtdetr" in f"{metadata.get('head', '')} {metadata.get('description', '')}".casefold():
        kind = "RT-DETR"
    # Ultralytics' other networks have outputs of the same shapes
    if found is not None and (notes.layout or kind in TASKS):
        name, outputs = found
        _log.info("%s: layout %s, outputs %s", path.name, name, ", ".join(outputs))
        return LAYOUTS[name], outputs
    origin = f" of Ultralytics' {kind}" if kind not in TASKS else ""
    raise ModelError(
        f"{path}: expected outputs of a layout that is known ({', '.join(LAYOUTS)}), found{origin} "
        f'{describe_values(values)} for an image {list(blank.shape)}; if it is one of them, write layout = "NAME" and '
        f'outputs = ["{next(iter(LAYOUTS["detr"].outputs))}", …] into {path.with_suffix(".toml")}'
    )


@contextmanager
def _explain(what: str) -> Iterator[None]:
    """Raise ModelError for the errors of onnxruntime, which have no common class, in the block."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"{what}; found {summarize_error(error)}") from error
