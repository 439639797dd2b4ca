"""Load SAM 3.1's tracker from Meta's checkpoint: a hub name, a file, or a folder with the file.

The file is safetensors, or torch's own format, from which tensors alone are read. Sizes come from the tensors, so there
is no configuration.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import torch
from safetensors.torch import load_file
from torch import Tensor

from ...errors import ModelError, summarize_error
from ...files import ANY_SIZE, CHECKPOINT_SUFFIXES, check_regular, describe_stand_in, explain_os_error
from ..torch_files import check_growth, check_torch_file
from ..weight_files import CENTRED, cast_source, name_weights
from .checkpoint import build_source, read_sizes
from .model import Sam31Model
from .source import ModelSizes, Source

SAM31 = "facebook/sam3.1"
SAM31_FILE = "sam3.1_multiplex.pt"
"""The file of SAM 3.1 on the hub. Its configuration there is of another model."""
STEM = SAM31_FILE.removesuffix(".pt")
"""Name of the checkpoint in folders, without its suffix."""
WRAPPERS = ("model", "state_dict")
"""Keys under which a checkpoint may hold its tensors."""


def find_local_checkpoint(name: str) -> Path | None:
    """Return the file of a SAM 3.1 checkpoint that `name` is, or that lies in the folder `name`; None if it is none."""
    path = Path(name)
    if path.suffix in CHECKPOINT_SUFFIXES and path.is_file():
        return path
    found = [path / f"{STEM}{suffix}" for suffix in CHECKPOINT_SUFFIXES]
    return next((file for file in found if file.is_file()), None)


def find_checkpoint(name: str, fetch: bool = True) -> Path | None:
    """Return the local file of a SAM 3.1 checkpoint; None for other weights.

    If `name` is its hub name, the file is fetched, or taken from the hub's cache. Raises ModelError where that fails.
    """
    if checkpoint := find_local_checkpoint(name):
        return checkpoint
    if name != SAM31 or os.path.isdir(name):
        return None
    try:
        return Path(huggingface_hub.hf_hub_download(SAM31, SAM31_FILE, local_files_only=not fetch))
    except Exception as error:  # the hub raises many, also of other packages
        raise ModelError(
            f"cannot load {name}: expected {SAM31_FILE} of the hub, which users have to ask for; found "
            f"{summarize_error(error)}"
        ) from error


def load_sam31(
    name: str, path: Path, *, device: torch.device, dtype: torch.dtype, image_size: int = 0
) -> Sam31Model:
    """Load the tracker from a file. Raises ModelError for a file that is damaged or of another model."""
    tensors = read_tensors(path)
    sizes = set_size(read_sizes(tensors, name), image_size, name)
    shown = path.name if os.path.isfile(name) else name_weights(name)
    return build_model(build_source(tensors, sizes, name), shown, device, dtype)


def read_tensors(path: Path) -> Mapping[str, Tensor]:
    """Read the tensors of a file, which stay in the file until they are used. Raises ModelError if it is damaged."""
    if stand_in := describe_stand_in(path):
        raise ModelError(f"expected weights at {path}, found {stand_in}")
    with explain_os_error(ModelError, f"cannot read the weights {path}"):
        check_regular(path, ANY_SIZE)
    if path.suffix != ".safetensors":
        check_torch_file(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # safetensors, pickle and torch raise errors of their own
        raise ModelError(
            f"cannot load {path}: expected safetensors, or tensors in torch's format; found "
            f"{summarize_error(error)}"
        ) from error
    for wrapper in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected tensors by their names, found a {type(content).__name__}")
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    check_growth(tensors.values(), path)
    return tensors


def set_size(sizes: ModelSizes, image_size: int, name: str) -> ModelSizes:
    """Choose another image size in pixels; 0 keeps the weights' own. Raises ModelError for one that does not divide."""
    if image_size == 0:
        return sizes
    if image_size % sizes.patch or image_size < 2 * sizes.patch:
        raise ModelError(
            f"{name}: image_size: expected a multiple of {sizes.patch} pixels, such as {sizes.image_size}; found "
            f"{image_size}"
        )
    return sizes._replace(image_size=image_size)


def build_model(source: Source, name: str, device: torch.device, dtype: torch.dtype) -> Sam31Model:
    """Build the stages on a device, in a dtype. Frequencies of positions stay exact."""
    cast_source(source, device, dtype)
    return Sam31Model(source, name=name, mean=CENTRED.mean, std=CENTRED.std).to(device)
