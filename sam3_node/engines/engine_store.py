"""Store engines: a folder for each build, with its plans, and a manifest that says what the engines fit.

A plan is code: whoever can write it runs as the user who loads it. So the store is created for its owner alone, and
nothing is read from files or folders that another user can change. The key that decides whether a stored engine fits
is made from the settings, the weights and this machine.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field, ValidationError

from ..errors import EngineError, ModelError
from ..files import (
    ANY_SIZE,
    describe_exposure,
    explain_os_error,
    make_private_dir,
    open_regular,
    read_private,
    write_private,
)
from ..models import TrackerModel, load_tracker
from ..models.checkpoints import NANO
from ..models.registry import find_file
from ..models.sam.tracker_model import GPU_BATCH
from ..models.weight_files import CONFIG, check_weight_files, list_weight_files, pick_device
from ..models.weight_files import find_file as find_weight_file
from ..settings import EngineSettings, Section, Settings
from .export import MAX_OBJECTS
from .inductor import INDUCTOR, PRECISIONS, describe_processor, find_inductor_target
from .tensorrt.builder import LOCAL, find_library, find_target

MANIFEST = "manifest.json"
INFORMATIVE = {"model", "bank_size"}  # fields of a key that need not match
BUILD_HINT = "build them: sam3-node engine build, with the same settings"
_log = logging.getLogger(__name__)


class EngineKey(Section):
    """The properties that a stored engine must match to serve: weights, shapes, precision, library and hardware."""

    model: str
    """Name of the weights."""
    weights: str
    """SHA-256 of the checkpoint."""
    precision: str
    """float32, float16, bfloat16 or fp8."""
    image_size: int
    """Pixels along a side."""
    bank_size: int
    """Frames kept for each object; shapes do not depend on it. 0 for a detector."""
    max_objects: int
    """Largest number of objects at once; of phrases for a detector."""
    library: str
    """tensorrt, tensorrt_rtx or inductor."""
    version: str
    """Version of the library; for inductor, of torch."""
    gpu: str
    """Generation of the GPU, such as sm89; cpu without a GPU."""
    gpu_name: str = ""
    """Name of the GPU that they are built for; empty for all of the generation."""
    cpu: str = ""
    """Processor that they are built for; empty for any."""

    def describe_differences(self, required: EngineKey) -> list[str]:
        """Return each reason why engines of this key cannot serve as `required`; empty if they can."""
        own = self.model_dump(exclude=INFORMATIVE)
        other = required.model_dump(exclude=INFORMATIVE)
        # engines for more objects also serve fewer
        if self.max_objects > required.max_objects:
            del own["max_objects"]
        return [
            f"{name.replace('_', ' ')}: expected {_shorten(other[name])}, found {_shorten(value)}"
            for name, value in own.items()
            if value != other[name]
        ]


class Manifest(Section):
    """The contents of an engine's folder."""

    format: Literal[1] = 1
    """Version of this file's format."""
    key: EngineKey
    """Key that the engines fit."""
    scales: str = ""
    """For an fp8 encoder, the digest of its scales and recipe."""
    plans: dict[str, str] = Field(min_length=1)
    """SHA-256 of each stage's plan."""
    build_s: dict[str, float]
    """Seconds that each stage took to export and build."""
    built_s: float
    """Time of the build, seconds since 1970."""

    @property
    def folder_name(self) -> str:
        """Name of the folder: a digest of everything in which one build can differ from another."""
        key = self.key.model_dump_json(exclude=INFORMATIVE)
        return hashlib.sha256(f"{self.format} {key} {self.scales}".encode()).hexdigest()[:16]


class StoredEngine(NamedTuple):
    """Engines in the store. `folder` holds STAGE.plan for each stage, and a report once the accuracy check has run.

    TensorRT-RTX adds STAGE.kernels.
    """

    folder: Path
    manifest: Manifest

    @property
    def plan_bytes(self) -> int:
        """Size of all plans on disk; plans that are absent count as 0."""
        return sum(path.stat().st_size for path in self.folder.glob("*.plan"))

    def kernels_path(self, stage: str) -> Path:
        """Return the path of the kernels that are compiled when the plan of a stage first runs; it may not exist."""
        return self.folder / f"{stage}.kernels"

    def read_plan(self, stage: str) -> bytes:
        """Read the plan of a stage.

        Raises EngineError where it is absent, differs from what was built, or can be changed by other users.
        """
        path = self.folder / f"{stage}.plan"
        with explain_os_error(EngineError, f"cannot read {path}", f"; {BUILD_HINT}"):
            # whoever can write one of the folders can replace the plan in it
            _require_private(self.folder.parent, self.folder)
            plan = read_private(path)
        expected = self.manifest.plans.get(stage)
        digest = hashlib.sha256(plan).hexdigest()
        if digest != expected:
            raise EngineError(f"{path} is damaged: expected sha256 {expected}, found {digest}; {BUILD_HINT}")
        return plan


class EngineStore:
    """The engines under one folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()

    def save(
        self,
        key: EngineKey,
        plans: Mapping[str, bytes],
        build_s: Mapping[str, float],
        *,
        scales: str = "",
    ) -> StoredEngine:
        """Store plans by stage, all or nothing; they replace earlier plans of the same build.

        Raises EngineError where they cannot be written.
        """
        digests = {stage: hashlib.sha256(plan).hexdigest() for stage, plan in plans.items()}
        manifest = Manifest(
            key=key,
            scales=scales,
            plans=digests,
            build_s=dict(build_s),
            built_s=time.time(),
        )
        remedy = "; free space there or choose another folder with --engine.folder"
        with explain_os_error(EngineError, f"engines cannot be written to {self.folder}", remedy):
            return StoredEngine(self._write(manifest, plans), manifest)

    def all(self) -> Iterator[StoredEngine]:
        """Yield all engines, the newest first. Skip engines that cannot be read or trusted, with a warning.

        Raises EngineError if other users can change the store itself.
        """
        # `lexists` is true for a dangling link, which must be reported and not taken for an empty store
        if not os.path.lexists(self.folder):
            return
        _require_private(self.folder)
        engines = [
            stored for path in self.folder.glob(f"*/{MANIFEST}") if (stored := _read(path)) is not None
        ]
        yield from sorted(engines, key=lambda stored: stored.manifest.built_s, reverse=True)

    def find(self, required: EngineKey) -> StoredEngine:
        """Return the newest engines that can serve as `required`. Raises EngineError that describes the nearest."""
        engines = [(stored, stored.manifest.key.describe_differences(required)) for stored in self.all()]
        if not engines:
            raise EngineError(f"no engines in {self.folder}; {BUILD_HINT}")
        nearest, differences = min(
            engines, key=lambda engine: len(engine[1])
        )  # the newest of equally near ones
        if not differences:
            return nearest
        raise EngineError(
            f"no engines in {self.folder} can serve; the nearest, {nearest.folder.name}: {'; '.join(differences)}; "
            + BUILD_HINT
        )

    def expected_s(self, key: EngineKey, stage: str) -> float | None:
        """Return the seconds that a stage took in an earlier build of the same weights, precision, size and library.

        None if there was no such build.
        """
        for stored in self.all():
            earlier = stored.manifest.key
            compared = (earlier.weights, earlier.precision, earlier.image_size, earlier.library)
            if compared == (key.weights, key.precision, key.image_size, key.library):
                return stored.manifest.build_s.get(stage)
        return None

    def _write(self, manifest: Manifest, plans: Mapping[str, bytes]) -> Path:
        make_private_dir(self.folder)
        _require_private(self.folder)
        target = self.folder / manifest.folder_name
        # in the store itself, because a folder cannot be renamed into another file system;
        # the name's dot keeps readers from taking a half-written build for engines
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".") as temporary:
            new = Path(temporary) / "new"
            new.mkdir(mode=0o700)
            for stage, plan in plans.items():
                write_private(new / f"{stage}.plan", plan)
            write_private(new / MANIFEST, f"{manifest.model_dump_json(indent=1)}\n".encode())
            # a folder cannot be renamed over another one that has contents
            if target.exists():
                target.rename(Path(temporary) / "old")
            new.rename(target)
        return target


def _shorten(value: object) -> str:
    return str(value)[:48] or "any"


def _require_private(*folders: Path) -> None:
    for folder in folders:
        if reason := describe_exposure(folder):
            raise EngineError(f"engines are code, so only their user may be able to change them: {reason}")


def _read(path: Path) -> StoredEngine | None:
    if path.parent.name.startswith("."):  # a build that is being written, or was interrupted
        return None
    try:
        _require_private(path.parent)
        return StoredEngine(path.parent, Manifest.model_validate_json(read_private(path)))
    except EngineError as error:
        _log.warning("skipped %s: %s", path, error)
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        _log.warning("skipped %s: it is no manifest of engines (%s); %s", path, reason, BUILD_HINT)
    return None


FP8 = "fp8"
MIN_GENERATION = {"bfloat16": 80, FP8: 89}
"""Oldest generation of GPU, as in sm80, that computes in a precision."""


def compute_key(model: TrackerModel, settings: Settings, gpu: str = LOCAL) -> EngineKey:
    """Build the key of the engines that `settings` ask for, to run on `gpu`.

    model: loaded as the settings say, in any dtype. Raises EngineError for a GPU or a precision that no engine can be
    built for, MissingExtraError without TensorRT.
    """
    engine = settings.engine
    # packages, and plans of groups of objects, take as many at once whatever the settings say
    if engine.kind == INDUCTOR:
        require_compilable(engine, model.device)
        target = find_inductor_target(model.device, gpu)
        hardware = {"gpu": target.generation, "gpu_name": target.name, "cpu": describe_processor()}
        most = MAX_OBJECTS
        fields = {"library": INDUCTOR, "version": str(torch.__version__), **hardware}
    else:
        most = model.capabilities.plan_rows(round_up_objects(settings.tracker.max_objects), MAX_OBJECTS)
        fields = describe_tensorrt(gpu)
        _require_arithmetic(engine.arithmetic, fields["gpu"])
    return EngineKey(
        model=model.name,
        weights=checkpoint_digest(settings.model.name),
        precision=engine.arithmetic,
        image_size=model.image_size,
        bank_size=settings.tracker.bank_size,
        max_objects=most,
        **fields,
    )


def describe_tensorrt(gpu: str) -> dict[str, str]:
    """Return a key's fields of the library and the GPU. Raises EngineError or MissingExtraError."""
    library = find_library()
    generation, name = find_target(library, gpu)
    return {"library": library.name, "version": library.version, "gpu": generation, "gpu_name": name}


def _require_arithmetic(precision: str, generation: str) -> None:
    """Raise EngineError for a precision that GPUs of a generation, such as sm89, do not compute in."""
    needed = MIN_GENERATION.get(precision, 0)
    if int(generation.removeprefix("sm")) < needed:
        raise EngineError(
            f"engine.precision {precision}: expected a GPU of generation sm{needed} or newer, found {generation}; use "
            f"--engine.precision {'float16' if precision == 'bfloat16' else 'bfloat16'}"
        )


def require_compilable(engine: EngineSettings, device: torch.device) -> None:
    """Raise EngineError for a precision that inductor does not take on this device: float16 is slow on a CPU."""
    usable = [name for name in PRECISIONS if (device.type, name) != ("cpu", "float16")]
    if engine.arithmetic not in usable:
        raise EngineError(
            f"engine.precision: {INDUCTOR} takes {', '.join(usable)} on {device.type}, found {engine.arithmetic}; use "
            "--engine.precision float32"
        )


def resolve_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the inputs and outputs of engines. With fp8, all that is not in FP8 is in bfloat16.

    Not in float16: fused attention would add up the products of tens of thousands of keys in float16, and the products
    of FP8 numbers can leave its range before their scales apply.
    """
    dtype = getattr(torch, "bfloat16" if precision == FP8 else precision)
    assert isinstance(dtype, torch.dtype)
    return dtype


def choose_model_dtype(settings: Settings) -> str | torch.dtype:
    """Return the dtype to load the tracker in: on a GPU its engines' dtype, unless `model.dtype` names another.

    Nothing is rounded then between the stages, and torch answers prompts in the same arithmetic.
    """
    model = settings.model
    engine = settings.engine
    if engine.kind == "torch" or model.dtype != "auto" or pick_device(model.device).type != "cuda":
        return model.dtype
    return resolve_dtype(engine.arithmetic)


def load_model_in(settings: Settings, dtype: str | torch.dtype) -> TrackerModel:
    """Load the model that the settings name, uncompiled, in a dtype."""
    source = settings.model
    return load_tracker(source.name, device=source.device, dtype=dtype, image_size=source.image_size)


def load_stages(settings: Settings) -> TrackerModel:
    """Load the model in the dtype of its engines. Raises ModelError, or EngineError for weights without memory."""
    model = load_model_in(settings, resolve_dtype(settings.engine.arithmetic))
    if reason := model.capabilities.why_not_engines():
        raise EngineError(f"{model.name} {reason}")
    return model


def round_up_objects(max_objects: int) -> int:
    """Return the largest batch that the tracker makes for up to `max_objects` objects: a power of two."""
    return int(min(1 << (max_objects - 1).bit_length(), GPU_BATCH))


def checkpoint_digest(name: str) -> str:
    """Compute the SHA-256 of the configuration and weights that `--model.name` names; it is the same for any dtype.

    Raises EngineError where they are not files on this machine, or lie outside their folder.
    """
    digest = hashlib.sha256()
    path = Path(name)  # so that the message names the weights if their check fails
    try:
        for path in _find_weight_files(name):
            with open_regular(path, ANY_SIZE) as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except (OSError, ModelError) as error:
        raise EngineError(f"cannot read the weights {path} to identify their engines: {error}") from error
    return digest.hexdigest()


def _find_weight_files(name: str) -> list[Path]:
    """Return the configuration and all files from which weights are loaded, or the one file of their own layout.

    Raises ModelError where they lie outside their folder, or cannot be fetched.
    """
    # a digest of gigabytes that are not here yet is nothing to wait for
    if found := find_file(name, fetch=False):
        return [found.path]
    # such as a detector in ONNX
    if Path(name).is_file():
        return [Path(name)]
    folder = NANO if name == "nano" else Path(name).expanduser()
    # the name is no folder, so the hub's cache has the files; a name without / is of no repository of weights, and the
    # hub would be asked for it in vain for a minute
    if not folder.is_dir() and "/" in name:
        config = find_weight_file(name, CONFIG)
        folder = Path(config).parent if config else folder
    check_weight_files(folder)
    return list_weight_files(folder)


def identify_setup(settings: Settings) -> str:
    """Return the key of what fits only these weights at this image size, this version of torch and this device.

    It has 32 hex digits. Raises EngineError where the weights are not files on this machine.
    """
    device = pick_device(settings.model.device)
    hardware = " ".join(find_inductor_target(device)) if device.type == "cuda" else describe_processor()
    weights = checkpoint_digest(settings.model.name)
    text = f"{weights} {settings.model.image_size} {torch.__version__} {hardware}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
