"""Describes the arm of the bundled recording as a robot: its URDF, and the positions of its joints on each frame.

The root is the camera, which a hand holds: six joints lead from it to the arm's base, which stands still.
"""

import numpy as np
from scipy.spatial.transform import Rotation

from sam3_node.geometry import Array
from tools.scenes.arm import Limb
from tools.scenes.plan import Plan, frame_samples
from tools.scenes.stage import frames

LINKS = (  # name, parent, axes along which it slides, axes about which it then turns
    ("base", "camera", "xyz", "zyx"),
    ("waist", "base", "", "z"),
    ("upper", "waist", "", "y"),
    ("fore", "upper", "", "y"),
    ("hand", "fore", "", "zyx"),
    ("left", "hand", "x", ""),
    ("right", "hand", "x", ""),
)
OWNERS = ("upper", "fore", "hand", "base", "waist", "upper", "fore", "hand", "left", "right")
"""The link of each limb of `arm.reach`, in its order."""
EULER = {"": "ZYX", "z": "ZYX", "y": "YXZ", "zyx": "ZYX"}
"""Angles of which the first ones are about these axes, in any range."""


JOINT = """<joint name="{name}" type="{kind}">
  <origin xyz="{origin}"/>
  <parent link="{parent}"/>
  <child link="{child}"/>
  <axis xyz="{axis}"/>
  <limit lower="-10" upper="10" effort="0" velocity="0"/>
</joint>
"""


def describe_arm(plan: Plan) -> tuple[str, list[dict[str, float]]]:
    """Return the URDF of a plan's arm, and its joints on each frame, in radians or metres."""
    samples = frame_samples(plan.effects, plan.settings)
    limbs = [_poses(limb)[samples] for limb in plan.limbs]
    world = _place_links(limbs) | {"camera": plan.camera.poses()[samples]}
    text = f'<robot name="{plan.scenario}">\n<link name="camera"/>\n'
    values = dict[str, Array]()
    for name, parent, slides, turns in LINKS:
        place = np.linalg.inv(world[parent]) @ world[name]
        origin = [0.0 if axis in slides else place[0, "xyz".index(axis), 3] for axis in "xyz"]
        angles = np.unwrap(Rotation.from_matrix(place[:, :3, :3]).as_euler(EULER[turns]), axis=0).T
        moved = {f"slide_{axis}": place[:, "xyz".index(axis), 3] for axis in slides}
        moved |= dict(zip(turns, angles, strict=False))
        text += _describe_chain(name, parent, origin, list(moved)) + f'<link name="{name}">\n'
        for limb, poses, owner in zip(plan.limbs, limbs, OWNERS, strict=True):
            if owner == name:
                text += f"  {_describe_limb(limb, np.linalg.inv(world[name][0]) @ poses[0])}\n"
        text += "</link>\n"
        values |= {f"{name}_{move}": positions for move, positions in moved.items()}
    rows = np.round(np.stack([*values.values()], axis=1), 6).tolist()
    return f"{text}</robot>\n", [dict(zip(values, row, strict=True)) for row in rows]


def _place_links(limbs: list[Array]) -> dict[str, Array]:
    """Return world_from_link [n, 4, 4] of all links but the camera, from the poses of the limbs."""
    shoulder, elbow, wrist = (limbs[index][:, :3, 3] for index in (4, 5, 6))
    up = np.broadcast_to([0.0, 0.0, 1.0], shoulder.shape)
    side = np.cross(up, wrist - shoulder)
    hand = limbs[7][:, :3, :3]
    return {
        "base": _stack(np.eye(3), shoulder * (1, 1, 0)),
        "waist": _stack(frames(up, np.cross(side, up)), shoulder),
        # x lies in the arm's plane
        "upper": _stack(frames(elbow - shoulder, np.cross(side, elbow - shoulder)), shoulder),
        "fore": _stack(frames(wrist - elbow, np.cross(side, wrist - elbow)), elbow),
        "hand": _stack(hand, wrist),
        "left": _stack(hand, limbs[8][:, :3, 3]),
        "right": _stack(hand, limbs[9][:, :3, 3]),
    }


def _poses(limb: Limb) -> Array:
    return _stack(Rotation.from_quat(limb.quats, scalar_first=True).as_matrix(), limb.positions)


def _stack(rotations: Array, positions: Array) -> Array:
    poses = np.tile(np.eye(4), (len(positions), 1, 1))
    poses[:, :3, :3] = rotations
    poses[:, :3, 3] = positions
    return poses


def _describe_chain(name: str, parent: str, origin: list[float], moves: list[str]) -> str:
    """Return the joints from a parent to a link, with a link without a body between two of them."""
    text = ""
    for move in moves:
        joint = f"{name}_{move}"
        kind = "prismatic" if move.startswith("slide") else "revolute"
        child = name if move == moves[-1] else f"{joint}_link"
        axis = " ".join(str(int(move[-1] == each)) for each in "xyz")
        ends = {"parent": parent, "child": child, "origin": _numbers(origin)}
        text += JOINT.format(name=joint, kind=kind, axis=axis, **ends)
        text += f'<link name="{child}"/>\n' if child != name else ""
        parent = child
        origin = [0.0, 0.0, 0.0]
    return text


def _describe_limb(limb: Limb, place: Array) -> str:
    size = limb.size
    angles = Rotation.from_matrix(place[:3, :3]).as_euler("xyz")
    solids = [(f'box size="{_numbers(2 * np.array(size))}"', 0.0)]
    if limb.solid != "box":
        solids = [(f'cylinder radius="{size[0]:.5f}" length="{2 * size[1]:.5f}"', 0.0)]
    if limb.solid == "capsule":
        solids += [(f'sphere radius="{size[0]:.5f}"', end) for end in (-size[1], size[1])]
    return "".join(
        f'<collision><origin xyz="{_numbers(place[:3, 3] + end * place[:3, 2])}" rpy="{_numbers(angles)}"/>'
        f"<geometry><{solid}/></geometry></collision>"
        for solid, end in solids
    )


def _numbers(values: Array | list[float]) -> str:
    return " ".join(f"{round(float(value), 5) + 0.0:.5f}" for value in values)  # without -0.00000
