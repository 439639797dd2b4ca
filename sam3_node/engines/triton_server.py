"""A model repository for Triton Inference Server: the stages of a tracker, and two ensembles that segment an image.

Each stage is a model with an ONNX export, or with a TensorRT plan of the engine store. Prompts of a kind are decoded by
one more model. An ensemble keeps nothing between two requests, so it cannot track: the client that calls the stages
keeps an object's memories and chooses which of them are read.

Files of configuration are written as text here, because they need a dozen fields. The package that has the server's
schema, tritonclient, would add gRPC and an older protobuf. The tests parse the files with its schema.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import EngineError, OutputError, require
from ..files import explain_os_error, make_folder
from ..models import TrackerModel
from ..models.sam.stages import Decoder, Features
from ..settings import Settings
from ..tracking.tracks import BOX_LABELS
from .engine_store import BUILD_HINT, EngineStore, StoredEngine, checkpoint_digest, load_stages
from .export import EXTRA, BuildStep, ReportProgress, export, ignore_progress
from .oom import reraise_out_of_memory
from .specs import OBJECTS, STAGES, StageSpec, TensorSpec, tracker_stages

PREFIX = "sam3_"
ONNX, PLAN, ENSEMBLE = "onnxruntime_onnx", "tensorrt_plan", "ensemble"
FILES = {ONNX: "model.onnx", PLAN: "model.plan"}
VERSION = "1"
ONNX_PRECISIONS = ("float32", "float16")
"""The server's ONNX backend takes no bfloat16."""
TENSORRT = "tensorrt"
PROMPTS = {"point": (1,), "box": BOX_LABELS}
"""Labels of the points of each kind of prompt. Another number of points would be another network."""


class Word(str):
    """A constant of the schema, which is written without quotes."""


TYPES = {
    torch.float32: Word("TYPE_FP32"),
    torch.float16: Word("TYPE_FP16"),
    torch.bfloat16: Word("TYPE_BF16"),
    torch.int64: Word("TYPE_INT64"),
    torch.bool: Word("TYPE_BOOL"),
}

Config = Mapping[str, Any]
"""Fields of the schema's ModelConfig: numbers, strings, words, maps, tuples of numbers, and lists of these."""


class ServedModel(NamedTuple):
    """A model of the repository: its configuration, and what is served under it."""

    config: Config
    stage: StageSpec | None = None
    """None for an ensemble"""

    @property
    def name(self) -> str:
        """Name of the model and of its folder."""
        return str(self.config["name"])


class PromptDecode(nn.Module):
    """The decoder for N prompts of one kind on an image, each for an object of its own."""

    labels: Tensor

    def __init__(self, decoder: Decoder, labels: Sequence[int], multimask: bool) -> None:
        super().__init__()
        self.decoder, self.multimask = decoder, multimask
        device = decoder.no_memory.device
        self.register_buffer(
            "labels", torch.tensor([labels], dtype=torch.int32, device=device), persistent=False
        )

    def forward(
        self, top: Tensor, fine: Tensor, middle: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode places [N, 2] (x y) or [N, 4] (x0 y0 x1 y1) in model pixels, with the image's features.

        Return logits [N, 4h, 4w], predicted iou [N] and presence logits [N].
        """
        count, points = places.shape[0], self.labels.shape[1]
        labels = self.labels.expand(count, points)
        inputs = self.decoder.embed(Features(fine, middle, top), places.reshape(-1, points, 2), labels)
        decoded = self.decoder(*inputs, self.multimask)
        return decoded.logits, decoded.iou, decoded.presence


class FloatRead(nn.Module):
    """The memory read for memories in another dtype than bfloat16."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(
        self,
        top: Tensor,
        memory: Tensor,
        offset: Tensor,
        pointers: Tensor,
        pointer_age: Tensor,
        valid: Tensor,
    ) -> Tensor:
        """Read as the stage does."""
        result: Tensor = self.stage(top, memory.bfloat16(), offset, pointers, pointer_age, valid)
        return result


class FloatRemember(nn.Module):
    """The memory write that returns memories in the dtype of the logits."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, top: Tensor, logits: Tensor, presence: Tensor) -> Tensor:
        """Write as the stage does."""
        result: Tensor = self.stage(top, logits, presence).to(logits.dtype)
        return result


WITHOUT_BFLOAT16 = {"read": FloatRead, "remember": FloatRemember}


def export_repository(
    settings: Settings, folder: Path, *, plans: bool = False, progress: ReportProgress = ignore_progress
) -> list[Path]:
    """Write the models into `folder`, a new or existing model repository; return the folder of each.

    By default, stages are exported to ONNX in `engine.precision`, float32 or float16. With `plans`, the four stages are
    those that `engine build` has made with TensorRT; without bfloat16, prompts and ensembles come beside them. Raises
    EngineError for a precision that cannot be served, for plans that are not in the store or that the server cannot
    run, and for models that are in the folder already; ModelError, MissingExtraError and OutputError. Nothing is
    written then.
    """
    precision = settings.engine.arithmetic
    if not plans and precision not in ONNX_PRECISIONS:
        raise EngineError(
            f"engine.precision {precision}: expected {' or '.join(ONNX_PRECISIONS)} for ONNX files, because Triton's "
            "ONNX backend takes no other inputs; use --engine.precision float16, or --plans with TensorRT plans"
        )
    if not plans or precision in ONNX_PRECISIONS:
        require("onnx", EXTRA)
    with reraise_out_of_memory(EngineError, "while models were exported"):
        model = load_stages(settings)
        stored = _find_plans(settings, model.image_size) if plans else None
        models = make_models(model, settings.tracker.bank_size, stored)
        _require_absent(folder, models)
        make_folder(folder)
        return _write_models(folder, models, stored, progress)


def make_models(model: TrackerModel, bank_size: int, stored: StoredEngine | None = None) -> list[ServedModel]:
    """Return the models of a repository: ONNX exports, or the plans of `stored` where there are any."""
    platform = ONNX if stored is None else PLAN
    stages = dict(tracker_stages(model, bank_size, trunk=stored.manifest.key.trunk if stored else False))
    if stored is None:
        stages = {name: _without_bfloat16(stage) for name, stage in stages.items()}
    served = [ServedModel(_describe_stage(stage, platform, model), stage) for stage in stages.values()]
    if model.dtype == torch.bfloat16:
        return served
    encode = stages["encode"]
    for kind, labels in PROMPTS.items():
        prompt = _specify_prompt(model, encode, kind, labels)
        served.append(ServedModel(_describe_stage(prompt, ONNX, model), prompt))
        served.append(ServedModel(_describe_ensemble(kind, encode, prompt)))
    return served


def _without_bfloat16(stage: StageSpec) -> StageSpec:
    """Return a stage whose memories have the dtype of its other tensors."""
    if stage.name not in WITHOUT_BFLOAT16:
        return stage
    number = stage.inputs[0].dtype
    inputs, outputs = (
        tuple(spec._replace(dtype=number) if spec.dtype == torch.bfloat16 else spec for spec in specs)
        for specs in (stage.inputs, stage.outputs)
    )
    module = WITHOUT_BFLOAT16[stage.name](stage.module)
    return stage._replace(module=module, inputs=inputs, outputs=outputs)


def _specify_prompt(model: TrackerModel, encode: StageSpec, kind: str, labels: Sequence[int]) -> StageSpec:
    """Specify the decoder of prompts of a kind, whose places are the input `points` or `boxes`."""
    fine, middle, top = encode.outputs[:3]
    module = PromptDecode(model.decode_stage, labels, model.competes(len(labels), True))
    places = TensorSpec("points" if kind == "point" else "boxes", (OBJECTS, 2 * len(labels)), torch.float32)
    outputs = (
        TensorSpec("logits", (OBJECTS, *model.mask_size), model.dtype),
        TensorSpec("iou", (OBJECTS,), model.dtype),
        TensorSpec("presence", (OBJECTS,), model.dtype),
    )
    return StageSpec(f"prompt_{kind}", module, (top, fine, middle, places), outputs)


def _describe_stage(stage: StageSpec, platform: str, model: TrackerModel) -> Config:
    """Return a stage's configuration. Nothing is batched by the server: all objects share the features of an image."""
    kind = "KIND_GPU" if platform == PLAN else "KIND_AUTO"
    config: dict[str, Any] = {
        "name": PREFIX + stage.name,
        "platform": platform,
        "max_batch_size": 0,
        "input": _describe_tensors(stage.inputs),
        "output": _describe_tensors(stage.outputs),
        "instance_group": [{"count": 1, "kind": Word(kind)}],
    }
    if stage.name == "encode":  # what a client needs to make pixels
        values = {
            "pixels": "RGB from 0 to 1, resized to the square, less mean, divided by std",
            "mean": model.mean.flatten().tolist(),
            "std": model.std.flatten().tolist(),
        }
        config["parameters"] = [
            {"key": name, "value": {"string_value": str(value)}} for name, value in values.items()
        ]
    return config


def _describe_ensemble(kind: str, encode: StageSpec, prompt: StageSpec) -> Config:
    """Return the configuration of the ensemble that encodes an image and decodes prompts of a kind on it."""
    features = [spec.name for spec in encode.outputs[:3]]
    return {
        "name": f"{PREFIX}segment_{kind}",
        "platform": ENSEMBLE,
        "max_batch_size": 0,
        "input": _describe_tensors([*encode.inputs, prompt.inputs[-1]]),
        "output": _describe_tensors(prompt.outputs),
        "ensemble_scheduling": {
            "step": [
                _describe_step(encode, [spec.name for spec in encode.inputs], features),
                _describe_step(
                    prompt, [spec.name for spec in prompt.inputs], [spec.name for spec in prompt.outputs]
                ),
            ]
        },
    }


def _describe_step(stage: StageSpec, inputs: Sequence[str], outputs: Sequence[str]) -> Config:
    """Return a step of an ensemble whose tensors have the names of the stage's."""
    return {
        "model_name": PREFIX + stage.name,
        "model_version": -1,
        "input_map": [{"key": name, "value": name} for name in inputs],
        "output_map": [{"key": name, "value": name} for name in outputs],
    }


def _describe_tensors(specs: Sequence[TensorSpec]) -> list[Config]:
    return [
        {
            "name": spec.name,
            "data_type": TYPES[spec.dtype],
            "dims": tuple(side if isinstance(side, int) else -1 for side in spec.shape),
        }
        for spec in specs
    ]


def format_config(config: Config) -> str:
    """Format a configuration as the text of a config.pbtxt."""
    return "".join(f"{line}\n" for line in _format_fields(config, ""))


def _format_fields(fields: Config, indent: str) -> Iterator[str]:
    for name, value in fields.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield f"{indent}{name} {{"
                yield from _format_fields(item, f"{indent}  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_format_value(item)}"


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[ {', '.join(map(str, value))} ]"
    return value if isinstance(value, Word) else json.dumps(value)


def _find_plans(settings: Settings, image_size: int) -> StoredEngine:
    """Return the newest plans of these weights in the store that the server can run. Raises EngineError."""
    engine = settings.engine
    wanted = (checkpoint_digest(settings.model.name), engine.arithmetic, image_size)
    fitting = [
        stored
        for stored in EngineStore(engine.folder).all()
        if (stored.manifest.key.weights, stored.manifest.key.precision, stored.manifest.key.image_size)
        == wanted
        and set(STAGES) <= set(stored.manifest.plans)
    ]
    for stored in fitting:
        if stored.manifest.key.library == TENSORRT:
            return stored
    what = f"plans of {settings.model.name} in {engine.arithmetic} at {image_size} pixels"
    if fitting:
        raise EngineError(
            f"{what}: expected plans of {TENSORRT}, found plans of {fitting[0].manifest.key.library}, which Triton "
            "cannot run; build them where the extra tensorrt is installed, or export ONNX without --plans"
        )
    raise EngineError(f"{what}: found none in {engine.folder}; {BUILD_HINT}, or export ONNX without --plans")


def _require_absent(folder: Path, models: Sequence[ServedModel]) -> None:
    """Raise EngineError if the folder holds one of these models."""
    present = next((model.name for model in models if (folder / model.name).exists()), None)
    if present is not None:
        raise EngineError(
            f"{folder / present} exists already: expected a folder without it; delete the {PREFIX}* folders there, or "
            "choose another folder"
        )


def _write_models(
    folder: Path, models: Sequence[ServedModel], stored: StoredEngine | None, progress: ReportProgress
) -> list[Path]:
    """Write all models or nothing."""
    with (
        explain_os_error(OutputError, f"cannot write models to {folder}"),
        tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary,
    ):
        for model in models:
            step = BuildStep(model.name, progress)
            _write_model(Path(temporary) / model.name, model, stored)
            step.finish()
        return [(Path(temporary) / model.name).rename(folder / model.name) for model in models]


def _write_model(folder: Path, model: ServedModel, stored: StoredEngine | None) -> None:
    """Write the folder of one model; an ensemble has an empty folder of its version."""
    version = folder / VERSION
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(format_config(model.config), encoding="utf-8")
    if model.stage is None:
        return
    path = version / FILES[model.config["platform"]]
    if model.config["platform"] == ONNX:
        export(model.stage, path)
    else:
        assert stored is not None
        path.write_bytes(stored.read_plan(model.stage.name))
