"""The one configuration tree: TOML profile < environment SAM3_* < command line.

The string under each field is its help, on the command line and in README's table alike.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.exceptions import SettingsError as UndecodableError

from .errors import SettingsError
from .types import ColourEncoding, Delivery, MaskEncoding


def _split(value: object) -> object:
    return tuple(filter(None, value.split(","))) if isinstance(value, str) else value


_LOGGED: set[str] = set()
_log = logging.getLogger(__name__)

CommaSeparated = (NoDecode, BeforeValidator(_split))  # "a,b" in the environment and on the command line


class Section(BaseModel):
    """One section of the tree. A field that was renamed keeps its old name as an alias, see `renamed`."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, frozen=True
    )
    renamed: ClassVar[Mapping[str, str]] = {}
    """Old names of fields, each with the present one."""

    @model_validator(mode="before")
    @classmethod
    def _accept_old_names(cls, fields: object) -> object:
        return cls.with_present_names(fields) if isinstance(fields, Mapping) else fields

    @classmethod
    def with_present_names(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Replace old names of fields by the present ones, and log each old name once."""
        for old in fields.keys() & cls.renamed.keys() - _LOGGED:
            _LOGGED.add(old)
            _log.warning("setting %r was renamed: use %r", old, cls.renamed[old])
        return {cls.renamed.get(name, name): value for name, value in fields.items()}


class TransportSettings(Section):
    frames: Annotated[tuple[str, ...], *CommaSeparated, Field(min_length=1)] = ("tcp://127.0.0.1:5550",)
    """Frame endpoints: each camera binds one, the node connects to all. With commas between."""
    masks: str = "tcp://127.0.0.1:5551"
    """Endpoint that the node binds and publishes masks on."""
    control: str = "tcp://127.0.0.1:5552"
    """Endpoint that the node binds and answers control requests on."""
    delivery: Delivery = "newest"
    """newest: live, stale frames are skipped and counted. every: lossless, with back-pressure."""


class CameraSettings(Section):
    source: str = "scene:shapes"
    """What to publish: scene:tabletop, scene:shapes, bag:FILE, video:FILE or webcam:INDEX."""
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
    """Quality of jpeg colour; what is recorded as jpeg is sent as it is."""
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
    image_size: int = Field(0, ge=0, le=4096)
    """Side of the square that frames are scaled to, pixels; 0 is the weights' own. Smaller is faster and coarser."""


class EngineSettings(Section):
    renamed = {"least_cosine": "min_cosine", "least_iou": "min_iou"}

    kind: Literal["torch", "tensorrt", "inductor"] = "torch"
    """What runs the model: torch; or engines that `sam3-node engine build` made, by TensorRT or by torch (inductor)."""
    precision: Literal["float32", "float16", "bfloat16", "fp8"] = "float16"
    """Arithmetic of the engines; fp8 is the encoder's, the rest is float16 then."""
    folder: Path = Path("~/.cache/sam3_node/engines")
    """Where engines are kept, each with the gate's report."""
    graphs: bool = False
    """On a GPU, capture what every frame runs in CUDA graphs."""
    fallback: bool = True
    """Where engines cannot serve, run torch and say so in each message's model; off: refuse to start."""
    min_cosine: float = Field(0.99, gt=0.0, le=1.0)
    """Gate: cosine of a stage's worst output with torch in float32, below which it is refused."""
    min_iou: float = Field(0.95, gt=0.0, le=1.0)
    """Gate: mean mask IoU with torch in float32 over a tracked clip, below which engines are refused."""


class TrackerSettings(Section):
    max_objects: int = Field(16, ge=1, le=256)
    """Objects that may be tracked at once, per camera; memory for all is taken at the start."""
    bank_size: int = Field(7, ge=2, le=240)
    """Frames kept per object, the conditioning one counted; with recent, above the model's own 7 changes nothing."""
    selection: Literal["recent", "confident"] = "recent"
    """Which of them are attended to: the newest (the reference), or the newest with a confident mask."""
    mask_encoding: MaskEncoding = "bits+zstd"
    """How masks travel: bits+zstd (fast) or rle (COCO's compressed counts)."""
    feature_cache: int = Field(4, ge=1, le=64)
    """Recent frames whose features are kept, for prompts on a frame that the user has just seen."""
    max_cameras: int = Field(4, ge=1, le=64)
    """Cameras served at once, further ones counted and dropped; one silent for 10 s gives up its place."""


class DetectorSettings(Section):
    renamed = {"doubt": "min_track_score", "lost_s": "max_lost_s"}

    kind: Literal["none", "yolo-world", "sam3-concept", "grounding-dino"] = "yolo-world"
    """What finds things by name; none: objects come by click, box or mask alone."""
    name: str = "nano"
    """Its weights: nano (bundled, yolo-world), a folder, or for the other two a hub name."""
    prompts: Annotated[tuple[str, ...], *CommaSeparated] = ()
    """What to look for from the start, with commas between; `sam3-node prompt` changes it live."""
    vocabulary: Path | None = None
    """Vocabulary file of yolo-world's phrases; empty takes the one beside its weights."""
    text_encoder: Path | None = None
    """Folder of a CLIP text encoder for yolo-world's other phrases."""
    every: int = Field(5, ge=1, le=1000)
    """Detect on every so many frames; also when prompts change, and when an object is no longer sure."""
    score: float = Field(0.2, gt=0.0, lt=1.0)
    """Score from which on a detection begins an object; half of it is enough to confirm one."""
    min_track_score: float = Field(0.5, ge=0.0, le=1.0)
    """Score below which a tracked object is no longer sure."""
    max_lost_s: float = Field(5.0, gt=0.0, le=3600.0)
    """Seconds that an object found by name is kept without a sure mask or a detection of it."""
    association: bool = True
    """Correct, take back and merge tracked objects by detections; off: detections only begin objects."""


class RecordSettings(Section):
    out: Path = Path("recordings")
    """A file NAME.mcap; or a folder, in which a recording is named by the time of its start (UTC)."""
    cameras: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")], ...], *CommaSeparated
    ] = ()
    """Cameras whose frames and masks are recorded, with commas between; empty records all."""
    split_mb: float = Field(0.0, ge=0.0, le=1e9)
    """Length, MB, from which on a recording goes on in another file, NAME_0001.mcap; 0 never."""
    split_s: float = Field(0.0, ge=0.0, le=1e9)
    """The same by time, seconds."""
    queue_mb: float = Field(256.0, gt=0.0, le=1e6)
    """What may wait for a slow disk, MB; what comes beyond is dropped and counted."""


class GroupSettings(Section):
    processes: Annotated[tuple[Literal["camera", "node", "watch", "record"], ...], *CommaSeparated] = (
        "camera",
        "node",
        "watch",
    )
    """What launch/start brings up, in this order; when one ends, all are taken down."""
    cameras: tuple[CameraSettings, ...] = ()
    """Several cameras, the n-th on the n-th of transport.frames; empty starts the one of [camera]."""
    restart: Literal["never", "on-failure"] = "never"
    """on-failure: a process that fails is started again, alone, after a growing pause."""
    grace_s: float = Field(3.0, gt=0.0, le=60.0)
    """Seconds that a process is given to end after SIGTERM, before it is killed."""


class Settings(BaseSettings):
    """Everything that a deployment may choose. Made by `load_settings`, or directly from sections alone."""

    model_config = SettingsConfigDict(
        env_prefix="SAM3_",
        env_nested_delimiter="__",
        extra="forbid",
        use_attribute_docstrings=True,
        frozen=True,
    )

    transport: TransportSettings = TransportSettings()
    camera: CameraSettings = CameraSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    tracker: TrackerSettings = TrackerSettings()
    detector: DetectorSettings = DetectorSettings()
    record: RecordSettings = RecordSettings()
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
        # load_settings lays the environment between the profile and the command line
        return (init_settings,)


class Option(NamedTuple):
    """One field of the tree: `name` is section.field, `default` as it is written, `help` its docstring."""

    name: str
    default: str
    help: str
    choices: tuple[str, ...]
    is_flag: bool
    is_text: bool


def options() -> Iterator[Option]:
    """Every field of the tree, in its order. Those that are not `is_text` can only be set in a profile."""
    for section, holder in Settings.model_fields.items():
        for name, field in holder.annotation.model_fields.items():  # type: ignore[union-attr]
            kind = field.annotation
            choices = tuple(kind.__args__) if get_origin(kind) is Literal else ()
            is_text = not (get_origin(kind) is tuple and kind.__args__[0] is CameraSettings)
            yield Option(
                f"{section}.{name}",
                _write(field.default),
                field.description or "",
                choices,
                kind is bool,
                is_text,
            )


def old_names() -> Iterator[str]:
    """Yield section.field of each old name that is still accepted."""
    for section, holder in Settings.model_fields.items():
        for name in holder.annotation.renamed:  # type: ignore[union-attr]
            yield f"{section}.{name}"


Layers = Mapping[str, Mapping[str, Any]]


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

    Relative paths in the profile are taken from its folder; others from the working directory.
    Raises SettingsError that names each wrong field as section.field, and where it was set.
    """
    layers = {f"in {profile}": _anchor(read_toml(profile), profile)} if profile is not None else {}
    layers |= {"in the environment": _environment(), "on the command line": _nest(overrides or {})}
    try:
        return Settings(**_merge({name: _rename(layer) for name, layer in layers.items()}))
    except ValidationError as error:
        raise SettingsError(_explain(error, layers)) from error


def _anchor(tree: dict[str, Any], profile: Path) -> dict[str, Any]:
    """Make the paths of a profile absolute: files, folders, and a name of weights such as ./weights."""
    folder = profile.absolute().parent
    cameras = tree.get("group", {}).get("cameras", []) if isinstance(tree.get("group"), dict) else []
    for camera in (tree.get("camera"), *(cameras if isinstance(cameras, list) else [])):
        if isinstance(camera, dict):
            _anchor_camera(camera, folder)
    for section in (tree.get("model"), tree.get("detector")):
        if isinstance(section, dict) and str(section.get("name")).startswith(("./", "../")):
            section["name"] = str(folder / section["name"])
    detector = tree.get("detector")
    for name in ("vocabulary", "text_encoder"):
        if isinstance(detector, dict) and isinstance(detector.get(name), str):
            detector[name] = str(folder / detector[name])
    record = tree.get("record")
    if isinstance(record, dict) and isinstance(record.get("out"), str):
        record["out"] = str(folder / record["out"])
    engine = tree.get("engine")
    if isinstance(engine, dict) and isinstance(engine.get("folder"), str):
        engine["folder"] = str(folder / Path(engine["folder"]).expanduser())
    return tree


def _anchor_camera(camera: dict[str, Any], folder: Path) -> None:
    calibration, source = camera.get("calibration"), camera.get("source")
    if isinstance(calibration, str):
        camera["calibration"] = str(folder / calibration)
    if isinstance(source, str) and source.startswith(("bag:", "video:")):
        scheme, _, path = source.partition(":")
        camera["source"] = f"{scheme}:{folder / path}"


def _environment() -> dict[str, Any]:
    try:
        return EnvSettingsSource(Settings)()
    except UndecodableError as error:
        raise SettingsError(f"settings in the environment: {error} ({error.__cause__})") from error


def _nest(overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for path, value in overrides.items():
        section, _, name = path.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def _rename(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Give the fields of a layer their present names, so that layers merge by them."""
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {
        name: section.with_present_names(fields)
        if isinstance(fields, Mapping) and (section := sections.get(name)) is not None
        else fields
        for name, fields in layer.items()
    }


def _merge(layers: Layers) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for layer in layers.values():
        for section, fields in layer.items():
            below = tree.get(section)
            if isinstance(below, Mapping) and isinstance(fields, Mapping):
                tree[section] = {**below, **fields}
            else:
                tree[section] = fields
    return tree


def _explain(error: ValidationError, layers: Layers) -> str:
    lines = []
    for item in error.errors():
        place, where = ".".join(map(str, item["loc"])), _origin(item["loc"], layers)
        lines.append(f"{place}: {item['msg']} (found {item['input']!r} {where})")
    return "settings do not validate: " + "; ".join(lines)


def _origin(place: tuple[int | str, ...], layers: Layers) -> str:
    """The uppermost layer that holds the section and field."""
    for name, layer in reversed(list(layers.items())):
        fields = layer.get(str(place[0]), {})
        if place[0] in layer and (len(place) == 1 or not isinstance(fields, Mapping) or place[1] in fields):
            return name
    return "by default"


def _write(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def table() -> str:
    """The configuration as a markdown table, for README."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for option in options():
        default = f"`{option.default}`" if option.default else ""
        rows.append(f"| `{option.name}` | {default} | {option.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
