"""Segments of a recording, cut and stitched, on masks of moving blocks."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from sam3_node.replay.shards import Segment, cut_segments, stitch
from sam3_node.types import Instance, Mask, MaskFrame

WIDTH = 80
HEIGHT = 60
LABELS = {1: "mug", 2: "mug", 3: "bowl", 4: "mug"}
Ids = Mapping[int, int]


def block(truth: int, seq: int) -> Mask:
    full = np.zeros((HEIGHT, WIDTH), np.bool_)
    full[14 * (truth - 1) : 14 * (truth - 1) + 12, seq : seq + 20] = True
    return Mask.from_full(full)


def masks_at(seq: int, ids: Ids, camera: str = "cam0") -> MaskFrame:
    """Make a frame with the true objects in `ids`, under these segment ids."""
    instances = tuple(
        Instance(own, LABELS[truth], 0.9, "tracked", seq, 0, block(truth, seq)) for truth, own in ids.items()
    )
    return MaskFrame(camera, seq, 1000 * seq, WIDTH, HEIGHT, instances=instances)


def segment(start: int, stop: int, ids: Ids) -> Iterator[MaskFrame]:
    return (masks_at(seq, ids) for seq in range(start, stop))


def tracks_of(stitched: Iterator[MaskFrame]) -> dict[int, set[int]]:
    """Return the true objects of each id."""
    found: dict[int, set[int]] = {}
    for masks in stitched:
        for one in masks.instances:
            found.setdefault(one.id, set()).add(1 + one.mask.box[1] // 14)
    return found


@pytest.mark.parametrize(
    ("count", "length", "overlap", "expected"),
    [
        (100, 40, 10, [(0, 40), (30, 70), (60, 100)]),
        (101, 40, 10, [(0, 40), (30, 70), (60, 100), (90, 101)]),
        (40, 40, 10, [(0, 40)]),
        (5, 40, 10, [(0, 5)]),
        (12, 4, 0, [(0, 4), (4, 8), (8, 12)]),
        (0, 40, 10, []),
    ],
)
def test_segments_cover_every_frame(
    count: int, length: int, overlap: int, expected: list[tuple[int, int]]
) -> None:
    assert cut_segments(count, length, overlap) == [Segment(*span) for span in expected]


def test_every_length_is_covered_with_its_overlap() -> None:
    for count in range(1, 60):
        segments = cut_segments(count, 7, 3)
        assert (segments[0].start, segments[-1].stop) == (0, count)
        for before, after in itertools.pairwise(segments):
            assert before.stop - after.start == 3
            assert after.stop > before.stop


def test_objects_with_new_ids_in_each_segment_are_joined() -> None:
    parts = [segment(0, 12, {1: 1, 3: 5}), segment(8, 20, {3: 1, 1: 2}), segment(16, 30, {1: 9, 3: 4})]
    stitched = list(stitch(parts, 4))
    assert [masks.seq for masks in stitched] == list(range(30))
    assert tracks_of(iter(stitched)) == {1: {1}, 5: {3}}


@pytest.mark.parametrize(
    ("parts", "tracks"),
    [
        pytest.param(
            [(0, 12, {1: 1, 2: 2}), (8, 20, {1: 2, 2: 1})],
            {1: {1}, 2: {2}},
            id="swapped ids are swapped back",
        ),
        pytest.param(
            [(0, 12, {1: 1, 2: 7}), (8, 20, {1: 1, 4: 2}), (16, 30, {4: 1, 2: 2})],
            {1: {1}, 7: {2}, 8: {4}, 9: {2}},
            id="new objects get unused ids",
        ),
        pytest.param([(0, 12, {1: 1}), (8, 20, {2: 1})], {1: {1}, 2: {2}}, id="masks with little overlap"),
    ],
)
def test_objects_are_joined_by_their_masks(
    parts: list[tuple[int, int, Ids]], tracks: dict[int, set[int]]
) -> None:
    assert tracks_of(stitch([segment(*part) for part in parts], 4)) == tracks


def test_objects_with_other_labels_are_not_joined() -> None:
    after = [
        replace(masks, instances=tuple(replace(one, label="cup") for one in masks.instances))
        for masks in segment(8, 20, {1: 1})
    ]
    assert tracks_of(stitch([segment(0, 12, {1: 1}), after], 4)) == {1: {1}, 2: {1}}


def test_without_an_overlap_every_object_is_new() -> None:
    parts = [segment(0, 10, {1: 1}), segment(10, 20, {1: 1})]
    stitched = list(stitch(parts, 0))
    assert [masks.seq for masks in stitched] == list(range(20))
    assert tracks_of(iter(stitched)) == {1: {1}, 2: {1}}


def test_an_empty_overlap_loses_no_frame() -> None:
    parts = [segment(0, 8, {1: 1}), segment(12, 20, {1: 1})]
    assert [masks.seq for masks in stitch(parts, 4)] == [*range(8), *range(12, 20)]


def test_an_object_that_appears_late_in_the_overlap_is_joined() -> None:
    after = [masks_at(seq, {1: 1} if seq > 10 else {}) for seq in range(8, 20)]
    assert tracks_of(stitch([segment(0, 12, {1: 3}), after], 4)) == {3: {1}}


def test_hidden_objects_are_not_joined() -> None:
    def hidden(masks: MaskFrame) -> MaskFrame:
        empty = (replace(one, mask=Mask.empty((HEIGHT, WIDTH))) for one in masks.instances)
        return replace(masks, instances=tuple(empty))

    parts = [list(map(hidden, segment(0, 12, {1: 1}))), list(map(hidden, segment(8, 20, {1: 1})))]
    assert {one.id for masks in stitch(parts, 4) for one in masks.instances} == {1, 2}


def test_frames_are_the_earlier_segments_up_to_the_middle_of_the_overlap() -> None:
    parts = [[replace(masks, model=name) for masks in segment(start, start + 12, {1: 1})]
             for name, start in (("a", 0), ("b", 8))]  # fmt: skip
    assert "".join(masks.model for masks in stitch(parts, 4)) == "a" * 10 + "b" * 10


def test_each_camera_has_its_own_ids() -> None:
    def both(start: int, stop: int, left: Ids, right: Ids) -> Iterator[MaskFrame]:
        for seq in range(start, stop):
            yield masks_at(seq, left, "left")
            yield masks_at(seq, right, "right")

    parts = [both(0, 12, {1: 1}, {2: 1}), both(8, 20, {2: 1, 1: 2}, {2: 4})]
    stitched = list(stitch(parts, 8))
    assert [(masks.camera, masks.seq) for masks in stitched[-2:]] == [("left", 19), ("right", 19)]
    assert len(stitched) == 40
    assert tracks_of(masks for masks in stitched if masks.camera == "left") == {1: {1}, 2: {2}}
    assert tracks_of(masks for masks in stitched if masks.camera == "right") == {1: {2}}


def test_frames_are_read_only_as_needed() -> None:
    read: list[int] = []

    def watched(start: int, stop: int) -> Iterator[MaskFrame]:
        for seq in range(start, stop):
            read.append(seq)
            yield masks_at(seq, {1: 1})

    stitched = stitch([watched(0, 50), watched(46, 90)], 4)
    for _ in range(20):
        next(stitched)
    assert len(read) == 20 + 4
