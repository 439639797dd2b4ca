"""The one configuration tree: TOML profile < environment SAM3_* < command line.

The string under each field is its help, on the command line and in README's table alike.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from .errors import SettingsError
from .types import ColourEncoding, Delivery, MaskEncoding


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, frozen=True)


class TransportSettings(Section):
    frames: tuple[str, ...] = ("tcp://127.0.0.1:5550",)
    """Frame endpoints: each camera binds one, the node connects to all. tcp://host:port or ipc://path."""
    masks: str = "tcp://127.0.0.1:5551"
    """Endpoint that the node binds and publishes masks on."""
    control: str = "tcp://127.0.0.1:5552"
    """Endpoint that the node binds and answers control requests on."""
    delivery: Delivery = "newest"
    """newest: live, stale frames are skipped and counted. every: lossless, with back-pressure."""


class CameraSettings(Section):
    source: str = "scene:shapes"
    """What to publish: scene:shapes, video:FILE or webcam:INDEX."""
    name: str = Field("cam0", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Name of the camera, the last part of its topics."""
    fps: float = Field(0.0, ge=0.0, le=1000.0)
    """Frames per second; 0 keeps the source's own rate."""
    width: int = Field(0, ge=0, le=16384)
    """Width in pixels to resize to; 0 keeps the source's own."""
    height: int = Field(0, ge=0, le=16384)
    """Height in pixels to resize to; 0 keeps the source's own."""
    encoding: ColourEncoding = "bgr8"
    """How colour travels: bgr8 costs no coding time, jpeg about a tenth of the bytes."""
    jpeg_quality: int = Field(90, ge=1, le=100)
    """Quality of jpeg colour."""
    calibration: Path | None = None
    """Calibration file (TOML, see calibration/example.toml) whose intrinsics travel with each frame."""
    loop: bool = False
    """Start again at the end of a finite source."""
    frames: int = Field(0, ge=0)
    """Stop after so many frames; 0 never."""


class ModelSettings(Section):
    name: str = "nano"
    """nano (bundled), a folder in transformers' layout, or a hub name such as facebook/sam3."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:N; auto takes CUDA where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic: auto is bfloat16 on CUDA and float32 on a CPU."""
    compile: bool = False
    """Compile the stages with torch.compile: a slower first minute, then faster frames."""
    threads: int = Field(0, ge=0, le=1024)
    """CPU threads for the model; 0 lets torch choose."""


class TrackerSettings(Section):
    max_objects: int = Field(16, ge=1, le=256)
    """Objects that may be tracked at once, per camera; memory for all is taken at the start."""
    bank_size: int = Field(7, ge=2, le=240)
    """Frames that the memory bank keeps per object, the conditioning frame counted."""
    selection: Literal["recent", "confident"] = "recent"
    """Which of them are attended to: the newest (the reference), or the newest with a confident mask."""
    mask_encoding: MaskEncoding = "bits+zstd"
    """How masks travel: bits+zstd (fast) or rle (COCO's compressed counts)."""
    feature_cache: int = Field(4, ge=1, le=64)
    """Recent frames whose features are kept, for prompts on a frame that the user has just seen."""
    max_cameras: int = Field(4, ge=1, le=64)
    """Cameras served at once; frames of further ones are counted and dropped."""


class GroupSettings(Section):
    processes: tuple[Literal["camera", "node", "watch"], ...] = ("camera", "node", "watch")
    """What launch/start brings up, in this order; when one ends, all are taken down."""
    cameras: tuple[CameraSettings, ...] = ()
    """Several cameras, the n-th on the n-th of transport.frames; empty starts the one of [camera]."""
    restart: Literal["never", "on-failure"] = "never"
    """on-failure: a process that fails is started again, alone, after a growing pause."""
    grace_s: float = Field(3.0, gt=0.0, le=60.0)
    """Seconds that a process is given to end after SIGTERM, before it is killed."""


class Settings(BaseSettings):
    """Everything that a deployment may choose."""

    model_config = SettingsConfigDict(
        env_prefix="SAM3_", env_nested_delimiter="__", extra="forbid", use_attribute_docstrings=True, frozen=True
    )

    transport: TransportSettings = TransportSettings()
    camera: CameraSettings = CameraSettings()
    model: ModelSettings = ModelSettings()
    tracker: TrackerSettings = TrackerSettings()
    group: GroupSettings = GroupSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # the profile is given at birth, and the environment outranks it
        return env_settings, init_settings


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file, or raise SettingsError naming the file and the place."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error


def load_settings(profile: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Build the tree from a TOML profile, the environment and `overrides` ({"model.name": "nano", …}).

    Raises SettingsError that names each wrong field with its place.
    """
    base = read_toml(profile) if profile is not None else {}
    try:
        settings = Settings(**base)
        if not overrides:
            return settings
        tree = settings.model_dump()
        for path, value in overrides.items():
            section, _, field = path.partition(".")
            tree[section][field] = value
        return _revalidate(tree)
    except ValidationError as error:
        raise SettingsError(_explain(error, profile)) from error


def _revalidate(tree: dict[str, Any]) -> Settings:
    parts = {name: field.annotation(**tree[name]) for name, field in Settings.model_fields.items()}  # type: ignore[misc]
    return Settings.model_construct(**parts)


def _explain(error: ValidationError, profile: Path | None) -> str:
    where = f" in {profile}" if profile else ""
    lines = [
        f"  {'.'.join(map(str, item['loc']))}: {item['msg']} (found {item['input']!r})" for item in error.errors()
    ]
    return f"settings do not validate{where}:\n" + "\n".join(lines)
