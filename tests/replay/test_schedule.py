"""Steps on all frames, with edits and objects on the frames that they belong to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.bags.native.reader import RecordedMasks
from sam3_node.errors import ReplayError
from sam3_node.replay.event_log import MAX_NOTES, Notes, Step
from sam3_node.replay.job import ObjectOnFrame
from sam3_node.replay.schedule import FrameEdits, check_extents, group_edits, step_all_frames
from sam3_node.schema.operations import AddObject, RefineObject, RemoveObject, Reset, SetPrompts
from sam3_node.types import Frame
from sam3_node.wire import Event
from tests.support.refuses import refuses
from tests.support.replay_logs import make_frame, make_masks, served

BOX = [0, 0, 4, 4]


def test_every_frame_is_stepped_with_its_edits() -> None:
    edits = FrameEdits()
    edits.before["a", 1] = [Reset()]
    edits.on["a", 2] = [RefineObject(id=1)]
    actions = list(step_all_frames([make_frame(seq) for seq in range(4)], Notes(False), edits))
    assert actions[:3] == [Step(make_frame(0), 5), Reset(), Step(make_frame(1), 5)]
    assert actions[3] == Step(make_frame(2), 5, edits=(RefineObject(id=1),))


def test_recorded_edits_are_on_the_frames_they_took_effect_on() -> None:
    log: list[Any] = [
        served(0),
        make_masks(3),
        Event(1, "add_object", {"box": BOX}),  # on the next frame
        Event(2, "set_prompts", {"prompts": []}),
        make_masks(6),
        Event(3, "refine_object", {"id": 1, "box": BOX}),  # on the last frame
        make_masks(8),
        Event(4, "refine_object", {"id": 1, "box": BOX, "seq": 6}),
        Event(5, "remove_object", {"id": 1}),  # no frame follows
    ]
    edits = group_edits(item if isinstance(item, Event) else RecordedMasks(item, b"") for item in log)
    assert [edit.op for edit in edits.before["a", 6]] == ["add_object", "set_prompts"]
    assert {place: len(edited) for place, edited in edits.on.items()} == {("a", 6): 2}
    assert sum(map(len, edits.before.values())) == 2


def test_an_edit_waits_for_a_frame_of_its_own_camera() -> None:
    added = Event(0, "add_object", {"camera": "b", "box": BOX})
    log = [make_masks(1), make_masks(1, camera="b"), added, make_masks(2), make_masks(2, camera="b")]
    edits = group_edits(item if isinstance(item, Event) else RecordedMasks(item, b"") for item in log)
    assert [place for place, waiting in edits.before.items() if waiting] == [("b", 2)]


def test_edits_are_kept_by_frames_that_have_some_and_can_be_stepped_twice() -> None:
    log: list[Any] = [make_masks(0), Event(1, "reset", {}), make_masks(1), make_masks(2)]
    edits = group_edits(item if isinstance(item, Event) else RecordedMasks(item, b"") for item in log)
    assert list(edits.before) == [("a", 1)]
    frames = [make_frame(seq) for seq in range(3)]
    first, second = (list(step_all_frames(frames, Notes(False), edits.copy())) for _ in range(2))
    assert first == second
    assert Reset() in first


def test_objects_are_added_on_their_frames() -> None:
    frames = [make_frame(seq, camera) for seq in (4, 5) for camera in "ab"]
    shown = (
        ObjectOnFrame(camera="b", box=(0, 0, 1, 1), label="first of b"),
        ObjectOnFrame(camera="a", seq=5, points=((1, 1),), label="by seq"),
        ObjectOnFrame(camera="a", index=1, points=((1, 1),), label="by index"),
        ObjectOnFrame(camera="c", points=((1, 1),), label="nowhere"),
    )
    notes = Notes(lenient=False)
    actions = list(step_all_frames(frames, notes, objects=shown))
    edited = [(item.frame, edit) for item in actions if isinstance(item, Step) for edit in item.edits]
    placed = [(frame.camera, frame.seq, getattr(edit, "label", None)) for frame, edit in edited]
    assert placed == [("b", 4, "first of b"), ("a", 5, "by seq"), ("a", 5, "by index")]
    first = AddObject(camera="b", seq=4, box=(0.0, 0.0, 1.0, 1.0), label="first of b")
    assert isinstance(actions[1], Step)
    assert actions[1].edits == (first,)
    assert notes.lines == ["object nowhere: expected frame 0 of c, found no such frame"]


def test_notes_are_bounded() -> None:
    notes = Notes(lenient=True)
    for number in range(2 * MAX_NOTES):
        notes.add_gap(f"gap {number}")
    assert len(notes.lines) == MAX_NOTES


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"box": (900, 900, 950, 950)}, ("box", "8", "6")),
        ({"points": ((2, 2), (8, 2))}, ("points", "8", "6")),
        ({"points": ((2, -1),)}, "points"),
        ({"mask": "MASK"}, ("mask", "6", "8")),
    ],
)
def test_an_object_outside_the_frames_is_refused_at_the_first_one(
    wrong: dict[str, Any], told: str | tuple[str, ...], tmp_path: Path
) -> None:
    if "mask" in wrong:
        cv2.imwrite(str(tmp_path / "mask.png"), np.ones((5, 5), np.uint8))
        wrong = {"mask": str(tmp_path / "mask.png")}
    frames = [replace(make_frame(seq, camera), width=8, height=6) for seq in range(3) for camera in "ab"]
    later = ObjectOnFrame(camera="b", index=2, **wrong)
    for marked in (later, replace(later, camera=None, index=0)):
        read: list[Frame] = []
        with refuses(ReplayError, field=told):
            check_extents([marked], (read.append(frame) or frame for frame in frames))
        assert len(read) == (1 if marked.camera is None else 2)


def test_an_object_that_is_partly_outside_is_accepted() -> None:
    frames = iter([replace(make_frame(seq), width=8, height=6) for seq in range(3)])
    objects = [
        ObjectOnFrame(box=(-5, -5, 99, 3)),
        ObjectOnFrame(points=((7.9, 5.9),)),
        ObjectOnFrame(camera="another", box=(900, 900, 950, 950)),  # it is noted when its frame does not come
    ]
    check_extents(objects[:2], frames)
    assert next(frames).seq == 1
    check_extents(objects, frames)
    check_extents([], frames)


def test_with_a_stride_frames_of_its_multiples_are_stepped_and_those_with_marks() -> None:
    frames = [make_frame(seq, camera) for seq in range(3, 20) for camera in ("a", "b")]
    edits = FrameEdits()
    edits.before["a", 7] = [SetPrompts(prompts=("mug",))]
    edits.on["b", 11] = [RemoveObject(id=1, camera="b")]
    marked = ObjectOnFrame(camera="b", seq=9, box=(0, 0, 2, 2))
    notes = Notes(False)
    actions = list(step_all_frames(frames, notes, edits, objects=[marked], stride=4))
    steps = [action for action in actions if isinstance(action, Step)]
    found = {name: [step.frame.seq for step in steps if step.frame.camera == name] for name in ("a", "b")}
    assert found == {"a": [3, 4, 7, 8, 12, 16], "b": [3, 4, 8, 9, 11, 12, 16]}
    assert [step.skipped for step in steps if step.frame.camera == "a"] == [0, 0, 2, 0, 3, 3]
    assert sum(isinstance(action, SetPrompts) for action in actions) == 1
    assert not notes.lines
    # a part that begins later steps the same frames, but for its first one
    part = [
        step.frame.key for step in step_all_frames(frames[16:], notes, stride=4) if isinstance(step, Step)
    ]
    whole = [step.frame.key for step in step_all_frames(frames, notes, stride=4) if isinstance(step, Step)]
    assert set(part) - {frame.key for frame in frames[16:18]} <= set(whole)
