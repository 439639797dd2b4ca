"""Which fields of an instance messages of ROS have. It reads the source alone, and needs no ROS."""

import ast

from sam3_node.types import Instance
from tests.support.paths import ROOT

PACKAGE = ROOT / "launch/ros2/sam3_node_ros/sam3_node_ros"
NAMES = ("instance", "placed")
"""Names of an instance there"""
NOT_IN_ROS = {
    "age": "vision_msgs has no field for it",
    "camera_position_m": "tf has positions in other frames",
    "confidence": "vision_msgs has no field for it; the score of a hypothesis is `score`",
    "depth_share": "vision_msgs has no field for it",
    "doubtful": "markers have another colour, by `is_sure`",
    "frames_since_seen": "only objects with a mask are published",
    "heights_m": "vision_msgs has no field for it",
    "held": "the service `where` has it",
    "hidden_by": "the service `where` has it",
    "name_confidence": "vision_msgs has no field for it",
    "nearest_m": "vision_msgs has no field for it",
    "state": "markers have another colour, by `is_sure`",
    "upright_centre_m": "the box of a detection is the oriented one",
    "upright_quaternion_xyzw": "the box of a detection is the oriented one",
    "upright_size_m": "the box of a detection is the oriented one",
    "velocity_age_s": "vision_msgs has no field for it",
    "velocity_mps": "vision_msgs has no field for it",
    "world_id": "ids are those of one camera",
}
"""Fields of an instance that no message of ROS has, and why"""


def test_each_field_of_an_instance_is_in_ros_or_has_its_reason() -> None:
    parts = (node for path in PACKAGE.glob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    read = {
        part.attr
        for part in parts
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in NAMES
    }
    assert set(Instance.__struct_fields__) - read == NOT_IN_ROS.keys()
