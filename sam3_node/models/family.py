"""What a family of trackers declares, so that nobody has to ask which one weights are of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..gpu_memory import OBJECTS, GpuMemory
from .sam.tracker_model import PUBLISHED_LIMITS, MaskLimits, TrackerModel
from .weight_files import IMAGENET, Normalisation

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
    "spatial_perceiver.",
)
"""How the names of tensors begin without which objects are followed by their last masks."""


class LoadOptions(NamedTuple):
    """How weights are to be loaded."""

    device: torch.device
    dtype: torch.dtype
    image_size: int = 0
    """pixels; 0 for the weights' own"""


class Reading(NamedTuple):
    """What was read of weights."""

    source: Any
    """modules with the weights, float32, and their `config`"""
    missing: list[str]
    """names of tensors that the files lack"""


def keep(source: Any) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class TransformersWeights:
    """Weights in transformers' layout: config.json, whose `model_type` says whose they are, and safetensors."""

    kinds: tuple[str, ...]
    """the `model_type` of the family's weights"""
    read: Callable[[str, Callable[[Any], Any]], Reading]
    """(name, configure) -> modules with the weights; `configure` changes the configuration before they are built"""
    size_step: Callable[[Any], int] | None
    """(configuration) -> pixels that divide every valid image size; None if there is but one size"""
    set_size: Callable[[Any, int], None] | None
    """(configuration, pixels): set the image size"""
    normalisation: Normalisation = IMAGENET
    """of images, where the weights do not say"""
    fold: Callable[[Any], None] = keep
    """(source): what must be folded before a cast would round it"""
    build: Callable[..., TrackerModel] = TrackerModel
    """(source, name, mean, std, has_memory) -> the model"""
    has_memory: bool = True
    """False if no weights of the family have memory modules"""
    memory_modules: tuple[str, ...] = MEMORY_MODULES


@dataclass(frozen=True)
class FileWeights:
    """Weights in one file of a layout of their own, whose tensors tell all sizes."""

    find_local: Callable[[str], Path | None]
    """(name) -> the local file that a name is, or that lies in the folder of this name; None for other weights"""
    find: Callable[[str, bool], Path | None]
    """(name, fetch) -> the same, also of the name on the hub, whose file may be fetched; ModelError if that fails"""
    load: Callable[[str, Path, LoadOptions], TrackerModel]
    describe: Callable[[str, Path], str]
    """(name, file) -> what the file holds, in words; ModelError where it is damaged"""
    hub_file: str
    """name of the file on the hub"""
    hint: str
    """what a folder with such weights holds, in words"""


@dataclass(frozen=True)
class Family:
    """A family of trackers."""

    title: str
    weights: TransformersWeights | FileWeights
    hub_name: str = ""
    """name of its repository on the hub, where the family is known by it or users have to ask for it"""
    is_gated: bool = False
    """the hub gives the repository only to users who have asked for it"""
    detector_kind: str = ""
    """detector.kind that these weights can also serve, if there is one"""
    mask_limits: MaskLimits = PUBLISHED_LIMITS
    gpu_memory: GpuMemory = OBJECTS
