"""Two passes over the same frames as one stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from sam3_node.replay.merge import merge, turned
from sam3_node.types import Instance, Mask, MaskFrame


def masks_at(seq: int, scores: dict[int, float], model: str = "", camera: str = "cam0") -> MaskFrame:
    mask = Mask.from_full(np.ones((4, 4), np.bool_))
    instances = (Instance(n, model, score, "tracked", 0, 0, mask) for n, score in scores.items())
    return MaskFrame(camera, seq, 0, 4, 4, model=model, instances=tuple(instances))


def passes(seqs: Iterable[int], scores: dict[int, float], model: str) -> Iterator[MaskFrame]:
    return (masks_at(seq, scores, model) for seq in seqs)


def chosen(masks: MaskFrame) -> dict[int, str]:
    return {one.id: one.label for one in masks.instances}


def test_the_higher_score_is_taken_for_each_object_and_forward_of_equals() -> None:
    forward = passes(range(3), {1: 0.9, 2: 0.3, 3: 0.5}, "forward")
    backward = passes(range(3), {3: 0.5, 2: 0.4, 1: 0.1}, "backward")
    for masks in merge(forward, backward):
        assert chosen(masks) == {1: "forward", 2: "backward", 3: "forward"}
        assert masks.model == "forward"


def test_frames_and_objects_of_one_pass_alone_are_there() -> None:
    forward = passes(range(2, 6), {1: 0.9}, "forward")
    backward = passes(range(4), {1: 0.5, 2: 0.5}, "backward")
    merged = list(merge(forward, backward))
    assert [masks.seq for masks in merged] == list(range(6))
    assert [chosen(masks).get(1) for masks in merged] == ["backward"] * 2 + ["forward"] * 4
    assert [chosen(masks).get(2) for masks in merged] == ["backward"] * 4 + [None] * 2


def test_a_pass_without_frames_leaves_the_other_as_it_is() -> None:
    frames = list(passes(range(4), {1: 0.9}, "a"))
    assert list(merge(frames, [])) == frames
    assert list(merge([], frames)) == frames
    assert not list(merge([], []))


def test_several_cameras_come_in_the_order_of_the_recording() -> None:
    order = [("left", 0), ("right", 4), ("left", 1), ("right", 5)]
    frames = [masks_at(seq, {1: 0.5}, camera=camera) for camera, seq in order]
    merged = merge(frames[1:], frames[:3], lambda masks: order.index((masks.camera, masks.seq)))
    assert [(masks.camera, masks.seq) for masks in merged] == order


def test_it_reads_no_further_than_it_gives() -> None:
    read: list[int] = []

    def watched() -> Iterator[MaskFrame]:
        for seq in range(100):
            read.append(seq)
            yield masks_at(seq, {1: 0.5})

    merged = merge(watched(), passes(range(100), {1: 0.4}, ""))
    for _ in range(10):
        next(merged)
    assert len(read) <= 11


def test_parts_of_a_backward_pass_are_turned_around() -> None:
    read: list[int] = []

    def part(first: int, last: int) -> list[MaskFrame]:
        read.append(first)
        return list(passes(range(first, last, -1), {1: 0.5}, ""))

    turning = turned([lambda: part(9, 5), lambda: part(5, 2), lambda: part(2, -1)])
    assert next(turning).seq == 0
    assert read == [2]
    assert [masks.seq for masks in turning] == list(range(1, 10))
