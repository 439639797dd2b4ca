"""Two passes over the same frames, merged to one stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from sam3_node.errors import ReplayError
from sam3_node.replay.second_pass import merge
from sam3_node.types import Instance, Mask, MaskFrame

DOUBT = 0.5


def masks_at(
    seq: int,
    scores: dict[int, float],
    model: str = "",
    camera: str = "cam0",
    age: int = 0,
    frames_since_seen: int = 0,
    column: int = 0,
) -> MaskFrame:
    full = np.zeros((4, 4), np.bool_)
    full[:, column] = True
    mask = Mask.from_full(full)
    instances = (
        Instance(n, model, score, "tracked", age, frames_since_seen, mask) for n, score in scores.items()
    )
    return MaskFrame(camera, seq, 0, 4, 4, model=model, instances=tuple(instances))


def passes(seqs: Iterable[int], scores: dict[int, float], model: str) -> Iterator[MaskFrame]:
    return (masks_at(seq, scores, model) for seq in seqs)


def chosen(masks: MaskFrame) -> dict[int, str]:
    return {one.id: one.label for one in masks.instances}


def test_the_higher_score_is_taken_for_each_object_and_forward_of_equals() -> None:
    forward = passes(range(3), {1: 0.9, 2: 0.3, 3: 0.5}, "forward")
    backward = passes(range(3), {3: 0.5, 2: 0.4, 1: 0.1}, "backward")
    for masks in merge(forward, backward, DOUBT):
        assert chosen(masks) == {1: "forward", 2: "backward", 3: "forward"}
        assert masks.model == "forward"


def test_objects_of_one_pass_alone_are_there_on_its_frames() -> None:
    forward = passes(range(6), {1: 0.9}, "forward")
    backward = passes(range(4), {1: 0.5, 2: 0.5}, "backward")
    merged = list(merge(forward, backward, DOUBT))
    assert [masks.seq for masks in merged] == list(range(6))
    assert [chosen(masks) for masks in merged] == [{1: "forward", 2: "backward"}] * 4 + [{1: "forward"}] * 2


def test_without_a_second_pass_the_first_is_as_it_was() -> None:
    frames = [masks_at(seq, {1: 0.9}, age=seq) for seq in range(4)]
    assert list(merge(frames, [], DOUBT)) == frames
    assert not list(merge([], [], DOUBT))


def test_several_cameras_come_in_the_order_of_the_recording() -> None:
    order = [("left", 0), ("right", 4), ("left", 1), ("right", 5), ("left", 2)]
    frames = [masks_at(seq, {1: 0.5}, camera=camera) for camera, seq in order]
    again = [masks_at(seq, {1: 0.6}, "again", camera) for camera, seq in order[1:4]]
    merged = list(merge(frames, again, DOUBT))
    assert [(masks.camera, masks.seq) for masks in merged] == order
    assert [chosen(masks)[1] for masks in merged] == ["", "again", "again", "again", ""]


def test_ages_are_counted_in_the_order_of_the_frames() -> None:
    forward = [masks_at(seq, {1: 0.5} if seq >= 2 else {}, age=max(0, seq - 2)) for seq in range(5)]
    backward = [
        masks_at(0, {1: 0.1}, age=2, frames_since_seen=1),
        masks_at(1, {1: 0.5}, age=1),
    ]
    merged = [masks.instances[0] for masks in merge(forward, backward, DOUBT)]
    assert [one.age for one in merged] == [1, 2, 3, 4, 5]
    assert [one.frames_since_seen for one in merged] == [1, 0, 0, 0, 0]


def test_a_span_that_disagrees_on_its_first_frame_is_left_out() -> None:
    forward = [masks_at(seq, {1: score}) for seq, score in enumerate([0.7, 0.2, 0.7, 0.2, 0.7])]
    other = [masks_at(seq, {1: 0.9}, "backward", age=2 - seq, column=2) for seq in range(2)]
    same = [masks_at(seq, {1: 0.6}, "backward", age=4 - seq) for seq in (2, 3)]
    merged = [chosen(masks)[1] for masks in merge(forward, [*other, *same], DOUBT)]
    assert merged == ["", "", "", "backward", ""]
    unsure = [masks_at(0, {1: 0.3}), *forward[1:]]
    merged = [chosen(masks)[1] for masks in merge(unsure, [*other, *same], DOUBT)]
    assert merged == ["backward", "backward", "", "backward", ""]


def test_a_frame_that_the_first_pass_does_not_have_is_an_error() -> None:
    merged = merge(passes(range(3), {1: 0.5}, ""), passes(range(5, 6), {1: 0.5}, ""), DOUBT)
    with pytest.raises(ReplayError, match="frame 5"):
        list(merged)


def test_frames_are_read_only_as_needed() -> None:
    read: list[int] = []

    def watched() -> Iterator[MaskFrame]:
        for seq in range(100):
            read.append(seq)
            yield masks_at(seq, {1: 0.5})

    merged = merge(watched(), passes(range(100), {1: 0.4}, ""), DOUBT)
    for _ in range(10):
        next(merged)
    assert len(read) <= 11
