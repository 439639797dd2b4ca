"""Masks that are surely wrong: not published where the confidence is calibrated."""

from __future__ import annotations

import numpy as np

from sam3_node.models import TrackerModel
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import TrackerSettings
from sam3_node.types import Frame, Instance
from sam3_node.wire import encode_image
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.tiny import random_source, stages_of

WIDTH, HEIGHT = 200, 150


def random_tracker(name: str) -> TrackerModel:
    """A tiny random tracker that always finds its objects in view."""
    return stages_of(random_source("sam3", presence=60.0), name)


def frame(seq: int) -> Frame:
    image = np.random.default_rng(seq).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    return Frame("cam0", seq, 1000 + seq, WIDTH, HEIGHT, "bgr8", encode_image(image, "bgr8"))


def second_instance(model: TrackerModel, hide_below: float) -> Instance:
    """Add an object and return its instance on the second frame with it."""
    pipeline = Pipeline(model, TrackerSettings(max_objects=4, hide_below=hide_below), "cam0")
    pipeline.step(frame(0))
    pipeline.add(FramePrompt(points=[(100.0, 75.0)]))
    pipeline.step(frame(1))
    (instance,) = pipeline.step(frame(2)).instances
    return instance


def test_a_mask_that_is_surely_wrong_is_not_published_and_its_object_is_occluded() -> None:
    calibrated = random_tracker("nano")
    shown = second_instance(calibrated, hide_below=0.0)
    assert shown.state == "tracked"
    assert shown.confidence is not None
    just_shown = second_instance(calibrated, hide_below=shown.confidence)
    assert (just_shown.state, just_shown.mask.area) == ("tracked", shown.mask.area)
    hidden = second_instance(calibrated, hide_below=1.0)
    assert (hidden.state, hidden.confidence, hidden.mask.area) == ("occluded", None, 0)
    assert hidden.mask.size == (HEIGHT, WIDTH)
    assert (hidden.age, hidden.frames_since_seen) == (2, 2)


def test_no_mask_is_hidden_where_the_confidence_is_not_calibrated() -> None:
    shown = second_instance(random_tracker("tiny"), hide_below=1.0)
    assert shown.state == "tracked"
    assert shown.mask.area > 0
