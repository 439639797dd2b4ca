"""Replays of what a node was shown, and with boxes of the command line."""

from __future__ import annotations

from pathlib import Path

import cv2
import pytest

from sam3_node.bags import read_masks
from sam3_node.cli.main import _parser
from sam3_node.cli.replay import _make_job
from sam3_node.errors import ReplayError, RequestError
from sam3_node.node.operations import carry_out
from sam3_node.perception.checkpoint import pack_state, unpack_state
from sam3_node.perception.perception import Perception
from sam3_node.replay.job import Job
from sam3_node.replay.run import PerceptionCache, compare_masks, run_job
from sam3_node.settings import DetectorSettings, Settings
from tests.support.live import Live, chosen, moving_frame, tiny_settings
from tests.support.refuses import refuses
from tests.support.tiny_detectors import picture, write_tiny_sam3

BOX = [16.0, 12.0, 40.0, 30.0]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("weights")
    write_tiny_sam3(folder / "detector")
    detector = DetectorSettings(kind="sam3-concept", name=str(folder / "detector"), score=0.02, every=2)
    return tiny_settings(folder, max_objects=24).model_copy(update={"detector": detector})


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    assert cv2.imwrite(str(path), picture())
    return path


def labels(path: Path) -> list[set[str]]:
    return [{item.label for item in masks.instances} for masks in read_masks(path / "masks.mcap")]


def test_a_replay_repeats_what_the_node_was_shown(
    settings: Settings, photo: Path, load: PerceptionCache, tmp_path: Path
) -> None:
    with Live(tmp_path / "live.mcap", Perception.load(settings)) as live:
        for seq in range(12):
            live.step(moving_frame(seq))
            if seq == 2:
                live.ask("add_exemplar", name="washer", boxes=[BOX], seq=1)
            if seq == 5:
                live.ask("add_exemplar", name="bolt", boxes=[BOX], photo=photo.read_bytes())
                live.ask("add_exemplar", name="washer", boxes=[[0, 0, 20, 9]], labels=[0], text="red mug")
            if seq == 8:
                live.ask("set_prompts", prompts=["bolt"])
        assert {item.label for masks in live.masks for item in masks.instances} >= {"washer", "bolt"}
    for mode in ("as-recorded", "every"):
        out = tmp_path / mode
        job = Job((str(tmp_path / "live.mcap"),), str(out), mode, settings=chosen(settings))
        assert run_job(job, load).refused == 0
        if mode == "as-recorded":
            assert compare_masks(list(read_masks(out / "masks.mcap")), live.masks).is_identical
        assert set.union(*labels(out)) >= {"washer", "bolt"}


def test_a_state_holds_exemplars_and_the_images_of_frames(settings: Settings) -> None:
    before, after = Perception.load(settings), Perception.load(settings)
    before.serve("left").step(moving_frame(0))
    carry_out(before, "add_exemplar", {"name": "washer", "boxes": [BOX]})
    before.serve("left").step(moving_frame(1))
    after.restore(unpack_state(pack_state(before.state())))
    masks = []
    for perception in (before, after):
        carry_out(perception, "add_exemplar", {"name": "bolt", "boxes": [BOX], "seq": 0})
        masks += [perception.serve("left").step(moving_frame(seq)) for seq in (2, 3)]
        assert perception.status()["exemplars"].keys() == {"washer", "bolt"}
    assert compare_masks(masks[:2], masks[2:]).is_identical
    with refuses(RequestError, field="box"):
        carry_out(after, "add_exemplar", {"name": "washer", "boxes": [[90, 90, 99, 99]]})
    with refuses(RequestError, field="labels"):
        carry_out(after, "add_exemplar", {"name": "washer", "boxes": [BOX], "labels": [1, 0]})


def test_boxes_of_the_command_line_show_what_to_detect(
    settings: Settings, photo: Path, load: PerceptionCache, tmp_path: Path
) -> None:
    with Live(tmp_path / "bag.mcap", Perception.load(settings)) as live:
        for seq in range(4):
            live.skip(moving_frame(seq))
    line = [
        "replay",
        str(tmp_path / "bag.mcap"),
        "-o",
        str(tmp_path / "out"),
        "--exemplar=washer=16,12,40,30",
    ]
    line += [f"--exemplar=bolt={photo}:10,20,60,70", "--unlike=washer=0,0,20,9"]
    job = _make_job(_parser().parse(line), settings)
    summary = run_job(job, load)
    assert (summary.refused, summary.notes) == (0, [])
    assert set.union(*labels(tmp_path / "out")) >= {"washer"}
    lost = _make_job(_parser().parse([*line, "--exemplar=nut=lost.png:1,2,3,4"]), settings)
    with refuses(ReplayError, field="lost.png"):
        run_job(lost, load)
