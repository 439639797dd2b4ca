"""A replay gives the same `world_id` as the live node, also when it continues from a checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sam3_node.perception.perception import Perception
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.step import StepFrame
from sam3_node.replay.event_log import Action, Step
from sam3_node.replay.job import Job
from sam3_node.replay.player import Player
from sam3_node.replay.run import compare_job, run_job
from sam3_node.schema.operations import AddObject
from sam3_node.types import MaskFrame
from tests.perception.test_linking import world_ids
from tests.support.live import BOX, Live, chosen, moving_frame, tiny_settings

CAMERAS = ("left", "right")
FRAMES = 12


@pytest.fixture(autouse=True)
def positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each object a position in base: 1 m apart for each id, the same for both cameras, with the frame's noise."""
    track: Callable[..., MaskFrame] = Pipeline.step

    def step(pipeline: Pipeline, given: StepFrame) -> MaskFrame:
        masks = track(pipeline, given)
        noise_m = 0.01 * (given.frame.seq % 3)
        sure = {"frame": "base", "state": "tracked", "doubtful": False}
        instances = tuple(
            replace(item, position_m=(item.id + noise_m, 0.0, 0.0), **sure) for item in masks.instances
        )
        return replace(masks, instances=instances)

    monkeypatch.setattr(Pipeline, "step", step)


def test_a_replay_links_as_the_node_did(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, link_distance_m=0.05)
    with Live(tmp_path / "live.mcap", Perception.load(settings)) as live:
        for seq in range(FRAMES):
            for camera in CAMERAS:
                live.step(moving_frame(seq, camera))
                if seq == 1:
                    live.ask("add_object", camera=camera, box=BOX)
            if seq == 6:
                live.ask("add_object", camera="right", box=BOX)
    assert world_ids(live.masks[-2]) == [1]
    assert world_ids(live.masks[-1]) == [1, 3]
    job = Job((str(tmp_path / "live.mcap"),), str(tmp_path / "out"), "as-recorded", settings=chosen(settings))
    run_job(job)
    compared = compare_job(job)
    assert compared.is_identical, compared


def test_a_player_continues_with_the_same_ids(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, link_distance_m=0.05)
    perception = Perception.load(settings)
    actions: list[Action] = [
        Step(moving_frame(seq, camera), 1) for seq in range(FRAMES) for camera in CAMERAS
    ]
    actions[4:4] = [AddObject(camera=camera, box=(16.0, 12.0, 48.0, 36.0)) for camera in CAMERAS]

    def play(player: Player, part: list[Action]) -> list[list[int | None]]:
        return [world_ids(masks) for action in part if (masks := player.play(action)) is not None]

    whole = play(Player(perception), actions)
    assert whole[-2:] == [[1], [1]]
    for cut in (7, 9, 12, 15):
        first = Player(perception)
        begun = play(first, actions[:cut])
        checkpoint = first.checkpoint()
        second = Player(perception)
        second.resume(checkpoint, {})
        assert begun + play(second, actions[cut:]) == whole
