"""A detector of another package in the step of a frame."""

import threading
from typing import Any

import numpy as np

from sam3_node.detection.detectors import prepare_prompts
from sam3_node.detection.guarded import GuardedDetector
from sam3_node.models import TrackerModel
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import DetectorSettings, TrackerSettings
from sam3_node.types import Detection
from tests.support.coloured_blocks import ColourDetector, frame

PLACE = (30, 40)


class OwnColours(ColourDetector):
    """Finds colours, and fails as told."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    def detect(self, image: np.ndarray, query: Any, threshold: float) -> list[Detection]:
        self.go.wait()
        if self.fault is not None:
            raise self.fault
        return super().detect(image, query, threshold)


def test_a_detector_that_fails_or_is_slow_costs_no_mask(nano: TrackerModel) -> None:
    own = OwnColours()
    detector = GuardedDetector(own, "own:colours")
    settings = DetectorSettings(kind="own", every=1)
    pipeline = Pipeline(nano, TrackerSettings(max_objects=4), "cam0", detector, settings)
    pipeline.set_prompts(prepare_prompts(detector, ["red"], 0.5))
    numbers = iter(range(1, 100))

    def ids() -> set[int]:
        masks = pipeline.step(frame(next(numbers), {PLACE: "red"}))
        return {one.id for one in masks.instances if one.mask.area}

    ids()
    seen = ids()
    assert len(seen) == 1
    own.fault = KeyError("weights")
    assert ids() == seen
    own.fault = None
    detector.limit_s = 0.001
    own.go.clear()
    assert ids() == ids() == seen
    own.go.set()
