"""The node's steps and edits in a recording, and the frames matched with them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
from msgspec.structs import asdict, astuple

from sam3_node.bags.native.reader import RecordedMasks
from sam3_node.errors import ReplayError, WireError
from sam3_node.replay.edits import CatchUpEnded, Edit, ReplayEdit, Restarted, Served, Unreadable
from sam3_node.replay.event_log import (
    WINDOW,
    Gap,
    LogEntry,
    LoggedStep,
    Notes,
    Step,
    match_frames,
    read_edit,
    read_event_log,
)
from sam3_node.schema.fields import to_plain
from sam3_node.schema.operations import AddObject, Change, PinFrame, Reset
from sam3_node.types import Frame, FrameBatch, JointState, MaskFrame, RobotState, Shed, StepDecisions
from sam3_node.wire import Event
from sam3_node.wire.messages import joints_fields
from tests.support.refuses import mentions, refuses
from tests.support.replay_logs import make_frame, make_masks, served
from tests.support.tables import each_row

FRESH = {"events": 0, "cameras": {}, "prompts": []}


def read_log(*log: MaskFrame | Event, description: dict[str, Any] | None = None) -> list[LogEntry]:
    return read_recorded(log, description or FRESH)


def read_recorded(log: Sequence[MaskFrame | Event], description: dict[str, Any] | None) -> list[LogEntry]:
    items = (RecordedMasks(item, b"") if isinstance(item, MaskFrame) else item for item in log)
    return list(read_event_log(items, description))


def gaps(entries: Sequence[LogEntry]) -> list[str]:
    return [item.text for item in entries if isinstance(item, Gap)]


def test_the_log_has_the_steps_and_edits_in_order() -> None:
    failed = Event(2, "failed", {"camera": "a", "seq": 5, "error": "bad"})
    added = Event(1, "add_object", {"box": [0, 0, 4, 4]})
    entries = read_log(served(0), make_masks(0), added, make_masks(3, 2), failed, make_masks(6))
    assert entries == [
        Served("a"),
        LoggedStep("a", 0, 100, 7, 0),
        AddObject(box=(0.0, 0.0, 4.0, 4.0)),
        LoggedStep("a", 3, 103, 7, 2),
        LoggedStep("a", 5),
        LoggedStep("a", 6, 106, 7, 0),
    ]
    assert [item.failed for item in entries if isinstance(item, LoggedStep)] == [False, False, True, False]


def test_steps_say_what_the_node_decided() -> None:
    decided = StepDecisions(shed=Shed(2), batch=FrameBatch(3, 2), windows=1)
    assert None not in astuple(decided), "give each decision a value here"
    failed = Event(1, "failed", {"camera": "a", "seq": 1, "error": "bad", **to_plain(decided)})
    entries = read_log(served(0), replace(make_masks(0), **asdict(decided)), failed, make_masks(2))
    expected = [decided, decided, StepDecisions()]
    assert [item.decisions for item in entries if isinstance(item, LoggedStep)] == expected
    actions = match_frames(entries, map(make_frame, range(3)), Notes(lenient=False))
    assert [item.decisions for item in actions if isinstance(item, Step)] == expected


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ((served(0), make_masks(0), make_masks(2)), ("a", "1")),
        ((served(0), make_masks(0), make_masks(5, 2)), ("2", "recording")),
        ((served(0), make_masks(0), Event(2, "reset", {})), ("1", "2", "reset")),
        ((Event(2, "reset", {}),), ("0", "2", "node")),
        ((served(0), Event(3, "pause", {}), served(1)), ("1", "3", "node")),
    ],
)
def test_a_gap_is_at_the_place_of_the_missing_data(
    log: Sequence[Any], message: str | tuple[str, ...]
) -> None:
    entries = read_log(*log)
    with refuses(ReplayError, field=message):
        Notes(lenient=False).add_gap(gaps(entries)[0])
    assert isinstance(entries[-1], LoggedStep | Edit)


@pytest.mark.parametrize(
    ("description", "log", "complete"),
    [
        (FRESH, (served(0), make_masks(0)), True),
        # masks came before the description
        ({"events": 1, "cameras": {"a": {}}}, (served(0), make_masks(0)), True),
        # the node had served cameras, without any requests
        ({"events": 1, "cameras": {"a": {"objects": 0}}}, (make_masks(9), Event(1, "reset", {})), True),
        ({"events": 2, "cameras": {"a": {"objects": 1}}}, (make_masks(9),), False),
        ({"events": 1, "cameras": {"a": {"objects": 3}}, "prompts": ["mug"]}, (make_masks(9),), False),
        ({"events": 4, "cameras": {"a": {}}}, (Event(4, "reset", {}), make_masks(9)), False),
        (None, (make_masks(9),), False),
        (None, (served(0), make_masks(0)), True),
    ],
)
def test_a_late_beginning_is_a_gap(
    description: dict[str, Any] | None, log: Sequence[Any], complete: bool
) -> None:
    entries = read_recorded(log, description)
    assert ("begins later" in "".join(gaps(entries))) != complete
    assert not complete or not gaps(entries)


def test_a_frame_whose_masks_were_withheld_was_stepped() -> None:
    joints = JointState("arm", 17, {"elbow": 0.5})
    args = {"camera": "a", "seq": 3, "error": "old", "withheld": True, "joints": joints_fields(joints)}
    args["batch"] = {"size": 3, "index": 2}
    event = Event(1, "failed", args)
    entries = read_log(served(0), make_masks(0), event, make_masks(5, 1))
    decisions = StepDecisions(batch=FrameBatch(3, 2))
    assert entries[2] == LoggedStep(
        "a", 3, withheld=True, robot=RobotState(None, joints), decisions=decisions
    )
    assert not entries[2].failed
    assert not gaps(entries)
    (step,) = match_frames([entries[2]], [make_frame(seq) for seq in range(6)], Notes(lenient=False))
    assert isinstance(step, Step)
    assert (step.frame.seq, step.failed, step.withheld, step.robot.joints) == (3, False, True, joints)
    assert step.decisions == decisions


@pytest.mark.parametrize(
    "batch", [{"size": 2, "index": 2}, {"size": 1, "index": 0}, {"size": 10**6, "index": 1}]
)
def test_a_batch_that_cannot_be_is_refused(batch: dict[str, int]) -> None:
    args = {"camera": "a", "seq": 0, "error": "old", "withheld": True, "batch": batch}
    with refuses(WireError, field="event failed"):
        read_log(served(0), Event(1, "failed", args))


def test_a_camera_that_starts_again_is_no_gap() -> None:
    assert not gaps(read_log(served(0), make_masks(7), make_masks(0), make_masks(1)))


def test_a_restarted_node_is_an_edit() -> None:
    entries = read_log(served(0), make_masks(0), served(0), make_masks(5))
    assert entries[2:4] == [Restarted(), Served("a")]
    assert not gaps(entries)


def test_an_event_without_arguments_is_an_error() -> None:
    with refuses(WireError, field=("event", "failed")):
        read_log(served(0), Event(1, "failed", {"camera": "a"}))


@each_row(
    ("op", "args", "edit"),
    [
        ("pin_frame", {"seq": 3, "camera": None}, PinFrame(seq=3)),
        ("caught_up", {"camera": "a", "id": 2, "took_s": 0.5}, CatchUpEnded("a", 2)),
        ("caught_up", {"camera": "a", "id": 2, "error": "gone"}, CatchUpEnded("a", 2, "gone")),
        ("served", {"camera": "a", "fps": 30}, Served("a")),
    ],
)
def test_an_event_is_read_into_an_edit(op: str, args: dict[str, Any], edit: Edit) -> None:
    assert read_edit(Event(0, op, args)) == edit


@each_row(
    ("op", "args", "camera", "named"),
    [
        ("add_object", {"box": [0, 0, 4, 4], "colour": "red", "camera": "a"}, "a", ("add_object", "colour")),
        ("remove_object", {"camera": "a"}, "a", ("remove_object", "id")),
        ("caught_up", {"camera": "a"}, "a", ("caught_up", "id")),
        ("pin_frame", {"seq": 1, "camera": ["a"]}, None, ("pin_frame", "camera")),
        ("painted", {"camera": "a"}, None, ("add_object", "painted")),
    ],
)
def test_an_event_of_another_version_is_refused_in_its_turn(
    op: str, args: dict[str, Any], camera: str | None, named: tuple[str, ...]
) -> None:
    edit = read_edit(Event(0, op, args))
    assert isinstance(edit, Unreadable)
    assert (edit.op, edit.camera) == (op, camera)
    assert mentions(edit.reason, *named)


def test_every_edit_has_a_name_of_its_own() -> None:
    kinds = [kind for union in (Change, ReplayEdit) for kind in get_args(union) if kind is not Unreadable]
    assert len({kind.op for kind in kinds}) == len(kinds)


def match(log: Sequence[LogEntry], frames: Sequence[Frame], lenient: bool = False) -> tuple[list[Any], Notes]:
    notes = Notes(lenient)
    entries = [
        (item.frame.camera, item.frame.seq) if isinstance(item, Step) else item.op
        for item in match_frames(log, frames, notes)
    ]
    return entries, notes


def stepped(seq: int, camera: str = "a") -> LoggedStep:
    return LoggedStep(camera, seq, 100 + seq)


def test_frames_of_several_cameras_are_matched_in_another_order() -> None:
    frames = [make_frame(seq, camera) for seq in range(6) for camera in "abc"]
    log = [stepped(2, "c"), stepped(0), Reset(), stepped(5, "b"), stepped(5), stepped(4, "c")]
    entries, _ = match(log, frames)
    assert entries == [("c", 2), ("a", 0), "reset", ("b", 5), ("a", 5), ("c", 4)]


def test_a_missing_frame_is_one_gap() -> None:
    frames = [make_frame(seq, camera) for seq in range(6) for camera in "ab" if (seq, camera) != (2, "a")]
    log = [stepped(0), stepped(2), stepped(1, "b"), stepped(3), stepped(5, "b")]
    with refuses(ReplayError, field=("2", "stepped")):
        match(log, frames)
    entries, notes = match(log, frames, lenient=True)
    assert entries == [("a", 0), ("b", 1), ("a", 3), ("b", 5)]
    assert len(notes.lines) == 1


@pytest.mark.parametrize("first", [0, 1])
def test_frames_with_the_same_seq_are_matched_by_capture_time(first: int) -> None:
    stamps = [(0, 1), (1, 101), (0, 900), (1, 901)]
    frames = [make_frame(seq, capture_ns=stamp_ns) for seq, stamp_ns in stamps]
    log = [LoggedStep("a", *stamp) for stamp in stamps[first:]]
    notes = Notes(lenient=False)
    entries = [item.frame.capture_ns for item in match_frames(log, frames, notes) if isinstance(item, Step)]
    assert entries == [1, 101, 900, 901][first:]


def test_frames_are_read_only_as_needed() -> None:
    read = 0

    def frames() -> Iterator[Frame]:
        nonlocal read
        for seq in range(5 * WINDOW):
            read += 1
            yield make_frame(seq)

    entries = match_frames([stepped(seq) for seq in range(0, 5 * WINDOW, 2)], frames(), Notes(lenient=False))
    for count, _ in enumerate(entries):
        assert read == 2 * count + 1


def test_a_frame_that_is_recorded_twice_is_stepped_once() -> None:
    entries, _ = match([stepped(0), stepped(1)], [make_frame(0), replace(make_frame(0)), make_frame(1)])
    assert entries == [("a", 0), ("a", 1)]


RESTORED_ARGS = {"sha256": "ab" * 32, "saved_ns": 5, "ids_continue": True, "cameras": ["a"]}


def test_a_restore_is_a_gap_that_names_the_snapshot() -> None:
    """The node was killed, and continued from a snapshot, which is not in the recording."""
    log = (served(0), make_masks(0), Event(0, "restored", RESTORED_ARGS), make_masks(1))
    entries = read_log(*log)
    assert gaps(entries) == [text := gaps(entries)[0]]
    assert "continued from a snapshot (SHA-256 " + "ab" * 32 in text
    assert Restarted() in entries
    with refuses(ReplayError, field="--allow-gaps"):
        list(match_frames(entries, [make_frame(0), make_frame(1)], Notes(lenient=False)))


def test_a_recording_of_a_node_that_had_continued_before_is_a_gap() -> None:
    description = {"events": 1, "cameras": {"a": {"objects": 2}}, "prompts": [], "restored": RESTORED_ARGS}
    assert mentions(gaps(read_log(make_masks(4), description=description))[0], "snapshot")


def test_masks_of_another_node_without_its_events_are_a_gap() -> None:
    masks = [replace(make_masks(seq), node=node) for seq, node in enumerate(("one", "one", "two", "two"))]
    entries = read_log(served(0), *masks)
    (text,) = gaps(entries)
    assert mentions(text, "one", "two")
    assert entries.count(Restarted()) == 1


def test_masks_of_a_node_that_tells_its_restart_are_no_gap() -> None:
    first, second = (replace(make_masks(seq), node=str(seq)) for seq in range(2))
    assert gaps(read_log(served(0), first, Event(1, "reset", {}), served(0), second)) == []
