"""Where weights come from: the bundled nano, a local folder in transformers' layout, or a hub name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, Sam2VideoModel, Sam3TrackerVideoModel
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from ..errors import ModelError
from .devices import pick_device, pick_dtype
from .digest import check_digest
from .sam import TrackerModel

NANO = Path(__file__).parent / "nano"
CLASSES: dict[str, Any] = {
    "sam3_tracker_video": Sam3TrackerVideoModel,
    "sam3_video": Sam3TrackerVideoModel,  # facebook/sam3: detector and tracker in one; the tracker is taken out
    "sam2_video": Sam2VideoModel,
    "sam2": Sam2VideoModel,  # single images: segments, cannot track
}
# without these a model segments but cannot track
MEMORY_MODULES = (
    "memory_attention.",
    "memory_encoder.",
    "memory_temporal_positional_encoding",
    "no_memory_positional_encoding",
    "no_object_pointer",
    "object_pointer_proj.",
    "mask_downsample.",
    "temporal_positional_encoding_projection_layer.",
    "occlusion_spatial_embedding_parameter",
)
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
CENTRED = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def load_tracker(
    name_or_path: str | os.PathLike[str] = "nano",
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    compile: bool = False,
) -> TrackerModel:
    """Load a tracker: "nano", a folder in transformers' layout, or a hub name such as "facebook/sam3".

    `device` may be "auto" (CUDA where there is one); `dtype` None or "auto" is bfloat16 on CUDA, float32 elsewhere.
    Raises ModelError when the weights are absent, damaged, or not those of a SAM 2 or SAM 3 tracker.
    """
    place = pick_device(device)
    number = pick_dtype(dtype, place)
    name = os.fspath(name_or_path)
    if name == "nano":
        check_digest(NANO / "model.safetensors")
    files = str(NANO) if name == "nano" else name
    source, can_track = _load_pretrained(files)
    normalise = _normalisation(files, source)
    model = TrackerModel(
        _cast(source, place, number),
        name=Path(name).name if os.path.isdir(name) else name,
        mean=normalise["image_mean"],
        std=normalise["image_std"],
        can_track=can_track,
    ).to(place)
    if compile:
        model.compile()
    return model


def _load_pretrained(name: str) -> tuple[nn.Module, bool]:
    """The transformers model and whether its memory modules were among the weights."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.isdir(os.path.dirname(name))
    if is_path and not os.path.isdir(name):
        raise ModelError(
            f"no folder {name}: expected 'nano', a folder with config.json and weights, or a hub name"
        )
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        kind = AutoConfig.from_pretrained(name).model_type
        if kind not in CLASSES:
            raise ModelError(f"{name} holds a {kind} model; expected one of {', '.join(CLASSES)}")
        source, found = CLASSES[kind].from_pretrained(name, dtype=torch.float32, output_loading_info=True)
    except ModelError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, SafetensorError, KeyError and more
        raise ModelError(
            f"cannot load {name}: expected a folder or hub repository with config.json and safetensors; "
            f"found {type(error).__name__}: {_first_line(error)}"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
    missing = sorted(found["missing_keys"])
    essential = [key for key in missing if not key.startswith(MEMORY_MODULES)]
    if essential or found["mismatched_keys"]:
        wrong = essential or [str(item) for item in found["mismatched_keys"]]
        raise ModelError(
            f"{name} lacks {len(wrong)} tensors that a tracker needs, among them {', '.join(wrong[:3])}"
        )
    return source.eval(), not missing


def _normalisation(name: str, source: Any) -> dict[str, list[float]]:
    """Mean and deviation of pixels: as the checkpoint's own processor file says, else the family's."""
    path = cached_file(name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    if path is not None:
        found = json.loads(Path(path).read_text())
        if "image_mean" in found and "image_std" in found:
            return {key: [float(value) for value in found[key]] for key in ("image_mean", "image_std")}
    return CENTRED if isinstance(source, Sam3TrackerVideoModel) else IMAGENET


def _cast(source: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move to device and dtype, rotary frequencies staying float32 as in the reference."""
    exact = {name: buffer.clone() for name, buffer in source.named_buffers() if name.endswith("inv_freq")}
    source.to(device=device, dtype=dtype)
    for name, buffer in exact.items():
        owner, _, attribute = name.rpartition(".")
        setattr(source.get_submodule(owner), attribute, buffer.to(device))
    return source


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]
