"""Messages of the golden files. `python -m tests.support.wire_examples` writes the files of a new wire version."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from sam3_node import types, wire
from sam3_node.types import (
    Depth,
    Frame,
    FramePose,
    Instance,
    Intrinsics,
    JointState,
    Mask,
    MaskFrame,
    RobotAction,
    Shed,
)
from tests.support.paths import ROOT

DATA = ROOT / "tests" / "data" / "wire"
JPEG = DATA / "grey-8x8.jpg"


@dataclass(frozen=True)
class Example:
    """A value, and the functions that pack it into parts and unpack it."""

    value: Any
    pack: Callable[[Any], Sequence[Any]]
    unpack: Callable[[Sequence[Any]], Any]
    exact: bool = True
    """False if a compression library may give other bytes for the same content."""


def raw_frame() -> Frame:
    return Frame(
        camera="wrist-1",
        seq=41,
        capture_ns=1_700_000_000_123_456_789,
        width=3,
        height=2,
        encoding="bgr8",
        colour=bytes(range(18)),
        clock="device",
        sent_ns=1_700_000_000_125_000_000,
        depth=Depth(3, 2, "z16", 0.001, True, np.array([[0, 1, 2], [500, 9, 65535]], "<u2").tobytes()),
        intrinsics=Intrinsics(600.5, 601.0, 1.5, 1.0, "brown_conrady", (0.1, -0.2, 0.0, 0.001, 0.05)),
        times={"sensor_ns": 17, "backend_s": 0.25},
    )


def jpeg_frame() -> Frame:
    return Frame("cam0", 0, 5, 8, 8, "jpeg", JPEG.read_bytes())


def mask(rows: Sequence[str]) -> Mask:
    """Return a mask drawn with '#' for the pixels inside."""
    return Mask.from_full(np.array([[pixel == "#" for pixel in row] for row in rows]))


MUG = mask(["........", "...##...", "..####..", "...#.#..", "........"])
DRIVER = mask(["#......#", "#......#", "#......#", "#......#", "########"])
HIDDEN = Instance(7, "screwdriver", 0.0, "occluded", 12, 9, Mask.empty((5, 8)))


def masks_of(
    *instances: Instance, capture_ns: int = 17, received_ns: int = 1_700_000_000_126_000_000, **fields: Any
) -> MaskFrame:
    return MaskFrame("wrist-1", 41, capture_ns, 8, 5, received_ns, instances=instances, **fields)


def masks() -> MaskFrame:
    return masks_of(
        mug("red mug", position_m=(0.1, -0.25, 0.75), frame="camera_color", extent_m=(0.08, 0.08, 0.1)),
        Instance(4, "", 1.0, "tentative", 1, 0, DRIVER),
        HIDDEN,
        capture_ns=1_700_000_000_123_456_789,
        published_ns=1_700_000_000_150_000_000,
        skipped=2,
        model="nano",
        stages_us={"decode": 7, "preprocess": 410, "encode": 9000, "track": 8000, "masks": 300, "pack": 90},
        prompts=("red mug", "schraubenschlüssel"),
    )


def mug(label: str = "mug", **fields: Any) -> Instance:
    return Instance(3, label, 0.875, "tracked", 40, 0, MUG, **fields)


def driver(label: str = "", **fields: Any) -> Instance:
    return Instance(4, label, 0.75, "tracked", 9, 0, DRIVER, **fields)


NODE = "0123456789abcdef"


def masks_with_depth() -> MaskFrame:
    measured = mug(
        "mug",
        position_m=(0.5, -0.25, 0.75),
        frame="base",
        extent_m=(0.125, 0.0625, 0.03125),
        depth_share=0.875,
        camera_position_m=(0.0, 0.125, 0.5),
        covariance_m2=(1e-6, 0.0, -1e-7, 1e-6, 0.0, 4e-6),
        extent_centre_m=(0.5, -0.25, 0.75),
        extent_quaternion_xyzw=(0.5, -0.5, 0.5, 0.5),
        nearest_m=(0.5, -0.25, 0.6875),
        velocity_mps=(0.25, 0.0, -0.125),
        velocity_age_s=0.0,
        points_m=np.arange(6, dtype="<f4").tobytes(),
    )
    transparent = driver("glass", depth_share=0.0)
    camera = FramePose("camera", "base", 17, (0.5, -0.25, 1.25), (1.0, 0.0, 0.0, 0.0))
    gripper = FramePose("gripper", "base", 17, (0.5, -0.25, 1.0), (1.0, 0.0, 0.0, 0.0))
    return masks_of(measured, transparent, received_ns=18, camera_pose=camera, robot_pose=gripper)


def gripper_pose() -> FramePose:
    return FramePose(
        "gripper", "base", 1_700_000_000_123_456_789, (0.5, -0.25, 0.75), (0.5, -0.5, 0.5, 0.5), "device"
    )


def joint_state() -> JointState:
    positions = {"shoulder": -0.5, "elbow": 1.25, "finger": 0.03125}
    return JointState("left-arm", 1_700_000_000_123_456_789, positions, "device")


def robot_action() -> RobotAction:
    values = {"shoulder": -0.5, "elbow": 1.25, "finger": 0.03125}
    return RobotAction("left-arm", 1_700_000_000_123_456_789, values, "leader", "device")


def masks_with_robot() -> MaskFrame:
    hidden = Instance(7, "screwdriver", 0.0, "occluded", 12, 9, Mask.empty((5, 8)), hidden_by="robot")
    return masks_of(mug(), hidden, received_ns=18, joints=joint_state(), robot_mask=DRIVER)


def masks_with_table() -> MaskFrame:
    box = {"upright_centre_m": (0.5, -0.25, 0.125), "upright_size_m": (0.0625, 0.125, 0.25)}
    standing = mug(
        frame="base",
        held=True,
        heights_m=(0.03125, 0.25),
        upright_quaternion_xyzw=(0.0, 0.0, 0.6, 0.8),
        **box,
    )
    return masks_of(standing, received_ns=18, table=types.Plane((0.0, 0.0, 1.0), -0.5, 0.0009765625))


def _request(op: str, request_id: str | None = None, **args: Any) -> Example:
    request = wire.Request(17, op, args, request_id)
    return Example(
        request, lambda value: [wire.pack_request(value)], lambda parts: wire.unpack_request(parts[0])
    )


def _reply(reply: wire.Reply) -> Example:
    return Example(reply, lambda value: [wire.pack_reply(value)], lambda parts: wire.unpack_reply(parts[0]))


def _masks(value: MaskFrame) -> Example:
    return Example(value, lambda value: wire.pack_masks(value, "rle"), wire.unpack_masks)


def _candidates() -> dict[str, Any]:
    shown = [
        {"mask": wire.encode_mask(mask, "rle"), "score": score}
        for mask, score in ((DRIVER, 0.5), (MUG, 0.25))
    ]
    return {"seq": 41, **shown[0], "masks": shown}


def _points() -> dict[str, Any]:
    return {"seq": 41, "frame": "base", "points_m": np.arange(6, dtype="<f4").tobytes()}


def _places() -> list[dict[str, Any]]:
    seen = {"camera": "wrist-1", "epoch": 2**53 - 1, "silent_s": 0.0625, "id": 3, "label": "mug"}
    seen |= {
        "state": "lost",
        "in_view": False,
        "age_s": 12.5,
        "seq": 41,
        "capture_ns": 17,
        "box": [2, 1, 6, 4],
    }
    seen |= {"confidence": 0.96875, "frame": "base", "position_m": [0.5, -0.25, 0.75], "size_m": 0.125}
    seen |= {"camera_position_m": [0.0, 0.125, 0.5], "covariance_m2": [1e-6, 0.0, -1e-7, 1e-6, 0.0, 4e-6]}
    camera = {"frame": "camera", "parent": "base", "stamp_ns": 17, "clock": "system"}
    camera |= {"position": [0.5, -0.25, 1.25], "quaternion": [1.0, 0.0, 0.0, 0.0]}
    seen |= {"camera_pose": camera, "held": False, "hidden_by": "robot"}
    return [seen | {"has_picture": True}]


def _picture() -> dict[str, Any]:
    return {"seq": 41, "capture_ns": 17, "box": [0, 0, 8, 5], "jpeg": JPEG.read_bytes()}


def _event(op: str, **args: Any) -> Example:
    return Example(wire.Event(3, op, {"camera": "wrist-1", **args}), wire.pack_event, wire.unpack_event)


EXAMPLES = {
    "frame-raw": Example(raw_frame(), wire.pack_frame, wire.unpack_frame),
    "frame-jpeg": Example(jpeg_frame(), wire.pack_frame, wire.unpack_frame),
    "masks-rle": _masks(masks()),
    "masks-bits": Example(masks(), wire.pack_masks, wire.unpack_masks, exact=False),
    "masks-doubt": _masks(masks_of(mug(confidence=0.96875), driver(confidence=0.125, doubtful=True), HIDDEN)),
    "masks-names": _masks(
        masks_of(
            mug(confidence=0.96875, name_confidence=0.9375),
            driver("mug", confidence=0.96875, doubtful=True, name_confidence=0.125),
        )
    ),
    "masks-world": _masks(
        masks_of(
            mug(world_id=2, position_m=(0.5, -0.25, 0.125), frame="base", extent_m=(0.125, 0.125, 0.25)),
            driver(),
        )
    ),
    "masks-device-clock": Example(masks_of(clock="device"), wire.pack_masks, wire.unpack_masks),
    "masks-epoch": Example(
        masks_of(received_ns=18, published_ns=19, node=NODE, epoch=2**53 - 1),
        wire.pack_masks,
        wire.unpack_masks,
    ),
    "masks-depth": _masks(masks_with_depth()),
    "masks-shed": _masks(masks_of(driver("screwdriver"), received_ns=18, shed=Shed(2, (3, 7)))),
    "masks-windows": _masks(masks_of(driver("screwdriver"), received_ns=18, windows=2)),
    "masks-robot": _masks(masks_with_robot()),
    "masks-table": _masks(masks_with_table()),
    "beat": Example([wire.BEAT_TOPIC], list, list),
    "pose": Example(gripper_pose(), wire.pack_pose, wire.unpack_pose),
    "joints": Example(joint_state(), wire.pack_pose, wire.unpack_pose),
    "action": Example(robot_action(), wire.pack_action, wire.unpack_action),
    "request-set-prompts": _request("set_prompts", prompts=["red mug", "screwdriver"]),
    "request-set-prompts-priorities": _request(
        "set_prompts", prompts=["red mug", "screwdriver"], priorities={"screwdriver": "low"}
    ),
    "request-add-exemplar": _request(
        "add_exemplar", name="mug", boxes=[[2.0, 1.0, 6.0, 4.0]], labels=[0], seq=41
    ),
    "request-add-object-priority": _request("add_object", box=[2.0, 1.0, 6.0, 4.0], priority="low"),
    "request-add-object-points": _request(
        "add_object", points=[[3.5, 2.0], [7.0, 4.5]], labels=[1, 0], seq=41
    ),
    "request-add-object-choice": _request("add_object", points=[[3.5, 2.0]], seq=41, choice=2),
    "request-add-object-mask": _request(
        "add_object", mask=wire.encode_mask(MUG, "rle"), label="mug", camera="wrist-1"
    ),
    "request-refine-object": _request("refine_object", id=3, points=[[1.0, 1.0]], labels=[0]),
    "request-remove-object": _request("remove_object", id=3),
    "request-remove-object-epoch": _request("remove_object", id=3, camera="wrist-1", epoch=2**53 - 1),
    "request-id": _request("reset", request_id="shelf-3:7"),
    "event-id": Example(wire.Event(3, "reset", request_id="shelf-3:7"), wire.pack_event, wire.unpack_event),
    "request-list-objects": _request("list_objects"),
    "request-segment": _request("segment", box=[2.0, 1.0, 6.0, 4.0], seq=41),
    "request-segment-multimask": _request("segment", points=[[3.5, 2.0]], seq=41, multimask=True),
    "request-points": _request("points", id=3, count=2, camera="wrist-1", epoch=2**53 - 1),
    "request-where": _request("where", label="mug"),
    "request-where-id": _request("where", id=3, camera="wrist-1", epoch=2**53 - 1),
    "request-picture": _request("picture", id=3, camera="wrist-1", epoch=2**53 - 1),
    "request-add-like": _request("add_like", like=3, like_camera="wrist-1", camera="left"),
    "event-recalled": _event("recalled", id=3, absent_s=12.5),
    "event-ambiguous": _event("ambiguous", id=3, ids=[3, 4]),
    "request-reset": _request("reset"),
    "request-pause": _request("pause"),
    "request-resume": _request("resume"),
    "request-begin-episode": _request("begin_episode", task="put the mug on the tray"),
    "request-end-episode": _request("end_episode", keep=False),
    "request-status": _request("status"),
    "reply-id": _reply(wire.Reply(17, {"id": 3})),
    "reply-mask": _reply(wire.Reply(17, {"mask": wire.encode_mask(DRIVER, "rle"), "score": 0.5})),
    "reply-masks": _reply(wire.Reply(17, _candidates())),
    "reply-points": _reply(wire.Reply(17, {"id": 3, "camera": "wrist-1", "epoch": 2**53 - 1, **_points()})),
    "reply-where": _reply(wire.Reply(17, {"objects": _places()})),
    "reply-picture": _reply(wire.Reply(17, {"id": 3, "camera": "wrist-1", "epoch": 2**53 - 1, **_picture()})),
    "reply-node": _reply(wire.Reply(17, {"id": 3}, node=NODE)),
    "reply-error-node": _reply(
        wire.Reply(
            17, error=wire.Failure("node_restarted", "object ids of wrist-1 have begun again"), node=NODE
        )
    ),
    "reply-nothing": _reply(wire.Reply(17)),
    "reply-error": _reply(
        wire.Reply(17, error=wire.Failure("unknown_object", "expected a tracked id, found 9"))
    ),
}


def golden(name: str) -> list[bytes]:
    """Return the parts of a golden file."""
    return [bytes.fromhex(part) for part in json.loads((DATA / f"{name}.json").read_text())["parts"]]


def plain(value: Any) -> Any:
    """Convert a value to one that compares by content, including arrays and buffers."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.shape, value.tobytes())
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def _write() -> None:
    for name, example in EXAMPLES.items():
        parts = [bytes(part).hex() for part in example.pack(example.value)]
        (DATA / f"{name}.json").write_text(json.dumps({"parts": parts}, indent=1) + "\n")


if __name__ == "__main__":
    _write()
