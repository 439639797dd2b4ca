"""The operations: what their fields say about requests, and that those of wire version 1 stay as they are."""

from typing import Any

import msgpack
import pytest

from sam3_node.errors import RequestError
from sam3_node.schema.operations import (
    CHANGES,
    OPERATIONS,
    PROMPT,
    AddExemplar,
    AddObject,
    ConfirmHandOver,
    Operation,
    PinFrame,
    PromptOperation,
    Reset,
    SegmentFrame,
    SetPrompts,
    list_required,
)
from sam3_node.types import Mask
from sam3_node.wire import Request, pack_request, unpack_request
from sam3_node.wire.frame_prompt import FramePrompt
from sam3_node.wire.requests import read_operation, read_prompt, write_prompt
from tests.support.hostility import limited_memory
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.wire_examples import EXAMPLES, golden

# required arguments, then optional ones; * stands for those of a prompt
WIRE_1 = {
    "add_object": ("*", "camera choice epoch label priority seq stride"),
    "add_like": ("like like_camera", "camera epoch label like_epoch"),
    "refine_object": ("* id", "camera epoch seq stride"),
    "pin_frame": ("seq", "camera epoch lease_s"),
    "remove_object": ("id", "camera epoch"),
    "rename_object": ("id label", "camera epoch"),
    "set_prompts": ("prompts", "most priorities scores"),
    "add_exemplar": ("boxes name", "camera epoch labels photo seq text"),
    "reset": ("", "camera"),
    "pause": ("", ""),
    "resume": ("", ""),
    "list_objects": ("", "camera"),
    "segment": ("*", "camera multimask seq"),
    "segment_everything": ("", "camera grid max_overlap min_iou min_stability most seq"),
    "segment_photo": ("photo", "multimask names objects scores"),
    "points": ("id", "camera count epoch"),
    "where": ("", "camera epoch id label"),
    "next_pick": ("", "camera covered cup_radius_m epoch id label max_age_ms most opening_m reach_m"),
    "planning_scene": ("", "camera container"),
    "list_names": ("", "containing most"),
    "picture": ("id", "camera epoch"),
    "status": ("", ""),
    "describe": ("", ""),
    "snapshot": ("", "name"),
    "read_snapshot": ("offset snapshot", ""),
    "restore": ("name", ""),
    "hand_over": ("", "taker token"),
    "confirm_hand_over": ("token", "accepted"),
    "begin_episode": ("", "task"),
    "end_episode": ("", "keep"),
}
# a mask may be packed in another encoding, so that one has a test of its own
REQUESTS = [name for name in EXAMPLES if name.startswith("request-") and name != "request-add-object-mask"]
BOX = (16.0, 12.0, 48.0, 36.0)


def to_message(operation: Operation[Any]) -> dict[str, Any]:
    """Return the arguments of an operation as a message has them."""
    args: dict[str, Any] = msgpack.unpackb(msgpack.packb(operation.to_args()))
    return args


@each_row("op", WIRE_1)
def test_operations_of_wire_version_1_are_frozen(op: str) -> None:
    kind = OPERATIONS[op]
    takes_prompt = issubclass(kind, PromptOperation)
    names = set(kind.__struct_fields__) - (set(PROMPT) if takes_prompt else set())
    required = [*(["*"] if takes_prompt else []), *sorted(list_required(kind))]
    optional = sorted(names - list_required(kind))
    assert (" ".join(required), " ".join(optional)) == WIRE_1[op]


def test_every_change_is_an_operation_and_names_are_unique() -> None:
    assert len({kind.op for kind in OPERATIONS.values()}) == len(OPERATIONS)
    assert set(CHANGES) < OPERATIONS.keys()


@each_row("name", REQUESTS)
def test_a_golden_request_is_an_operation_that_packs_the_same_bytes(name: str) -> None:
    (data,) = golden(name)
    request = unpack_request(data)
    args = to_message(request.operation)
    assert args == {key: request.args[key] for key in args}
    assert args.keys() == request.args.keys()
    # clients may name the arguments in any order
    ordered = {key: args[key] for key in request.args}
    assert pack_request(Request(request.id, request.op, ordered, request.request_id)) == data


@each_row(
    ("operation", "args"),
    [
        (AddObject(box=BOX), {"box": list(BOX)}),
        (
            AddObject(points=((1, 2),), labels=(1,), label="", choice=0),
            {"points": [[1.0, 2.0]], "labels": [1], "label": "", "choice": 0},
        ),
        (SegmentFrame(points=((1, 2),)), {"points": [[1.0, 2.0]]}),
        (
            SegmentFrame(points=((1, 2),), multimask=True),
            {"points": [[1.0, 2.0]], "multimask": True},
        ),
        (PinFrame(seq=3, lease_s=0.0), {"seq": 3, "lease_s": 0.0}),
        (SetPrompts(prompts=()), {"prompts": []}),
        (SetPrompts(prompts=("mug",), most={"mug": 1}), {"prompts": ["mug"], "most": {"mug": 1}}),
        (
            AddExemplar(name="nut", boxes=(BOX,), labels=(1,)),
            {"name": "nut", "boxes": [list(BOX)], "labels": [1]},
        ),
        (Reset(), {}),
        (ConfirmHandOver(token="t"), {"token": "t"}),
        (ConfirmHandOver(token="t", accepted=False), {"token": "t", "accepted": False}),
    ],
    ids=lambda value: value.op if hasattr(value, "op") else "",
)
def test_a_request_has_the_arguments_that_were_given(operation: Any, args: dict[str, Any]) -> None:
    assert to_message(operation) == args
    assert to_message(read_operation(operation.op, msgpack.unpackb(msgpack.packb(args)))) == args


def test_the_mask_of_a_prompt_is_packed_and_read() -> None:
    mask = Mask((4, 6), (1, 1, 3, 3), Mask.from_full(_square()).crop)
    args = to_message(AddObject(**write_prompt(FramePrompt(mask=mask)), camera="left"))
    read = read_operation("add_object", args)
    assert isinstance(read, AddObject)
    assert (read_prompt(read).mask.full() == mask.full()).all()
    assert read.camera == "left"


def test_the_arguments_of_a_request_that_was_read_can_be_read_again() -> None:
    # a text of as many characters as a message may have, and of more bytes
    args = {"box": list(BOX), "label": "\u5e3d" * 60_000, "seq": None}
    request = unpack_request(msgpack.packb({"v": 1, "id": 3, "op": "add_object", "args": args}))
    assert (request.args, request.count_items() > 4) == (args, True)
    assert request == Request(3, "add_object", args)


def _square() -> Any:
    import numpy as np

    full = np.zeros((4, 6), dtype=bool)
    full[1:3, 1:3] = True
    return full


def test_nil_counts_as_absent() -> None:
    operation = read_operation("add_object", {"box": list(BOX), "points": None, "label": None, "seq": None})
    assert (to_message(operation), operation.op) == ({"box": list(BOX)}, "add_object")


@each_row(
    ("op", "args", "field"),
    [
        ("add_objet", {}, ("add_objet", "add_object")),
        ("add_object", {"box": list(BOX), "labl": "mug"}, ("labl", "label", *PROMPT)),
        ("add_object", {}, ("points", "box", "mask")),
        ("add_object", {"box": list(BOX), "stride": 99}, ("stride", "99")),
        ("add_object", {"box": list(BOX), "priority": "high"}, ("priority", "high")),
        ("remove_object", {}, ("id", "nothing")),
        ("remove_object", {"id": "1"}, ("id", "1")),
        ("pause", {"camera": "left"}, ("camera", "none")),
        ("set_prompts", {"prompts": ["mug"], "scores": {"mug": 2.0}}, ("mug", "0.01..1.0")),
        ("add_exemplar", {"name": "nut", "boxes": [list(BOX)], "labels": [1, 0]}, ("labels", "1")),
        ("points", {"id": 1, "count": 0}, ("count", "10000")),
        ("read_snapshot", {"snapshot": 1}, ("offset",)),
    ],
)
def test_a_wrong_request_names_the_field(op: str, args: dict[str, Any], field: tuple[str, ...]) -> None:
    with refuses(RequestError, field=field):
        read_operation(op, args)


@pytest.mark.parametrize("name", ["points", "labels", "box"])
@pytest.mark.parametrize("text", ["x" * 60_000, b"x" * 60_000])
def test_one_text_among_many_numbers_takes_no_more_memory_than_it_has(name: str, text: str | bytes) -> None:
    args: dict[str, Any] = {"points": [[1, 2]], name: [[text, 1]] + [[1, 2]] * 4000}
    with limited_memory(1), refuses(RequestError, field=name):
        read_operation("segment", args)
