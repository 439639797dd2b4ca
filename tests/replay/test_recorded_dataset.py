"""A recording that became a LeRobot dataset: its replay gives the masks that the node published."""

from pathlib import Path

import pytest

from sam3_node.perception.perception import Perception
from sam3_node.recording.lerobot.conversion import convert_recordings
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.run import run_job
from sam3_node.settings import LeRobotSettings
from tests.support.live import Live, chosen, masks_of, moving_frame, tiny_settings

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
