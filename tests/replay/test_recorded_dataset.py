"""A recording that became a LeRobot dataset: its replay gives the masks that the node published."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow.parquet
import pytest

from sam3_node.bags import open_bag
from sam3_node.errors import OutputError
from sam3_node.perception.perception import Perception
from sam3_node.recording.lerobot.conversion import convert_recordings
from sam3_node.recording.lerobot.masks import NAMES
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.outputs.lerobot import write_lerobot
from sam3_node.replay.run import run_job
from sam3_node.settings import LeRobotSettings
from sam3_node.types import Instance, Mask, MaskFrame
from tests.support.live import Live, chosen, masks_of, moving_frame, tiny_settings
from tests.support.refuses import refuses
from tools.lerobot_recorded.recording import SIZES

FRAMES = 12
BOX = (14.0, 10.0, 42.0, 32.0)


@pytest.mark.parametrize("pictures", ["png", "video"])
def test_a_replay_gives_the_masks_that_the_node_published(pictures: str, tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    recording = tmp_path / "live.mcap"
    published = {}
    with Live(recording, Perception.load(settings)) as live:
        live.step(moving_frame(0))
        live.ask("add_object", box=list(BOX), label="block", camera="left", seq=0)
        for seq in range(1, FRAMES):
            masks = live.step(moving_frame(seq))
            assert masks is not None
            published[seq] = masks.instances[0].mask.full()

    folder = tmp_path / "dataset"
    options = LeRobotSettings(pictures=pictures)  # type: ignore[arg-type]
    assert convert_recordings([recording], options, folder, print).appended == 1
    objects = (ObjectOnFrame(camera="left", index=0, box=BOX, label="block"),)
    job = Job((str(folder),), str(tmp_path / "out"), objects=objects, settings=chosen(settings))
    run_job(job)
    replayed = {masks.seq: masks.instances[0].mask.full() for masks in masks_of(job) if masks.seq}
    assert replayed.keys() == published.keys()
    # a video changes pixels, pictures in the tables do not
    for seq, mask in published.items():
        if pictures == "png":
            assert (replayed[seq] == mask).all()
        else:
            assert (replayed[seq] == mask).mean() > 0.7


def test_marks_of_episodes_change_nothing_in_a_replay(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    recording = tmp_path / "live.mcap"
    with Live(recording, Perception.load(settings)) as live:
        for seq in range(6):
            live.step(moving_frame(seq))
            if seq == 1:
                live.tell("begin_episode", episode=0, task="look", begun_ns=1)
            if seq == 4:
                live.tell("end_episode", episode=0, task="look", begun_ns=1, ended_ns=2, keep=True)
    job = Job((str(recording),), str(tmp_path / "out"), mode="as-recorded", settings=chosen(settings))
    run_job(job)
    assert [masks.seq for masks in masks_of(job)] == list(range(6))


def paint(camera: str, row: int) -> MaskFrame:
    """Return masks whose objects, labels and scores are none of the recording."""
    width, height = SIZES[camera]
    full = np.zeros((height, width), np.bool_)
    full[4:20, 4 + row : 20 + row] = True
    cup = Instance(7, "cup", 0.25, "tracked", 1, 0, Mask.from_full(full), confidence=0.5)
    return MaskFrame(camera, row, row * 10**8, width, height, instances=(cup,))


def copy_with(dataset: Path, out: Path, cameras: Sequence[str]) -> Path:
    """Return the copy of a dataset with the masks of `paint` in every second row of cameras."""
    masks = [paint(camera, row) for row in range(0, 20, 2) for camera in cameras]
    write_lerobot(out, dataset, lambda: iter(masks), lambda _: None, ("plate",))
    return out / "lerobot"


def read_table(dataset: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns of a dataset's tables, and all rows."""
    tables = [pyarrow.parquet.read_table(path) for path in sorted((dataset / "data").rglob("*.parquet"))]
    assert len({table.schema for table in tables}) == 1
    return tables[0].schema.names, [row for table in tables for row in table.to_pylist()]


def test_all_that_speaks_of_objects_is_of_one_replay(lerobot_dataset: Path, tmp_path: Path) -> None:
    before, _ = read_table(lerobot_dataset)
    written = copy_with(lerobot_dataset, tmp_path / "out", ["front"])
    names, rows = read_table(written)
    assert set(names) == set(before)
    found = []
    for number, row in enumerate(rows):
        image = cv2.imdecode(np.frombuffer(row["observation.masks.front"]["bytes"], np.uint8), -1)[..., ::-1]
        numbers = np.array(row["observation.objects.front"]).reshape(8, 4)
        is_stepped = number < 20 and number % 2 == 0
        assert set(map(tuple, image.reshape(-1, 3))) == (
            {(0, 0, 0), (2, 1, 64)} if is_stepped else {(0, 0, 0)}
        )
        assert numbers[0].tolist() == ([2.0, 0.25, 0.5, 0.0] if is_stepped else [0.0] * 4)
        assert not numbers[1:].any()
        found.append(numbers.ravel())
    described = json.loads((written / NAMES).read_text())
    assert described["labels"] == {"1": "plate", "2": "cup"}
    # statistics are those of the new numbers, also of each episode
    stats = json.loads((written / "meta/stats.json").read_text())["observation.objects.front"]
    assert stats["mean"] == pytest.approx(np.mean(found, axis=0).tolist())
    assert stats["max"] == pytest.approx(np.max(found, axis=0).tolist())
    (path,) = (written / "meta/episodes").rglob("*.parquet")
    episode = pyarrow.parquet.read_table(path).to_pylist()[0]
    first = found[: episode["length"]]
    assert episode["stats/observation.objects.front/std"] == pytest.approx(np.std(first, axis=0).tolist())


def test_masks_of_a_camera_that_was_not_replayed_are_left_out(lerobot_dataset: Path, tmp_path: Path) -> None:
    written = copy_with(lerobot_dataset, tmp_path / "out", ["wrist"])
    names, _ = read_table(written)
    features = json.loads((written / "meta/info.json").read_text())["features"]
    stats = json.loads((written / "meta/stats.json").read_text())
    (path,) = (written / "meta/episodes").rglob("*.parquet")
    described = {name.split("/")[1] for name in pyarrow.parquet.read_schema(path).names if "stats/" in name}
    for known in (names, features, stats, described):
        objects = {name for name in known if re.search(r"\.(masks|objects|masks_valid)\.", name)}
        # what is true or false has no statistics
        flags = {"observation.masks_valid.wrist"} if known in (names, features) else set()
        assert objects == {"observation.masks.wrist", "observation.objects.wrist"} | flags
    with open_bag(written) as bag:
        assert bag.cameras == ("front", "wrist")


def test_a_copy_with_other_labels_is_not_appended_to(
    lerobot_dataset: Path, lerobot_recording: Path, tmp_path: Path
) -> None:
    written = copy_with(lerobot_dataset, tmp_path / "out", ["front"])
    with refuses(OutputError, field=("new folder", str(written))):
        convert_recordings([lerobot_recording], LeRobotSettings(), written, lambda _: None)
