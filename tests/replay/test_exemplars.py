"""Exemplars in states and in replays."""

from pathlib import Path
from typing import Any

import cv2
import pytest

from sam3_node.bags import read_masks
from sam3_node.cli.replay import _make_job
from sam3_node.errors import ReplayError, RequestError
from sam3_node.node.operations import carry_out
from sam3_node.perception.checkpoint import pack_state, unpack_state
from sam3_node.perception.perception import Perception
from sam3_node.replay.run import PerceptionCache, compare_masks, run_job
from sam3_node.settings import DetectorSettings, Settings
from sam3_node.wire.requests import read_operation
from tests.support.command_line import command_parser
from tests.support.hostility import make_irregular
from tests.support.live import Live, moving_frame, tiny_settings
from tests.support.refuses import refuses
from tests.support.tiny_detectors import picture, write_tiny_sam3

BOX = [16.0, 12.0, 40.0, 30.0]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    write_tiny_sam3(tmp_path / "detector")
    detector = DetectorSettings(kind="sam3-concept", name=str(tmp_path / "detector"), score=0.02, every=2)
    return tiny_settings(tmp_path, max_objects=24).model_copy(update={"detector": detector})


def show(perception: Perception, **args: Any) -> None:
    carry_out(perception, read_operation("add_exemplar", args))


def test_a_state_holds_exemplars_and_the_images_of_frames(settings: Settings) -> None:
    before = Perception.load(settings)
    after = Perception.load(settings)
    masks = []
    before.serve("left").step(moving_frame(0))
    show(before, name="washer", boxes=[BOX])
    before.serve("left").step(moving_frame(1))
    after.restore(unpack_state(pack_state(before.state())))
    for perception in (before, after):
        show(perception, name="bolt", boxes=[BOX], seq=0)
        masks += [perception.serve("left").step(moving_frame(seq)) for seq in (2, 3)]
        assert perception.status()["exemplars"] == {"washer": [1], "bolt": [1]}
    assert compare_masks(masks[:2], masks[2:]).is_identical
    with refuses(RequestError, field="labels"):
        show(after, name="washer", boxes=[BOX], labels=[1, 0])


def test_boxes_of_the_command_line_and_of_a_recording_are_looked_for(
    settings: Settings, load: PerceptionCache, tmp_path: Path
) -> None:
    assert cv2.imwrite(str(tmp_path / "photo.png"), picture())
    with Live(tmp_path / "bag.mcap", Perception.load(settings)) as live:
        for seq in range(5):
            live.step(moving_frame(seq))
            if seq == 1:
                live.ask("add_exemplar", name="nut", boxes=[BOX])
    place = ["--exemplar=washer=16,12,40,30", "--unlike=washer=0,0,20,9"]
    for number, (options, label) in enumerate(
        ((place, "washer"), ([f"--exemplar=bolt={tmp_path}/photo.png:10,20,60,70"], "bolt"), ([], "nut"))
    ):
        out = tmp_path / str(number)
        line = ["replay", str(tmp_path / "bag.mcap"), "-o", str(out), *options]
        summary = run_job(_make_job(command_parser().parse(line), settings), load)
        assert (summary.refused, summary.notes) == (0, [])
        found = (item.label for masks in read_masks(out / "masks.mcap") for item in masks.instances)
        assert set(found) == {label}
    for photo in (Path("lost.png"), *make_irregular(tmp_path)):
        lost = [*line[:3], str(tmp_path / f"lost {photo.stem}"), f"--exemplar=nut={photo}:1,2,3,4"]
        with refuses(ReplayError, field=photo.name):
            run_job(_make_job(command_parser().parse(lost), settings), load)
