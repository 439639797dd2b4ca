"""Read and write a YOLO-World as a folder with config.json, model.safetensors and, optionally, its digest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from ...errors import ModelError, OutputError
from ...files import make_folder
from ..weight_files import check_weight_files
from ..weight_loading import check_digest, digest_path, pick_device, pick_dtype, write_digest
from .config import YoloWorldConfig
from .network import YoloWorld

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MAX_LISTED = 3  # tensors in an error message


def load_yolo_world(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> YoloWorld:
    """Load the detector in a folder, in inference mode. `device` and `dtype` are those of `load_tracker`.

    Raises ModelError, which names the file, and the tensors that are missing or have another shape.
    """
    target = pick_device(device)
    chosen_dtype = pick_dtype(dtype, target)
    folder = Path(path)
    config = _read_config(folder / CONFIG)
    check_weight_files(folder)
    weights = folder / WEIGHTS
    if digest_path(weights).exists():
        check_digest(weights, hint="copy or convert the weights again")
    try:
        state = load_file(weights)
    except Exception as error:  # OSError, SafetensorError
        raise ModelError(f"cannot read {weights}: expected safetensors, found {error}") from error
    return build(config, state, origin=str(weights)).to(target, chosen_dtype).eval()


def save_yolo_world(model: YoloWorld, folder: Path) -> None:
    """Write config.json, model.safetensors and its digest into a folder. Create the folder if needed."""
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    make_folder(folder)
    try:
        (folder / CONFIG).write_text(json.dumps(model.config.to_json(), indent=2) + "\n")
        (folder / WEIGHTS).write_bytes(save(state, metadata={"format": "pt"}))
        write_digest(folder / WEIGHTS)
    except OSError as error:
        raise OutputError(f"cannot write weights to {folder}: {error.strerror or error}") from error


def build(config: YoloWorldConfig, state: Mapping[str, Tensor], *, origin: str) -> YoloWorld:
    """Build a network with these float32 weights. Raises ModelError, naming `origin`, unless all tensors match."""
    with torch.device("meta"):
        model = YoloWorld(config)
    expected = {name: value.shape for name, value in model.state_dict().items()}
    shapes = {name: value.shape for name, value in state.items()}
    wrong = {
        "lacks": sorted(expected.keys() - shapes),
        "has unknown": sorted(shapes.keys() - expected),
        "has, of another shape,": [
            f"{name} {list(shapes[name])} for {list(shape)}"
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ],
    }
    faults = [f"{verb} {len(names)} tensors: {_list_names(names)}" for verb, names in wrong.items() if names]
    if faults:
        raise ModelError(
            f"{origin} does not fit a YOLO-World of its configuration: it {'; it '.join(faults)}"
        )
    exact = {
        name: value.float() if value.is_floating_point() else value.long() for name, value in state.items()
    }
    model.load_state_dict(exact, assign=True)
    return model


def _read_config(path: Path) -> YoloWorldConfig:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read {path}: expected a folder with {CONFIG} and {WEIGHTS}, as `sam3-node weights convert` "
            f"writes it; found {error}"
        ) from error
    try:
        return YoloWorldConfig.from_json(config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _list_names(names: list[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (" …" if len(names) > MAX_LISTED else "")
