"""Quantise an encoder to FP8 after training (E4M3, arXiv 2209.05433).

A recipe names the layers to quantise, and the reason for each layer that it excludes. `calibrate` runs frames through
the model and notes how large the inputs of each layer become (`Scales`). From these, `quantise_encoder` makes an
encoder whose layers round to FP8 in torch, and `export_quantised` writes it to ONNX with QuantizeLinear and
DequantizeLinear. Inputs have one scale for each layer, weights one for each output channel.
"""

import copy
import difflib
import fnmatch
import hashlib
import io
import warnings
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, ValidationError
from torch import Tensor, nn

from ..errors import EngineError, SettingsError, require
from ..files import explain_os_error, read_regular, write_output, write_private_atomically
from ..models import TrackerModel
from ..models.sam.fp8 import MAX_E4M3
from ..settings import EngineSettings, Section, describe_faults, read_toml
from ..types import Image
from .engine_store import StoredEngine
from .export import export
from .specs import tracker_stages

KINDS: dict[str, type[nn.Module]] = {"linear": nn.Linear, "convolution": nn.Conv2d}
MAX_JSON_BYTES = 16 << 20
"""Size of the largest file with scales or a recipe. A larger one is refused."""
NEAREST_NAMES = 5
Layers = dict[str, nn.Module]


class Exclusion(Section):
    """Layers that a recipe leaves out."""

    layers: str = Field(min_length=1)
    """Pattern of names within the encoder; * and ? as in the shell."""
    reason: str = Field(min_length=1)
    """Why they are left out."""


# its text is part of the digest of stored fp8 engines
PATCHES = Exclusion(
    layers="*patch*",
    reason="it reads pixels, and is a thousandth of the work: nothing to win, detail to lose",
)


class Recipe(Section):
    """The layers to quantise. The defaults equal calibration/fp8/default.toml."""

    kinds: tuple[Literal["linear", "convolution"], ...] = Field(("linear",), min_length=1)
    """Kinds of layers to quantise."""
    exclude: tuple[Exclusion, ...] = (PATCHES,)
    """Layers of these kinds to leave out."""

    def select_layers(self, stage: nn.Module) -> Layers:
        """Return the layers of an encoder to quantise, by name.

        Raises EngineError for an exclusion that matches no layer, with the nearest names, and where no layer is of the
        kinds or is left.
        """
        if not find_layers(stage, self.kinds):
            raise EngineError(
                f"FP8: expected an encoder with layers of the kinds {', '.join(self.kinds)}, found none, as in "
                "EdgeTAM's of convolutions alone; use --engine.precision bfloat16"
            )
        # of all kinds, because an exclusion may name a layer of a kind that the recipe does not quantise
        names = list(find_layers(stage))
        excluded = set[str]()
        for exclusion in self.exclude:
            matches = fnmatch.filter(names, exclusion.layers)
            # a pattern without a match is misspelt, or meant for another encoder
            if not matches:
                raise EngineError(_describe_unknown(exclusion.layers, names))
            excluded.update(matches)
        layers = {
            name: layer for name, layer in find_layers(stage, self.kinds).items() if name not in excluded
        }
        if not layers:
            raise EngineError("expected a recipe that quantises some layer, found one that leaves out all")
        return layers


DEFAULT_RECIPE = Recipe()


def load_recipe(path: Path | None) -> Recipe:
    """Read and check a recipe; the default for None. Raises SettingsError with each wrong field, and what it needs."""
    if path is None:
        return DEFAULT_RECIPE
    try:
        return Recipe(**read_toml(path))
    except ValidationError as error:
        raise SettingsError(f"{path} does not validate: {describe_faults(error)}") from error


def find_layers(stage: nn.Module, kinds: tuple[str, ...] = tuple(KINDS)) -> Layers:
    """Return the layers of these kinds by name, in the order of the stage."""
    classes = tuple(KINDS[kind] for kind in kinds)
    return {name: layer for name, layer in stage.named_modules() if isinstance(layer, classes)}


def _describe_unknown(pattern: str, names: list[str]) -> str:
    # a cutoff of 0 always finds some names to suggest
    nearest = difflib.get_close_matches(pattern, names, NEAREST_NAMES, cutoff=0.0)
    return f"the recipe leaves out {pattern!r}, but this encoder has no such layer; nearest: {', '.join(nearest)}"


EXTRA = "quantize"
MIN_SCALE = 2.0**-14  # smaller scales gain nothing, because FP8 has its own exponents
CALIBRATE_HINT = "make them: sam3-node calibrate fp8 SOURCE -o FILE"
SCALES_FILE = "scales.json"
RECIPE_FILE = "recipe.json"


class QuantisedLayer(nn.Module):
    """A linear layer or convolution that rounds its input and weights to FP8 first.

    amax: largest magnitude of its inputs; larger ones saturate. That of the weights is taken from the weights.
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
            self.register_buffer(f"{name}_scale", compute_scale(largest, weight))
            # QuantizeLinear takes the dtype of its result from the zero
            self.register_buffer(f"{name}_zero", torch.zeros_like(largest, dtype=torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        x = round_fp8(x, self.input_scale, self.input_zero)
        weight = round_fp8(layer.weight, self.weight_scale, self.weight_zero)
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, layer.bias)
        padding: Any = layer.padding
        return F.conv2d(x, weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)


def compute_scale(amax: Tensor, like: Tensor) -> Tensor:
    """Return the scale that maps `amax` to the largest FP8 number: a bfloat16 number in the dtype of `like`."""
    # a bfloat16 number is exact in float32, so models of both dtypes round alike
    return (amax.float() / MAX_E4M3).clamp(min=MIN_SCALE).bfloat16().to(like)


def round_fp8(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Round x to FP8 numbers times `scale`.

    scale: [], or [n] along the first axis of x. zero: 0 in FP8, of the same shape.
    """
    # the file must have the two operators of ONNX, not the arithmetic that imitates them
    if torch.onnx.is_in_onnx_export():
        return _write_onnx(x, scale, zero)
    wide = scale.float() if scale.ndim == 0 else scale.float().view(-1, *[1] * (x.ndim - 1))
    scaled = (x.float() / wide).clamp(-MAX_E4M3, MAX_E4M3)  # beyond this range the cast gives NaN
    return (scaled.to(zero.dtype).float() * wide).to(x.dtype)


def _write_onnx(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    write = partial(torch.onnx.ops.symbolic, attrs={"axis": 0}, shape=x.shape)
    eight = write("QuantizeLinear", (x, scale, zero), dtype=zero.dtype)
    return write("DequantizeLinear", (eight, scale, zero), dtype=x.dtype)


class Scales(Section):
    """Result of a calibration: the largest magnitude (amax) of each layer's inputs over all frames.

    An engine can be built again from it without the frames. The amax of weights is in the weights themselves, and the
    digest identifies them.
    """

    version: int = Field(2, ge=2, le=2)
    """Version of this format."""
    model: str
    """Name of the weights, for people."""
    digest: str = Field(pattern="[0-9a-f]{64}")
    """`weights_digest` of the weights."""
    frames: int = Field(ge=1)
    """Number of frames that were encoded."""
    amax: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    """Amax by the layer's name within the encoder."""

    def save(self, path: Path) -> None:
        """Write the scales as JSON. Raises OutputError where that fails."""
        write_output(path, f"{self.model_dump_json(indent=1)}\n".encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read scales that `save` wrote. Raises EngineError for a file that is absent, damaged or another."""
        try:
            with explain_os_error(EngineError, f"cannot read FP8 scales from {path}", f"; {CALIBRATE_HINT}"):
                return cls.model_validate_json(read_regular(path, MAX_JSON_BYTES))
        except ValidationError as error:
            fields = describe_faults(error)
            raise EngineError(f"{path} holds no FP8 scales: {fields}; {CALIBRATE_HINT}") from error

    def check(self, model: TrackerModel) -> None:
        """Raise EngineError unless the scales belong to the model's weights."""
        if weights_digest(model) != self.digest:
            raise EngineError(
                f"these FP8 scales belong to other weights ({self.model}) than the weights of {model.name}; "
                + CALIBRATE_HINT
            )


def weights_digest(model: TrackerModel) -> str:
    """Compute the SHA-256 of the encoder's weights in bfloat16; a model in float32 has the same as one in bfloat16.

    Only the backbone counts. The weights of the pyramid are folded in the model's own dtype, so rounding may differ.
    """
    digest = hashlib.sha256()
    backbone = model.encode_stage.get_submodule("backbone")
    for name, weight in backbone.named_parameters():
        digest.update(f"{name} {list(weight.shape)}\n".encode())
        # numpy has no bfloat16
        digest.update(weight.detach().bfloat16().cpu().contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


@torch.inference_mode()
def calibrate(
    model: TrackerModel,
    images: Iterable[Image],
    recipe: Recipe = DEFAULT_RECIPE,
    progress: Callable[[int], None] = lambda done: None,
) -> Scales:
    """Encode BGR uint8 [h, w, 3] images, and note the amax of every layer of the recipe's kinds.

    This includes layers that the recipe leaves out, so that a later recipe needs no frames. The model is not changed.
    `progress` is called with the number of frames done. Raises EngineError where there is no image or the recipe does
    not fit, MissingExtraError without modelopt.
    """
    _check_dtype(model)
    # a recipe that does not fit must fail before the frames are read
    recipe.select_layers(model.encode_stage)
    # modelopt changes layers in place
    stage = copy.deepcopy(model.encode_stage)
    names = list(find_layers(stage, recipe.kinds))
    count = 0

    def encode_images(network: nn.Module) -> None:
        nonlocal count
        for count, image in enumerate(images, start=1):
            network(model.preprocess(_check_image(image, count)))
            progress(count)
        if not count:
            raise EngineError("calibration: expected at least one frame, found none")

    _record_maxima(stage, names, encode_images)
    amax = {name: _read_amax(name, stage.get_submodule(name)) for name in names}
    return Scales(model=model.name, digest=weights_digest(model), frames=count, amax=amax)


def quantise_encoder(model: TrackerModel, scales: Scales, recipe: Recipe = DEFAULT_RECIPE) -> nn.Module:
    """Return a copy of the encode stage that rounds to FP8 as an engine would; the model is not changed.

    The copy may replace `model.stages.encode`. Raises EngineError for scales of other weights, for scales that lack a
    layer of the recipe, and for a recipe that does not fit.
    """
    _check_dtype(model)
    scales.check(model)
    stage = copy.deepcopy(model.encode_stage)
    layers = recipe.select_layers(stage)
    missing = [name for name in layers if name not in scales.amax]
    if missing:
        raise EngineError(
            f"the scales have no amax of {len(missing)} layers that the recipe quantises, among them {missing[0]}; "
            + CALIBRATE_HINT
        )
    for name, layer in layers.items():
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        stage.set_submodule(name, QuantisedLayer(layer, scales.amax[name]))
    return stage.requires_grad_(False).eval()


def export_quantised(
    model: TrackerModel, scales: Scales, path: Path, recipe: Recipe = DEFAULT_RECIPE
) -> Path:
    """Export the encode stage with FP8 QuantizeLinear and DequantizeLinear around the layers of the recipe.

    The rest is in the model's dtype: bfloat16 for an engine, float32 to compare on a CPU. Raises EngineError as
    `quantise_encoder`, and where the export fails.
    """
    module = quantise_encoder(model, scales, recipe)
    # only the module differs: the specs are those of the plain encoder
    return export(tracker_stages(model)["encode"]._replace(module=module), path)


class Quantisation(NamedTuple):
    """Scales and recipe of an FP8 encoder."""

    scales: Scales
    recipe: Recipe = DEFAULT_RECIPE

    @property
    def digest(self) -> str:
        """SHA-256 of everything in it that changes an engine."""
        text = f"{self.scales.model_dump_json()} {self.recipe.model_dump_json()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, stored: StoredEngine) -> None:
        """Write it into the folder of its engines, so that the accuracy check can name the layers that differ."""
        for name, section in ((SCALES_FILE, self.scales), (RECIPE_FILE, self.recipe)):
            write_private_atomically(stored.folder / name, f"{section.model_dump_json(indent=1)}\n".encode())

    @classmethod
    def load(cls, stored: StoredEngine) -> Self | None:
        """Read what `save` wrote; None where it is absent or belongs to other engines."""
        try:
            scales = Scales.load(stored.folder / SCALES_FILE)
            recipe = Recipe.model_validate_json(read_regular(stored.folder / RECIPE_FILE, MAX_JSON_BYTES))
        except (OSError, EngineError, ValidationError):
            return None
        quantisation = cls(scales, recipe)
        return quantisation if quantisation.digest == stored.manifest.scales else None


def load_quantisation(engine: EngineSettings) -> Quantisation:
    """Read the scales and the recipe of `engine`. Raises EngineError without scales; SettingsError for the recipe."""
    if engine.scales is None:
        raise EngineError(
            "engine.precision fp8: expected engine.scales with the output of a calibration, found none; "
            + CALIBRATE_HINT
        )
    return Quantisation(Scales.load(engine.scales), load_recipe(engine.recipe))


def _record_maxima(stage: nn.Module, names: list[str], run: Callable[[nn.Module], None]) -> None:
    """Let modelopt record the maximum of the inputs of the named layers while `run` runs the stage."""
    # all quantizers are off first, so that modelopt rounds and records nothing else
    off = [{"quantizer_name": "*", "enable": False}]
    # (4, 3) is E4M3: bits of exponent and mantissa
    on = [{"quantizer_name": f"{name}.input_quantizer", "cfg": {"num_bits": (4, 3)}} for name in names]
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = require("modelopt.torch.quantization", EXTRA)
        quantization.quantize(stage, {"quant_cfg": off + on, "algorithm": "max"}, run)


def _read_amax(name: str, layer: Any) -> float:
    # a layer that no frame has reached has no amax
    amax = getattr(layer.input_quantizer, "amax", None)
    if not isinstance(amax, Tensor) or not amax.isfinite().all():
        raise EngineError(
            f"calibration: expected finite inputs of {name}, found {amax}; try the model in float32"
        )
    return float(amax)


def _check_image(image: Image, number: int) -> Image:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise EngineError(
            f"calibration frame {number}: expected BGR uint8 [h, w, 3], found {image.dtype} {list(image.shape)}"
        )
    return image


def _check_dtype(model: TrackerModel) -> None:
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise EngineError(
            f"FP8: expected a model in float32 or bfloat16, found {model.dtype}; load it with --model.dtype bfloat16"
        )
