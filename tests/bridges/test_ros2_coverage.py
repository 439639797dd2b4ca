"""Every field of the masks is in a message of ROS, or in the list of those that are left out. It needs no ROS.

The fields come from the schema. A field is carried if some message differs where it alone differs.
"""

import math
from array import array
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from msgspec import inspect
from sam3_node_ros import left_out
from sam3_node_ros.messages import MaskMessages
from sam3_node_ros.parts import Header
from sam3_node_ros.picks import LIMITS, PickMessages, read_pick_request

from sam3_node.errors import RequestError
from sam3_node.schema.operations import NextPick
from sam3_node.schema.replies import ParallelGrip, Pick, PicksReply, RefusedObject, SuctionPoint
from sam3_node.schema.values import Instance, Mask, MaskFrame
from sam3_node.types import NANOSECONDS
from tests.support.paths import ROOT
from tests.support.refuses import refuses

HEIGHT = 12
WIDTH = 16
Struct = TypeVar("Struct", bound=msgspec.Struct)


class Message(SimpleNamespace):
    """A message of any type: its fields by keyword, and an empty `data`."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"data": array("B"), **fields})


MAKE = MaskMessages("base_link", lambda name: Message)


def make_mask(number: int) -> Mask:
    full = np.zeros((HEIGHT, WIDTH), np.bool_)
    full[2 : 4 + number, 3:9] = True
    return Mask.from_full(full)


def make_value(info: inspect.Type, number: int) -> Any:
    """Return a value of a type of the schema: one for each of the numbers 1 and 2."""
    if isinstance(info, inspect.UnionType):
        return make_value(next(one for one in info.types if not isinstance(one, inspect.NoneType)), number)
    if isinstance(info, inspect.BoolType):
        return number == 2
    if isinstance(info, inspect.IntType):
        return (info.ge or 0) + number
    if isinstance(info, inspect.FloatType):
        return number / 4
    if isinstance(info, inspect.StrType):
        return f"text{number}"
    if isinstance(info, inspect.LiteralType):
        # of one choice, the other is none
        return (*info.values, None)[number - 1]
    if isinstance(info, inspect.BytesType):
        return np.full(6, number, "<f4").tobytes()
    if isinstance(info, inspect.TupleType):
        return tuple(make_value(one, number) for one in info.item_types)
    if isinstance(info, inspect.VarTupleType):
        return (make_value(info.item_type, number),) * (info.min_length or 1)
    if isinstance(info, inspect.DictType):
        return {"name": make_value(info.value_type, number)}
    if isinstance(info, inspect.StructType):
        return make(info.cls, number)
    assert isinstance(info, inspect.DataclassType)
    assert info.cls is Mask
    return make_mask(number)


def make(kind: type[Struct], number: int, **given: Any) -> Struct:
    """Return a value with all fields, but those that are given."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    made = {one.name: make_value(one.type, number) for one in info.fields if one.name not in given}
    return kind(**made, **given)


# a sure object with a position, of which all messages are made
INSTANCE = make(Instance, 1, state="tracked", frame="base")
MASKS = make(MaskFrame, 1, width=WIDTH, height=HEIGHT, instances=(INSTANCE,), before=None)
OTHER: dict[str, Any] = {
    **{name: getattr(make(Instance, 2), name) for name in Instance.__struct_fields__},
    **{
        name: getattr(make(MaskFrame, 2, instances=(), before=MASKS), name)
        for name in MaskFrame.__struct_fields__
    },
    "state": "tentative",
    "frame": "camera",
    "width": WIDTH + 1,
    "height": HEIGHT + 1,
}
"""Another value of each field."""


def make_messages(masks: MaskFrame) -> str:
    """Return all messages about masks, as text."""
    # the bridge keeps the header of each image that it has sent, by camera, seq and stamp
    header = Header(*divmod(masks.capture_ns, NANOSECONDS), "optical")
    made = [
        MAKE.make_detections_2d(masks, header),
        MAKE.make_detections_3d(masks, header),
        MAKE.make_upright_boxes(masks, header),
        MAKE.make_table(masks, header),
        MAKE.make_label_image(masks, header),
        MAKE.make_label_table(masks, header),
        MAKE.make_mask(masks, header, ""),
        MAKE.make_transforms(masks, header),
        MAKE.make_markers(masks, header),
    ]
    for instance in masks.instances:
        points_m = np.frombuffer(instance.points_m or b"", "<f4").reshape(-1, 3)
        made.append(MAKE.make_points(points_m, instance.frame, header))
    with np.printoptions(threshold=10**6):
        return repr(made)


@pytest.mark.parametrize("name", MaskFrame.__struct_fields__)
def test_a_field_of_the_frame_is_carried_or_left_out_for_a_reason(name: str) -> None:
    assert getattr(MASKS, name) != OTHER[name]
    is_carried = make_messages(msgspec.structs.replace(MASKS, **{name: OTHER[name]})) != make_messages(MASKS)
    assert is_carried == (name not in left_out.FRAME), f"{name}: carry it, or say in left_out.py why not"


@pytest.mark.parametrize("name", Instance.__struct_fields__)
def test_a_field_of_an_object_is_carried_or_left_out_for_a_reason(name: str) -> None:
    assert getattr(INSTANCE, name) != OTHER[name]
    changed = msgspec.structs.replace(INSTANCE, **{name: OTHER[name]})
    messages = make_messages(msgspec.structs.replace(MASKS, instances=(changed,)))
    is_carried = messages != make_messages(MASKS)
    assert is_carried == (name not in left_out.OBJECT), f"{name}: carry it, or say in left_out.py why not"


DEFINITIONS = ROOT / "launch/ros2/sam3_node_msgs"
PARTS = {"position_m": "pose", "quaternion_xyzw": "pose"}
"""Fields of picks that a message has within another one."""
TOLD = {"camera": "the ROS node", "epoch": "each id", "seq": "header", "frame": "header"}
"""Fields of the reply of picks, and what tells each in its place."""


def fill(reply: PicksReply) -> Message:
    """Return the response of a reply, without its success."""
    response = Message()
    PickMessages("base_link", lambda name: Message).fill_picks(response, reply, Header(1, 2, "optical"))
    return response


def list_fields(name: str) -> list[set[str]]:
    """Return the names of the fields of a definition; of a service, those of request and response."""
    parts = (DEFINITIONS / name).read_text().split("---")
    return [{line.split()[1] for line in part.splitlines() if line and line[0] != "#"} for part in parts]


def test_the_messages_of_picks_have_the_fields_of_the_schema() -> None:
    """So a field that is new in the schema is not forgotten here."""
    response = fill(make(PicksReply, 1, frame="base"))
    (pick,) = response.picks
    (refused,) = response.refused
    for kind, message in ((Pick, pick), (SuctionPoint, pick.suction), (ParallelGrip, pick.grip)):
        made = vars(message).keys() - {"data", "has_suction", "has_grip"}
        assert made == {PARTS.get(name, name) for name in kind.__struct_fields__}
        assert list_fields(f"msg/{kind.__name__}.msg") == [vars(message).keys() - {"data"}]
    assert list_fields("msg/RefusedObject.msg") == [set(RefusedObject.__struct_fields__)]
    assert vars(refused).keys() - {"data"} == set(RefusedObject.__struct_fields__)
    arguments, replied = list_fields("srv/NextPick.srv")
    # an id has its epoch
    assert arguments == set(NextPick.__struct_fields__) - {"camera", "epoch"}
    assert replied - {"success", "code", "message"} == vars(response).keys() - {"data"}
    assert (
        replied - {"success", "code", "message", "header"} == set(PicksReply.__struct_fields__) - TOLD.keys()
    )


def test_values_of_picks_are_carried_over() -> None:
    reply = make(PicksReply, 1, frame="base", epoch=31)
    response = fill(reply)
    pick = response.picks[0]
    suction = reply.picks[0].suction
    assert suction is not None
    assert pick.id == f"{reply.picks[0].id}@1f"
    assert pick.under == [f"{reply.picks[0].under[0]}@1f"]
    assert pick.rank == reply.picks[0].rank
    assert (pick.has_suction, pick.suction.radius_m) == (True, suction.radius_m)
    place = pick.suction.pose
    assert place.header.frame_id == response.header.frame_id == "base_link"
    found = [getattr(place.pose.position, axis) for axis in "xyz"]
    assert found == list(suction.position_m)
    assert fill(make(PicksReply, 1, frame="camera")).header.frame_id == "optical"


def test_what_is_not_known_of_a_pick_is_no_number() -> None:
    pick = Pick(7, "cup", 1, "nothing lies on it")
    response = fill(PicksReply(camera="cam0", seq=1, picks=(pick,), refused=()))
    found = response.picks[0]
    assert (found.id, found.has_suction, found.has_grip, found.under) == ("7", False, False, [])
    unknown = (found.confidence, found.depth_share, found.visible_share, found.height_m, response.age_ms)
    assert all(map(math.isnan, unknown))
    assert (response.problem, response.header.frame_id) == ("", "optical")


def test_what_a_request_for_picks_leaves_at_0_is_the_nodes_own() -> None:
    names = set(NextPick.__struct_fields__) - {"camera"}
    nothing: dict[str, Any] = dict.fromkeys(names)
    empty = SimpleNamespace(**dict.fromkeys(LIMITS, 0), label="", id="", covered=False)
    assert read_pick_request(empty) == nothing | {"covered": False}
    full = SimpleNamespace(**dict.fromkeys(LIMITS, 2), label="", id="7@1f", covered=True)
    given: dict[str, Any] = {"id": 7, "epoch": 31, "covered": True}
    assert read_pick_request(full) == nothing | dict.fromkeys(LIMITS, 2) | given
    full.label = "cup"
    with refuses(RequestError):
        read_pick_request(full)


def test_the_list_names_fields_of_the_schema_alone() -> None:
    assert left_out.FRAME.keys() <= set(MaskFrame.__struct_fields__)
    assert left_out.OBJECT.keys() <= set(Instance.__struct_fields__)
    assert all(left_out.FRAME.values())
    assert all(left_out.OBJECT.values())
