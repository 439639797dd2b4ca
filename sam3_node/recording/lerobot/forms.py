"""The JSON and the rows of a LeRobot dataset, as types of the maps that are written."""

from typing import NotRequired, TypedDict

from ...schema.fields import Natural, Side

VideoInfo = TypedDict(
    "VideoInfo",
    {
        "video.height": int,
        "video.width": int,
        "video.codec": str,
        "video.pix_fmt": str,
        "video.is_depth_map": bool,
        "video.fps": int,
        "video.channels": int,
        "has_audio": bool,
    },
)
"""The description of a video that lerobot stores in its feature."""


class Feature(TypedDict):
    """A feature: a column of the table, or a video."""

    dtype: str
    shape: list[Side]
    names: NotRequired[list[str] | None]
    info: NotRequired[VideoInfo]


Features = dict[str, Feature]
"""Features of a dataset as its info.json describes them, by their names."""
Cells = dict[str, object]
"""A row of a table, by the names of the columns, which follow from the dataset's features."""


class PictureCell(TypedDict):
    """A cell of a table that is a picture. `path` would be that of a file of its own."""

    bytes: bytes
    path: None


class ObjectRow(TypedDict):
    """An object of an episode and camera, whose pixels have the number `index`."""

    episode: Natural
    camera: str
    index: Natural
    id: Natural
    label: str
    doubtful: NotRequired[list[list[Natural]]]
    """Runs [first, last] of rows on which the object was doubtful"""


class MaskNames(TypedDict):
    """What the pixels of the masks are."""

    channels: tuple[str, ...]
    labels: dict[int, str]
    """Labels by their numbers"""
    objects: list[ObjectRow]
    frames_without_masks: dict[int, int]
    """Number of frames without masks, by episode"""
    regions: NotRequired[dict[int, str]]
    """Numbers of the pixels of GR00T's masks"""


class CameraGaps(TypedDict):
    """What was done about frames of a camera that are absent or too many."""

    repeated: int
    left_out: int
    max_gap_ms: float
    fps: NotRequired[float]
    """Usual rate of the camera, in frames per second; 0 for a single frame. Older datasets lack it"""


class RowCounts(TypedDict):
    """Numbers of an episode's rows that a policy should not learn from without a look at them."""

    without_masks: Natural
    doubtful: Natural
    off_in_time: Natural


class EpisodeSource(TypedDict, total=False):
    """The recording of an episode, and what was done about its gaps."""

    recording: list[str]
    """Names of its files"""
    begin_ns: int
    end_ns: int
    max_stamp_ms: float
    """Longest time between the timestamp of a row, k / fps, and its frame"""
    cameras: dict[str, CameraGaps]
    max_gap_ms: dict[str, float]
    """Longest time between a row and a message of a feature of numbers"""
    action_sources: dict[str, str]
    timed_by_arrival: list[str]
    rows: RowCounts


class Info(TypedDict):
    """The description of a dataset."""

    codebase_version: str
    robot_type: str | None
    total_episodes: int
    total_frames: int
    total_tasks: int
    chunks_size: int
    fps: int
    splits: dict[str, str]
    data_path: str
    video_path: str
    features: Features
    # version 3.0
    data_files_size_in_mb: NotRequired[int]
    video_files_size_in_mb: NotRequired[int]
    # version 2.1
    total_videos: NotRequired[int]
    total_chunks: NotRequired[int]
    mask_path: NotRequired[str]


class TaskRow(TypedDict):
    """A row of the table of tasks."""

    task_index: int
    task: str
