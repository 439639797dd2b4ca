"""A model repository for Triton Inference Server: the stages of a tracker, a detector, and ensembles of them.

Each stage is a model with an ONNX export, or with a TensorRT plan of the engine store. Prompts of a kind are decoded by
one more model. An ensemble keeps nothing between two requests, so it cannot track: the client that calls the stages
keeps an object's memories and chooses which of them are read. An ensemble has no code either: it passes tensors on. So
the graph of the detector itself chooses among overlapping boxes, and converts them to the tracker's pixels.

Files of configuration are written as text here, because they need a dozen fields. The package that has the server's
schema, tritonclient, would add gRPC and an older protobuf. The tests parse the files with its schema.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..detection.loading import load_detector
from ..detection.yolo_world import YoloWorldDetector
from ..errors import EngineError, OutputError, require
from ..files import explain_os_error, make_folder, move_inside, write_new
from ..models import TrackerModel
from ..models.yolo.network import YoloWorld, load_yolo_world
from ..settings import Settings
from ..tracking.tracks import BOX_LABELS
from .detector import resolve_folder
from .engine_store import (
    BUILD_HINT,
    EngineStore,
    StoredEngine,
    checkpoint_digest,
    load_model_in,
    resolve_dtype,
)
from .export import EXTRA, BuildStep, ReportProgress, export, ignore_progress
from .oom import reraise_out_of_memory
from .served_networks import NAMED, FindNamed, FloatMemoryEncoder, PrepareImage, PromptDecode
from .specs import HEIGHT, IMAGES, OBJECTS, POINTS, STAGES, WIDTH, StageSpec, TensorSpec, tracker_stages

ONNX = "onnxruntime_onnx"
PLAN = "tensorrt_plan"
ENSEMBLE = "ensemble"
ENSEMBLE_FILE = "ENSEMBLE.txt"
"""File in the folder of an ensemble's version. The server does not read it."""
FILES = {ONNX: "model.onnx", PLAN: "model.plan"}
VERSION = "1"
ONNX_PRECISIONS = ("float32", "float16")
"""The server's ONNX backend takes no bfloat16."""
TENSORRT = "tensorrt"
PROMPTS: dict[str, tuple[int, ...]] = {"points": (), "point": (1,), "box": BOX_LABELS}
"""Labels of the points of each kind of prompt; none where they come with the points."""


class Word(str):
    """A constant of the schema, which is written without quotes."""


TYPES = {
    torch.float32: Word("TYPE_FP32"),
    torch.float16: Word("TYPE_FP16"),
    torch.bfloat16: Word("TYPE_BF16"),
    torch.int64: Word("TYPE_INT64"),
    torch.int32: Word("TYPE_INT32"),
    torch.uint8: Word("TYPE_UINT8"),
    torch.bool: Word("TYPE_BOOL"),
}

Config = Mapping[str, Any]
"""Fields of the schema's ModelConfig: numbers, strings, words, maps, and sequences of these."""


class ServedModel(NamedTuple):
    """A model of the repository: its configuration, and what is served under it."""

    config: Config
    stage: StageSpec | None = None
    """None for an ensemble"""

    @property
    def name(self) -> str:
        """Name of the model and of its folder."""
        return str(self.config["name"])


class Search(NamedTuple):
    """A detector, and what it looks for."""

    net: YoloWorld
    names: tuple[str, ...] = ()
    """empty: vectors in each request say it"""
    text: Tensor | None = None
    """vectors [K, D] of the names"""


class Serving(NamedTuple):
    """Options of the models without memories: the encoder, the decoders of prompts, and the detector."""

    batch: int = 8
    """the most images in a call; the server joins requests up to it. 0 for models of one image"""
    instances: int = 1
    """copies of each model, which run at once"""
    delay_us: int = 0
    """microseconds that a request may wait for others to join it"""
    preferred: tuple[int, ...] = ()
    """numbers of images to wait for; empty: `batch`"""


USUAL_SERVING = Serving()


def export_repository(
    settings: Settings,
    folder: Path,
    *,
    plans: bool = False,
    name: str = "",
    names: Sequence[str] = (),
    serving: Serving = USUAL_SERVING,
    progress: ReportProgress = ignore_progress,
) -> list[Path]:
    """Write the models into `folder`, a new or existing model repository; return the folder of each.

    By default, stages are exported to ONNX in `engine.precision`, float32 or float16. Weights for images alone have the
    encoder and the prompts. With `plans`, the four stages are TensorRT plans that `engine build` has made; without
    bfloat16, prompts and ensembles come beside them. A YOLO-World of the settings comes with them, and an ensemble that
    segments what it finds. name: the beginning of all names of models; by default, the name of the weights. names: what
    the detector looks for, if not vectors in each request say it. Raises
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
    if names and settings.detector.kind != "yolo-world":
        raise EngineError(
            f"names: expected a detector that can be served, yolo-world, found {settings.detector.kind}; use "
            "--detector.kind yolo-world, or leave --names out"
        )
    # bfloat16 plans have no ONNX models beside them
    if not plans or precision in ONNX_PRECISIONS:
        require("onnx", EXTRA)
    with reraise_out_of_memory(EngineError, "while models were exported"):
        model = load_model_in(settings, resolve_dtype(precision))
        stored = _find_plans(settings, model.image_size) if plans else None
        detector = None
        # the detector is an ONNX model, and those take no bfloat16
        if settings.detector.kind == "yolo-world" and model.dtype != torch.bfloat16:
            detector = _load_search(settings, names, model.dtype)
        models = make_models(
            model, settings.tracker.bank_size, stored, detector=detector, name=name, serving=serving
        )
        # before the exports, which take time
        present = [model.name for model in models if (folder / model.name).exists()]
        if present:
            raise EngineError(
                f"{folder}: expected no models of these names, found {', '.join(present)}; delete them, choose another "
                "folder, or name these models with --name"
            )
        make_folder(folder)
        return _write_models(folder, models, stored, progress)


def make_models(
    model: TrackerModel,
    bank_size: int,
    stored: StoredEngine | None = None,
    *,
    detector: Search | None = None,
    name: str = "",
    serving: Serving = USUAL_SERVING,
) -> list[ServedModel]:
    """Return the models of a repository: ONNX exports, or the plans of `stored` where there are any."""
    platform = ONNX if stored is None else PLAN
    stages = dict(tracker_stages(model, bank_size))
    if stored is None:
        stages = {key: _without_bfloat16(stage) for key, stage in stages.items()}
        stages["encode"] = _for_images(stages["encode"])
    else:
        serving = serving._replace(batch=0)  # plans encode one image
    describe = _Describer(re.sub(r"\W+", "_", name or model.name.rpartition("/")[2]), serving)
    served = [ServedModel(describe.stage(stage, platform, model), stage) for stage in stages.values()]
    # prompts are ONNX models, and ensembles contain them
    if model.dtype == torch.bfloat16:
        return served
    encode = stages["encode"]
    prepare = _specify_preparation(model, encode, detector)
    served.append(ServedModel(describe.stage(prepare, ONNX, model), prepare))
    features = _find_prompt_features(encode)
    served.append(ServedModel(describe.ensemble("encode_image", [prepare, encode], features)))
    for kind, labels in PROMPTS.items():
        prompt = _specify_prompt(model, encode, kind, labels)
        served.append(ServedModel(describe.stage(prompt, ONNX, model), prompt))
        steps = [prepare, encode, prompt]
        served.append(ServedModel(describe.ensemble(f"segment_{kind}", steps, prompt.outputs)))
    if detector is not None:  # the last prompts are boxes
        detect = _specify_detector(detector, model)
        config = describe.stage(detect, ONNX, model)
        if detector.names:
            config = {**config, "parameters": [_make_parameter("names", ",".join(detector.names))]}
        served.append(ServedModel(config, detect))
        steps = [prepare, detect, encode, prompt]
        outputs = [*detect.outputs, *prompt.outputs]
        served.append(ServedModel(describe.ensemble("segment_named", steps, outputs)))
    return served


def _map_specs(stage: StageSpec, change: Callable[[TensorSpec], TensorSpec]) -> StageSpec:
    inputs, outputs = (tuple(map(change, specs)) for specs in (stage.inputs, stage.outputs))
    return stage._replace(inputs=inputs, outputs=outputs)


def _for_images(stage: StageSpec) -> StageSpec:
    """Return a stage of one image for any number of them."""
    return _map_specs(stage, lambda spec: spec._replace(shape=(IMAGES, *spec.shape[1:])))


def _without_bfloat16(stage: StageSpec) -> StageSpec:
    """Return a stage whose memories have the dtype of its other tensors. A read takes memories of any dtype."""
    number = stage.inputs[0].dtype
    rounds = stage.name == "remember" and stage.outputs[0].dtype != number
    module = FloatMemoryEncoder(stage.module) if rounds else stage.module
    stage = _map_specs(
        stage, lambda spec: spec._replace(dtype=number) if spec.dtype == torch.bfloat16 else spec
    )
    return stage._replace(module=module)


def _find_prompt_features(encode: StageSpec) -> list[TensorSpec]:
    """Return the features that prompts are decoded on: top, fine and middle."""
    features = {spec.name: spec for spec in _for_images(encode).outputs}
    # SAM 3.1 has features of their own for prompts
    return [features.get(f"prompt_{level}", features[level]) for level in ("top", "fine", "middle")]


def _specify_prompt(model: TrackerModel, encode: StageSpec, kind: str, labels: Sequence[int]) -> StageSpec:
    """Specify the decoder of prompts of a kind: points with labels, one point or a box."""
    multimask = model.has_candidates
    competes = bool(labels) and model.competes(len(labels), True)
    module = PromptDecode(model.decode_stage, labels, multimask, competes)
    objects = (IMAGES, OBJECTS)
    if labels:
        name = "points" if kind == "point" else "boxes"
        prompts = [TensorSpec(name, (*objects, 2 * len(labels)), torch.float32)]
    else:
        prompts = [
            TensorSpec("points", (*objects, POINTS, 2), torch.float32),
            TensorSpec("labels", (*objects, POINTS), torch.int32),
        ]
    outputs = [
        TensorSpec("logits", (*objects, *model.mask_size), model.dtype),
        TensorSpec("iou", objects, model.dtype),
        TensorSpec("presence", objects, model.dtype),
    ]
    if multimask:
        rivals = (*objects, model.candidates)
        outputs.append(TensorSpec("candidates", (*rivals, *model.mask_size), model.dtype))
        outputs.append(TensorSpec("candidate_iou", rivals, model.dtype))
    return StageSpec(f"prompt_{kind}", module, (*_find_prompt_features(encode), *prompts), tuple(outputs))


def _specify_preparation(model: TrackerModel, encode: StageSpec, detector: Search | None) -> StageSpec:
    """Specify what makes the pixels of the tracker, and of a detector, from images."""
    image = TensorSpec("image", (IMAGES, HEIGHT, WIDTH, 3), torch.uint8)
    outputs = [_for_images(encode).inputs[0]]
    side = None
    if detector is not None:
        side = detector.net.config.image_size
        outputs.append(TensorSpec("letterbox", (IMAGES, 3, side, side), torch.float32))
        outputs.append(TensorSpec("frame", (IMAGES, 2), torch.float32))
    return StageSpec("prepare", PrepareImage(model, side), (image,), tuple(outputs))


def _load_search(settings: Settings, names: Sequence[str], dtype: torch.dtype) -> Search:
    """Load the detector of the settings, and the vectors of what it looks for."""
    chosen = settings.detector
    weights = resolve_folder(chosen)
    if not names:
        return Search(load_yolo_world(weights, device=settings.model.device, dtype=dtype))
    detector = load_detector(
        chosen.kind,
        weights,
        vocabulary=chosen.vocabulary,
        text_encoder=chosen.text_encoder,
        device=settings.model.device,
        dtype=dtype,
    )
    assert isinstance(detector, YoloWorldDetector)
    return Search(detector.model, tuple(names), detector.prepare(names).vectors)


def _specify_detector(search: Search, model: TrackerModel) -> StageSpec:
    """Specify the detector whose boxes are in pixels of the tracker's square; its phrases vary in number."""
    config = search.net.config
    side = config.image_size
    found = (IMAGES, NAMED)
    inputs = [
        TensorSpec("letterbox", (IMAGES, 3, side, side), torch.float32),
        TensorSpec("frame", (IMAGES, 2), torch.float32),
    ]
    if search.text is None:
        inputs.append(TensorSpec("text", (IMAGES, OBJECTS, config.text_channels), torch.float32))
    outputs = (
        TensorSpec("boxes", (*found, 4), torch.float32),
        TensorSpec("scores", found, torch.float32),
        TensorSpec("phrases", found, torch.int64),
    )
    module = FindNamed(search.net, model.image_size, search.text)
    return StageSpec("detect", module, tuple(inputs), outputs)


class _Describer:
    """Makes the configurations of models whose names begin with `name`."""

    def __init__(self, name: str, serving: Serving) -> None:
        self._name = name
        self._serving = serving

    def stage(self, stage: StageSpec, platform: str, model: TrackerModel) -> Config:
        """Return a stage's configuration. Stages of memories are not batched: all objects share an image's features."""
        config: dict[str, object] = {**self._head(stage, platform)}
        kind = Word("KIND_GPU" if platform == PLAN else "KIND_AUTO")
        count = 1 if stage.name in STAGES[1:] else self._serving.instances
        config["instance_group"] = [{"count": count, "kind": kind}]
        if config["max_batch_size"]:
            config["dynamic_batching"] = self._describe_batching()
        if stage.name == "encode":  # what a client needs to make pixels
            values = {
                "pixels": "RGB from 0 to 1, resized to the square, less mean, divided by std",
                "mean": model.mean.flatten().tolist(),
                "std": model.std.flatten().tolist(),
            }
            config["parameters"] = [_make_parameter(key, str(value)) for key, value in values.items()]
        return config

    def _describe_batching(self) -> Config:
        """Return how the server joins requests. An empty field turns it on, with the server's own defaults."""
        batching: dict[str, Sequence[int] | int] = {}
        if self._serving.preferred:
            batching["preferred_batch_size"] = self._serving.preferred
        if self._serving.delay_us:
            batching["max_queue_delay_microseconds"] = self._serving.delay_us
        return batching

    def ensemble(self, name: str, stages: Sequence[StageSpec], outputs: Sequence[TensorSpec]) -> Config:
        """Return the configuration of the ensemble that runs stages in order; tensors of one name are one tensor."""
        taken = {spec.name: spec for stage in stages for spec in stage.inputs}
        made = {spec.name for stage in stages for spec in stage.outputs}
        used = taken.keys() | {spec.name for spec in outputs}
        steps = [
            {
                "model_name": f"{self._name}_{stage.name}",
                # -1 is the newest version
                "model_version": -1,
                "input_map": _map_names(spec.name for spec in stage.inputs),
                "output_map": _map_names(spec.name for spec in stage.outputs if spec.name in used),
            }
            for stage in stages
        ]
        inputs = tuple(spec for name, spec in taken.items() if name not in made)
        whole = StageSpec(name, nn.Identity(), inputs, tuple(outputs))
        return {**self._head(whole, ENSEMBLE), "ensemble_scheduling": {"step": steps}}

    def _head(self, stage: StageSpec, platform: str) -> Config:
        """Return name, platform and tensors. The schema leaves out the first dimension of what it batches."""
        batch = 0 if stage.name in STAGES[1:] else self._serving.batch
        tensors = {
            side: [
                {
                    "name": spec.name,
                    "data_type": TYPES[spec.dtype],
                    "dims": tuple(side if isinstance(side, int) else -1 for side in spec.shape[batch > 0 :]),
                }
                for spec in specs
            ]
            for side, specs in (("input", stage.inputs), ("output", stage.outputs))
        }
        name = f"{self._name}_{stage.name}"
        return {"name": name, "platform": platform, "max_batch_size": batch, **tensors}


def _make_parameter(key: str, value: str) -> Config:
    return {"key": key, "value": {"string_value": value}}


def _map_names(names: Iterable[str]) -> list[Config]:
    return [{"key": name, "value": name} for name in names]


def format_config(config: Config) -> str:
    """Format a configuration as the text of a config.pbtxt, a line for each field."""
    return "".join(f"{name}: {_format(value)}\n" for name, value in config.items())


def _format(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_format(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format, value))}]"
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
    # the store yields the newest first
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


def _write_models(
    folder: Path, models: Sequence[ServedModel], stored: StoredEngine | None, progress: ReportProgress
) -> list[Path]:
    """Write all models or nothing."""
    with (
        explain_os_error(OutputError, f"cannot write models to {folder}"),
        # within the folder, because a rename does not cross file systems; the server sees whole models only
        tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary,
    ):
        for model in models:
            step = BuildStep(model.name, progress)
            _write_model(Path(temporary) / model.name, model, stored)
            step.finish()
        return [move_inside(folder, Path(temporary) / model.name, folder / model.name) for model in models]


def _write_model(folder: Path, model: ServedModel, stored: StoredEngine | None) -> None:
    """Write the folder of one model; an ensemble has a folder of its version without a model."""
    version = folder / VERSION
    version.mkdir(parents=True)
    write_new(folder / "config.pbtxt", format_config(model.config))
    if model.stage is None:
        # the server needs the folder, and object stores and git keep no empty ones
        write_new(version / ENSEMBLE_FILE, "An ensemble has no model file: config.pbtxt says what it runs.\n")
        return
    path = version / FILES[model.config["platform"]]
    if model.config["platform"] == ONNX:
        export(model.stage, path)
    else:
        assert stored is not None
        write_new(path, stored.read_plan(model.stage.name))
