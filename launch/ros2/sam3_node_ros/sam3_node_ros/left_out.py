"""Fields of masks that no message of ROS carries, each with the reason. The documentation has them as a table."""

from sam3_node.types import StepDecisions

_TIMES = "times of the node; `/diagnostics` has rate and latency"
_REQUEST = "the answer of `~/where` has it"
_CLIENT = "no message of vision_msgs has a place for it; read it with the Python client"
_SETTING = "of the node, not of a frame; its status has it"
_ROBOT = "ROS has the robot's own topics"

FRAME: dict[str, str] = {
    "seq": "ROS has no numbers of images; the stamp names the image",
    "clock": "a stamp of ROS has no clock; it is that of the image",
    "received_ns": _TIMES,
    "published_ns": _TIMES,
    "stages_us": _TIMES,
    "skipped": "`/diagnostics` has the count",
    **dict.fromkeys(StepDecisions.__struct_fields__, _CLIENT),
    "batch": "it says how features were rounded, for a replay",
    "model": _SETTING,
    "prompts": _SETTING,
    "node": "the epoch in an `id` changes with each run",
    "camera_pose": _ROBOT,
    "robot_pose": _ROBOT,
    "joints": _ROBOT,
    "robot_mask": _CLIENT,
    "before": "the bridge has sent it before",
}
"""Fields of a MaskFrame."""
OBJECT: dict[str, str] = {
    "age": _CLIENT,
    "frames_since_seen": _CLIENT,
    "name_confidence": _CLIENT,
    "world_id": _CLIENT,
    "depth_share": _CLIENT,
    "camera_position_m": "TF gives it from the position",
    "nearest_m": _CLIENT,
    "velocity_mps": _CLIENT,
    "velocity_age_s": _CLIENT,
    "hidden_by": _REQUEST,
    "held": _REQUEST,
    "heights_m": "the upright box has the highest point, `~/table` the plane that it stands on",
}
"""Fields of an Instance."""
