"""Choose faster arithmetic for torch's own stages, once it has passed the accuracy check on the bundled recording.

`load_by_accuracy_check` chooses the dtype on a CPU where the settings leave it open: bfloat16 where the CPU has it. It
judges once for each machine and weights, and keeps the report beside the engines. Some CPUs compute wrongly in
bfloat16, and some weights lose too much, so capability alone is no reason to use it.

`serve_fast_torch` puts the encoder in FP8 in place for `engine.kind` torch. It is judged once for each GPU, weights and
versions, and made each time the model is loaded. `serve_kernels` lets our Triton kernels run: they are the same
arithmetic, so they are compared with float32 on random values, which takes no clip and no second model.
"""

import hashlib
import importlib.util
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import nn

from ..errors import EngineError, Sam3NodeError, find_version, require
from ..files import keep, read_kept, read_regular
from ..models import TrackerModel
from ..models.sam.fp8 import Fp8Linear, can_multiply
from ..models.sam.memory_attention import MIN_TOKENS
from ..models.sam.probes import PROBE_ERROR
from ..models.sam.stages import Stages
from ..models.weight_files import pick_device
from ..settings import Settings
from .engine_store import FP8, identify_setup, load_model_in
from .oom import STAGE_ERRORS, reraise_out_of_memory
from .quantize import MAX_JSON_BYTES, QuantisedLayer, load_quantisation, quantise_encoder
from .slot import apply_thresholds, attempt, read_check_clip, use_torch
from .validation import Clock, Report, compare_stages, read_clock

MIN_COSINE = 0.99
"""Cosine of each stage's worst output in float32 and bfloat16 from which an open dtype becomes bfloat16."""
MIN_IOU = 0.97
"""Mean mask IoU with float32, likewise. Decoded masks of nano have 64 x 64 cells: one that flips at the edge of the
bundled recording's smallest object is 0.02 of its IoU. Wrong arithmetic was seen to reach 0.89."""
MAX_PARAMETERS = 100_000_000
"""Weights beyond this stay in float32: on a CPU their accuracy check would take minutes."""
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
FOLDER = "bfloat16"
"""Name under which the report of the bfloat16 accuracy check is kept."""
FAST_FOLDER = "faster"
"""Name under which the report of the FP8 accuracy check is kept."""
LAUNCHES = "launches"
"""Folder of the files with the fastest launch settings of our kernels, one for each kind of GPU."""
TRITON = "triton"
BACKEND = "inductor"
"""Compiler of the encoder in FP8, where the settings ask for one."""
AMPERE = (8, 0)
"""Compute capability from which NVIDIA GPUs have units for bfloat16, and our kernels have run."""
MAX_ERROR_CHARS = 300
"""Characters of an error of the compiler that a message has. Triton's errors have the reason in their third line."""

_log = logging.getLogger(__name__)

_Block = Literal[16, 32, 64, 128, 256]
_KeptLaunch = tuple[_Block, _Block, Literal[1, 2, 4, 8, 16], Annotated[int, msgspec.Meta(ge=1, le=8)]]
"""A `kernels.Launch` in a file, with the sizes that kernels can have."""
Load = Callable[[torch.dtype], TrackerModel]


def has_open_dtype(settings: Settings) -> bool:
    """Return True for `model.dtype auto` with eager torch on a CPU that has bfloat16 arithmetic."""
    model = settings.model
    return (
        model.dtype == "auto"
        and model.compile is not True
        and settings.engine.kind == "torch"
        and pick_device(model.device).type == "cpu"
        and has_bfloat16()
    )


def has_bfloat16() -> bool:
    """Return True if this CPU multiplies bfloat16 in hardware, and oneDNN may use it (ONEDNN_MAX_CPU_ISA)."""
    features = torch.cpu.get_capabilities()
    capable = features.get("avx512_bf16") or features.get("amx_bf16")
    allowed = os.environ.get(ISA_VARIABLE, "ALL").upper()
    return bool(capable) and (allowed in ("ALL", "DEFAULT") or allowed.endswith(("BF16", "FP16", "AMX")))


def load_by_accuracy_check(load: Load, settings: Settings) -> TrackerModel:
    """Load a model in bfloat16 if that passes, or has passed, the accuracy check on this machine; else in float32.

    `load` loads the weights of `settings` in a dtype, and its errors pass.
    """
    path = find_report(settings, FOLDER)
    # a kept report spares the second model and the accuracy check
    if report := Report.load(path):
        return load(torch.bfloat16 if report.passed else torch.float32)
    reference = load(torch.float32)
    parameters = sum(parameter.numel() for parameter in reference.parameters())
    # what no engine can be compared with, the accuracy check cannot compare either
    if reference.capabilities.why_not_engines() or parameters > MAX_PARAMETERS:
        return reference
    candidate = load(torch.bfloat16)
    try:
        report = compare(reference, candidate)
    except Sam3NodeError as error:
        _log.info("%s stays in float32: bfloat16 could not be compared: %s", reference.name, error)
        return reference
    # kept before the verdict, so that a refused dtype is not judged again at each start
    _write_report(path, report)
    refusal = report.refusal()
    if refusal is not None:
        _log.info("%s stays in float32: bfloat16 was refused by the gate: %s", reference.name, refusal)
        return reference
    _log.info("%s runs in bfloat16: the gate passed it", reference.name)
    return candidate


def compare(reference: TrackerModel, candidate: TrackerModel) -> Report:
    """Compare a model in bfloat16 with the same weights in float32 on the bundled recording.

    Raises EngineError where there is nothing to compare.
    """
    return _check_accuracy(reference, candidate, candidate.stages, MIN_COSINE, MIN_IOU)


def _check_accuracy(
    reference: TrackerModel,
    model: TrackerModel,
    stages: Stages,
    min_cosine: float,
    min_iou: float,
    **options: Any,
) -> Report:
    """Compare stages that serve instead of a model's own with the reference, on the bundled recording."""
    clip = read_check_clip()
    return compare_stages(
        reference,
        stages,
        clip.frames,
        min_cosine,
        min_iou,
        dtype=model.dtype,
        prompts=clip.prompts(reference.image_size),
        served=model,
        **options,
    )


def find_report(settings: Settings, folder: str, *properties: object) -> Path | None:
    """Return where a report on these weights and settings on this machine is kept.

    properties: others that it depends on. None if the weights, the scales or the recipe are no local files.
    """
    engine = settings.engine
    given = engine.precision, engine.read_kernel, settings.model.compile, settings.tracker.read, *properties
    try:
        files = [read_regular(path, MAX_JSON_BYTES) for path in (engine.scales, engine.recipe) if path]
        machine = identify_setup(settings), find_version("triton"), torch.version.cuda
    except (EngineError, OSError):
        return None
    key = _sources_digest(), *machine, *given, *files
    name = hashlib.sha256(" ".join(map(str, key)).encode()).hexdigest()[:32]
    return settings.engine.folder.expanduser() / folder / f"{name}.json"


def _sources_digest() -> str:
    """Return a digest of the code of stages, tracker and accuracy check: other arithmetic is checked again."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("models", "tracking", "engines"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _write_report(path: Path | None, report: Report) -> None:
    """Keep a report for the next start."""
    if path is not None:
        keep(path, report.to_json().encode(), "the gate will run again at the next start")


def make_fp8_encoder(model: TrackerModel, settings: Settings) -> nn.Module:
    """Return a copy of the encoder whose linear layers of the recipe compute in FP8.

    Convolutions, and layers whose sides are no multiples of 16, round to FP8 and compute in the model's dtype. Raises
    EngineError without scales, or for scales or a recipe that do not fit.
    """
    stage = quantise_encoder(model, *load_quantisation(settings.engine))
    # a list, because the loop replaces modules of the tree that it walks
    for name, layer in list(stage.named_modules()):
        if isinstance(layer, QuantisedLayer) and can_multiply(layer.layer):
            assert isinstance(layer.layer, nn.Linear)
            stage.set_submodule(name, Fp8Linear(layer.layer, layer.input_scale))
    return stage


def serve_fast_torch(model: TrackerModel, settings: Settings, clock: Clock = read_clock) -> None:
    """Put the faster stages that `settings` ask for into `model.stages`, once they have passed the accuracy check.

    The check times them by `clock`, and its report is kept beside the engines. Where they cannot serve and
    `engine.fallback` is on, the model keeps its stages and its name says why. Otherwise raises EngineError or
    MissingExtraError.
    """
    engine = settings.engine
    if engine.kind != "torch" or engine.precision != FP8:
        return
    stages = model.stages

    def serve() -> None:
        try:
            fast = make_stages(model, settings)
            # the stages that are not in FP8 compute in the model's dtype, so it is a part of the key
            path = find_report(settings, FAST_FOLDER, model.dtype)
            report = Report.load(path)
            if report is None:
                report = compare_fast(fast, model, settings, clock)
                _write_report(path, report)
        except STAGE_ERRORS:
            raise
        except Exception as error:  # the compiler's own, such as for a GPU that it does not know
            said = " ".join(str(error).split())[:MAX_ERROR_CHARS]
            raise EngineError(f"torch's faster stages fail: {type(error).__name__}: {said}") from error
        # the kept report has figures only: the thresholds may have changed since
        if refusal := apply_thresholds(report, engine).refusal():
            raise EngineError(f"torch's faster stages refused by the gate: {refusal}")
        model.stages = fast

    if reason := attempt(serve, engine):
        use_torch(model, stages, reason)


def make_stages(model: TrackerModel, settings: Settings) -> Stages:
    """Return the model's stages with the encoder in FP8. The model is not changed."""
    encode = make_fp8_encoder(model, settings)
    if settings.model.compile is True:
        # one image of one size: no shape varies
        encode.compile(backend=BACKEND, dynamic=False)
    return model.stages._replace(encode=encode)


def serve_kernels(model: TrackerModel, settings: Settings) -> None:
    """Let our Triton kernels run where the settings ask for them, or leave it open and they are worth it.

    They are compiled and compared with float32 on random values first. Where they were asked for and cannot run, and
    `engine.fallback` is on, torch's operations serve and the model's name says why. Otherwise raises EngineError or
    MissingExtraError. Where nobody asked, the log says why.
    """
    engine = settings.engine
    if model.device.type == "cuda":
        # cuDNN plans each shape of an attention for 40 to 150 ms, more than it ever saves for a small model
        torch.backends.cuda.enable_cudnn_sdp(math.prod(model.grid) >= MIN_TOKENS)
    # a model that was loaded before, such as by an earlier trial of `tune`, may have left them on
    model.use_kernels(False)
    if engine.kind != "torch" or engine.read_kernel == "torch":
        return
    stages = model.stages

    def serve() -> None:
        try:
            _check_kernels(model, engine.folder)
        except STAGE_ERRORS:
            raise
        except Exception as error:  # triton has its own, such as for a GPU that its ptxas does not know
            said = " ".join(str(error).split())[:MAX_ERROR_CHARS]
            raise EngineError(f"the kernels fail: {type(error).__name__}: {said}") from error
        model.use_kernels()

    if engine.read_kernel == TRITON:
        if reason := attempt(serve, engine):
            use_torch(model, stages, reason)
    # nobody asked for the kernels, so their failure is no reason to stop or to rename the model
    elif are_kernels_worth_it(model):
        reason = attempt(serve, engine.model_copy(update={"fallback": True}))
        if reason is not None:
            _log.info("torch's own operations read memories: %s", reason)


def are_kernels_worth_it(model: TrackerModel) -> bool:
    """Return True for half precision on an NVIDIA GPU with triton, and a model large enough.

    SAM 3 takes 2 to 8 ms less by the kernels. nano gains less than the 5 s for which its start would compile them.
    """
    return (
        not model.capabilities.why_not_kernels()
        and model.device.type == "cuda"
        and torch.version.hip is None
        and model.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(model.device) >= AMPERE
        and math.prod(model.grid) >= MIN_TOKENS
        and importlib.util.find_spec(TRITON) is not None
    )


def _check_kernels(model: TrackerModel, folder: Path) -> None:
    """Raise EngineError or MissingExtraError unless the kernels compute rightly for this model."""
    if model.device.type != "cuda" or model.dtype == torch.float32:
        raise EngineError(
            "engine.read_kernel triton: expected a model on CUDA in bfloat16 or float16, found one on "
            f"{model.device.type} in {str(model.dtype).removeprefix('torch.')}; use --engine.read_kernel torch"
        )
    require(TRITON, TRITON)
    # imported late: the module itself imports triton, which is optional
    from ..models.sam import kernels

    # before the check, so that it runs what will serve
    use_kept_launch(model.device, folder)
    launch = kernels.choose_launch(model.device)
    error = kernels.measure_error(model.device, model.dtype, launch)
    if error > PROBE_ERROR:
        raise EngineError(
            f"engine.read_kernel triton: expected an error of at most {PROBE_ERROR} beside float32 on this GPU, found "
            f"{error:.2g}; use --engine.read_kernel torch"
        )


def use_kept_launch(device: torch.device, folder: Path) -> None:
    """Launch the read's attention as `sam3-node tune` has found fastest on GPUs of this generation, if it has run."""
    from ..models.sam import kernels

    data = read_kept(_launch_path(device, folder), "sam3-node tune finds it again")
    if (launch := read_launch(data or b"")) is not None:
        kernels.use_launch(device, kernels.Launch(*launch))


def read_launch(data: bytes) -> tuple[int, int, int, int] | None:
    """Return the queries and keys of a block, the warps and the stages that `keep_launch` has kept.

    None for other bytes.
    """
    try:
        launch: tuple[int, int, int, int] = msgspec.json.decode(data, type=_KeptLaunch)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return launch


def keep_launch(device: torch.device, folder: Path) -> None:
    """Time the launches of the read's attention on this GPU, and keep the fastest for starts to come."""
    from ..models.sam import kernels

    times = kernels.time_launches(device)
    fastest = min(times, key=lambda launch: times[launch])
    keep(_launch_path(device, folder), json.dumps(fastest).encode(), "sam3-node tune finds it again")
    kernels.use_launch(device, fastest)


def _launch_path(device: torch.device, folder: Path) -> Path:
    generation = "".join(map(str, torch.cuda.get_device_capability(device)))
    # another version of triton may have another fastest launch
    return folder.expanduser() / LAUNCHES / f"sm{generation}-{find_version(TRITON)}.json"


def compare_fast(
    stages: Stages, model: TrackerModel, settings: Settings, clock: Clock | None = read_clock
) -> Report:
    """Check accuracy on the bundled clip: compare stages with the model's in float32, with the same memory attention.

    Each other one is timed in comparison with the model's own, unless there is no clock.
    """
    engine = settings.engine
    with reraise_out_of_memory(
        EngineError, "while torch's faster stages were compared with torch in float32"
    ):
        reference = load_model_in(settings, torch.float32)
        reference.use_read(settings.tracker.read)
        thresholds = engine.min_cosine, engine.min_iou
        return _check_accuracy(reference, model, stages, *thresholds, engines=False, clock=clock)
