"""Make the table of the body of a masks message: from the schema, with words that its fields do not say."""

from msgspec import inspect

from sam3_node.schema.describing import read_meanings
from sam3_node.types import MaskFrame
from sam3_node.wire.messages import MASKS

from .tables import code, table

_POSE = "the fields of a pose message from `frame` on"
MASKS_WORDS = {
    "camera": "as in the topic",
    "seq": "that of the frame",
    "capture_ns": "that of the frame",
    "clock": "that of the frame; left out for `system`. For another clock, count ages from `received_ns`",
    "stages_us": "text to integer: `decode`, `preprocess`, `encode`, `track`, `masks`, `remember` of this frame; "
    "`detect` if the detector ran on it, `recall` if an object was searched for by its looks, `window` if objects may "
    "be followed in windows; `pack`, which is the packing time of the message before, because no message can hold its "
    "own",
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
    "batch": "sent if the frame was [encoded together](design.md#several-cameras) with those of other cameras: `size`, "
    "2 or more, and `index` of this frame, from 0",
}
"""What the fields of a MaskFrame do not say about the message"""


def masks_table() -> str:
    """Return the fields of a masks message, in its order: name, type and meaning."""
    info = inspect.type_info(MASKS.struct)
    assert isinstance(info, inspect.StructType)
    meanings = read_meanings(MaskFrame) | MASKS_WORDS
    rows = [["`v`, `kind`", "", "1, `masks`"]]
    for field in info.fields:
        if field.name not in ("v", "kind"):
            optional = "" if field.required else ", optional"
            rows.append([code(field.encode_name), _name_type(field.type) + optional, meanings[field.name]])
    return table(["body field", "type", ""], rows)


def _name_type(info: inspect.Type) -> str:
    """Return the type of a value in a message."""
    if isinstance(info, inspect.UnionType):
        return _name_type(next(one for one in info.types if not isinstance(one, inspect.NoneType)))
    if isinstance(info, inspect.VarTupleType):
        item = _name_type(info.item_type)
        return f"list of {item if item == 'text' else f'{item}s'}"
    names = {
        inspect.IntType: "integer",
        inspect.FloatType: "number",
        inspect.StrType: "text",
        inspect.LiteralType: "text",
        inspect.DictType: "map",
        inspect.StructType: "map",
    }
    return names[type(info)]
