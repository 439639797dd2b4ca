"""Datasets that somebody else has made or changed: nothing outside of the folder, and nothing of others, is touched."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sam3_node.errors import BagError, OutputError
from sam3_node.files import check_inside
from sam3_node.recording.lerobot.conversion import Converted, convert_recordings
from sam3_node.recording.lerobot.dataset import UNFINISHED, DatasetFolder
from sam3_node.replay.outputs.lerobot import write_lerobot
from sam3_node.settings import LeRobotSettings
from tests.support.hostility import HUGE_BYTES, limited_memory
from tests.support.refuses import mentions, refuses

RECORD = "meta/sam3_episodes/episode-000000.json"
NEXT = ("data/chunk-000/file-002.parquet", "videos/observation.images.wrist/chunk-000/file-002.mp4")
"""Files of the episode that comes next."""


@pytest.fixture
def dataset(lerobot_dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lerobot_dataset, tmp_path / "pick"))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file beside the dataset."""
    path = tmp_path / "victim" / "chunk-000" / "file-002.mp4"
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    return path


def convert(recording: Path, folder: Path) -> Converted:
    return convert_recordings([recording], LeRobotSettings(), folder, lambda _: None)


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("key", ["../../victim", "/victim", "..", "a/b", ""])
def test_a_key_that_leads_out_of_the_dataset_is_refused(dataset: Path, victim: Path, key: str) -> None:
    for path in (dataset / "meta/sam3_episodes").iterdir():
        record = json.loads(path.read_text())
        video = next(name for name, feature in record["features"].items() if feature["dtype"] == "video")
        record["features"][key] = record["features"].pop(video)
        path.write_text(json.dumps(record))
    with refuses(OutputError, field=("record", "folder")):
        DatasetFolder(dataset)
    assert victim.read_text() == "mine"


def nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("fps",), 10**10),
        (("fps",), 0),
        (("fps",), 12.5),
        (("first_row",), 10**30),
        (("length",), -1),
        (("number",), True),
        (("task",), nest(700)),
        (("task",), "a" * 100_000),
        (("features", "action", "shape"), [10**9]),
        (("features", "action", "dtype"), "{secret}"),
        (("features", "index", "dtype"), "float32"),
        (("features", "observation.images.front", "shape"), [3]),
        (("statistics",), {}),
        (("statistics", "action"), None),
        (("statistics", "action", "count"), []),
        (("statistics", "action", "mean", 0), "1"),
        (("statistics", "action", "mean", 0), 10**400),
        (("statistics", "action", "mean"), [1.0]),
        (("statistics", "action", "std", 1), float("nan")),
    ],
)
def test_a_record_of_other_values_is_refused(dataset: Path, place: tuple[str | int, ...], value: Any) -> None:
    record = json.loads((dataset / RECORD).read_text())
    inner = record
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    (dataset / RECORD).write_text(json.dumps(record))
    before = read_all(dataset)
    with refuses(OutputError, field=("episode-000000.json", "another folder")) as caught:
        DatasetFolder(dataset)
    assert len(str(caught.value)) < 1000
    assert read_all(dataset) == before


@pytest.mark.parametrize("key", ["{secret}", "{chunk_index:02000000000d}", "{0.__class__}"])
def test_a_key_is_no_template(dataset: Path, key: str) -> None:
    for path in (dataset / "meta/sam3_episodes").iterdir():
        record = json.loads(path.read_text())
        for part in ("features", "statistics"):
            record[part][key] = record[part].pop("observation.images.front")
        path.write_text(json.dumps(record))
    with limited_memory(8), refuses(OutputError, field=("letters", "folder")):
        DatasetFolder(dataset)


@pytest.mark.parametrize("place", [RECORD, "meta/info.json"])
@pytest.mark.parametrize("kind", ["pipe", "sparse", "folder"])
def test_what_is_no_file_of_a_dataset_is_not_read(
    dataset: Path, lerobot_recording: Path, place: str, kind: str
) -> None:
    path = dataset / place
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(HUGE_BYTES)
    with limited_memory(8):
        try:
            DatasetFolder(dataset).close()
        except OutputError:
            return
    # a description is made anew from the records
    assert place == "meta/info.json"
    assert json.loads(path.read_text())["total_episodes"] == 2


def link_next(dataset: Path, victim: Path) -> None:
    (dataset / (NEXT[0] + ".partial")).symlink_to(victim)


def link_video(dataset: Path, victim: Path) -> None:
    (dataset / NEXT[1]).symlink_to(victim)


def link_dangling(dataset: Path, victim: Path) -> None:
    (dataset / NEXT[0]).symlink_to(victim.with_name("new"))


def link_folder(dataset: Path, victim: Path) -> None:
    moved = victim.parents[2] / "moved"
    (dataset / "data/chunk-000").rename(moved)
    (dataset / "data/chunk-000").symlink_to(moved)


@pytest.mark.parametrize("link", [link_next, link_video, link_dangling, link_folder])
def test_links_in_the_place_of_a_new_episode_are_not_followed(
    dataset: Path, victim: Path, link: Callable[[Path, Path], None]
) -> None:
    with DatasetFolder(dataset) as folder:
        features = folder.episodes[0].features
        fps = folder.episodes[0].fps
    link(dataset, victim)
    before = read_all(victim.parents[2])
    with DatasetFolder(dataset) as folder, pytest.raises(OutputError) as caught:
        folder.begin(features, fps)
    assert mentions(str(caught.value), "folder")
    assert read_all(victim.parents[2]) == before


def test_links_in_the_place_of_masks_for_groot_are_not_followed(
    lerobot_recording: Path, victim: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "groot"
    options = LeRobotSettings(version="2.1")
    assert convert_recordings([lerobot_recording], options, folder, lambda _: None).appended == 2
    before = read_all(victim.parents[1])
    (folder / "masks/chunk-000/observation.images.front/episode_000002.npz").symlink_to(victim)
    with DatasetFolder(folder) as dataset, pytest.raises(OutputError) as caught:
        dataset.begin(dataset.episodes[0].features, dataset.episodes[0].fps)
    assert mentions(str(caught.value), "folder")
    assert read_all(victim.parents[1]) == before


@pytest.mark.parametrize(
    "place", ["meta", "meta/sam3_episodes", "meta/info.json", "meta/.sam3_lock", "meta/stats.json"]
)
def test_links_in_the_place_of_the_description_are_not_followed(
    dataset: Path, tmp_path: Path, place: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (dataset / place).rename(elsewhere)
    (dataset / place).symlink_to(elsewhere)
    with refuses(OutputError, field=("symbolic", "folder")):
        DatasetFolder(dataset)


def test_episodes_of_another_program_stay(dataset: Path, lerobot_recording: Path) -> None:
    """lerobot appends an episode to the dataset, as `lerobot-record --resume` does."""
    (dataset / NEXT[0]).write_bytes(b"rows of lerobot")
    info = json.loads((dataset / "meta/info.json").read_text())
    (dataset / "meta/info.json").write_text(json.dumps(info | {"total_episodes": 3}))
    before = read_all(dataset)
    with refuses(OutputError, field=("3", "2", "folder")):
        convert(lerobot_recording, dataset)
    assert read_all(dataset) == before


@pytest.mark.parametrize("place", ["data/chunk-000/file-001.parquet", "videos"])
def test_a_file_that_was_deleted_is_told(dataset: Path, place: str) -> None:
    if (dataset / place).is_dir():
        shutil.rmtree(dataset / place)
    else:
        (dataset / place).unlink()
    with refuses(OutputError, field=("episode", "restore")):
        DatasetFolder(dataset)


def test_a_file_of_another_program_is_not_overwritten(dataset: Path) -> None:
    (dataset / NEXT[0]).write_bytes(b"rows of lerobot")
    with DatasetFolder(dataset) as folder, refuses(OutputError, field=("another", "folder")):
        folder.begin(folder.episodes[0].features, folder.episodes[0].fps)
    assert (dataset / NEXT[0]).read_bytes() == b"rows of lerobot"


@pytest.mark.parametrize(
    "place", ["../victim/chunk-000/file-002.mp4", "data/chunk-000/file-001.parquet", RECORD]
)
def test_a_made_up_journal_removes_nothing_else(dataset: Path, victim: Path, place: str) -> None:
    before = read_all(dataset)
    (dataset / UNFINISHED).write_text(place)
    DatasetFolder(dataset).close()
    assert read_all(dataset) == before
    assert victim.read_text() == "mine"


def test_a_copy_of_a_dataset_takes_no_file_from_elsewhere(
    dataset: Path, tmp_path: Path, victim: Path
) -> None:
    (dataset / "meta/notes.txt").symlink_to(victim)
    with refuses(BagError, field=("leads", "copy")):
        write_lerobot(tmp_path / "out", dataset, lambda: iter(_masks()), lambda _: None, ())
    assert not any(data == b"mine" for data in read_all(tmp_path / "out").values())


def _masks() -> list[object]:
    from sam3_node.types import MaskFrame

    return [
        MaskFrame(
            camera="wrist",
            seq=0,
            capture_ns=0,
            clock="system",
            received_ns=0,
            published_ns=0,
            stages_us={},
            skipped=0,
            width=64,
            height=48,
            model="m",
            prompts=(),
            instances=(),
        )
    ]


def test_a_path_stays_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    assert check_inside(folder, folder / "a" / "b") == folder / "a" / "b"
    for path in (folder / ".." / "x", tmp_path / "x", folder / "link" / "x", folder / "link"):
        with refuses(OutputError, field="folder"):
            check_inside(folder, path)
