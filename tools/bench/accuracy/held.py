"""Measure the table, and what the gripper holds, on rendered clips of a gripper that picks and pushes, or only passes.

python -m tools.bench.accuracy.held [--clips N] [--json FILE]

The stage gets the true masks, eroded or dilated by a pixel, the true poses, and depth with the noise of a D435, at
320x240 and 15 Hz; no tracker runs. A screen hides a part of the way. Needs the extra `scenes`.
"""

import time
from collections import defaultdict
from typing import Any, NamedTuple

import cv2
import numpy as np

from sam3_node.calibration import Calibration
from sam3_node.geometry import (
    Array,
    invert,
    pose_of,
    quaternion_from_rotation,
    rigid,
    rotation_from_vector,
    transform_points,
    vector_from_rotation,
)
from sam3_node.perception.spatial import SpatialStage
from sam3_node.perception.surfaces import RayMap
from sam3_node.settings import SpatialSettings
from sam3_node.types import NANOSECONDS, Frame, Instance, Intrinsics, Mask, Plane
from sam3_node.wire import GRASPED, encode_depth
from tools.bench.accuracy.robot import render
from tools.bench.accuracy.spatial import add_noise, compute_truth
from tools.bench.common import Figures, make_parser
from tools.scenes.render import load_mujoco
from tools.scenes.stage import frames, keyframes

SIZE, FPS, SECONDS, CLIPS = (240, 320), 15.0, 9.0, 40
LENS = Intrinsics(277.0, 277.0, 159.5, 119.5)
PINHOLE = {"width_px": 320, "height_px": 240, "fx_px": 277, "fy_px": 277, "cx_px": 159.5, "cy_px": 119.5}
SPOTS = [(x, y) for x in (-0.3, -0.1, 0.1, 0.3) for y in (-0.12, 0.1)]
SPHERE, CYLINDER, BOX = 2, 5, 6
"""MuJoCo's kinds of geoms."""
FIRST, THINGS, TRACKED = 3, 5, 3
"""The geom of the first thing, after floor, table and screen; things, and how many of them are tracked."""
SEEN_PX = 30
"""Pixels from which a tracker would follow an object."""
GRASP_S, RELEASE_S, PUSH_S, GUARD_S = 1.8, 5.3, (6.9, 8.3), 0.5
"""Times of a clip with a pick, and the time after a grasp and a release in which either answer counts."""
TOOL = np.diag([1.0, -1.0, -1.0])
"""The gripper points down."""


class Clip(NamedTuple):
    """Geoms (kind, size, place in the body) of the things and of the gripper, last, with the bodies' poses [n, 4, 4].

    The gripper picks the first thing and pushes the second one, unless it only passes.
    """

    geoms: list[list[tuple[int, Any, Any]]]
    poses: list[Array]
    camera: Array
    screen: Array


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clips", type=int, default=CLIPS, help=f"clips of each kind (default {CLIPS})")
    args = parser.parse_args()
    figures, found = Figures("accuracy.held"), defaultdict[str, list[float]](list)
    for passes in (False, True):
        for seed in range(args.clips):
            random = np.random.default_rng([seed, passes])
            run_clip(make_clip(random, passes), passes, random, found)
    count = {
        name: sum(found.pop(name, [0]))
        for name in ("right", "wrong", "missed", "grasped", "strange", "passed")
    }
    figures.add(
        "clips with a pick: frames, precision of held",
        count["right"] / (count["right"] + count["wrong"]),
        "of 1",
        "0.95",
    )
    figures.add(
        "clips with a pick: frames, recall of held",
        count["right"] / (count["right"] + count["missed"]),
        "of 1",
        "0.95",
    )
    figures.add("clips with a pick: picked objects with one `grasped`", count["grasped"] / args.clips, "of 1")
    figures.add("clips with a pick: `grasped` of other objects", count["strange"], "")
    figures.add("clips that pass: `grasped`", count["passed"], "", "0")
    for name, values in found.items():
        for what, share in (("median", 50), ("p95", 95)):
            figures.add(f"{name[:-3]}: {what}", float(np.percentile(values, share)), name[-2:])
    figures.write(args.json)


def make_clip(random: np.random.Generator, passes: bool) -> Clip:
    """Draw a clip at random. The table is z = 0."""
    times = np.arange(0, SECONDS, 1 / FPS)
    azimuth, elevation = random.uniform(0, 2 * np.pi), np.radians(random.uniform(30, 65))
    flat = np.array([np.cos(azimuth), np.sin(azimuth), 0])
    away = flat * np.cos(elevation) + (0, 0, np.sin(elevation))
    eye = frames(-away[None], np.cross(-away, (0, 0, 1.0)))[0]
    geoms, poses, spots = [], [], random.permutation(SPOTS) + random.uniform(-0.02, 0.02, (len(SPOTS), 2))
    # the first thing goes to the free spot that is farthest to the side
    side = [abs((spot - spots[0]) @ eye[:2, 0]) for spot in spots[THINGS:]]
    goal = np.append(spots[THINGS + int(np.argmax(side))], 0)
    for x, y in spots[:THINGS]:
        kind, size = int(random.choice([SPHERE, CYLINDER, BOX])), random.uniform(0.018, 0.035, 3)
        half = size[{SPHERE: 0, CYLINDER: 1, BOX: 2}[kind]]
        turn = rotation_from_vector([0, 0, random.uniform(0, np.pi)])
        geoms.append([(kind, size, np.zeros(3))])
        poses.append(np.tile(rigid(turn, [x, y, half]), (len(times), 1, 1)))
    homes = np.array([pose[0, :3, 3] * (1, 1, 1.2) for pose in poses])
    way = plan_pass(random, homes) if passes else plan_pick(random, homes, goal, geoms[1][0][1].max())
    tip = keyframes(times, way)
    turns = keyframes(
        times, [(t, np.zeros(3)) for t in (0, 2.0, 5.1)] + [(3.6, random.uniform(-0.3, 0.3, 3))]
    )
    turns[:, 2] += keyframes(times, [(2.0, np.zeros(1)), (5.0, random.uniform(-1, 1, 1))])[:, 0]
    gripper = np.array(
        [rigid(rotation_from_vector(turn) @ TOOL, place) for turn, place in zip(turns, tip, strict=True)]
    )
    if not passes:
        grasp, release = int(GRASP_S * FPS), int(RELEASE_S * FPS)
        poses[0][grasp:] = gripper[grasp:] @ invert(gripper[grasp]) @ poses[0][0]
        poses[0][release:] = poses[0][release]
        begin, end = int(PUSH_S[0] * FPS), int(PUSH_S[1] * FPS)
        poses[1][begin:end, :2, 3] += tip[begin:end, :2] - tip[begin, :2]
        poses[1][end:] = poses[1][end - 1]
    opening = geoms[0][0][1].max() + 0.008
    fingers = [(BOX, (0.006, 0.012, 0.04), (side * opening, 0, -0.03)) for side in (-1, 1)]
    geoms.append([(BOX, (0.05, 0.022, 0.02), (0, 0, -0.09)), *fingers])
    camera = rigid(eye, random.uniform(0.8, 1.1) * away)
    middle = (homes[0] + goal) / 2 + (0, 0, 0.12)
    return Clip(geoms, [*poses, gripper], camera, rigid(eye, middle + 0.35 * (camera[:3, 3] - middle)))


def plan_pick(
    random: np.random.Generator, homes: Array, goal: Array, reach: float
) -> list[tuple[float, Array]]:
    """Return keys of the gripper's tip: it picks the first thing, carries it to `goal`, and pushes the second one."""
    up, angle = np.array([0, 0, random.uniform(0.08, 0.15)]), random.uniform(0, 2 * np.pi)
    first, last = homes[0], goal * (1, 1, 0) + homes[0] * (0, 0, 1)
    heading = np.array([np.cos(angle), np.sin(angle), 0])
    bent = rotation_from_vector([0, 0, random.uniform(-0.8, 0.8)]) @ heading
    behind = homes[1] - heading * (reach + 0.02)
    keys = [(0.0, first + 2 * up), (1.0, first + up), (1.6, first), (GRASP_S, first), (2.6, first + up)]
    keys += [
        (4.6, last + up),
        (5.2, last),
        (RELEASE_S, last),
        (5.9, last + up),
        (6.5, behind + up),
        (PUSH_S[0], behind),
    ]
    return [
        *keys,
        (7.6, behind + 0.06 * heading),
        (PUSH_S[1], behind + 0.06 * (heading + bent)),
        (8.9, behind + up),
    ]


def plan_pass(random: np.random.Generator, homes: Array) -> list[tuple[float, Array]]:
    """Return keys of a gripper that reaches around things, and passes over them."""
    keys = [(0.0, homes[0] + (0, 0, 0.15))]
    for begin, thing in zip(np.arange(1.0, 8.5, 1.6), random.permutation(len(homes)), strict=True):
        over = homes[thing] + (0, 0, random.uniform(0.05, 0.15))
        keys += [
            (begin, over),
            (begin + 0.5, homes[thing] + random.uniform(-0.01, 0.02, 3)),
            (begin + 0.7, homes[thing]),
            (begin + 1.2, over),
        ]
    return keys


def build(clip: Clip) -> Any:
    """Return MuJoCo's model: floor, table, screen, things and the gripper."""
    spec = load_mujoco().MjSpec()
    world, eye = spec.worldbody, clip.camera[:3, :3] * (1, -1, -1)
    world.add_geom(type=BOX, size=[2, 2, 0.05], pos=[0, 0, -0.8])
    world.add_geom(type=BOX, size=[0.45, 0.35, 0.02], pos=[0, 0, -0.02])
    quat = np.roll(quaternion_from_rotation(clip.screen[:3, :3]), 1)
    world.add_geom(type=BOX, size=[0.045, 0.06, 0.002], pos=clip.screen[:3, 3], quat=quat)
    for geoms in clip.geoms:
        body = world.add_body(mocap=True)
        for kind, size, place in geoms:
            body.add_geom(type=kind, size=size, pos=place, contype=0, conaffinity=0)
    world.add_camera(name="camera", pos=clip.camera[:3, 3], xyaxes=eye[:, :2].T.ravel(), fovy=46.84)
    return spec.compile()


def run_clip(clip: Clip, passes: bool, random: np.random.Generator, found: dict[str, list[float]]) -> None:
    """Add the figures of one clip."""
    mujoco, model = load_mujoco(), build(clip)
    data, renderer, rays = mujoco.MjData(model), mujoco.Renderer(model, *SIZE), RayMap().rays(LENS, SIZE)
    # the base is tilted against the table
    base = rigid(rotation_from_vector(random.uniform(-0.08, 0.08, 3)), random.uniform(-0.3, 0.3, 3))
    eye = base @ clip.camera
    vector = vector_from_rotation(eye[:3, :3]).tolist()
    hand_eye = {"kind": "eye_to_hand", "translation_m": eye[:3, 3].tolist(), "rotation_vector_rad": vector}
    calibration = Calibration(intrinsics=PINHOLE, hand_eye=hand_eye)
    stages = [SpatialStage(SpatialSettings(table=on), calibration) for on in (False, True)]
    last_seen, grasped = np.zeros(3), []
    for seq in range(len(clip.poses[0])):
        for index, pose in enumerate(clip.poses):
            data.mocap_pos[index] = pose[seq, :3, 3]
            mujoco.mju_mat2Quat(data.mocap_quat[index], pose[seq, :3, :3].ravel())
        mujoco.mj_forward(model, data)
        geoms, depth_m = render(renderer, data)
        noisy = encode_depth(add_noise(depth_m.astype(np.float64), random), "z16", 0.001, True)
        stamp_ns, now_s = round(seq * NANOSECONDS / FPS), seq / FPS
        frame = Frame("cam0", seq, stamp_ns, *SIZE[::-1], "bgr8", b"", depth=noisy)
        gripper = pose_of(base @ clip.poses[-1][seq], "gripper", "base", stamp_ns, "system")
        instances = [see(index, geoms == FIRST + index, random) for index in range(TRACKED)]
        spent = []
        for on, stage in enumerate(stages):
            begin = time.process_time()
            measured, place = stage.measure(
                frame, instances, gripper if on else None, geoms >= FIRST + THINGS
            )
            spent.append(1000 * (time.process_time() - begin))
        found["cost of table and held, 3 objects, one core ms"].append(spent[1] - spent[0])
        grasped += [index for event, index in stages[1].held.changes if event == GRASPED]
        judge_table(base, place.table, measured, clip, found)
        for item in measured:
            is_true = item.id == 0 and not passes and GRASP_S <= now_s < RELEASE_S
            unsure = any(0 <= now_s - when < GUARD_S for when in (GRASP_S, RELEASE_S))
            name = {(1, 1): "right", (0, 1): "wrong", (1, 0): "missed"}.get((is_true, item.held))
            if name and not (unsure and item.id == 0):
                found[name].append(1)
        body, target = base @ clip.poses[0][seq], measured[0]
        if target.area:
            inside = geoms == FIRST
            if inside.any():
                seen_m = transform_points(eye, compute_truth(depth_m, inside, rays))
                last_seen = transform_points(invert(body), seen_m)
        elif target.held and target.position_m is not None:
            error = np.linalg.norm(transform_points(body, last_seen) - target.position_m)
            found["position of a held object while it is hidden mm"].append(1000 * float(error))
    renderer.close()
    if passes:
        found["passed"].append(len(grasped))
    else:
        found["grasped"].append(grasped.count(0) == 1)
        found["strange"].append(len(grasped) - grasped.count(0))


def see(index: int, inside: np.ndarray, random: np.random.Generator) -> Instance:
    """Return an instance with a disturbed mask, or with none if a tracker would not see the object."""
    change = (cv2.erode, cv2.dilate, np.copy)[random.integers(3)]
    mask = inside.astype(np.uint8)
    mask = change(mask, np.ones((3, 3), np.uint8)) if change is not np.copy else mask
    if np.count_nonzero(mask) < SEEN_PX:
        return Instance(index, "", 0.0, "occluded", 0, 1, Mask.empty(inside.shape))
    return Instance(index, "", 1.0, "tracked", 0, 0, Mask.from_full(mask > 0))


def judge_table(
    base: Array, table: Plane | None, measured: Any, clip: Clip, found: dict[str, list[float]]
) -> None:
    """Add the errors of the plane, and of the top of what stands still on it."""
    if table is None:
        found["table missing"].append(1)
        return
    tilt = np.degrees(np.arccos(min(1.0, float(base[:3, 2] @ table.normal))))
    found["table: tilt dg"].append(float(tilt))
    found["table: distance at its middle mm"].append(
        1000 * abs(float(base[:3, 3] @ table.normal) - table.offset_m)
    )
    found["table: rms mm"].append(1000 * table.rms_m)
    if measured[2].heights_m:
        found["height of an object's top mm"].append(
            1000 * abs(measured[2].heights_m[1] - 2 * clip.poses[2][0, 2, 3])
        )


if __name__ == "__main__":
    main()
