"""Spans of low scores, tracked again from the next confident frame."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sam3_node.bags import read_masks
from sam3_node.replay.job import Job
from sam3_node.replay.run import run_job
from sam3_node.replay.second_pass import find_multi_shot_spans
from sam3_node.replay.shards import Shards
from sam3_node.replay.store import FolderStore
from sam3_node.types import Instance, Mask, MaskFrame, TrackState
from tests.support.tabletop import NANO, cut, ious, shown

DOUBT = 0.5
BALL, FIRST, STOP = "orange ball", 140, 164


def masks_of(scores: list[float | None], camera: str = "cam0", object_id: int = 1) -> list[MaskFrame]:
    """Make masks of an object with these scores; None if it is out of view."""
    return [
        MaskFrame(camera, seq, 0, 4, 4, instances=(instance(object_id, score),))
        for seq, score in enumerate(scores)
    ]


def instance(object_id: int, score: float | None) -> Instance:
    mask = Mask.from_full(np.full((4, 4), score is not None))
    state: TrackState = "occluded" if score is None else "tracked"
    return Instance(object_id, "thing", score or 0.0, state, 1, 0, mask)


def places(scores: list[float | None]) -> list[tuple[int, int]]:
    return [(span.first, span.last) for span in find_multi_shot_spans(masks_of(scores), DOUBT)]


def test_a_span_lies_between_confident_frames() -> None:
    assert places([0.9, 0.4, None, 0.1, 0.8, 0.9]) == [(0, 4)]
    assert places([0.9, None, None, None, 0.5, 0.2, 0.2, 0.2, 0.6]) == [(0, 4), (4, 8)]


def test_short_drops_and_open_ends_are_no_spans() -> None:
    assert places([0.9, 0.4, 0.4, 0.9]) == []
    assert places([0.4, 0.4, 0.4, 0.9]) == []
    assert places([0.9, 0.4, 0.4, 0.4, None]) == []


def test_spans_are_separate_for_cameras_and_objects() -> None:
    drop: list[float | None] = [0.9, 0.1, 0.1, 0.1, 0.9]
    left, right = masks_of(drop, "left"), masks_of(drop[::-1], "right", object_id=7)
    both = [masks for pair in zip(left, right, strict=True) for masks in pair]
    found = [(span.camera, span.id, span.first, span.last) for span in find_multi_shot_spans(both, DOUBT)]
    assert found == [("left", 1, 0, 8), ("right", 7, 1, 9)]


def test_a_drop_of_the_score_is_repaired_backward(tmp_path: Path) -> None:
    bag = cut(tmp_path / "bag.mcap", FIRST, STOP)
    job = Job(
        (str(bag),),
        str(tmp_path / "out"),
        "every",
        "multi-shot",
        objects=(shown(BALL, FIRST),),
        settings=NANO,
    )
    summary = run_job(job)
    assert any("spans of objects tracked again" in note for note in summary.notes)
    once = ious(Shards(FolderStore(tmp_path / "out")).masks(), BALL)
    twice = ious(read_masks(tmp_path / "out" / "masks.mcap"), BALL)
    changed = [seq for seq in once if once[seq] != twice[seq]]
    assert changed
    assert np.mean([twice[seq] for seq in changed]) > np.mean([once[seq] for seq in changed])
