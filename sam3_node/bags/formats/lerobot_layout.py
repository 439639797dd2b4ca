"""Reads the description of a LeRobot dataset: its cameras, and where the rows and pictures of each episode are.

Up to version 2.1 each episode has a Parquet file and a video of each camera. In version 3.0 files hold several
episodes, and tables in meta/episodes say where each begins.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import BagError, WireError
from ...files import describe_stand_in, read_regular
from ...schema.fields import Plain, decode_json
from ...wire import Fields
from .. import samples
from ..isolated import IsolatedCalls
from .lerobot_times import VideoPart, place_parts

INFO = "meta/info.json"
"""File with the description of a dataset."""
VERSIONS = ("v2.0", "v2.1", "v3.0")
"""Versions of datasets that are read."""

# where the files are if the description does not say
DATA_V2 = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_V2 = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
DATA_V3 = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_V3 = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_V2 = "meta/episodes.jsonl"
EPISODES_V3 = "meta/episodes"

EPISODE_ROWS = 256
"""Number of rows of a table of episodes that one call reads."""
MAX_JSON = 64 << 20
"""Size of the largest description that is read, in bytes."""
MAX_EPISODES = 200_000
"""Number of episodes that are read. Later ones are ignored."""
MAX_ROWS = 1 << 40
"""Largest number of a row, and largest time of an episode in a video in seconds."""
# fields of the description of depth in a video, whose codes have 12 bits
_DEPTH_CODES = ("depth_min", "depth_max", "shift", "use_log")
# metres per unit of depth in images; without a unit the type of the numbers decides
_DEPTH_UNITS = {None: None, "m": 1.0, "mm": 0.001}
# largest depth that a video may declare
_MAX_DEPTH_M = 1e4
# lowest rate of a dataset, in Hz
_MIN_FPS = 1e-6
# a field of a path such as {episode_index:06d}
_FIELD = re.compile(r"\{(\w+)(?::0?(\d))?d?\}")


class DepthFormat(NamedTuple):
    """The way in which depth is stored.

    Images hold depth in units of `unit_m` metres; None means mm for integers and m for floats. Videos hold 12-bit codes
    from `min_m` to `max_m`, in even steps of the depth or, with `is_log`, of log(depth + `shift_m`).
    """

    unit_m: float | None = None
    min_m: float = 0.0
    max_m: float = 0.0
    shift_m: float = 0.0
    is_log: bool = False


class ImageFeature(NamedTuple):
    """A camera: its feature's key, its own name, whether videos hold its frames, and its depth format."""

    key: str
    name: str
    is_video: bool
    depth: DepthFormat | None = None


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

    `images` hold colour, `depths` hold depth.
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
    try:
        return _LayoutReader(root, tables).read()
    except WireError as error:
        raise BagError(str(error)) from error


class _LayoutReader:
    """Reads the description of one dataset."""

    def __init__(self, root: Path, tables: IsolatedCalls) -> None:
        self._root = root
        self._path = root / INFO
        self._tables = tables
        self._info = _parse_json(self._path, _read_bytes(self._path))
        self._fields = Fields(self._info, str(self._path))
        self._left_out: list[str] = []

    def read(self) -> LeRobotLayout:
        # the version says where everything else is
        version = str(self._info.get("codebase_version"))
        if version not in VERSIONS:
            raise self._wrong(
                f"a LeRobot dataset of version {', '.join(VERSIONS)}, found {version!r:.40}; convert it with lerobot's "
                "own tools"
            )
        fps = self._fields.number("fps", _MIN_FPS, samples.MAX_FPS)
        pictures = list(self._list_images())
        images = tuple(image for image in pictures if image.depth is None)
        depths = tuple(image for image in pictures if image.depth is not None)
        if not images:
            features = ", ".join(self._info["features"])
            raise self._wrong(
                f"a feature of the type image or video that is no depth, found {features[:300]}"
            )

        # each episode has a part of a video for each of these
        keys = [image.key for image in pictures if image.is_video]
        if version == "v3.0":
            place = EPISODES_V3
            episodes = self._place_videos(list(self._read_v3(keys, fps)), keys, fps)
        else:
            place = EPISODES_V2
            episodes = tuple(self._read_v2(keys))
        if not episodes:
            found = "; ".join(self._left_out) or "none"
            raise BagError(f"{self._root / place}: expected at least one episode, found {found}")
        left_out = tuple(self._left_out)
        return LeRobotLayout(self._root, version, fps, self._info, images, depths, left_out, episodes)

    def _wrong(self, text: str) -> BagError:
        return BagError(f"{self._path}: expected {text}")

    def _list_images(self) -> Iterator[ImageFeature]:
        """Yield the cameras. Note why other pictures are skipped."""
        for key, feature in self._fields.open_map("features").items():
            if not isinstance(feature, dict):
                continue
            # masks that this package has added are no camera
            kind = feature.get("dtype")
            if kind not in ("image", "video") or ".masks." in key:
                continue
            name = key.removeprefix("observation.").removeprefix("images.").replace("/", "_")
            try:
                yield ImageFeature(key, name, kind == "video", _find_depth(feature, kind == "video"))
            except BagError as error:
                self._left_out.append(f"skipped {key}: {error}")

    def _read_v2(self, keys: list[str]) -> Iterator[Episode]:
        path = self._root / EPISODES_V2
        first_row = 0
        lines = [line for line in _read_bytes(path).splitlines() if line.strip()]
        size = _integer(self._fields, "chunks_size", 1) if self._fields.has("chunks_size") else 1000
        for line in lines[:MAX_EPISODES]:
            # each episode has files of its own, from their first rows on
            row = Fields(_parse_json(path, line), str(path))
            number = _integer(row, "episode_index")
            length = _integer(row, "length")
            fields = {"episode_chunk": number // size, "episode_index": number}
            data = self._fill("data_path", DATA_V2, fields)
            files = {key: self._fill("video_path", VIDEO_V2, {**fields, "video_key": key}) for key in keys}
            videos = {key: VideoPart(file, 0.0) for key, file in files.items()}
            yield Episode(number, first_row, length, data, 0, videos)
            first_row += length

    def _read_v3(self, keys: list[str], fps: float) -> Iterator[Episode]:
        first_rows: dict[Path, int] = {}
        for row in self._read_episode_rows(keys):
            first_row = _integer(row, "dataset_from_index")
            end = _integer(row, "dataset_to_index")
            table = self._fill("data_path", DATA_V3, _read_place(row, "data"))

            # the first episode of a table begins at its first row
            begins = first_rows.setdefault(table, first_row)
            if end < first_row or first_row < begins:
                raise BagError(
                    f"{row.what}: expected episodes in the order of their rows, found {first_row} to {end}"
                )

            videos = {}
            for key in keys:
                fields = {**_read_place(row, f"videos/{key}"), "video_key": key}
                begin_s = row.number(f"videos/{key}/from_timestamp", 0, MAX_ROWS)
                end_s = begin_s + (end - first_row) / fps
                if row.has(f"videos/{key}/to_timestamp"):
                    end_s = row.number(f"videos/{key}/to_timestamp", 0, MAX_ROWS)
                videos[key] = VideoPart(self._fill("video_path", VIDEO_V3, fields), begin_s, end_s)
            number = _integer(row, "episode_index")
            yield Episode(number, first_row, end - first_row, table, first_row - begins, videos)

    def _place_videos(
        self, episodes: Sequence[Episode], keys: Sequence[str], fps: float
    ) -> tuple[Episode, ...]:
        """Return the episodes with checked parts of their videos."""
        placed = [dict(episode.videos) for episode in episodes]
        for key in keys:
            by_file: dict[Path, list[int]] = {}
            for at, episode in enumerate(episodes):
                by_file.setdefault(episode.videos[key].path, []).append(at)
            for members in by_file.values():
                found = place_parts(
                    [episodes[at].videos[key] for at in members], [episodes[at].length for at in members], fps
                )
                if found.note is not None:
                    self._left_out.append(found.note)
                for at, part in zip(members, found.parts, strict=True):
                    placed[at][key] = part
        return tuple(
            replace(episode, videos=videos) for episode, videos in zip(episodes, placed, strict=True)
        )

    def _read_episode_rows(self, keys: list[str]) -> Iterator[Fields]:
        columns = ["episode_index", "dataset_from_index", "dataset_to_index"]
        columns += ["data/chunk_index", "data/file_index"]
        names = ("chunk_index", "file_index", "from_timestamp")
        columns += [f"videos/{key}/{name}" for key in keys for name in names]
        ends = [f"videos/{key}/to_timestamp" for key in keys]
        for path in sorted((self._root / EPISODES_V3).glob("*/*.parquet")):
            # a damaged table costs its own episodes
            try:
                known = set(self._tables.call("list_columns", path))
                found = columns + [name for name in ends if name in known]
                for row in read_rows(self._tables, path, found, 0, MAX_EPISODES, EPISODE_ROWS):
                    yield Fields(row, str(path))
            except BagError as error:
                self._left_out.append(f"the episodes of {error}")

    def _fill(self, name: str, default: str, fields: Mapping[str, int | str]) -> Path:
        """Return the path by a template such as data/chunk-{chunk_index:03d}. It stays inside the dataset."""
        template = self._info.get(name) or default

        def replace(match: re.Match[str]) -> str:
            value = fields.get(match[1])
            if value is None:
                raise self._wrong(f"{', '.join(fields)} in a path, found {match[0]!r:.60}")
            if isinstance(value, int):
                return str(value).zfill(int(match[2] or 0))
            return value

        # not `str.format`, which would evaluate what a template from outside asks for
        filled = _FIELD.sub(replace, template) if isinstance(template, str) else ""
        path = Path(filled)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in str(path):
            raise self._wrong(f"paths inside the dataset, found {template!r:.100}")
        return self._root / path


def read_rows(
    tables: IsolatedCalls, path: Path, columns: Sequence[str], first: int, count: int, at_once: int
) -> Iterator[Plain]:
    """Yield up to `count` rows of a table from the row `first`, each by the names of its columns."""
    # a few rows at a time, because they may hold images
    end = first + count
    while first < end:
        count = min(at_once, end - first)
        found = tables.call("read_rows", path, columns=columns, first=first, count=count)
        rows = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
        if not rows:
            return
        yield from rows
        first += len(rows)


def _read_place(row: Fields, prefix: str) -> dict[str, int | str]:
    return {name: _integer(row, f"{prefix}/{name}") for name in ("chunk_index", "file_index")}


def _integer(fields: Fields, name: str, low: int = 0) -> int:
    number = fields.number(name, low, MAX_ROWS)
    if not number.is_integer():
        raise fields.wrong(name, "a whole number")
    return int(number)


def _find_depth(feature: Mapping[str, Any], is_video: bool) -> DepthFormat | None:
    """Return how the depth of a feature is stored, None for colour. Raises BagError that says what is absent or wrong.

    The flag is `is_depth_map` since lerobot 0.6, and was `video.is_depth_map` before.
    """
    if True not in _look_up(feature, "is_depth_map"):
        return None

    # images hold depth itself, in a unit
    if not is_video:
        unit = next(_look_up(feature, "depth_unit"), None)
        if not isinstance(unit, str | None) or unit not in _DEPTH_UNITS:
            raise BagError(
                f"depth in images: expected a depth_unit of m or mm in its info, found {unit!r:.40}"
            )
        return DepthFormat(_DEPTH_UNITS[unit])

    # videos hold codes, whose meaning needs all four fields
    found: list[Any] = [next(_look_up(feature, name), None) for name in _DEPTH_CODES]
    *numbers, is_log = found
    if isinstance(is_log, bool) and all(type(value) in (int, float) for value in numbers):
        low, high, shift = map(float, numbers)
        is_open = math.isfinite(shift) and (not is_log or low + shift > 0)
        if 0 <= low < high <= _MAX_DEPTH_M and is_open:
            return DepthFormat(None, low, high, shift, is_log)
    raise BagError(
        f"depth in a video: expected its metres in its info in {INFO}: 0 <= depth_min < depth_max, depth_min + shift "
        f"above 0 and a use_log of true or false, found {dict(zip(_DEPTH_CODES, found, strict=True))!r:.150}"
    )


def _look_up(feature: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield the values of a name in a feature and in its info; names there may have the prefix `video.` or `info.`."""
    for place in (feature.get("info"), feature.get("video_info"), feature):
        for prefix in ("", "video.", "info."):
            if isinstance(place, dict) and place.get(f"{prefix}{name}") is not None:
                yield place[f"{prefix}{name}"]


def _read_bytes(path: Path) -> bytes:
    # datasets are often cloned without their large files
    if stand_in := describe_stand_in(path):
        raise BagError(f"{path}: expected a file of a LeRobot dataset, found {stand_in}")
    with samples.reading(path):
        return read_regular(path, MAX_JSON)


def _parse_json(path: Path, text: bytes) -> Any:
    try:
        return decode_json(text, str(path))
    except WireError as error:
        raise BagError(str(error)) from error
