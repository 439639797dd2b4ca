"""What a look at the episodes of a dataset shows: a line or a summary of each, and a strip of its pictures."""

from __future__ import annotations

from pathlib import Path

import cv2
import msgspec
import numpy as np

from ...errors import OutputError
from ...files import explain_os_error
from ...types import Image
from .dataset import find_layouts
from .editing import Piece, explain_damage, read_pictures, read_rows, require_dataset
from .masks import IMAGE
from .records import RECORDS, EpisodeRecord, list_videos, read_records

SHEET_PICTURES = 8
"""Pictures of an episode on a sheet."""
SHEET_EPISODES = 400
"""Episodes on a sheet at most: a JPEG has 65,535 lines."""
SHEET_WIDTH = 160
"""Width of a picture on a sheet, pixels."""
TITLE_HEIGHT = 18
"""Height of an episode's title on a sheet, pixels."""


class EpisodeSummary(msgspec.Struct, frozen=True):
    """What a person should know of an episode. A number is None if an older version has not counted it."""

    number: int
    task: str
    seconds: float
    rows: int
    rates: dict[str, float | None]
    """frames per second by camera"""
    without_masks: int | None
    """rows on which a camera has none"""
    doubtful: int | None
    """rows with a doubtful object"""
    off_in_time: int | None
    """rows whose frame is more than half a period away"""
    gap_ms: float | None
    """longest time between a row and its frame"""


def summarise(episode: EpisodeRecord) -> EpisodeSummary:
    """Return the summary of an episode."""
    counts = episode.source.get("rows", {})
    cameras = episode.source.get("cameras", {})
    return EpisodeSummary(
        number=episode.number,
        task=episode.task,
        seconds=episode.length / episode.fps,
        rows=episode.length,
        rates={name: camera.get("fps") for name, camera in cameras.items()},
        without_masks=counts.get("without_masks"),
        doubtful=counts.get("doubtful"),
        off_in_time=counts.get("off_in_time"),
        gap_ms=max((camera["max_gap_ms"] for camera in cameras.values()), default=None),
    )


def list_episodes(folder: Path) -> list[str]:
    """Return a table of the episodes, a line each, to be read beside `Edits`.

    Raises OutputError for a folder that is no dataset of this package.
    """
    require_dataset(folder)
    lines = [
        f"{'episode':>7} {'seconds':>8} {'rows':>6} {'no masks':>9} {'doubtful':>9} {'off':>5} {'gap ms':>7}  task"
    ]
    for found in map(summarise, read_records(folder / RECORDS)):
        counts = (found.without_masks, found.doubtful, found.off_in_time)
        without_masks, doubtful, off = ("-" if count is None else count for count in counts)
        gap = "-" if found.gap_ms is None else f"{found.gap_ms:.0f}"
        lines.append(
            f"{found.number:7d} {found.seconds:8.1f} {found.rows:6d} {without_masks:>9} {doubtful:>9} {off:>5} "
            f"{gap:>7}  {found.task!r:.60}"
        )
    return lines


def draw_sheet(folder: Path) -> Image:
    """Return a sheet with pictures of the first camera, a strip for each episode. BGR uint8 [h, w, 3].

    Raises OutputError for a folder that is no dataset of this package, and for damaged files.
    """
    require_dataset(folder)
    episodes = read_records(folder / RECORDS)
    if not episodes:
        raise OutputError(f"expected a dataset with episodes, found none in {folder}; record one first")
    strips = []
    for episode in episodes[:SHEET_EPISODES]:
        strips += [_draw_title(episode), draw_strip(folder, episode)]
    return np.concatenate(strips)


def _draw_title(episode: EpisodeRecord) -> Image:
    title = np.zeros((TITLE_HEIGHT, SHEET_PICTURES * SHEET_WIDTH, 3), np.uint8)
    text = ascii(f"{episode.number}  {episode.length / episode.fps:.1f} s  {episode.task}")[1:-1]
    cv2.putText(title, text, (4, 13), cv2.FONT_HERSHEY_SIMPLEX, 0.4, (255, 255, 255), 1, cv2.LINE_AA)
    return title


def draw_strip(folder: Path, episode: EpisodeRecord) -> Image:
    """Return pictures of an episode's first camera beside each other, at even times. BGR uint8 [h, w, 3].

    Raises OutputError for damaged files.
    """
    piece = Piece(episode, 0, episode.length, episode.task)
    wanted = set(np.linspace(0, episode.length - 1, SHEET_PICTURES).round().astype(int).tolist())
    unread = f"cannot read episode {episode.number}"
    with explain_damage(episode), explain_os_error(OutputError, unread):
        # a dataset without tables or cameras raises a LookupError
        layout = find_layouts(folder)[0]
        cameras = [name for name in episode.features if name.startswith(IMAGE.format(""))]
        key = cameras[0]
        rows = None
        if key not in list_videos(episode.features):
            rows = read_rows(folder, layout, piece, [key])
        pictures = [_shrink(image) for image in read_pictures(folder, layout, piece, key, rows, wanted)]
    # a short episode has fewer rows
    pictures += [np.zeros_like(pictures[0])] * (SHEET_PICTURES - len(pictures))
    return np.concatenate(pictures, axis=1)


def _shrink(image: Image) -> Image:
    height = max(1, round(image.shape[0] * SHEET_WIDTH / image.shape[1]))
    return np.asarray(cv2.resize(image, (SHEET_WIDTH, height), interpolation=cv2.INTER_AREA), np.uint8)
