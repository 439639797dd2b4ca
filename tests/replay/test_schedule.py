"""Plans of what a node did, the frames of a plan, edits at the frames that they are meant for; progress in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sam3_node.bags.native.reader import RecordedMasks
from sam3_node.errors import ReplayError, WireError
from sam3_node.replay.actions import MAX_NOTES, RESTARTED, Edit, Notes, Step
from sam3_node.replay.event_log import WINDOW, Gap, LogEntry, LoggedStep, match_frames, read_event_log
from sam3_node.replay.job import ObjectOnFrame
from sam3_node.replay.schedule import FrameEdits, add_objects, group_edits, step_all_frames
from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import Event

FRESH = {"events": 0, "cameras": {}, "prompts": []}


def frame(seq: int, camera: str = "a", capture_ns: int | None = None) -> Frame:
    return Frame(
        camera, seq, 100 + seq if capture_ns is None else capture_ns, 2, 2, "mono8", bytes(4), sent_ns=5
    )


def masks(seq: int, skipped: int = 0, camera: str = "a") -> MaskFrame:
    return MaskFrame(camera, seq, 100 + seq, 2, 2, received_ns=7, skipped=skipped)


def served(n: int, camera: str = "a") -> Event:
    return Event(n, "served", {"camera": camera})


def plan(*log: MaskFrame | Event, description: dict[str, Any] | None = None) -> list[LogEntry]:
    return list(read_event_log(log, description or FRESH))


def gaps(found: Sequence[LogEntry]) -> list[str]:
    return [item.text for item in found if isinstance(item, Gap)]


def test_a_plan_is_what_the_node_did_in_its_order() -> None:
    failed = Event(2, "failed", {"camera": "a", "seq": 5, "error": "bad"})
    found = plan(served(0), masks(0), Event(1, "add_object", {"box": [1]}), masks(3, 2), failed, masks(6))
    assert found == [
        Edit("served", {"camera": "a"}),
        LoggedStep("a", 0, 100, 7, 0),
        Edit("add_object", {"box": [1]}),
        LoggedStep("a", 3, 103, 7, 2),
        LoggedStep("a", 5),
        LoggedStep("a", 6, 106, 7, 0),
    ]
    assert [item.failed for item in found if isinstance(item, LoggedStep)] == [False, False, True, False]


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ((served(0), masks(0), masks(2)), "a: expected the masks of all frames .* 1 of them are not"),
        ((served(0), masks(0), masks(5, 2)), "2 of them are not in the recording"),
        ((served(0), masks(0), Event(2, "reset", {})), r"expected event 1 of the node, found 2 \(reset\)"),
        ((Event(2, "reset", {}),), r"expected event 0 of the node, found 2"),
        ((served(0), Event(3, "pause", {}), served(1)), "expected event 1 of the node, found 3"),
    ],
)
def test_what_is_missing_is_a_gap_where_it_is_missing(log: Sequence[Any], told: str) -> None:
    found = plan(*log)
    with pytest.raises(ReplayError, match=told):
        Notes(lenient=False).add_gap(gaps(found)[0])
    assert isinstance(found[-1], (LoggedStep, Edit))


@pytest.mark.parametrize(
    ("description", "log", "complete"),
    [
        (FRESH, (served(0), masks(0)), True),
        # heard before the node answered
        ({"events": 1, "cameras": {"a": {}}}, (served(0), masks(0)), True),
        # it had served cameras, and nobody had asked for anything
        ({"events": 1, "cameras": {"a": {"objects": 0}}}, (masks(9), Event(1, "reset", {})), True),
        ({"events": 2, "cameras": {"a": {"objects": 1}}}, (masks(9),), False),
        ({"events": 1, "cameras": {"a": {"objects": 3}}, "prompts": ["mug"]}, (masks(9),), False),
        ({"events": 4, "cameras": {"a": {}}}, (Event(4, "reset", {}), masks(9)), False),
        (None, (masks(9),), False),
        (None, (served(0), masks(0)), True),
    ],
)
def test_whether_a_recording_has_the_beginning(
    description: dict[str, Any] | None, log: Sequence[Any], complete: bool
) -> None:
    found = list(read_event_log(log, description))
    assert ("begins later" in "".join(gaps(found))) != complete
    assert not complete or not gaps(found)


def test_a_camera_that_starts_again_is_no_gap() -> None:
    assert not gaps(plan(served(0), masks(7), masks(0), masks(1)))


def test_a_node_that_starts_again_begins_anew() -> None:
    found = plan(served(0), masks(0), served(0), masks(5))
    assert found[2:4] == [Edit(RESTARTED), Edit("served", {"camera": "a"})]
    assert not gaps(found)


def test_an_event_without_its_arguments_is_refused() -> None:
    with pytest.raises(WireError, match="event failed"):
        plan(served(0), Event(1, "failed", {"camera": "a"}))


def lookup(
    plan: Sequence[LogEntry], frames: Sequence[Frame], lenient: bool = False
) -> tuple[list[Any], Notes]:
    notes = Notes(lenient)
    found = [
        (item.frame.camera, item.frame.seq) if isinstance(item, Step) else item.op
        for item in match_frames(plan, frames, notes)
    ]
    return found, notes


def stepped(seq: int, camera: str = "a") -> LoggedStep:
    return LoggedStep(camera, seq, 100 + seq)


def test_frames_of_several_cameras_are_found_in_another_order() -> None:
    frames = [frame(seq, camera) for seq in range(6) for camera in "abc"]
    plan = [stepped(2, "c"), stepped(0), Edit("reset"), stepped(5, "b"), stepped(5), stepped(4, "c")]
    found, _ = lookup(plan, frames)
    assert found == [("c", 2), ("a", 0), "reset", ("b", 5), ("a", 5), ("c", 4)]


def test_a_missing_frame_is_a_gap_and_costs_no_other() -> None:
    frames = [frame(seq, camera) for seq in range(6) for camera in "ab" if (seq, camera) != (2, "a")]
    plan = [stepped(0), stepped(2), stepped(1, "b"), stepped(3), stepped(5, "b")]
    with pytest.raises(ReplayError, match="camera a: expected frame 2, which the node stepped"):
        lookup(plan, frames)
    found, notes = lookup(plan, frames, lenient=True)
    assert found == [("a", 0), ("b", 1), ("a", 3), ("b", 5)]
    assert len(notes.lines) == 1


def test_frames_of_one_seq_are_told_apart_by_their_time() -> None:
    frames = [frame(0, capture_ns=1), frame(1), frame(0, capture_ns=900), frame(1, capture_ns=901)]
    plan = [LoggedStep("a", 0, 1), LoggedStep("a", 1, 101), LoggedStep("a", 0, 900), LoggedStep("a", 1, 901)]
    notes = Notes(lenient=False)
    found = [item.frame.capture_ns for item in match_frames(plan, frames, notes) if isinstance(item, Step)]
    assert found == [1, 101, 900, 901]


def test_few_frames_are_held_and_no_more_are_read_than_needed() -> None:
    read = 0

    def frames() -> Iterator[Frame]:
        nonlocal read
        for seq in range(5 * WINDOW):
            read += 1
            yield frame(seq)

    found = match_frames([stepped(seq) for seq in range(0, 5 * WINDOW, 2)], frames(), Notes(lenient=False))
    for count, _ in enumerate(found):
        assert read == 2 * count + 1


def test_every_frame_with_its_edits() -> None:
    edits = FrameEdits()
    edits.before["a", 1] = [Edit("reset")]
    edits.on["a", 2] = [Edit("refine_object", {"id": 1})]
    found = list(step_all_frames([frame(seq) for seq in range(4)], edits))
    assert found[:3] == [Step(frame(0), 5), Edit("reset"), Step(frame(1), 5)]
    assert found[3] == Step(frame(2), 5, edits=(Edit("refine_object", {"id": 1}),))


def test_edits_of_a_node_are_put_where_they_took_effect() -> None:
    log: list[Any] = [
        served(0),
        masks(3),
        Event(1, "add_object", {"box": [1]}),  # on the next frame
        Event(2, "set_prompts", {"prompts": []}),
        masks(6),
        Event(3, "refine_object", {"id": 1}),  # on the latest
        masks(8),
        Event(4, "refine_object", {"id": 1, "seq": 6}),
        Event(5, "remove_object", {"id": 1}),  # no frame comes any more
    ]
    edits = group_edits(item if isinstance(item, Event) else RecordedMasks(item, b"") for item in log)
    assert [edit.op for edit in edits.before["a", 6]] == ["add_object", "set_prompts"]
    assert {place: len(found) for place, found in edits.on.items()} == {("a", 6): 2}
    assert sum(map(len, edits.before.values())) == 2


def test_an_edit_waits_for_a_frame_of_its_own_camera() -> None:
    log: list[Any] = [masks(1), masks(1, camera="b"), Event(0, "add_object", {"camera": "b"}), masks(2)]
    log.append(masks(2, camera="b"))
    edits = group_edits(item if isinstance(item, Event) else RecordedMasks(item, b"") for item in log)
    assert [place for place, found in edits.before.items() if found] == [("b", 2)]


def test_objects_are_added_on_their_frames() -> None:
    steps = [Step(frame(seq, camera), 0) for seq in (4, 5) for camera in "ab"]
    shown = (
        ObjectOnFrame(camera="b", box=(0, 0, 1, 1), label="first of b"),
        ObjectOnFrame(camera="a", seq=5, points=((1, 1),), label="by seq"),
        ObjectOnFrame(camera="a", index=1, points=((1, 1),), label="by index"),
        ObjectOnFrame(camera="c", points=((1, 1),), label="nowhere"),
    )
    notes = Notes(lenient=False)
    found = list(add_objects(steps, shown, notes))
    placed = [
        (item.frame.camera, item.frame.seq, edit.args["label"]) for item in found for edit in item.edits
    ]
    assert placed == [("b", 4, "first of b"), ("a", 5, "by seq"), ("a", 5, "by index")]
    assert found[1].edits[0].args == {
        "camera": "b", "seq": 4, "box": [0, 0, 1, 1], "label": "first of b"
    }  # fmt: skip
    assert notes.lines == ["object nowhere: expected frame 0 of c, found no such frame"]


def test_notes_are_bounded() -> None:
    notes = Notes(lenient=True)
    for number in range(2 * MAX_NOTES):
        notes.add_gap(f"gap {number}")
    assert len(notes.lines) == MAX_NOTES


def test_a_frame_that_is_recorded_twice_is_stepped_once() -> None:
    found, _ = lookup([stepped(0), stepped(1)], [frame(0), replace(frame(0)), frame(1)])
    assert found == [("a", 0), ("a", 1)]
