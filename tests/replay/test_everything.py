"""Replays that track everything on the first frame of each camera."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from sam3_node.perception.perception import Perception
from sam3_node.replay.edits import AddEverything
from sam3_node.replay.event_log import Notes, Step
from sam3_node.replay.player import Player
from sam3_node.replay.schedule import step_all_frames
from sam3_node.replay.store import ReplayCounts
from sam3_node.schema.operations import SegmentEverything, SetPrompts
from tests.support.live import moving_frame, tiny_settings
from tests.support.refuses import mentions

# random weights are sure of nothing
ALL = SegmentEverything(camera="left", seq=0, grid=3, min_iou=0.0, min_stability=0.0, max_overlap=1.0)


def test_the_first_frame_of_each_camera_begins_its_objects() -> None:
    frames = [moving_frame(seq, camera) for seq in range(3) for camera in ("left", "right")]
    actions = [
        step for step in step_all_frames(frames, Notes(False), everything=True) if isinstance(step, Step)
    ]
    assert [len(action.edits) for action in actions] == [1, 1, 0, 0, 0, 0]
    assert actions[1].edits == (AddEverything(SegmentEverything(camera="right", seq=0)),)


def test_what_is_found_is_tracked_while_slots_are_free(tmp_path: Path) -> None:
    player = Player(Perception.load(tiny_settings(tmp_path, max_objects=2)))
    first = moving_frame(0)
    second = moving_frame(1)
    begun = player.play(Step(first, 0, edits=(AddEverything(ALL),)))
    assert [instance.id for instance in begun.instances] == [1, 2]
    assert all(instance.area for instance in begun.instances)
    followed = player.play(Step(second, 0))
    assert [instance.id for instance in followed.instances] == [1, 2]
    assert not player.counts["refused"]


@pytest.mark.parametrize(("limit", "notes"), [(1.0, 1), (0.0, 0)])
def test_a_search_that_finds_nothing_is_noted(limit: float, notes: int, tmp_path: Path) -> None:
    player = Player(Perception.load(tiny_settings(tmp_path)))
    edit = AddEverything(replace(ALL, min_iou=limit))
    player.play(Step(moving_frame(0), 0, edits=(edit,)))
    assert len(player.notes) == notes
    assert all(mentions(note, "left", "frame 0", "27", "0 had") for note in player.notes)


def test_prompts_that_begin_no_object_are_named() -> None:
    totals = ReplayCounts(objects={"left": {"1": "mug"}})
    status = {
        "prompts": ["mug", "can", "ball", "box"],
        "prompt_scores": {"mug": 0.0, "can": 0.15, "ball": 0.0, "box": 0.7},
        "prompt_limits": {"scores": dict.fromkeys(("mug", "can", "ball", "box"), 0.2)},
    }
    unfound = totals.describe_unfound(status)
    assert list(unfound) == ["can", "ball", "box"]
    assert mentions(unfound["can"], "'can'", "0.15", "0.2")
    assert mentions(unfound["ball"], "0.1")
    assert mentions(unfound["box"], "confirmed")


def test_an_edit_that_is_refused_is_noted_once(tmp_path: Path) -> None:
    player = Player(Perception.load(tiny_settings(tmp_path)))
    for _ in range(2):
        player.play(SetPrompts(prompts=("mug",)))
    assert player.counts["refused"] == 2
    assert [note.startswith("set_prompts was refused: ") for note in player.notes] == [True]
