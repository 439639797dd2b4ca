"""The clip of the gate: real objects on the bundled recording, and nobody's on any other."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.bags.bag import sample_images
from sam3_node.engines.slot import CLIP_FRAMES, CLIP_STEP, read_gate_clip
from sam3_node.errors import BagError
from tests.support.tabletop import TABLETOP, truth

SIDE = 256


def test_prompts_are_boxes_of_the_objects_on_the_bundled_recording() -> None:
    clip = read_gate_clip()
    prompts = clip.prompts(SIDE)
    assert prompts is not None
    first = {item.id: item.mask.full() for item in truth()[0].instances if item.area}
    assert [prompt.object_id for prompt in prompts] == list(first)
    for prompt in prompts:
        mask = cv2.resize(
            first[prompt.object_id].astype(np.uint8), (SIDE, SIDE), interpolation=cv2.INTER_AREA
        )
        rows, columns = mask.nonzero()
        edges = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        assert prompt.box == pytest.approx(edges, abs=1.5)


def test_frames_are_those_that_are_sampled_from_any_source(tmp_path: Path) -> None:
    sampled = list(sample_images(TABLETOP, CLIP_FRAMES, CLIP_STEP))
    assert np.array_equal(read_gate_clip().frames, sampled)
    for number, image in enumerate(sampled[:3]):
        cv2.imwrite(str(tmp_path / f"{number}.png"), image)
    clip = read_gate_clip(tmp_path)
    assert np.array_equal(clip.frames, sampled[:3:CLIP_STEP])
    assert clip.prompts(SIDE) is None  # the reference looks for objects itself


def test_a_source_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"no image")
    with pytest.raises(BagError, match="found none that can be read"):
        read_gate_clip(tmp_path)
