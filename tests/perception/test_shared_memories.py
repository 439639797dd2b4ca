"""Objects that share memories, as a camera's perception has them: clicks, corrections, pins and snapshots."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from sam3_node.models.sam31 import random_model
from sam3_node.perception.identity import LiveIdentity
from sam3_node.perception.loading import warm_up
from sam3_node.perception.perception import Perception
from sam3_node.perception.snapshot import Snapshot, restore_snapshot
from sam3_node.perception.step import StepFrame
from sam3_node.settings import Settings, TrackerSettings
from sam3_node.wire import pack_masks
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support import coloured_blocks

Action = Callable[[Perception], object]
FRAMES = 12
CUTS = (6, 13)
"""Actions before which the perception is saved"""


def make_perception() -> Perception:
    settings = Settings(tracker=TrackerSettings(max_objects=24))
    perception = Perception(settings, random_model(112, 32), None)
    perception.session = LiveIdentity(lambda _: 0.0, 0.0, live=True)
    return perception


def step(seq: int) -> Action:
    frame = coloured_blocks.frame(seq, {(30 + 3 * seq, 40): "red", (130, 90 + seq): "green"})

    def act(perception: Perception) -> bytes:
        pipeline = perception.serve(frame.camera)
        masks = pipeline.step(StepFrame(frame, frame.capture_ns))
        joined = [pipeline.catch_ups.advance() for _ in range(3)]
        return pack_masks(replace(masks, stages_us={}))[1] + repr(joined).encode()

    return act


def click(number: int, seq: int | None = None) -> Action:
    point = FramePrompt(points=[(10 + 13 * number % 300, 10 + 29 * number % 200)])
    return lambda perception: perception.serve("cam0").add(point, f"object {number}", seq).id


def refine(object_id: int, seq: int | None = None) -> Action:
    point = FramePrompt(points=[(50, 60)])
    return lambda perception: perception.serve("cam0").refine(object_id, point, seq).seq


def remove(object_id: int) -> Action:
    return lambda perception: perception.serve("cam0").remove(object_id)


@pytest.fixture(scope="module")
def story() -> list[Action]:
    after: dict[int, list[Action]] = {
        0: [click(number) for number in range(3)],
        2: [click(number) for number in range(3, 18)],
        3: [refine(2), remove(4)],
        5: [click(18, seq=4), refine(1, seq=3)],
        8: [click(19), remove(17)],
    }
    return [action for seq in range(FRAMES) for action in (step(seq), *after.get(seq, []))]


def test_clicks_corrections_and_past_frames_give_objects_with_masks(story: list[Action]) -> None:
    perception = make_perception()
    for action in story:
        action(perception)
    objects = perception.serve("cam0").objects
    assert [status.label for status in objects] == [
        f"object {number}" for number in range(20) if number not in (3, 16)
    ]


def test_the_status_says_that_the_confidence_is_not_calibrated() -> None:
    perception = make_perception()
    assert perception.status()["confidence_calibrated"] is False
    assert perception.describe()["confidence"]["calibrated"] is False


@pytest.mark.parametrize("cut", CUTS)
def test_masks_after_a_restore_are_those_of_a_node_that_was_never_killed(
    story: list[Action], cut: int
) -> None:
    whole = make_perception()
    for action in story[:cut]:
        action(whole)
    saved = Snapshot.take(whole, "hand_over").pack()
    expected = [action(whole) for action in story[cut:]]
    other = make_perception()
    restore_snapshot(other, Snapshot.unpack(saved, "test"), "test")
    assert [action(other) for action in story[cut:]] == expected


def test_a_start_warms_up_one_more_group_than_the_objects_fill() -> None:
    """The slot of an object that left is not given again, so that a full group and one object may be two."""
    model = random_model(56, 32)
    model.static_shapes = True
    settings = Settings(tracker=TrackerSettings(max_objects=model.slots))
    groups = set[int]()
    decode = model.stages.decode

    def watch(top: Tensor, *rest: Tensor) -> object:
        groups.add(len(top))
        return decode(top, *rest)

    model.stages = model.stages._replace(decode=watch)
    warm_up(model, settings, model.stages)
    assert groups == {1, 2}
