"""Describes the arm of the bundled recording as a robot: its URDF, and the positions of its joints on each frame.

The root is the camera, which a hand holds: six joints lead from it to the arm's base, which stands still.
"""

import numpy as np
from scipy.spatial.transform import Rotation

from sam3_node.geometry import Array, rigid
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


def describe_arm(plan: Plan) -> tuple[str, list[dict[str, float]]]:
    """Return the URDF of a plan's arm, and its joints on each frame, in radians or metres."""
    samples = frame_samples(plan.effects, plan.settings)
    limbs = [_poses(limb)[samples] for limb in plan.limbs]
    world = _place_links(limbs) | {"camera": plan.camera.poses()[samples]}
    text, values = "", dict[str, Array]()
    for name, parent, slides, turns in LINKS:
        place = np.linalg.inv(world[parent]) @ world[name]
        origin = [0.0 if axis in slides else place[0, "xyz".index(axis), 3] for axis in "xyz"]
        angles = Rotation.from_matrix(place[:, :3, :3]).as_euler(EULER[turns])
        moves = {
            f"{name}_slide_{axis}": ("prismatic", axis, place[:, "xyz".index(axis), 3]) for axis in slides
        }
        moves |= {
            f"{name}_{axis}": ("revolute", axis, np.unwrap(angle))
            for axis, angle in zip(turns, angles.T[: len(turns)], strict=True)
        }
        bodies = [
            _describe_limb(limb, np.linalg.inv(world[name][0]) @ pose[0])
            for limb, pose, owner in zip(plan.limbs, limbs, OWNERS, strict=True)
            if owner == name
        ]
        text += _describe_chain(name, parent, origin, moves) + _wrap("link", name, bodies)
        values |= {joint: positions for joint, (_, _, positions) in moves.items()}
    joints = [
        dict(zip(values, row, strict=True)) for row in np.round(np.stack([*values.values()], 1), 6).tolist()
    ]
    return f'<robot name="{plan.scenario}">\n<link name="camera"/>\n{text}</robot>\n', joints


def _place_links(limbs: list[Array]) -> dict[str, Array]:
    """Return world_from_link [n, 4, 4] of all links but the camera, from the poses of the limbs."""
    shoulder, elbow, wrist = (limbs[index][:, :3, 3] for index in (4, 5, 6))
    up = np.broadcast_to([0.0, 0.0, 1.0], shoulder.shape)
    ahead = np.cross(np.cross(up, wrist - shoulder), up)
    hand = limbs[7][:, :3, :3]
    return {
        "base": _stack(np.tile(np.eye(3), (len(up), 1, 1)), shoulder * (1, 1, 0)),
        "waist": _stack(frames(up, ahead), shoulder),
        # x lies in the arm's plane
        "upper": _stack(_frames_about(np.cross(up, ahead), elbow - shoulder), shoulder),
        "fore": _stack(_frames_about(np.cross(up, ahead), wrist - elbow), elbow),
        "hand": _stack(hand, wrist),
        "left": _stack(hand, limbs[8][:, :3, 3]),
        "right": _stack(hand, limbs[9][:, :3, 3]),
    }


def _frames_about(y: Array, z: Array) -> Array:
    """Return rotations [n, 3, 3] with the axes y and z [n, 3], which are orthogonal."""
    return frames(z, np.cross(y, z))


def _poses(limb: Limb) -> Array:
    return _stack(Rotation.from_quat(limb.quats, scalar_first=True).as_matrix(), limb.positions)


def _stack(rotations: Array, positions: Array) -> Array:
    return np.stack([rigid(*each) for each in zip(rotations, positions, strict=True)])


def _describe_chain(
    name: str, parent: str, origin: list[float], moves: dict[str, tuple[str, str, Array]]
) -> str:
    """Return the joints from a parent to a link, with a link without a body between two of them."""
    text = ""
    for index, (joint, (kind, axis, _)) in enumerate(moves.items()):
        child = name if index == len(moves) - 1 else f"{joint}_link"
        vector = " ".join(str(int(axis == each)) for each in "xyz")
        inside = [
            f'<origin xyz="{_numbers(origin)}"/>',
            f'<parent link="{parent}"/>',
            f'<child link="{child}"/>',
        ]
        inside += [f'<axis xyz="{vector}"/>', '<limit lower="-10" upper="10" effort="0" velocity="0"/>']
        text += _wrap(f'joint type="{kind}"', joint, inside)
        if child != name:
            text += f'<link name="{child}"/>\n'
        parent, origin = child, [0.0, 0.0, 0.0]
    return text


def _describe_limb(limb: Limb, place: Array) -> str:
    size, angles = limb.size, Rotation.from_matrix(place[:3, :3]).as_euler("xyz")
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


def _wrap(tag: str, name: str, inside: list[str]) -> str:
    kind, _, rest = tag.partition(" ")
    return (
        f'<{kind} name="{name}"{" " + rest if rest else ""}>\n'
        + "".join(f"  {line}\n" for line in inside)
        + f"</{kind}>\n"
    )


def _numbers(values: Array | list[float]) -> str:
    return " ".join(f"{value:.5f}" for value in values)
