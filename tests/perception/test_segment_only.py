"""Real weights without memory modules: they segment, and track by their last masks."""

from __future__ import annotations

import numpy as np
import pytest

from sam3_node.models import load_tracker
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import TrackerSettings
from sam3_node.wire import encode_image
from sam3_node.wire.frame_prompt import FramePrompt
from tests.perception.test_pipeline import HEIGHT, WIDTH, frame
from tests.support.paths import SHARED

SEGMENT_ONLY = SHARED / "weights" / "sam2-hiera-tiny"


@pytest.mark.skipif(not SEGMENT_ONLY.exists(), reason="needs ../shared/weights")
def test_real_weights_without_memory_segment_and_track() -> None:
    pipeline = Pipeline(load_tracker(SEGMENT_ONLY), TrackerSettings(), "cam0")
    image = np.full((HEIGHT, WIDTH, 3), 40, np.uint8)
    image[40:100, 60:140] = (30, 60, 220)
    pipeline.step(frame(0, colour=encode_image(image, "bgr8")))
    found = pipeline.queries.segment(FramePrompt(box=[55, 35, 145, 105])).mask.full()
    truth = np.zeros((HEIGHT, WIDTH), dtype=np.bool_)
    truth[40:100, 60:140] = True
    assert (found & truth).sum() / (found | truth).sum() > 0.9
    added = pipeline.add(FramePrompt(box=[55, 35, 145, 105])).id
    (tracked,) = pipeline.step(frame(1, colour=encode_image(np.roll(image, 6, 1), "bgr8"))).instances
    found, truth = tracked.mask.full(), np.roll(truth, 6, 1)
    assert (tracked.id, tracked.state) == (added, "tracked")
    assert (found & truth).sum() / (found | truth).sum() > 0.9
