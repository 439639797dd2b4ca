"""Load a tracker from the bundled nano weights, a local folder in transformers' layout, or a hub name.

`set_image_size` chooses another image size in the configuration, before the model is built. No weights depend on the
size: SAM 3 tiles its position map and scales its rotary positions to the window (see `Sam3ViTLayer` of transformers),
Hiera interpolates one position map and tiles the other, EdgeTAM's windows grow.
"""

import os
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError
from . import registry, weight_files
from .family import LoadOptions
from .sam.configuration import side
from .sam.tracker_model import TrackerModel

NANO = Path(__file__).parent / "nano"


def load_tracker(
    name_or_path: str | os.PathLike[str] = "nano",
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    compile: bool = False,
    image_size: int = 0,
) -> TrackerModel:
    """Load a tracker: "nano", a folder in transformers' layout, or a hub name such as "facebook/sam3".

    SAM 3.1's checkpoint may also be a file, or the one file of a folder; see `sam31.loading`. `registry` lists the
    families.

    `device` may be "auto": CUDA if available, else CPU. `dtype` None or "auto" is bfloat16 on CUDA, else float32.
    A CUDA device becomes the current one of this thread, so that streams, events and graphs are made on it.
    `image_size` is in pixels; 0 selects the weights' own size. Raises ModelError if the weights are missing, damaged,
    or belong to no SAM model, and for an image size that their encoder does not support.
    """
    target = weight_files.pick_device(device)
    chosen_dtype = weight_files.pick_dtype(dtype, target)
    if target.type == "cuda" and target.index is not None:
        torch.cuda.set_device(target)
    name = os.fspath(name_or_path)
    options = LoadOptions(target, chosen_dtype, image_size)
    if found := registry.find_file(name):
        model = found.weights.load(name, found.path, options)
        model.mask_limits = found.family.mask_limits
    else:
        model = _load_transformers(name, options)
    if compile:
        model.compile()
    return model


def _load_transformers(name: str, options: LoadOptions) -> TrackerModel:
    """Load weights in transformers' layout."""
    if name == "nano":
        weight_files.check_digest(NANO / "model.safetensors")
    files = str(NANO) if name == "nano" else name
    # what else a folder lacks is told when it is read
    if os.path.isdir(files) and not os.path.isfile(os.path.join(files, weight_files.CONFIG)):
        registry.check_folder(Path(files))
    kind = weight_files.read_kind(files)
    family, weights = registry.find_reader(kind, name)
    source, missing = weights.read(files, lambda config: set_image_size(config, options.image_size, name))
    essential = [key for key in missing if not key.startswith(weights.memory_modules)]
    if essential:
        raise ModelError(
            f"{name} lacks {len(essential)} tensors that a tracker needs, for example {', '.join(essential[:3])}"
        )
    weights.fold(source)
    normalisation = weight_files.read_normalisation(files, weights.normalisation)
    cast = weight_files.cast_source(source, options.device, options.dtype)
    what = f"{name}: expected sizes that fit together in {weight_files.CONFIG}, found"
    with weight_files.explain_sizes(what, "take the original files"):
        model = weights.build(
            cast,
            name=weight_files.name_weights(name),
            mean=normalisation.mean,
            std=normalisation.std,
            has_memory=weights.has_memory and not missing,
        )
    model = model.to(options.device)
    model.mask_limits = family.mask_limits
    return model


SIXTHS = (6, 5, 4, 3)  # suggested sizes, in sixths of the weights' own size: 1008, 840, 672 and 504 for SAM 3


def set_image_size(config: Any, size: int, name: str) -> Any:
    """Set the image size of a tracker's configuration to `size` x `size` pixels, and return it; 0 changes nothing.

    Raises ModelError for a size that the encoder cannot divide into its tokens.
    """
    if size == 0:
        return config
    family, weights = registry.find_reader(config.model_type, name)
    if weights.size_step is None or weights.set_size is None:
        own = config.vision_config.image_size
        if size != own:
            raise ModelError(
                f"{name}: image_size: expected 0 or {own}, the only size of {family.title}; found {size}"
            )
        return config
    step = weights.size_step(config)
    if size % step or size < 2 * step:
        raise ModelError(
            f"{name}: image_size: expected a multiple of {step} pixels, "
            f"such as {', '.join(map(str, suggest_sizes(config)))}; found {size}"
        )
    weights.set_size(config, size)
    return config


def size_step(config: Any) -> int:
    """Return the number of pixels that divides every valid image size."""
    _, weights = registry.find_reader(config.model_type, "this configuration")
    assert weights.size_step is not None, "weights of one size have no step"
    return weights.size_step(config)


def suggest_sizes(config: Any) -> list[int]:
    """Return sizes in pixels from the weights' own down to half of it, the largest first."""
    own = side(config.prompt_encoder_config.image_size)
    unit = size_step(config)
    # with few tokens, several sixths round to the same size
    return list(dict.fromkeys(max(2, round(own * sixths / 6 / unit)) * unit for sixths in SIXTHS))
