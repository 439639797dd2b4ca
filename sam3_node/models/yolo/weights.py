"""A YOLO-World on disk: a folder of config.json, model.safetensors and, where it is there, the digest of the latter."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from ...errors import ModelError, OutputError
from ..weight_loading import check_digest, digest_path, pick_device, pick_dtype, write_digest
from .config import YoloWorldConfig
from .network import YoloWorld

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LISTED = 3  # tensors named in an error


def load_yolo_world(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> YoloWorld:
    """The detector kept in a folder, ready to infer; `device` and `dtype` as for `load_tracker`.

    Raises ModelError that names the file, and the tensors that are missing or of another shape.
    """
    place = pick_device(device)
    number = pick_dtype(dtype, place)
    folder = Path(path)
    config = _read_config(folder / CONFIG)
    weights = folder / WEIGHTS
    if digest_path(weights).exists():
        check_digest(weights, advice="copy or convert the weights again")
    try:
        state = load_file(weights)
    except Exception as error:  # OSError, SafetensorError
        raise ModelError(f"cannot read {weights}: expected safetensors, found {error}") from error
    return build(config, state, origin=str(weights)).to(place, number).eval()


def save_yolo_world(model: YoloWorld, folder: Path) -> None:
    """Write config.json, model.safetensors and its digest into a folder, made where it is not there."""
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(model.config.to_json(), indent=2) + "\n")
        (folder / WEIGHTS).write_bytes(save(state, metadata={"format": "pt"}))
        write_digest(folder / WEIGHTS)
    except OSError as error:
        raise OutputError(f"cannot write weights to {folder}: {error.strerror or error}") from error


def build(config: YoloWorldConfig, state: Mapping[str, Tensor], *, origin: str) -> YoloWorld:
    """A network of these float32 weights; ModelError, naming `origin`, unless they are exactly its tensors."""
    with torch.device("meta"):
        model = YoloWorld(config)
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    found = {name: value.shape for name, value in state.items()}
    wrong = {
        "lacks": sorted(wanted.keys() - found),
        "has unknown": sorted(found.keys() - wanted),
        "has, of another shape,": [
            f"{name} {list(found[name])} for {list(shape)}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ],
    }
    told = [f"{verb} {len(names)} tensors: {_some(names)}" for verb, names in wrong.items() if names]
    if told:
        raise ModelError(f"{origin} does not fit a YOLO-World of its configuration: it {'; it '.join(told)}")
    exact = {
        name: value.float() if value.is_floating_point() else value.long() for name, value in state.items()
    }
    model.load_state_dict(exact, assign=True)
    return model


def _read_config(path: Path) -> YoloWorldConfig:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read {path}: expected a folder with {CONFIG} and {WEIGHTS}, as `sam3-node weights convert` "
            f"writes it; found {error}"
        ) from error
    try:
        return YoloWorldConfig.from_json(found)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (" …" if len(names) > LISTED else "")
