"""Make the tables of the fields of a masks message: from the schema, with words that its fields do not say."""

from collections.abc import Iterator, Mapping

import msgspec
from msgspec import inspect

from sam3_node.schema.describing import read_meanings
from sam3_node.types import Instance, MaskFrame
from sam3_node.wire.messages import INSTANCE, MASKS

from .tables import code, table

_POSE = "the fields of a pose message from `frame` on"
MASKS_WORDS = {
    "camera": "as in the topic",
    "seq": "that of the frame",
    "capture_ns": "that of the frame",
    "clock": "that of the frame; left out for `system`. For another clock, count ages from `received_ns`",
    "stages_us": "text to integer: `decode`, `preprocess`, `encode`, `track`, `masks`, `remember` of this frame; "
    "`detect` if the detector ran on it, `recall` if an object was searched for by its looks; `pack`, which is the "
    "packing time of the message before, because no message can hold its own",
    "instances": "one per object, as below; ids differ",
    "node": "the node's name for its present run, 16 random hex digits",
    "epoch": "random, 0..2^53-1; another one means that ids have begun again: the node was started again, or serves "
    "the camera anew",
    "camera_pose": f"pose of the camera in the robot's base at the capture: {_POSE}",
    "robot_pose": "the same of the gripper, from the poses that the node received",
    "joints": "the robot's joints at the capture, as in a joints message",
    "robot_mask": "the robot's pixels: a mask as below",
    "table": "the [table](three-d.md#the-table) in the base: `normal` (3 numbers, upward), `offset_m` (of it, along "
    "the normal), `rms_m`",
    "shed": "sent while the node [exceeds its latency budget](running.md#latency-budget). `level`: 1, it looks for "
    "objects by name less often; 2, low-priority objects are also tracked less often. `held`, optional: ids of the "
    "objects that were not tracked on this frame. They have no instance in this message, because their masks would be "
    "old, and come back with the next",
}
"""What the fields of a MaskFrame do not say about the message"""
INSTANCE_WORDS = {
    "id": "counts up from 1 for each camera; never used again in the same `epoch`",
    "label": "as given with the object; for an object found by name, the name with the most votes",
    "score": "0..1",
    "box": "tight around the mask; zeros if it is empty",
    "area": "pixels inside",
    "state": "`tracked`; `occluded` (not in view, no pixel found, or its mask surely wrong, see `tracker.hide_below`: "
    "the mask is empty); `tentative` (found by name and not confirmed; or no frame yet, only in `list_objects`)",
    "mask": "below; of the frame's size, with the `box` and `area` above",
    "confidence": "0..1: probability that the mask is right, that is, has an IoU of at least 0.5 with the object. Left "
    "out if there is no mask. See [design](design.md#confidence-of-masks)",
    "doubtful": "true if `confidence` is below the node's `tracker.min_confidence`, or `name_confidence` below its "
    "`detector.min_name_confidence`; left out otherwise. `state` does not depend on it",
    "name_confidence": "0..1: probability that the label is right, of an object that was found by name. Left out if a "
    "user gave the label, or if there is no mask. See [objects by name](objects-by-name.md#how-sure-a-name-is)",
    "hidden_by": "`robot`: it covers this `occluded` object",
    "held": "the gripper [holds it](three-d.md#what-the-gripper-holds)",
    "world_id": "from 1: the same for the objects of all cameras that the node takes for one thing, for as long as "
    "`node` stays the same. Left out unless `tracker.link_distance_m` is set and a position in `base` is known",
    "depth_share": "0..1: share of the mask's pixels with a valid depth. Sent if the frame has depth that can be used. "
    "[3-D](three-d.md) describes this and the other fields of 3-D",
    "frame": "frame of the fields of 3-D: `base` (the robot's) or `camera` (x right, y down, z forward)",
    "camera_position_m": "the position in `camera`, if `frame` is `base`",
    "points_m": "points of the surface: float32 x, y, z, little-endian. Sent if `spatial.points` is set",
}
"""What the fields of an Instance do not say about its map"""


def masks_table() -> str:
    """Return the table of the body of a masks message."""
    rows = list(_list_rows(MASKS.struct, MaskFrame, MASKS_WORDS))
    return table(["body field", "type", ""], [["`v`, `kind`", "", "1, `masks`"], *rows])


def masks_instance_table() -> str:
    """Return the table of the map of an instance."""
    return table(["instance field", "type", ""], _list_rows(INSTANCE.inner, Instance, INSTANCE_WORDS))


def _list_rows(
    message: type[msgspec.Struct], kind: type[msgspec.Struct], words: Mapping[str, str]
) -> Iterator[list[str]]:
    """Yield name, type and meaning of each field, in the order of the message."""
    info = inspect.type_info(message)
    assert isinstance(info, inspect.StructType)
    meanings = {**read_meanings(kind), **words}
    for field in info.fields:
        if field.name not in ("v", "kind"):
            optional = "" if field.required else ", optional"
            yield [code(field.encode_name), _name_type(field.type) + optional, meanings[field.name]]


def _name_type(info: inspect.Type) -> str:
    """Return the type of a value in a message, such as "3 numbers"."""
    if isinstance(info, inspect.UnionType):
        return _name_type(next(one for one in info.types if not isinstance(one, inspect.NoneType)))
    if isinstance(info, inspect.TupleType):
        return f"{len(info.item_types)} {_name_type(info.item_types[0])}s"
    if isinstance(info, inspect.VarTupleType):
        if info.min_length:
            return f"{info.min_length} {_name_type(info.item_type)}s"
        item = _name_type(info.item_type)
        return f"list of {item if item == 'text' else f'{item}s'}"
    names = {
        inspect.IntType: "integer",
        inspect.FloatType: "number",
        inspect.StrType: "text",
        inspect.LiteralType: "text",
        inspect.BoolType: "bool",
        inspect.BytesType: "bytes",
        inspect.DictType: "map",
        inspect.StructType: "map",
    }
    return names[type(info)]
