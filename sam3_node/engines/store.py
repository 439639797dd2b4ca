"""Where built engines are kept: a folder for each, with its plans, and a manifest of what they are of."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError

from ..errors import EngineError
from ..settings import Section

MANIFEST = "manifest.json"
NOTES = {"model", "bank_size"}  # of an identity: what people are told, and engines do not depend on
BUILD = "build them: sam3-node engine build, with the same settings"
_log = logging.getLogger(__name__)


class Identity(Section):
    """What engines are of, and what they run on."""

    model: str
    """Name of the weights."""
    weights: str
    """SHA-256 of the checkpoint."""
    precision: str
    """float32, float16, bfloat16 or fp8."""
    image_size: int
    """Pixels along a side."""
    bank_size: int
    """Frames kept for each object; shapes do not depend on it. 0 of a detector."""
    most_objects: int
    """Objects at once, up to; of a detector, phrases."""
    library: str
    """tensorrt, tensorrt_rtx or inductor."""
    version: str
    """Of the library; of inductor, torch's."""
    gpu: str
    """Generation of GPU, such as sm89; cpu for none."""
    gpu_name: str = ""
    """The one GPU that they are for; empty for all of the generation."""
    cpu: str = ""
    """The processor that they are for; empty for any."""

    def differences(self, wanted: Identity) -> list[str]:
        """Each reason why engines of this identity cannot serve as `wanted`; none where they can."""
        have, want = self.model_dump(exclude=NOTES), wanted.model_dump(exclude=NOTES)
        if self.most_objects > wanted.most_objects:
            del have["most_objects"]
        return [
            f"{name.replace('_', ' ')}: expected {_short(want[name])}, found {_short(value)}"
            for name, value in have.items()
            if value != want[name]
        ]


class Manifest(Section):
    """What is in an engine's folder."""

    format: Literal[1] = 1
    """Of this file."""
    identity: Identity
    """What the engines are of."""
    scales: str = ""
    """Of an fp8 encoder, the digest of its scales and recipe."""
    fp8_layers: int = 0
    """How many of the encoder's layers turn their input or weights into FP8."""
    plans: dict[str, str] = Field(min_length=1)
    """SHA-256 of each stage's plan."""
    build_s: dict[str, float]
    """Seconds that each took, export and build."""
    built_s: float
    """When, in seconds since 1970."""

    @property
    def key(self) -> str:
        """Name of the folder: a digest of everything that one build can differ from another in."""
        text = f"{self.format} {self.identity.model_dump_json(exclude=NOTES)} {self.scales}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Built(NamedTuple):
    """Engines in the store: `folder` holds STAGE.plan for each stage, and the gate's report once there is one."""

    folder: Path
    manifest: Manifest

    @property
    def plan_bytes(self) -> int:
        """Size of all plans on disk, as far as they are there."""
        return sum(path.stat().st_size for path in self.folder.glob("*.plan"))

    def plan(self, stage: str) -> bytes:
        """The plan of a stage. Raises EngineError where it is absent or not what was built."""
        path = self.folder / f"{stage}.plan"
        try:
            plan = path.read_bytes()
        except OSError as error:
            raise EngineError(f"cannot read {path}: {error.strerror}; {BUILD}") from error
        expected, found = self.manifest.plans.get(stage), hashlib.sha256(plan).hexdigest()
        if found != expected:
            raise EngineError(f"{path} is damaged: expected sha256 {expected}, found {found}; {BUILD}")
        return plan


class EngineStore:
    """The engines under one folder, which need not be there yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()

    def save(
        self,
        identity: Identity,
        plans: Mapping[str, bytes],
        build_s: Mapping[str, float],
        *,
        scales: str = "",
        fp8_layers: int = 0,
    ) -> Built:
        """Keep plans by stage, in the place of earlier ones that are of the same; whole or not at all.

        Raises EngineError where they cannot be written.
        """
        digests = {stage: hashlib.sha256(plan).hexdigest() for stage, plan in plans.items()}
        manifest = Manifest(
            identity=identity,
            scales=scales,
            fp8_layers=fp8_layers,
            plans=digests,
            build_s=dict(build_s),
            built_s=time.time(),
        )
        try:
            return Built(self._write(manifest, plans), manifest)
        except OSError as error:
            raise EngineError(
                f"engines cannot be written to {self.folder}: {error.strerror}; make room there or choose another "
                "folder with --engine.folder"
            ) from error

    def all(self) -> Iterator[Built]:
        """All engines, the newest first. What cannot be read is left out with a warning."""
        found = [built for path in self.folder.glob(f"*/{MANIFEST}") if (built := _read(path)) is not None]
        yield from sorted(found, key=lambda built: built.manifest.built_s, reverse=True)

    def find(self, wanted: Identity) -> Built:
        """The newest engines that can serve as `wanted`. Raises EngineError that says what is there instead."""
        known = list(self.all())
        for built in known:
            if not built.manifest.identity.differences(wanted):
                return built
        if not known:
            raise EngineError(f"no engines in {self.folder}; {BUILD}")
        nearest = min(known, key=lambda built: len(built.manifest.identity.differences(wanted)))
        reasons = "; ".join(nearest.manifest.identity.differences(wanted))
        raise EngineError(
            f"no engines in {self.folder} can serve; the nearest, {nearest.folder.name}: {reasons}; {BUILD}"
        )

    def expected_s(self, identity: Identity, stage: str) -> float | None:
        """Seconds that a stage of these weights took to build in this precision and size before, if it was."""
        for built in self.all():
            have = built.manifest.identity
            same = (have.weights, have.precision, have.image_size, have.library)
            if same == (identity.weights, identity.precision, identity.image_size, identity.library):
                return built.manifest.build_s.get(stage)
        return None

    def _write(self, manifest: Manifest, plans: Mapping[str, bytes]) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / manifest.key
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".") as temporary:
            new = Path(temporary) / "new"
            new.mkdir()
            for stage, plan in plans.items():
                (new / f"{stage}.plan").write_bytes(plan)
            (new / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n")
            if place.exists():
                place.rename(Path(temporary) / "old")
            new.rename(place)
        return place


def _short(value: object) -> str:
    return str(value)[:24] or "any"


def _read(path: Path) -> Built | None:
    if path.parent.name.startswith("."):
        return None
    try:
        return Built(path.parent, Manifest.model_validate_json(path.read_bytes()))
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        _log.warning("%s is left out: it is not a manifest of engines (%s); %s", path, reason, BUILD)
        return None
