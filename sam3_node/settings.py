"""All settings of a deployment, and the layers that fill them: a profile, the environment and the command line.

The string under each field is its help on the command line and in the documentation. The command line overrides the
environment (SAM3_*), and the environment overrides the TOML profile.
"""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource, NoDecode
from pydantic_settings.exceptions import SettingsError as EnvironmentDecodeError

from .addresses import Address, are_same_endpoint, split_address
from .errors import SettingsError, did_you_mean
from .files import parse_toml, read_regular
from .schema.fields import MAX_THREADS
from .types import ColourEncoding, Delivery, MaskEncoding

Layers = Mapping[str, Mapping[str, object]]

MAX_TOML_BYTES = 4 << 20
"""Size of the largest TOML file that is read: profiles, calibrations, recipes. A larger one is refused."""
PREFIX = "SAM3_"
"""Beginning of the environment variables that are settings."""
DELIMITER = "__"
"""What stands between section and field: SAM3_SECTION__FIELD is the setting section.field."""
_SERVICE_LINK = r"_(SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
"""Ends of the variables that Kubernetes sets for a Service."""
MAX_DATASET_FPS = 240
"""Highest rate of a LeRobot dataset that is written, in rows per second."""
CAMERA_PATTERN = r"^\.*[A-Za-z0-9_-][A-Za-z0-9_.-]*$"
"""Names of cameras: letters, digits, _, . and -, and not of dots alone."""

DETECTOR_KINDS = ("none", "yolo-world", "sam3-concept", "grounding-dino", "onnx")
"""Kinds of detectors that this package has."""


def join_path(folder: Path | None, text: str) -> str:
    """Return a path with ~ as the home folder; a relative one of a profile starts at its `folder`. Empty stays so."""
    path = os.path.expanduser(text)
    if folder is None or not text:
        return path
    return str(folder / path)  # an absolute path stays as it is


def _join_weights(folder: Path | None, text: str) -> str:
    """Resolve ./weights, ../weights and ~/weights of a profile. Others are names, or whole paths."""
    if text.startswith(("./", "../", "~")):
        return join_path(folder, text)
    return text


def _join_source(folder: Path | None, text: str) -> str:
    """Resolve the path in the source of a camera. A name of a device stays."""
    scheme, _, path = text.partition(":")
    is_file = scheme in ("bag", "video", "images")
    # a recording of the SDK is a file, another source of realsense the serial number of a camera
    if scheme == "realsense" and path.endswith((".db3", ".bag")):
        is_file = True
    if not is_file:
        return text
    return f"{scheme}:{join_path(folder, path)}"


class _ProfileText(str):
    """A text of a profile, which knows the profile's folder."""

    folder: Path | None = None


def _place_texts(value: Any, folder: Path | None) -> Any:
    """Return a value of a profile whose texts know the folder of the profile."""
    if isinstance(value, str):
        value = _ProfileText(value)
        value.folder = folder
    elif isinstance(value, list):
        value = [_place_texts(item, folder) for item in value]
    elif isinstance(value, dict):
        value = {name: _place_texts(item, folder) for name, item in value.items()}
    return value


def _in_full(join: Callable[[Path | None, str], str] = join_path) -> BeforeValidator:
    """Return the validator of a path. `join` returns it in full: (folder of its profile or None, text)."""

    def place(value: Any) -> Any:
        # what is no text is left to the field's own type, whose error says what was expected
        if not isinstance(value, str | Path):
            return value
        return join(getattr(value, "folder", None), str(value))

    return BeforeValidator(place)


ProfilePath = Annotated[Path, _in_full()]
"""A path. In a profile, a relative one starts at the folder of the profile; elsewhere, at the working directory."""
OptionalProfilePath = Annotated[Path | None, BeforeValidator(lambda value: value or None), _in_full()]
"""The same; an empty text is None."""
WeightsName = Annotated[str, _in_full(_join_weights)]
"""A name of weights, or a path to them."""
SourceName = Annotated[str, _in_full(_join_source)]
"""A source of a camera, such as bag:FILE."""


class Section(BaseModel):
    """One section of the tree."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, frozen=True
    )


class HealthSettings(Section):
    bind: str = ""
    """Address and port of the node's /healthz, /readyz and /metrics, such as 127.0.0.1:9464; port 0 takes a free one.
    Empty: none. It has no authentication: use loopback, or a network that you trust."""
    deadline_s: float = Field(5.0, gt=0.0, le=86400.0)
    """The node counts as ready if it published masks of any camera within this many seconds."""


class MonitoringSettings(Section):
    otlp_endpoint: str = Field("", pattern=r"^(https?://\S+)?$")
    """OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318, for spans of frames and their stages,
    and of control requests; it needs the extra otel. Empty: none."""


class LoggingSettings(Section):
    format: Literal["text", "json"] = "text"
    """Format of the log on stderr. json: one object a line, with camera and seq where a line is about a frame."""
    limit: int = Field(20, ge=0, le=1_000_000)
    """Maximum number of lines of one kind in ten seconds. Further lines are counted, and the count is logged. 0: no
    limit."""


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    items = [item.strip() for item in value.split(",")]
    return tuple(_place_texts([item for item in items if item], getattr(value, "folder", None)))


def _check_container(numbers: tuple[float, ...]) -> tuple[float, ...]:
    if numbers and (len(numbers) != 7 or not all(map(math.isfinite, numbers)) or min(numbers[4:]) <= 0):
        raise ValueError(
            "expected x, y, z, yaw, length, width and depth, seven finite numbers of which the last three are above 0"
        )
    return numbers


CommaSeparated = (NoDecode, BeforeValidator(_split))  # the environment and the command line give "a,b"


class TransportSettings(Section):
    frames: Annotated[tuple[str, ...], *CommaSeparated, Field(min_length=1)] = ("tcp://127.0.0.1:5550",)
    """Frame endpoints, separated by commas. Each camera binds one, and the node connects to all of them."""
    masks: str = "tcp://127.0.0.1:5551"
    """Endpoint that the node binds to publish masks."""
    control: str = "tcp://127.0.0.1:5552"
    """Endpoint that the node binds to answer control requests."""
    delivery: Delivery = "newest"
    """newest: live; stale frames are skipped and counted. every: lossless, with back-pressure."""
    keys: OptionalProfilePath = None
    """Folder of keys, made by `sam3-node keys new`. All sockets are then encrypted and admit only authorised keys.
    Empty: plain sockets, on this machine only."""
    key: str = ""
    """Name of this process's own key in that folder. Empty: the only key of the role that the process needs."""
    camera_keys: Annotated[tuple[str, ...], *CommaSeparated] = ()
    """Names of the keys of the cameras, in the order of transport.frames. Empty: the only key of role camera."""
    insecure: bool = False
    """true: bind addresses that other machines reach, without keys. Anyone on the network can then see the frames and
    control the node."""

    def require_newest(self, command: str) -> None:
        """Raise SettingsError for lossless delivery, with which a command would take messages from their receivers."""
        if self.delivery != "newest":
            raise SettingsError(
                f"{command} needs transport.delivery = 'newest': with 'every' each message goes to one receiver, and "
                f"{command} would take frames from the node and masks from the policy"
            )


def read_address(setting: str, text: str, example: str) -> Address:
    """Return the parts of HOST:PORT, the value of a setting. Raises SettingsError for anything else."""
    if (address := split_address(text)) is None:
        raise SettingsError(f"{setting}: expected HOST:PORT such as {example}, found {text!r:.80}")
    return address


class CameraSettings(Section):
    source: SourceName = "scene:shapes"
    """Source of the frames: scene:tabletop, scene:shapes, bag:FILE, video:FILE, images:FOLDER, realsense:SERIAL,
    rtsp://HOST/PATH, v4l2:NAME or webcam:INDEX; with camera.dialect, tcp://HOST:PORT of a camera server."""
    dialect: Literal["none", "groot", "lerobot", "imagezmq", "imagezmq-hub", "jpeg"] = "none"
    """Protocol of a camera server of another project: GR00T's whole-body camera server, lerobot's ImageServer, imagezmq
    in PUB/SUB mode. imagezmq-hub binds the source's address for senders in REQ/REP mode, and answers them. jpeg: any
    publisher of JPEGs or PNGs, one a message, alone or after a topic."""
    swap_red_blue: Literal["auto", "yes", "no"] = "auto"
    """Exchange red and blue in the images of a camera server. auto: as the dialect's servers need it."""
    name: str = Field("cam0", max_length=64, pattern=CAMERA_PATTERN)
    """Name of the camera, used as the last part of its topics."""
    fps: float = Field(0.0, ge=0.0, le=1000.0)
    """Frames per second; 0 keeps the rate of the source."""
    width: int = Field(0, ge=0, le=16384)
    """Width in pixels to resize frames to; 0 keeps the width of the source."""
    height: int = Field(0, ge=0, le=16384)
    """Height in pixels to resize frames to; 0 keeps the height of the source."""
    encoding: ColourEncoding = "bgr8"
    """Encoding of the colour image: bgr8 takes no encoding time, jpeg about a tenth of the bytes. h264 is a video of
    `bit_rate_mbps`, for networks; it needs PyAV (extra `bags`) at both ends."""
    jpeg_quality: int = Field(90, ge=1, le=100)
    """JPEG quality. Frames recorded as jpeg are sent unchanged."""
    bit_rate_mbps: float = Field(6.0, ge=0.1, le=200.0)
    """Rate of a video in h264, in Mbit/s."""
    depth: bool = True
    """Send depth, aligned to colour, if a RealSense camera has it. Recordings always keep their depth."""
    exposure_ms: float = Field(0.0, ge=0.0, le=10_000.0)
    """Exposure of the colour image of a RealSense or V4L2 camera in ms; 0: automatic."""
    depth_exposure_ms: float = Field(0.0, ge=0.0, le=10_000.0)
    """Exposure of the depth image of a RealSense camera in ms; 0: automatic."""
    emitter: Literal["keep", "on", "off"] = "keep"
    """Infrared projector of a RealSense camera; keep: as the camera has it."""
    preset: Literal["keep", "default", "hand", "high_accuracy", "high_density", "medium_density"] = "keep"
    """Visual preset of the depth of a RealSense D400 camera; keep: as the camera has it."""
    calibration: OptionalProfilePath = None
    """Calibration file (TOML, see calibration/example.toml). Each frame message carries its intrinsics."""
    loop: bool = False
    """Start a finite source again when it ends."""
    wait: bool = True
    """Start a finite source when a node receives its frames. false: start it at once."""
    frames: int = Field(0, ge=0)
    """Stop after this many frames; 0 never stops."""
    robot: str = ""
    """Endpoint on which the poses and joints of a recording of this package are published beside its frames, for
    spatial.poses of the node. Empty: none."""


class ModelSettings(Section):
    name: WeightsName = "nano"
    """Weights: nano (bundled), a folder in the layout of transformers, or a hub name such as facebook/sam3."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device: auto, cpu, cuda or cuda:N. auto uses CUDA if it is available."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the arithmetic. auto: on a GPU with units for bfloat16 that, on others float32, or the engines' own
    type if engine.kind names engines. On a CPU it is bfloat16 if the CPU computes it in hardware and the masks on the
    bundled recording agree with float32's (mean IoU 0.97), which the first start checks; else float32."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the stages with torch.compile: the first start takes a minute or more longer. auto: false, unless
    `sam3-node tune` has found it faster on this machine."""
    threads: int = Field(0, ge=0, le=MAX_THREADS)
    """CPU threads of a step. 0: a node chooses, while it runs, by the times of its steps and what other processes leave
    idle; a replay takes all."""
    image_size: int = Field(0, ge=0, le=4096)
    """Side in pixels of the square model input; 0: default of the weights. Smaller is faster and coarser."""


class EngineSettings(Section):
    kind: Literal["torch", "tensorrt", "inductor"] = "torch"
    """Runtime of the model: torch, or engines of TensorRT or inductor made by `sam3-node engine build`."""
    precision: Literal["auto", "float32", "float16", "bfloat16", "fp8"] = "auto"
    """Data type of the engines. fp8 applies to the linear layers of the encoder only; all else then uses bfloat16.
    auto: bfloat16; for kind torch on a GPU fp8, if there are scales and `sam3-node tune` has found it faster."""
    folder: ProfilePath = Path("~/.cache/sam3_node/engines")
    """Folder of the engines and of the gate's report on each."""
    scales: OptionalProfilePath = None
    """For kind torch and precision fp8 or auto: scales of the encoder, made by `sam3-node calibrate fp8`."""
    recipe: OptionalProfilePath = None
    """For kind torch and precision fp8: recipe of the layers to quantise. Empty: all linear layers but the patches'."""
    read_kernel: Literal["auto", "torch", "triton"] = "auto"
    """For kind torch on a GPU: kernels of the memory read. triton: this project's own, once a start has compared them
    with float32. auto: triton for SAM 2 and 3 in half precision on GPUs with units for bfloat16, else torch."""
    graphs: bool | Literal["auto"] = "auto"
    """On a GPU, capture the work of each frame in CUDA graphs. auto: true for kind torch on an NVIDIA GPU, unless
    `sam3-node tune` has found it slower."""
    fallback: bool = True
    """true: if no engine fits, run torch and name it in the model field of each message. false: refuse to start."""
    min_cosine: float = Field(0.99, gt=0.0, le=1.0)
    """Gate: reject a stage if the cosine similarity of its worst output to torch in float32 is below this."""
    min_iou: float = Field(0.95, gt=0.0, le=1.0)
    """Gate: reject engines if their mean mask IoU with torch in float32 over a tracked clip is below this."""
    max_time: float = Field(1.1, ge=0.0, le=1000.0)
    """Gate: reject engines or FP8 that take more than this times as long as torch on this machine. The part
    above 1 is for the noise of the measurement. 0: serve them however long they take."""

    @property
    def arithmetic(self) -> str:
        """The precision of engines: bfloat16 for auto."""
        if self.precision == "auto":
            return "bfloat16"
        return self.precision


class TrackerSettings(Section):
    max_objects: int = Field(16, ge=1, le=256)
    """Maximum number of objects per camera. Memory for all of them is allocated at startup."""
    bank_size: int = Field(7, ge=2, le=240)
    """Frames remembered per object, including the conditioning frame. With selection recent, more than the model's 7
    changes nothing."""
    selection: Literal["recent", "confident", "distractor"] = "recent"
    """Remembered frames to attend to: recent (the newest, as in the model), confident (the newest with confident
    masks), or distractor (the newest, and the last that told the object from a look-alike)."""
    read: Literal["exact", "pooled", "sparse"] = "exact"
    """Attention to memories, with engine.kind torch: exact (as in the model), or approximations with less than half the
    arithmetic: pooled (older frames at half their resolution), sparse (a quarter of the positions of older frames)."""
    window: Literal["off", "auto"] = "off"
    """Follow up to 4 objects of a camera in windows that go with them, too, each of which takes about as long as a
    frame with one object: off, or auto (for small model inputs; live, as many as the rate of the camera allows)."""
    mask_encoding: MaskEncoding = "bits+zstd"
    """Encoding of masks in messages: bits+zstd (fast) or rle (COCO compressed counts)."""
    feature_cache: int = Field(4, ge=1, le=64)
    """Minimum number of recent frames whose features are kept, whatever their age and size."""
    feature_cache_s: float = Field(2.0, ge=0.0, le=3600.0)
    """Seconds of recent frames of each camera whose features are kept. A prompt can name one of these frames, and its
    object catches up from there."""
    feature_cache_mb: float = Field(1024.0, ge=0.0, le=1e6)
    """Maximum memory in MB for the kept features of one camera. The host keeps them if the GPU has less than 16 times
    this memory."""
    min_confidence: float = Field(0.91, ge=0.0, le=1.0)
    """Confidence below which a mask is marked doubtful: at most 5 % wrong masks above it on each of the training and
    test sets. 0: never."""
    hide_below: float = Field(0.1, ge=0.0, le=1.0)
    """Confidence below which the node withholds a mask and marks the object occluded. 0: never. Only for weights that
    the confidence is calibrated for."""
    everything_min_iou: float = Field(0.0, ge=0.0, le=1.0)
    """Lowest IoU that the model may predict for a mask of segment-everything and replay --everything. 0: the model's
    own limit, 0.5 for nano, 0.8 for SAM 2 and EdgeTAM, 0.88 for others."""
    everything_min_stability: float = Field(0.0, ge=0.0, le=1.0)
    """Lowest stability of such a mask, its IoU at logits -1 and +1. 0: the model's own limit, 0.5 for nano, 0.95 for
    others."""
    link_distance_m: float = Field(0.0, ge=0.0, le=10.0)
    """Link objects of several calibrated cameras by a world_id if label and size agree and their positions in the base
    frame are at most this far apart, in metres; 0 links none."""
    exclude_robot: bool = True
    """true: with robot.urdf, masks leave out the robot, and what it covers is not lost."""
    recall: bool = True
    """true: know objects by their looks again when they come back into view, also after they were lost."""
    remember: int = Field(64, ge=0, le=1024)
    """Number of lost objects of each camera that are remembered, with their place and looks. 0: none."""
    remember_s: float = Field(3600.0, gt=0.0, le=1e7)
    """Seconds for which a lost object is remembered."""
    pictures: bool = True
    """true: keep a small picture of each object, for `where`. It may show people; snapshots contain it."""
    max_cameras: int = Field(4, ge=1, le=64)
    """Maximum number of cameras. Frames of further cameras are counted and skipped. A camera silent for 10 s frees its
    slot."""
    max_age_ms: float = Field(1000.0, ge=0.0, le=1e9)
    """Skip frames that are older than this when their step starts, and withhold masks that are older than this plus
    three median steps. 0 uses frames of any age. Live delivery only. An age counts from the capture if the camera's
    clock is system, else from the arrival."""
    max_prompt_age_s: float = Field(10.0, ge=0.0, le=1e6)
    """Reject prompts on a frame that is older than this. 0 accepts frames of any age. Live delivery only."""
    max_frame_pixels: int = Field(8192 * 8192, ge=1, le=16384 * 16384)
    """Maximum number of pixels of a frame. Larger frames, and compressed ones that decode slower, are rejected."""


class DeadlineSettings(Section):
    budget_ms: float = Field(0.0, ge=0.0, le=60_000.0)
    """Longest time in ms from the arrival of a frame to the publication of its masks. While frames take longer, the
    node first detects by name less often, then tracks objects of low priority on every second frame. 0: no budget.
    Live delivery only."""


class DetectorSettings(Section):
    kind: Annotated[str, Field(pattern=CAMERA_PATTERN, max_length=64, examples=list(DETECTOR_KINDS))] = (
        "yolo-world"
    )
    """Detector that finds objects by name. none: objects are added only by points, box or mask. Any other name is that
    of a detector of your own, which an installed package offers."""
    name: WeightsName = "nano"
    """Weights of the detector: nano (bundled, for yolo-world), a folder, a hub name (for sam3-concept and
    grounding-dino), or an ONNX file (for onnx). A detector of your own gets this text."""
    prompts: Annotated[tuple[str, ...], *CommaSeparated] = ()
    """Names of objects to look for at startup, separated by commas. `sam3-node prompt` changes them live."""
    vocabulary: OptionalProfilePath = None
    """Vocabulary file for yolo-world. Empty: use the file beside its weights."""
    text_encoder: OptionalProfilePath = None
    """Folder of a CLIP text encoder for yolo-world phrases that the vocabulary lacks."""
    every: int = Field(5, ge=1, le=1000)
    """Detect on every N-th frame, when prompts change, and when an object's score drops below min_track_score."""
    score: float = Field(0.2, gt=0.0, lt=1.0)
    """Minimum score of a detection to start a new object. Half of it confirms an existing object."""
    max_ms: float = Field(500.0, ge=0.0, le=60_000.0)
    """Longest time in ms that a frame waits for a detector of kind onnx, or of your own; it then has masks without
    detections. 0 waits for the end. Live delivery only."""
    text_score: float = Field(0.0, ge=0.0, lt=1.0)
    """For grounding-dino: score that each token of a name must exceed, transformers' text_threshold. 0: the best token
    alone decides, so a blue mug may be found as red mug."""
    min_track_score: float = Field(0.5, ge=0.0, le=1.0)
    """Minimum score of a tracked object to count as confident."""
    max_lost_s: float = Field(5.0, gt=0.0, le=3600.0)
    """Seconds to keep an object that was found by name while it has neither a confident mask nor a detection."""
    min_name_confidence: float = Field(0.9, ge=0.0, le=1.0)
    """Confidence of a name below which a mask is marked doubtful. 0: never. It holds for the bundled detector, and for
    others with `name_calibration`."""
    name_calibration: OptionalProfilePath = None
    """How sure names of this detector are, made by `sam3-node calibrate names`. Empty: as fitted to the bundled one."""
    association: bool = True
    """true: detections also correct, recover and merge tracked objects. false: detections only start new objects."""


class SpatialSettings(Section):
    calibration: Annotated[tuple[ProfilePath, ...], *CommaSeparated] = ()
    """Calibration files, separated by commas; each applies to the camera that it names, or to the first other one if
    it names none. They give positions in the robot's base, and replace the intrinsics and the depth scale of the
    frames."""
    poses: str = ""
    """Endpoint of the robot's poses, such as tcp://127.0.0.1:5553, for cameras on the gripper, and of its joints.
    Empty: none."""
    max_pose_gap_ms: float = Field(100.0, gt=0.0, le=10_000.0)
    """Longest time between the two poses before and after an image."""
    max_pose_ahead_ms: float = Field(20.0, ge=0.0, le=1000.0)
    """Longest time from the last pose to an image. The pose is extrapolated to the image at constant velocity."""
    points: int = Field(0, ge=0, le=2000)
    """Number of surface points of each instance in the masks messages; 0: none."""
    table: bool = False
    """true: measure the table, and each object's height above it and upright box, in the robot's base."""

    container: Annotated[tuple[float, ...], *CommaSeparated, AfterValidator(_check_container)] = ()
    """Container of the planning scene, such as a bin, in the robot's base: x, y and z of the middle of its floor, yaw
    in degrees, then length, width and depth of its inside, in metres, separated by commas. Empty: look for its rim."""


class RobotSettings(Section):
    urdf: OptionalProfilePath = None
    """URDF of the robot whose pixels are found, by its joints at spatial.poses. Empty: none."""
    name: str = Field("robot", max_length=64, pattern=CAMERA_PATTERN)
    """Name in the topic of its joints, joints/NAME."""
    base: str = ""
    """Link that is the calibrations' base. Empty: the root."""
    depth_margin_m: float = Field(0.03, ge=0.0, le=1.0)
    """With depth: distance from its bodies, in metres, up to which a point is the robot's."""


def describe_robot_gaps(robot: RobotSettings, spatial: SpatialSettings) -> tuple[str, ...]:
    """Return what keeps a live node from finding the robot's pixels, a sentence for each setting that lacks."""
    gaps = []
    if robot.urdf is not None and not spatial.poses:
        gaps.append(
            "robot.urdf: expected the robot's joints at spatial.poses, found no endpoint there; without joints no pixel"
            " of the robot is found: set --spatial.poses"
        )
    if robot.urdf is not None and not spatial.calibration:
        gaps.append(
            "robot.urdf: expected a calibration with hand_eye in spatial.calibration, found none; without the camera's"
            " place no pixel of the robot is found: make one with sam3-node calibrate hand-eye"
        )
    return tuple(gaps)


class RecordSettings(Section):
    out: ProfilePath = Path("recordings")
    """File NAME.mcap, or a folder. In a folder, each recording is named by its start time (UTC)."""
    cameras: Annotated[
        tuple[Annotated[str, Field(max_length=64, pattern=CAMERA_PATTERN)], ...], *CommaSeparated
    ] = ()
    """Names of the cameras to record, separated by commas. Empty: record all."""
    split_mb: float = Field(0.0, ge=0.0, le=1e9)
    """Start a new file (NAME_0001.mcap, ...) after this many MB; 0 never does."""
    split_s: float = Field(0.0, ge=0.0, le=1e9)
    """Start a new file after this many seconds; 0 never does."""
    queue_mb: float = Field(256.0, gt=0.0, le=1e6)
    """Maximum size in MB of the queue to the disk. Further messages are dropped and counted."""
    colour: Literal["raw", "jpeg", "png"] = "raw"
    """Format of colour that arrives raw. raw: as received. png: the same pixels. jpeg: smaller, but not bit-exact."""
    max_total_gb: float = Field(0.0, ge=0.0, le=1e9)
    """Delete the oldest recordings of this output beyond this many GB in total; 0 never does."""
    max_age_h: float = Field(0.0, ge=0.0, le=1e6)
    """Delete recordings of this output that are older than this many hours; 0 never does."""
    ring_s: float = Field(0.0, ge=0.0, le=86400.0)
    """Keep this many seconds in memory, and write them only at SIGUSR1 or Enter; 0 writes everything."""
    ring_mb: float = Field(1024.0, gt=0.0, le=1e6)
    """Maximum memory of the ring in MB. Beyond it, the oldest messages are dropped."""
    after_s: float = Field(10.0, ge=0.0, le=86400.0)
    """Seconds after a trigger that are written with the ring."""


class LeRobotSettings(Section):
    folder: OptionalProfilePath = None
    """Folder of the LeRobot dataset to which `record` and `convert` append episodes. Empty: none."""
    version: Literal["", "3.0", "2.1"] = ""
    """Version of the dataset. Empty: its own, 3.0 for a new one. 2.1 has what GR00T reads, also masks as integers."""
    fps: int = Field(0, ge=0, le=MAX_DATASET_FPS)
    """Rows per second. 0: those of the dataset, or for a new one the whole frames per second of its slowest camera."""
    task: str = Field("", max_length=200)
    """Task of episodes that were begun without one. Empty: the names that were looked for."""
    pictures: Literal["video", "png"] = "video"
    """How the frames of cameras are stored. video: H.264. png: in the tables, without loss, and many times larger."""
    objects: int = Field(8, ge=1, le=64)
    """Objects of a camera in an episode that have numbers (confidence, doubtful) beside their pixels."""
    max_gap_s: float = Field(0.25, gt=0.0, le=60.0)
    """Longest time in seconds from a row to its frame, joints or action. Episodes with a longer one are left out."""


class SnapshotSettings(Section):
    path: OptionalProfilePath = None
    """File of the snapshot from which a restarted node continues with the same objects and ids. In memory, such as
    below /run, it survives a crash of the node; on a disk, a crash of the machine too. Empty: none."""
    every_s: float = Field(2.0, gt=0.0, le=86400.0)
    """Seconds between two snapshots: the largest loss when the node is killed."""
    max_age_s: float = Field(60.0, ge=0.0, le=1e9)
    """Age in seconds up to which the node restores the snapshot at its start: later, things have moved. 0: any age."""
    confirm_s: float = Field(10.0, gt=0.0, le=3600.0)
    """Seconds that a node waits for its successor's confirmation before it keeps serving, and that the successor asks
    for the answer to its confirmation before it begins new ids."""


class ConsoleSettings(Section):
    bind: str = "127.0.0.1:8460"
    """Address and port of the console's page. Any address but loopback needs certificate and key, and the page then
    needs the token that the console prints."""
    certificate: OptionalProfilePath = None
    """TLS certificate, a PEM file with its chain."""
    key: OptionalProfilePath = None
    """Private key of the certificate, a PEM file."""
    token: bool = False
    """Also ask for the token on loopback: other users of this machine could open the page."""
    read_only: bool = False
    """Show pictures and masks, and refuse whatever would change the node."""


class BridgeSettings(Section):
    bind: str = "127.0.0.1:8765"
    """Address and port of the Foxglove bridge. Any address but loopback needs bridge.insecure."""
    insecure: bool = False
    """true: serve the Foxglove bridge to other machines, without encryption and to anyone who connects."""


class GroupSettings(Section):
    processes: Annotated[
        tuple[Literal["camera", "node", "watch", "record", "console"], ...], *CommaSeparated
    ] = ("camera", "node", "watch")
    """Processes that launch/start starts, in this order. When a camera or the node ends, it stops all. Without a
    watch, record or console that has ended, the others go on, and the node's status says so."""
    cameras: tuple[CameraSettings, ...] = ()
    """Several cameras; the n-th uses the n-th endpoint of transport.frames. Empty: start the camera of [camera]."""
    restart: Literal["never", "on-failure"] = "never"
    """on-failure: restart a failed process alone, after a pause that grows with each failure."""
    grace_s: float = Field(3.0, gt=0.0, le=60.0)
    """Seconds between SIGTERM and SIGKILL when processes are stopped."""
    watchdog_s: float = Field(10.0, ge=0.0, le=86400.0)
    """Seconds of silence after which launch/start kills a hung camera, node or recorder, as if it had failed; 0:
    never."""
    hang_s: float = Field(600.0, gt=0.0, le=86400.0)
    """Seconds without progress after which the main loop of a process counts as hung. The first frame must take less,
    even if it compiles a model; so must each request, and each step with model.compile."""
    hang_step_s: float = Field(8.0, gt=0.0, le=86400.0)
    """Seconds after which a later step of the node counts as hung, or ten times the median of the last 25 steps if that
    is more."""


class Settings(BaseModel):
    """All settings of a deployment. Create it with `load_settings`, or directly from sections."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    transport: TransportSettings = TransportSettings()
    camera: CameraSettings = CameraSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    tracker: TrackerSettings = TrackerSettings()
    deadline: DeadlineSettings = DeadlineSettings()
    detector: DetectorSettings = DetectorSettings()
    spatial: SpatialSettings = SpatialSettings()
    robot: RobotSettings = RobotSettings()
    record: RecordSettings = RecordSettings()
    lerobot: LeRobotSettings = LeRobotSettings()
    snapshot: SnapshotSettings = SnapshotSettings()
    console: ConsoleSettings = ConsoleSettings()
    bridge: BridgeSettings = BridgeSettings()
    group: GroupSettings = GroupSettings()
    health: HealthSettings = HealthSettings()
    monitoring: MonitoringSettings = MonitoringSettings()
    logging: LoggingSettings = LoggingSettings()


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
            # examples are those of a field that takes other names, too
            is_closed = get_origin(kind) is Literal
            choices = tuple(kind.__args__) if is_closed else tuple(map(str, field.examples or ()))
            # a list of cameras is a list of tables, which no text gives
            is_text = not (get_origin(kind) is tuple and kind.__args__[0] is CameraSettings)
            default = _format_value(field.default)
            help_text = " ".join((field.description or "").split())
            yield Option(f"{section}.{name}", default, help_text, choices, kind is bool, is_text)


def _format_value(value: object) -> str:
    # as TOML and the command line write it
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def read_toml(path: Path) -> Mapping[str, object]:
    """Parse a TOML file. Raises SettingsError that names the file and the position of the fault."""
    try:
        return parse_toml(read_regular(path, MAX_TOML_BYTES))
    except OSError as error:
        nearest = did_you_mean(path, map(str, path.parent.glob("*.toml")))
        raise SettingsError(f"cannot read {path}: {error.strerror}{nearest}") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error


def load_settings(profile: Path | None = None, overrides: Mapping[str, object] | None = None) -> Settings:
    """Build the tree from a TOML profile, the environment and `overrides` ({"model.name": "nano", …}).

    Relative paths in the profile start at its folder; other relative paths start at the working directory.
    Raises SettingsError that names each wrong field as section.field, and the layer that set it.
    """
    # from the lowest layer to the highest, each with the name that errors give it
    layers: dict[str, Mapping[str, object]] = {}
    if profile is not None:
        layers[f"in {profile}"] = _place_texts(read_toml(profile), profile.absolute().parent)
    layers |= {"in the environment": _environment(), "on the command line": _nest(overrides or {})}
    try:
        settings = Settings(**_merge(layers))
    except ValidationError as error:
        raise SettingsError(_explain(error, layers)) from error
    _check_endpoints(settings)
    return settings


def _check_endpoints(settings: Settings) -> None:
    """Raise SettingsError if two settings name the same endpoint: one process would take it from the other."""
    transport = settings.transport
    named = [("transport.frames", endpoint) for endpoint in transport.frames]
    named += [("transport.masks", transport.masks), ("transport.control", transport.control)]
    named += [("spatial.poses", settings.spatial.poses)]
    for (name, endpoint), (other_name, other) in itertools.combinations(named, 2):
        if name != other_name and are_same_endpoint(endpoint, other):
            raise SettingsError(
                f"{name} and {other_name}: expected an endpoint each, found {endpoint} and {other}, which are the same;"
                " choose another port or path for one of them"
            )


def _environment() -> Mapping[str, object]:
    _check_variables(os.environ)
    try:
        source = EnvSettingsSource(Settings, env_prefix=PREFIX, env_nested_delimiter=DELIMITER)  # type: ignore[arg-type]
        return source()
    except EnvironmentDecodeError as error:
        # the rest names a class of pydantic
        said = str(error).partition(" from source")[0]
        raise SettingsError(f"settings in the environment: {said} ({error.__cause__})") from error


def _check_variables(environment: Iterable[str]) -> None:
    """Raise SettingsError for a variable that starts with SAM3_ and is neither a setting nor a section."""
    # a misspelt variable would otherwise be no setting at all, and nobody would notice
    names = [*(option.name for option in options()), *Settings.model_fields]
    variables = {f"{PREFIX}{name.replace('.', DELIMITER)}".upper() for name in names}
    found = {variable for variable in environment if variable.upper().startswith(PREFIX)}
    # Kubernetes adds variables for each Service of the namespace, such as one that is named sam3-node
    for variable in sorted(found - _find_service_links(found)):
        if variable.upper() not in variables:
            raise SettingsError(
                f"environment variable {variable}: no setting has this name{did_you_mean(variable, sorted(variables))}"
            )


def _find_service_links(variables: Set[str]) -> Set[str]:
    """Return the variables that Kubernetes or Docker set for a Service, of which both the host and the port are set."""
    services = []
    for variable in variables:
        service = variable.removesuffix("_SERVICE_HOST")
        if service != variable and f"{service}_SERVICE_PORT" in variables:
            services.append(re.escape(service))
    links = re.compile(rf"({'|'.join(services)}){_SERVICE_LINK}")
    return {variable for variable in variables if services and links.fullmatch(variable)}


def _nest(overrides: Mapping[str, object]) -> Mapping[str, object]:
    tree: dict[str, dict[str, object]] = {}
    for path, value in overrides.items():
        section, _, name = path.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def _merge(layers: Layers) -> Mapping[str, object]:
    tree: dict[str, object] = {}
    for layer in layers.values():
        for section, fields in layer.items():
            # a section is merged field by field; a higher layer replaces a whole field
            lower = tree.get(section)
            if isinstance(lower, Mapping) and isinstance(fields, Mapping):
                tree[section] = {**lower, **fields}
            else:
                tree[section] = fields
    return tree


def _explain(error: ValidationError, layers: Layers) -> str:
    lines = []
    for item in error.errors():
        message = describe_fault(item)
        if item["type"] == "extra_forbidden":
            message = "no setting has this name"
        field = ".".join(map(str, item["loc"]))
        layer = _find_layer(item["loc"], layers)
        lines.append(f"{field}: {message}{_find_nearest(item)} (found {item['input']!r} {layer})")
    return "invalid settings: " + "; ".join(lines)


def describe_fault(item: ErrorDetails) -> str:
    """Say what a wrong field should be, without the names of classes that pydantic gives."""
    if item["type"] in ("model_type", "dataclass_type"):
        return "expected a table of fields"
    return item["msg"].removeprefix("Value error, ")


def describe_faults(error: Exception) -> str:
    """Describe each wrong field of a file: what it should be and what was found; other errors as they say it."""
    if not isinstance(error, ValidationError):
        return str(error)
    faults = []
    for item in error.errors():
        field = ".".join(map(str, item["loc"])) or "the whole"
        faults.append(f"{field}: {describe_fault(item)} (found {str(item['input'])[:80]!r})")
    return "; ".join(faults)


def _find_nearest(item: ErrorDetails) -> str:
    """Return "; did you mean NAME?" for an unknown setting or an unknown choice of one, else ""."""
    *parents, name = map(str, item["loc"])
    # pydantic lists the choices in its message, each in quotes
    if item["type"] == "literal_error":
        return did_you_mean(item["input"], re.findall(r"'([^']*)'", item["ctx"]["expected"]))
    if item["type"] != "extra_forbidden":
        return ""
    if not parents:
        return did_you_mean(name, Settings.model_fields)
    section: Any = Settings.model_fields[parents[0]].annotation
    if len(parents) > 1:  # group.cameras.INDEX
        section = CameraSettings
    siblings = list(section.model_fields)
    # the same field of another section is the likeliest meaning
    elsewhere = [option.name for option in options() if option.name.endswith(f".{name}")]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return did_you_mean(name, siblings)


def _find_layer(location: tuple[int | str, ...], layers: Layers) -> str:
    """Return the name of the highest-priority layer that sets this section and field."""
    # the highest layer that sets a field has decided its value
    for name, layer in reversed(list(layers.items())):
        fields = layer.get(str(location[0]), {})
        # a layer may set the whole section, or this field of it
        names_field = len(location) == 1 or not isinstance(fields, Mapping) or location[1] in fields
        if location[0] in layer and names_field:
            return name
    return "by default"
