"""The tree of all settings, and how a profile, the environment and the command line fill it.

The command line overrides the environment (SAM3_*), and the environment overrides the TOML profile. The string
under each field is its help text on the command line and in the documentation.
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
from pydantic_settings.exceptions import SettingsError as EnvironmentDecodeError

from .errors import SettingsError
from .types import ColourEncoding, Delivery, MaskEncoding


def _split(value: object) -> object:
    return tuple(filter(None, value.split(","))) if isinstance(value, str) else value


_WARNED_NAMES: set[str] = set()
_log = logging.getLogger(__name__)

CommaSeparated = (NoDecode, BeforeValidator(_split))  # the environment and the command line give "a,b"


class Section(BaseModel):
    """One section of the tree. A renamed field accepts its old name as an alias, see `renamed`."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, frozen=True
    )
    renamed: ClassVar[Mapping[str, str]] = {}
    """Maps the old name of each renamed field to its present name."""

    @model_validator(mode="before")
    @classmethod
    def _accept_old_names(cls, fields: object) -> object:
        return cls.with_current_names(fields) if isinstance(fields, Mapping) else fields

    @classmethod
    def with_current_names(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields under their current names. Log a warning once for each old name."""
        for old in fields.keys() & cls.renamed.keys() - _WARNED_NAMES:
            _WARNED_NAMES.add(old)
            _log.warning("setting %r was renamed: use %r", old, cls.renamed[old])
        return {cls.renamed.get(name, name): value for name, value in fields.items()}


class TransportSettings(Section):
    frames: Annotated[tuple[str, ...], *CommaSeparated, Field(min_length=1)] = ("tcp://127.0.0.1:5550",)
    """Frame endpoints, separated by commas. Each camera binds one, and the node connects to all of them."""
    masks: str = "tcp://127.0.0.1:5551"
    """Endpoint that the node binds to publish masks."""
    control: str = "tcp://127.0.0.1:5552"
    """Endpoint that the node binds to answer control requests."""
    delivery: Delivery = "newest"
    """newest: live; stale frames are skipped and counted. every: lossless, with back-pressure."""


class CameraSettings(Section):
    source: str = "scene:shapes"
    """Source of the frames: scene:tabletop, scene:shapes, bag:FILE, video:FILE or webcam:INDEX."""
    name: str = Field("cam0", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Name of the camera, used as the last part of its topics."""
    fps: float = Field(0.0, ge=0.0, le=1000.0)
    """Frames per second; 0 keeps the rate of the source."""
    width: int = Field(0, ge=0, le=16384)
    """Width in pixels to resize frames to; 0 keeps the width of the source."""
    height: int = Field(0, ge=0, le=16384)
    """Height in pixels to resize frames to; 0 keeps the height of the source."""
    encoding: ColourEncoding = "bgr8"
    """Encoding of the colour image: bgr8 takes no encoding time, jpeg about a tenth of the bytes."""
    jpeg_quality: int = Field(90, ge=1, le=100)
    """JPEG quality. Frames that are recorded as jpeg are sent unchanged."""
    calibration: Path | None = None
    """Calibration file (TOML, see calibration/example.toml). Each frame message carries its intrinsics."""
    loop: bool = False
    """Start a finite source again when it ends."""
    frames: int = Field(0, ge=0)
    """Stop after this many frames; 0 never stops."""


class ModelSettings(Section):
    name: str = "nano"
    """Weights: nano (bundled), a folder in the layout of transformers, or a hub name such as facebook/sam3."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device: auto, cpu, cuda or cuda:N. auto uses CUDA if it is available."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the arithmetic. auto is bfloat16 on CUDA and float32 on a CPU."""
    compile: bool = False
    """Compile the stages with torch.compile. The first minute is slower, later frames are faster."""
    threads: int = Field(0, ge=0, le=1024)
    """Number of CPU threads for the model; 0 lets torch choose."""
    image_size: int = Field(0, ge=0, le=4096)
    """Side in pixels of the square model input; 0: default of the weights. Smaller is faster and coarser."""


class EngineSettings(Section):
    renamed: ClassVar[Mapping[str, str]] = {"least_cosine": "min_cosine", "least_iou": "min_iou"}

    kind: Literal["torch", "tensorrt", "inductor"] = "torch"
    """Runtime of the model: torch, or engines of TensorRT or inductor made by `sam3-node engine build`."""
    precision: Literal["float32", "float16", "bfloat16", "fp8"] = "float16"
    """Data type of the engines. fp8 applies to the encoder only; the other stages then use float16."""
    folder: Path = Path("~/.cache/sam3_node/engines")
    """Folder of the engines and of the gate's report on each."""
    graphs: bool = False
    """On a GPU, capture the work of each frame in CUDA graphs."""
    fallback: bool = True
    """true: if no engine fits, run torch and name it in the model field of each message. false: refuse to start."""
    min_cosine: float = Field(0.99, gt=0.0, le=1.0)
    """Gate: reject a stage if the cosine similarity of its worst output to torch in float32 is below this."""
    min_iou: float = Field(0.95, gt=0.0, le=1.0)
    """Gate: reject engines if their mean mask IoU with torch in float32 over a tracked clip is below this."""


class TrackerSettings(Section):
    max_objects: int = Field(16, ge=1, le=256)
    """Maximum number of objects per camera. Memory for all of them is allocated at startup."""
    bank_size: int = Field(7, ge=2, le=240)
    """Frames remembered per object, including the conditioning frame. With selection recent, values above the model's 7
    change nothing."""
    selection: Literal["recent", "confident"] = "recent"
    """Remembered frames to attend to: recent (the newest, as the model), or confident (newest with confident masks)."""
    mask_encoding: MaskEncoding = "bits+zstd"
    """Encoding of masks in messages: bits+zstd (fast) or rle (COCO compressed counts)."""
    feature_cache: int = Field(4, ge=1, le=64)
    """Number of recent frames whose features are kept, so that prompts can name one of them."""
    min_confidence: float = Field(0.7, ge=0.0, le=1.0)
    """Confidence below which a mask is marked doubtful: 5 % wrong masks above it on the training clips. 0: never."""
    max_cameras: int = Field(4, ge=1, le=64)
    """Maximum number of cameras. Frames of others are counted and dropped. A camera silent for 10 s frees its slot."""


class DetectorSettings(Section):
    renamed: ClassVar[Mapping[str, str]] = {"doubt": "min_track_score", "lost_s": "max_lost_s"}

    kind: Literal["none", "yolo-world", "sam3-concept", "grounding-dino"] = "yolo-world"
    """Detector that finds objects by name. none: objects are added only by points, box or mask."""
    name: str = "nano"
    """Weights of the detector: nano (bundled, for yolo-world), a folder, or a hub name (for the other two kinds)."""
    prompts: Annotated[tuple[str, ...], *CommaSeparated] = ()
    """Names of objects to look for at startup, separated by commas. `sam3-node prompt` changes them live."""
    vocabulary: Path | None = None
    """Vocabulary file for yolo-world. Empty: use the file beside its weights."""
    text_encoder: Path | None = None
    """Folder of a CLIP text encoder for yolo-world phrases that the vocabulary lacks."""
    every: int = Field(5, ge=1, le=1000)
    """Detect on every N-th frame, when prompts change, and when an object's score drops below min_track_score."""
    score: float = Field(0.2, gt=0.0, lt=1.0)
    """Minimum score of a detection to start a new object. Half of it confirms an existing object."""
    min_track_score: float = Field(0.5, ge=0.0, le=1.0)
    """Minimum score of a tracked object to count as confident."""
    max_lost_s: float = Field(5.0, gt=0.0, le=3600.0)
    """Seconds to keep an object that was found by name while it has neither a confident mask nor a detection."""
    association: bool = True
    """true: detections also correct, recover and merge tracked objects. false: detections only start new objects."""


class RecordSettings(Section):
    out: Path = Path("recordings")
    """File NAME.mcap, or a folder. In a folder, each recording is named by its start time (UTC)."""
    cameras: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")], ...], *CommaSeparated
    ] = ()
    """Names of the cameras to record, separated by commas. Empty: record all."""
    split_mb: float = Field(0.0, ge=0.0, le=1e9)
    """Start a new file (NAME_0001.mcap, ...) after this many MB; 0 never does."""
    split_s: float = Field(0.0, ge=0.0, le=1e9)
    """Start a new file after this many seconds; 0 never does."""
    queue_mb: float = Field(256.0, gt=0.0, le=1e6)
    """Maximum size in MB of the queue to the disk. Messages beyond it are dropped and counted."""


class GroupSettings(Section):
    processes: Annotated[tuple[Literal["camera", "node", "watch", "record"], ...], *CommaSeparated] = (
        "camera",
        "node",
        "watch",
    )
    """Processes that launch/start starts, in this order. When one ends, all are stopped."""
    cameras: tuple[CameraSettings, ...] = ()
    """Several cameras; the n-th uses the n-th endpoint of transport.frames. Empty: start the camera of [camera]."""
    restart: Literal["never", "on-failure"] = "never"
    """on-failure: restart a failed process alone, after a pause that grows with each failure."""
    grace_s: float = Field(3.0, gt=0.0, le=60.0)
    """Seconds between SIGTERM and SIGKILL when processes are stopped."""


class Settings(BaseSettings):
    """All settings of a deployment. Create it with `load_settings`, or directly from sections."""

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
        # load_settings reads the environment itself, to merge it between the profile and the command line
        return (init_settings,)


class Option(NamedTuple):
    """One field of the tree: `name` is section.field, `default` is its text form, `help` its docstring.

    A profile can set every option. The environment and the command line can set those with `is_text`.
    """

    name: str
    default: str
    help: str
    choices: tuple[str, ...]
    is_flag: bool
    is_text: bool


def options() -> Iterator[Option]:
    """Yield an Option for each field of the tree, in order."""
    for section, holder in Settings.model_fields.items():
        for name, field in holder.annotation.model_fields.items():  # type: ignore[union-attr]
            kind = field.annotation
            choices = tuple(kind.__args__) if get_origin(kind) is Literal else ()
            is_text = not (get_origin(kind) is tuple and kind.__args__[0] is CameraSettings)
            default, help_text = _format_value(field.default), " ".join((field.description or "").split())
            yield Option(f"{section}.{name}", default, help_text, choices, kind is bool, is_text)


def old_names() -> Iterator[str]:
    """Yield each old name that is still accepted, as section.field."""
    for section, holder in Settings.model_fields.items():
        for name in holder.annotation.renamed:  # type: ignore[union-attr]
            yield f"{section}.{name}"


Layers = Mapping[str, Mapping[str, Any]]


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises SettingsError that names the file and the position of the fault."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error


def load_settings(profile: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Build the tree from a TOML profile, the environment and `overrides` ({"model.name": "nano", …}).

    Relative paths in the profile start at its folder; other relative paths start at the working directory.
    Raises SettingsError that names each wrong field as section.field, and the layer that set it.
    """
    layers = {f"in {profile}": _resolve_paths(read_toml(profile), profile)} if profile is not None else {}
    layers |= {"in the environment": _environment(), "on the command line": _nest(overrides or {})}
    try:
        return Settings(**_merge({name: _apply_current_names(layer) for name, layer in layers.items()}))
    except ValidationError as error:
        raise SettingsError(_explain(error, layers)) from error


def _resolve_paths(tree: dict[str, Any], profile: Path) -> dict[str, Any]:
    """Make the paths of a profile absolute: files, folders, and names of weights such as ./weights."""
    folder = profile.absolute().parent
    cameras = tree.get("group", {}).get("cameras", []) if isinstance(tree.get("group"), dict) else []
    for camera in (tree.get("camera"), *(cameras if isinstance(cameras, list) else [])):
        if isinstance(camera, dict):
            _resolve_camera_paths(camera, folder)
    for section in (tree.get("model"), tree.get("detector")):
        if isinstance(section, dict) and str(section.get("name")).startswith(("./", "../")):
            section["name"] = str(folder / section["name"])
    for name, field in (("detector", "vocabulary"), ("detector", "text_encoder"), ("record", "out")):
        section = tree.get(name)
        if isinstance(section, dict) and isinstance(section.get(field), str):
            section[field] = str(folder / section[field])
    engine = tree.get("engine")
    if isinstance(engine, dict) and isinstance(engine.get("folder"), str):
        engine["folder"] = str(folder / Path(engine["folder"]).expanduser())
    return tree


def _resolve_camera_paths(camera: dict[str, Any], folder: Path) -> None:
    calibration, source = camera.get("calibration"), camera.get("source")
    if isinstance(calibration, str):
        camera["calibration"] = str(folder / calibration)
    if isinstance(source, str) and source.startswith(("bag:", "video:")):
        scheme, _, path = source.partition(":")
        camera["source"] = f"{scheme}:{folder / path}"


def _environment() -> dict[str, Any]:
    try:
        return EnvSettingsSource(Settings)()
    except EnvironmentDecodeError as error:
        raise SettingsError(f"settings in the environment: {error} ({error.__cause__})") from error


def _nest(overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for path, value in overrides.items():
        section, _, name = path.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def _apply_current_names(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer with the current names of its fields, so that layers merge by name."""
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {
        name: section.with_current_names(fields)
        if isinstance(fields, Mapping) and (section := sections.get(name)) is not None
        else fields
        for name, fields in layer.items()
    }


def _merge(layers: Layers) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for layer in layers.values():
        for section, fields in layer.items():
            lower = tree.get(section)
            if isinstance(lower, Mapping) and isinstance(fields, Mapping):
                tree[section] = {**lower, **fields}
            else:
                tree[section] = fields
    return tree


def _explain(error: ValidationError, layers: Layers) -> str:
    lines = []
    for item in error.errors():
        field, layer = ".".join(map(str, item["loc"])), _find_layer(item["loc"], layers)
        lines.append(f"{field}: {item['msg']} (found {item['input']!r} {layer})")
    return "invalid settings: " + "; ".join(lines)


def _find_layer(location: tuple[int | str, ...], layers: Layers) -> str:
    """Return the name of the highest-priority layer that sets this section and field."""
    for name, layer in reversed(list(layers.items())):
        fields = layer.get(str(location[0]), {})
        names_field = len(location) == 1 or not isinstance(fields, Mapping) or location[1] in fields
        if location[0] in layer and names_field:
            return name
    return "by default"


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
