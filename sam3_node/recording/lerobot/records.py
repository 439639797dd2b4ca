"""The records of a dataset's episodes, from which all of its description is made."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ...errors import OutputError, WireError
from ...files import read_regular
from ...schema.fields import FromOne, Natural, Text, convert, decode_json
from ...settings import MAX_DATASET_FPS
from .forms import EpisodeSource, Features, ObjectRow, RowCounts
from .statistics import CHANNELS as COLOURS
from .statistics import NamedStats, check_stats

RECORDS = "meta/sam3_episodes"
"""Folder of the records of this package, one JSON file of each episode."""
DROPPED = "meta/sam3_dropped.json"
"""File with the keys of the episodes that were dropped, so that they are not appended again."""
MAX_RECORD_BYTES = 16 << 20
"""Size of the largest record of an episode, or description of a dataset, that is read."""
_KEY = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]{1,128}")
"""Keys of videos, which become names of folders."""

PICTURES = ("image", "video")
"""Types of the features that are pictures."""
INDICES: dict[str, str] = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Types of the columns that number a row, which each dataset has."""
FLAG = "bool"
"""Type of the features that are true or false. They have no statistics, because lerobot cannot normalise them."""


class DroppedEpisodes(msgspec.Struct):
    """The content of DROPPED."""

    keys: list[Natural]


@dataclass
class EpisodeRecord:
    """What the dataset's description needs of one episode."""

    number: Natural
    key: Natural
    """Number by which a recording's episode is recognised, so that it is appended once."""
    task: Text
    length: FromOne
    first_row: Natural
    fps: Annotated[int, Meta(ge=1, le=MAX_DATASET_FPS)]
    features: Features
    labels: list[str]
    """All labels of the dataset up to this episode, in the order of their numbers."""
    objects: list[ObjectRow]
    """Objects as NAMES lists them."""
    missing: Natural
    """Number of frames without masks, of all cameras."""
    statistics: dict[str, NamedStats]
    source: EpisodeSource = field(default_factory=EpisodeSource)
    video_row: Natural = 0
    """Frame of its videos that belongs to its first row: not 0 if its beginning was cut off."""


def read_dropped(folder: Path) -> set[int]:
    """Return the keys of the episodes that were dropped from a dataset. Raises OutputError for a damaged file."""
    if not (folder / DROPPED).exists():
        return set()
    try:
        values = decode_json(read_regular(folder / DROPPED, MAX_RECORD_BYTES), DROPPED)
        return set(convert(values, DroppedEpisodes, DROPPED).keys)
    except (OSError, WireError) as error:
        raise OutputError(
            f"{folder / DROPPED}: expected keys of episodes, found {str(error)[:200]}; remove it"
        ) from error


def list_videos(features: Features) -> list[str]:
    """Return the keys of the features that are videos."""
    return [key for key, feature in features.items() if feature["dtype"] == "video"]


def list_tasks(episodes: Sequence[EpisodeRecord]) -> list[str]:
    """Return the tasks of a dataset, in the order of their numbers."""
    return list(dict.fromkeys(episode.task for episode in episodes))


def count_rows(folder: Path) -> str | None:
    """Return a line that says which rows of a dataset may be learnt from; None without episodes.

    Raises OutputError if a record is damaged.
    """
    episodes = read_records(folder / RECORDS)
    if not episodes:
        return None
    total: RowCounts = {"without_masks": 0, "doubtful": 0, "off_in_time": 0}
    uncounted = 0
    for episode in episodes:
        counts = episode.source.get("rows")
        if counts is None:
            uncounted += episode.length
            continue
        total["without_masks"] += counts["without_masks"]
        total["doubtful"] += counts["doubtful"]
        total["off_in_time"] += counts["off_in_time"]
    text = (
        f"{sum(episode.length for episode in episodes)} rows in {len(episodes)} episodes: {total['without_masks']} "
        f"without masks of a camera, {total['doubtful']} with a doubtful object, {total['off_in_time']} more than "
        "half a period off in time"
    )
    if uncounted:
        text += f"; {uncounted} rows of an older version are not counted"
    return text


def read_records(folder: Path) -> list[EpisodeRecord]:
    """Read the records of all episodes. Raises OutputError if one is absent or damaged."""
    records = []
    first_row = 0
    for number, path in enumerate(sorted(folder.glob("episode-*.json"))):
        try:
            values = decode_json(read_regular(path, MAX_RECORD_BYTES), "record")
            # a check only: `convert` would drop what a later version has added to features
            convert(values, EpisodeRecord, "record")
            record = EpisodeRecord(**values)
            _check_features(record)
        except (OSError, ValueError, TypeError, WireError) as error:
            raise OutputError(
                f"{path}: expected a record of sam3-node, found {str(error)[:200]}; name another folder"
            ) from error
        if record.number != number or record.first_row != first_row:
            raise OutputError(
                f"{path}: expected the record of episode {number}, which begins with row {first_row}, found that of "
                f"{record.number}, row {record.first_row}; name another folder"
            )
        first_row += record.length
        records.append(record)
    return records


def _check_features(record: EpisodeRecord) -> None:
    """Raise ValueError for features that no dataset of this package has, or for statistics of others."""
    for key, feature in record.features.items():
        kind = feature["dtype"]
        is_picture = kind in PICTURES
        # a video's key becomes the name of a folder
        if kind == "video" and not _KEY.fullmatch(key):
            raise ValueError(
                f"a video's key of letters, digits, '_', '.' and '-' was expected, found {key!r:.80}"
            )
        known = [INDICES[key]] if key in INDICES else [*PICTURES, "float32", FLAG]
        if kind not in known or len(feature["shape"]) != (3 if is_picture else 1):
            raise ValueError(
                f"a feature of the type {' or '.join(known)} was expected, found {key!r:.80} of {kind!r:.20} with "
                f"{len(feature['shape'])} dimensions"
            )
        if kind == FLAG:
            continue
        shape = (COLOURS, 1, 1) if is_picture else (feature["shape"][0],)
        check_stats(record.statistics.get(key, {}), shape)
