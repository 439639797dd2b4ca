"""Layers that multiply in FP8 (E4M3, arXiv 2209.05433): rounded in torch, QuantizeLinear and DequantizeLinear in ONNX.

Activations have one scale a layer, weights one for each output channel.

Post-training quantisation of an encoder to FP8: calibrated on frames, fake-quantised in torch, exported to ONNX."""

from __future__ import annotations

import copy
import hashlib
import io
import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, ValidationError
from torch import Tensor, nn

from ..errors import EngineError, OutputError, require
from ..models import TrackerModel
from ..settings import Section
from .export import export
from .recipes import Recipe, layers_of, wrong_fields
from .specs import stages_of

LARGEST = 448.0  # of E4M3
MIN_SCALE = 2.0**-14  # the least normal float16; FP8 has exponents of its own, so smaller ones gain nothing


class QuantisedLayer(nn.Module):
    """A linear layer or convolution whose input and weights are rounded to FP8 first.

    amax: largest magnitude of its inputs; what is beyond it saturates. Weights' own are taken from them.
    """

    input_scale: Tensor
    input_zero: Tensor
    weight_scale: Tensor
    weight_zero: Tensor

    def __init__(self, layer: nn.Linear | nn.Conv2d, amax: float) -> None:
        super().__init__()
        self.layer = layer
        weight = layer.weight.detach()
        for name, largest in (
            ("input", weight.new_tensor(amax, dtype=torch.float32)),
            ("weight", weight.abs().flatten(1).amax(1)),
        ):
            self.register_buffer(f"{name}_scale", scale_of(largest, weight))
            self.register_buffer(f"{name}_zero", torch.zeros_like(largest, dtype=torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        x = round_fp8(x, self.input_scale, self.input_zero)
        weight = round_fp8(layer.weight, self.weight_scale, self.weight_zero)
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, layer.bias)
        padding: Any = layer.padding
        return F.conv2d(x, weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)


def scale_of(amax: Tensor, like: Tensor) -> Tensor:
    """The scale that takes `amax` to the largest FP8 number, one of float16's numbers, in the dtype of `like`."""
    return (amax.float() / LARGEST).clamp(min=MIN_SCALE).half().to(like)


def round_fp8(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x rounded to multiples of FP8 numbers by scale [], or scale [n] along the first axis of x; zero: 0 in FP8."""
    if torch.onnx.is_in_onnx_export():
        return _as_onnx(x, scale, zero)
    wide = scale.float() if scale.ndim == 0 else scale.float().view(-1, *[1] * (x.ndim - 1))
    scaled = (x.float() / wide).clamp(-LARGEST, LARGEST)  # beyond, the cast gives NaN
    return (scaled.to(zero.dtype).float() * wide).to(x.dtype)


def _as_onnx(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    write = partial(torch.onnx.ops.symbolic, attrs={"axis": 0}, shape=x.shape)
    eight = write("QuantizeLinear", (x, scale, zero), dtype=zero.dtype)
    return write("DequantizeLinear", (eight, scale, zero), dtype=x.dtype)


EXTRA = "quantize"
Image = npt.NDArray[np.uint8]
Progress = Callable[[int], None]
"""Is told how many frames are done."""


class Scales(Section):
    """What calibration found: the largest magnitude (amax) of each layer's inputs over all frames.

    Enough to build an engine again without the frames: weights have their amax in themselves, and the digest says
    which weights.
    """

    version: int = Field(1, ge=1, le=1)
    """Of this format."""
    model: str
    """Name of the weights, for people."""
    digest: str = Field(pattern="[0-9a-f]{64}")
    """What `weights_digest` gives for them."""
    frames: int = Field(ge=1)
    """How many were looked at."""
    amax: dict[str, float]
    """By the layer's name within the encoder."""

    def save(self, path: Path) -> None:
        """Write as JSON; OutputError where that cannot be done."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; EngineError for a file that is absent, damaged or another."""
        try:
            scales = cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise EngineError(f"cannot read FP8 scales from {path}: {error.strerror}; {_advice()}") from error
        except ValidationError as error:
            raise EngineError(f"{path} holds no FP8 scales: {wrong_fields(error)}; {_advice()}") from error
        wrong = [name for name, amax in scales.amax.items() if not (math.isfinite(amax) and amax >= 0)]
        if wrong:
            raise EngineError(
                f"{path}: expected an amax of 0 or more, found another for {wrong[:3]}; {_advice()}"
            )
        return scales

    def check(self, model: TrackerModel) -> None:
        """Raise EngineError unless they are of these weights."""
        if weights_digest(model) != self.digest:
            raise EngineError(
                f"expected FP8 scales of the weights of {model.name}, found those of other ones ({self.model}); "
                + _advice()
            )


def weights_digest(model: TrackerModel) -> str:
    """SHA-256 of the encoder's weights in float16, so that a model in float32 and one in float16 have the same.

    It is of the backbone's: those of the pyramid are folded in the model's own arithmetic and may differ by rounding.
    """
    found = hashlib.sha256()
    backbone = model.encode_stage.get_submodule("backbone")
    for name, weight in backbone.named_parameters():
        found.update(f"{name} {list(weight.shape)}\n".encode())
        found.update(weight.detach().half().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


@torch.inference_mode()
def calibrate(
    model: TrackerModel,
    images: Iterable[Image],
    recipe: Recipe | None = None,
    progress: Progress = lambda done: None,
) -> Scales:
    """Encode BGR uint8 [h, w, 3] images and note the amax of every layer of the recipe's kinds.

    That of layers that it leaves out, too, so that leaving out others later needs no frames. The model is untouched.
    Raises EngineError where there is no image, or where the recipe does not fit; MissingExtraError without modelopt.
    """
    recipe = recipe or Recipe()
    _check_dtype(model)
    recipe.chosen(model.encode_stage)
    stage = copy.deepcopy(model.encode_stage)
    names = list(layers_of(stage, recipe.kinds))
    count = 0

    def look(network: nn.Module) -> None:
        nonlocal count
        for count, image in enumerate(images, start=1):
            network(model.preprocess(_checked(image, count)))
            progress(count)
        if not count:
            raise EngineError("calibration: expected at least one frame, found none")

    _watch(stage, names, look)
    amax = {name: _amax(name, stage.get_submodule(name)) for name in names}
    return Scales(model=model.name, digest=weights_digest(model), frames=count, amax=amax)


def quantised(model: TrackerModel, scales: Scales, recipe: Recipe | None = None) -> nn.Module:
    """A copy of the encode stage that rounds to FP8 as an engine would; the model is untouched.

    It may take the place of `model.stages.encode`. Raises EngineError for scales of other weights, or that lack a layer
    that the recipe quantises, and for a recipe that does not fit.
    """
    recipe = recipe or Recipe()
    _check_dtype(model)
    scales.check(model)
    stage = copy.deepcopy(model.encode_stage)
    chosen = recipe.chosen(stage)
    missing = [name for name in chosen if name not in scales.amax]
    if missing:
        raise EngineError(
            f"the scales have no amax of {len(missing)} layers that the recipe quantises, among them {missing[0]}; "
            + _advice()
        )
    for name, layer in chosen.items():
        stage.set_submodule(name, QuantisedLayer(layer, scales.amax[name]))  # type: ignore[arg-type]
    return stage.requires_grad_(False).eval()


def export_quantised(model: TrackerModel, scales: Scales, recipe: Recipe | None, path: Path) -> Path:
    """As `export` of the encode stage, with FP8 QuantizeLinear and DequantizeLinear around what the recipe quantises.

    The rest is in the model's dtype: float16 for an engine, float32 to compare on a CPU. Raises EngineError as
    `quantised`, and where the export fails.
    """
    return export(stages_of(model)["encode"]._replace(module=quantised(model, scales, recipe)), path)


def _watch(stage: nn.Module, names: list[str], look: Callable[[nn.Module], None]) -> None:
    """Let modelopt take the maximum of the inputs of the layers of these names while `look` runs the stage."""
    off = [{"quantizer_name": "*", "enable": False}]
    watched = [{"quantizer_name": f"{name}.input_quantizer", "cfg": {"num_bits": (4, 3)}} for name in names]
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = require("modelopt.torch.quantization", EXTRA)
        quantization.quantize(stage, {"quant_cfg": off + watched, "algorithm": "max"}, look)


def _amax(name: str, layer: Any) -> float:
    amax = getattr(layer.input_quantizer, "amax", None)
    if not isinstance(amax, Tensor) or not amax.isfinite().all():
        raise EngineError(
            f"calibration: expected finite inputs of {name}, found {amax}; try the model in float32"
        )
    return float(amax)


def _checked(image: Image, number: int) -> Image:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise EngineError(
            f"calibration frame {number}: expected BGR uint8 [h, w, 3], found {image.dtype} {list(image.shape)}"
        )
    return image


def _check_dtype(model: TrackerModel) -> None:
    if model.dtype not in (torch.float32, torch.float16):
        raise EngineError(
            f"FP8: expected a model in float32 or float16, found {model.dtype}; load it with --model.dtype float16"
        )


def _advice() -> str:
    return "make them: sam3-node calibrate fp8 SOURCE -o FILE"
