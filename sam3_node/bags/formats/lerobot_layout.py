"""The layout of LeRobot datasets, versions 2.0, 2.1 and 3.0: cameras, and where each episode's rows and videos are.

Up to version 2.1 each episode has a Parquet file and a video of each camera. In version 3.0 files hold several
episodes, and tables in meta/episodes say where each begins. The numbers of all rows count from 0 over the dataset.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import BagError
from ...files import describe_stand_in
from ..episodes import MAX_FPS
from ..isolated import IsolatedCalls

INFO = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")
DATA_V2 = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_V2 = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
DATA_V3 = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_V3 = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_V2 = "meta/episodes.jsonl"
EPISODES_V3 = "meta/episodes"
ROWS = 256
MAX_JSON = 64 << 20
MAX_EPISODES = 200_000
MAX_ROWS = 1 << 40
_DEPTH_CODES = ("depth_min", "depth_max", "shift", "use_log")
_DEPTH_UNITS = {None: None, "m": 1.0, "mm": 0.001}
_MAX_DEPTH_M = 1e4
_FIELD = re.compile(r"\{(\w+)(?::0?(\d))?d?\}")


class DepthFormat(NamedTuple):
    """The way in which depth is stored.

    Images have it in the unit `unit_m` in metres; None is mm for integers and m for floats. Videos have 12-bit codes
    from `min_m` to `max_m`, in even steps of the depth or, with `is_log`, of log(depth + `shift_m`).
    """

    unit_m: float | None = None
    min_m: float = 0.0
    max_m: float = 0.0
    shift_m: float = 0.0
    is_log: bool = False


class ImageFeature(NamedTuple):
    """A camera: the feature's key, the name of its last part, whether its frames are in videos, and those of depth."""

    key: str
    name: str
    is_video: bool
    depth: DepthFormat | None = None


class VideoPart(NamedTuple):
    """The part of a video file that an episode is in, from `begin_s` on."""

    path: Path
    begin_s: float


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode's rows: `length` of them, from `first_row` of the dataset, from `table_row` of the file `table`."""

    number: int
    first_row: int
    length: int
    table: Path
    table_row: int
    videos: Mapping[str, VideoPart]


@dataclass(frozen=True, slots=True)
class LeRobotLayout:
    """A dataset's description: its info.json, its cameras, and its episodes in their order.

    `images` are those of colour, `depths` those of depth.
    """

    root: Path
    version: str
    fps: float
    info: Mapping[str, Any]
    images: tuple[ImageFeature, ...]
    depths: tuple[ImageFeature, ...]
    left_out: tuple[str, ...]
    episodes: tuple[Episode, ...]


def is_lerobot(root: Path) -> bool:
    """Return True for a folder with the description of a LeRobot dataset."""
    return (root / INFO).is_file() or (root / INFO).is_symlink()


def read_layout(root: Path, tables: IsolatedCalls) -> LeRobotLayout:
    """Read a dataset's description. Raises BagError for a damaged one, or one of another version."""
    info = _parse_json(root / INFO, _read_text(root / INFO))
    version = str(info.get("codebase_version"))
    if version not in VERSIONS:
        raise BagError(
            f"{root / INFO}: expected a LeRobot dataset of version {', '.join(VERSIONS)}, found {version:.40}; convert "
            "it with lerobot's own tools"
        )
    fps = _number(root, info, "fps")
    if not 0 < fps <= MAX_FPS:
        raise BagError(f"{root / INFO}: expected fps up to {MAX_FPS:.0f}, found {fps}")
    pictures, left_out = _list_images(root, info)
    keys = [image.key for image in pictures if image.is_video]
    if version == "v3.0":
        episodes = tuple(_read_v3(root, info, keys, tables, left_out))
    else:
        episodes = tuple(_read_v2(root, info, keys))
    if not episodes:
        place = root / (EPISODES_V3 if version == "v3.0" else EPISODES_V2)
        raise BagError(f"{place}: expected at least one episode, found {'; '.join(left_out) or 'none'}")
    images, depths = (
        tuple(image for image in pictures if (image.depth is not None) == is_depth)
        for is_depth in (False, True)
    )
    return LeRobotLayout(root, version, fps, info, images, depths, tuple(left_out), episodes)


def _list_images(root: Path, info: Mapping[str, Any]) -> tuple[list[ImageFeature], list[str]]:
    """Return the cameras, and why features that are pictures are left out. Raises BagError if no colour is left."""
    features = info.get("features")
    if not isinstance(features, dict):
        raise BagError(f"{root / INFO}: expected a map of features, found {features!r:.60}")
    found, left_out = [], []
    for key, feature in features.items():
        kind = feature.get("dtype") if isinstance(feature, dict) else None
        if kind not in ("image", "video") or ".masks." in key:
            continue
        name = key.removeprefix("observation.").removeprefix("images.").replace("/", "_")
        try:
            depth = _find_depth(feature, kind == "video")
        except BagError as error:
            left_out.append(f"{key} is left out: {error}")
        else:
            found.append(ImageFeature(key, name, kind == "video", depth))
    if all(image.depth is not None for image in found):
        raise BagError(
            f"{root}: expected a feature of the type image or video that is no depth, found "
            f"{', '.join(features)[:300]}"
        )
    return found, left_out


def _find_depth(feature: Mapping[str, Any], is_video: bool) -> DepthFormat | None:
    """Return how the depth of a feature is stored, None for colour. Raises BagError that says what is absent or wrong.

    Since lerobot 0.6 the flag is `is_depth_map`, before it was `video.is_depth_map`.
    """
    if True not in _look_up(feature, "is_depth_map"):
        return None
    if not is_video:
        unit = next(_look_up(feature, "depth_unit"), None)
        if unit not in _DEPTH_UNITS:
            raise BagError(
                f"depth in images: expected a depth_unit of m or mm in its info, found {unit!r:.40}"
            )
        return DepthFormat(_DEPTH_UNITS[unit])
    found = {name: next(_look_up(feature, name), None) for name in _DEPTH_CODES}
    absent = [name for name, value in found.items() if value is None]
    if absent:
        raise BagError(
            f"depth in a video: expected {', '.join(_DEPTH_CODES)} in its info in {INFO}, which give its metres, found "
            f"no {', '.join(absent)}"
        )
    numbers = [value for value in found.values() if isinstance(value, int | float) and math.isfinite(value)]
    is_log = found["use_log"]
    if len(numbers) == len(_DEPTH_CODES) and isinstance(is_log, bool) and not isinstance(numbers[0], bool):
        low, high, shift = map(float, numbers[:-1])
        if 0 <= low < high <= _MAX_DEPTH_M and (not is_log or low + shift > 0):
            return DepthFormat(None, low, high, shift, is_log)
    raise BagError(
        "depth in a video: expected 0 <= depth_min < depth_max in metres, depth_min + shift above 0 and a use_log of "
        f"true or false, found {found!r:.150}"
    )


def _look_up(feature: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield the values of a name in a feature and in its info; names there may have the prefix `video.` or `info.`."""
    for place in (feature.get("info"), feature.get("video_info"), feature):
        for prefix in ("", "video.", "info."):
            if isinstance(place, dict) and place.get(f"{prefix}{name}") is not None:
                yield place[f"{prefix}{name}"]


def _read_v2(root: Path, info: Mapping[str, Any], keys: list[str]) -> Iterator[Episode]:
    path, first_row = root / EPISODES_V2, 0
    lines = [line for line in _read_text(path).splitlines() if line.strip()]
    size = max(_integer(root, {"chunks_size": 1000, **info}, "chunks_size"), 1)
    for line in lines[:MAX_EPISODES]:
        row = _parse_json(path, line)
        number, length = _integer(path, row, "episode_index"), _integer(path, row, "length")
        fields = {"episode_chunk": number // size, "episode_index": number}
        data = _fill(root, info.get("data_path") or DATA_V2, fields)
        videos = {
            key: VideoPart(_fill(root, info.get("video_path") or VIDEO_V2, {**fields, "video_key": key}), 0.0)
            for key in keys
        }
        yield Episode(number, first_row, length, data, 0, videos)
        first_row += length


def _read_v3(
    root: Path, info: Mapping[str, Any], keys: list[str], tables: IsolatedCalls, left_out: list[str]
) -> Iterator[Episode]:
    first_rows: dict[Path, int] = {}
    for path, row in _read_episode_rows(root, keys, tables, left_out):
        first_row, end = (_integer(path, row, f"dataset_{edge}_index") for edge in ("from", "to"))
        fields = {name: _integer(path, row, f"data/{name}") for name in ("chunk_index", "file_index")}
        table = _fill(root, info.get("data_path") or DATA_V3, fields)
        begins = first_rows.setdefault(table, first_row)
        if end < first_row or first_row < begins:
            raise BagError(
                f"{path}: expected episodes in the order of their rows, found {first_row} to {end}"
            )
        videos = {key: _find_video(root, info, path, row, key) for key in keys}
        number = _integer(path, row, "episode_index")
        yield Episode(number, first_row, end - first_row, table, first_row - begins, videos)


def _find_video(
    root: Path, info: Mapping[str, Any], path: Path, row: Mapping[str, Any], key: str
) -> VideoPart:
    fields: dict[str, int | str] = {
        name: _integer(path, row, f"videos/{key}/{name}") for name in ("chunk_index", "file_index")
    }
    file = _fill(root, info.get("video_path") or VIDEO_V3, {**fields, "video_key": key})
    return VideoPart(file, _number(path, row, f"videos/{key}/from_timestamp"))


def _read_episode_rows(
    root: Path, keys: list[str], tables: IsolatedCalls, left_out: list[str]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    columns = ["episode_index", "dataset_from_index", "dataset_to_index"]
    columns += ["data/chunk_index", "data/file_index"]
    names = ("chunk_index", "file_index", "from_timestamp")
    columns += [f"videos/{key}/{name}" for key in keys for name in names]
    for path in sorted((root / EPISODES_V3).glob("*/*.parquet")):
        first = 0
        while True:
            try:
                found = tables.call("read_rows", path, columns=columns, first=first, count=ROWS)
            except BagError as error:
                left_out.append(f"the episodes of {error}")
                break
            count = len(found["episode_index"])
            if not count:
                break
            first += count
            if first > MAX_EPISODES:
                raise BagError(f"{path}: expected at most {MAX_EPISODES} episodes, found more")
            for values in zip(*found.values(), strict=True):
                yield path, dict(zip(found, values, strict=True))


def _fill(root: Path, template: object, fields: Mapping[str, int | str]) -> Path:
    """Return the path of a template such as data/chunk-{chunk_index:03d}; it stays inside the dataset."""

    def replace(match: re.Match[str]) -> str:
        value = fields.get(match[1])
        if value is None:
            raise BagError(f"{root / INFO}: expected {', '.join(fields)} in a path, found {match[0]!r:.60}")
        return str(value).zfill(int(match[2] or 0)) if isinstance(value, int) else value

    path = Path(_FIELD.sub(replace, template) if isinstance(template, str) else "")
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise BagError(f"{root / INFO}: expected paths inside the dataset, found {template!r:.100}")
    return root / path


def _read_text(path: Path) -> str:
    if stand_in := describe_stand_in(path):
        raise BagError(f"{path}: expected a file of a LeRobot dataset, found {stand_in}")
    try:
        size = path.stat().st_size
        if size > MAX_JSON or not path.is_file():
            raise BagError(f"{path}: expected at most {MAX_JSON} bytes of JSON, found {size}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BagError(f"{path}: expected a file of a LeRobot dataset ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BagError(f"{path}: expected JSON, found other bytes") from error


def _parse_json(path: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BagError(f"{path}: expected JSON, found {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise BagError(f"{path}: expected a map, found {value!r:.60}")
    return value


def _number(path: Path, values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_ROWS:
        raise BagError(f"{path}: expected a number as {name}, found {value!r:.60}")
    return float(value)


def _integer(path: Path, values: Mapping[str, Any], name: str) -> int:
    number = _number(path, values, name)
    if not math.isfinite(number) or number != int(number):
        raise BagError(f"{path}: expected a whole number as {name}, found {number}")
    return int(number)
