"""Measure the table, and what the gripper holds, on rendered clips of a gripper that picks, pushes, passes or fails.

python -m tools.bench.accuracy.held [--clips N] [--tracker NAME] [--json FILE]

The stage gets the true masks, eroded or dilated by a pixel, the true poses, and depth with the noise of a D435, at
320x240 and 15 Hz; no tracker runs. With --tracker, such as nano, that tracker makes the masks from rendered colour, at
default settings, after a box around each thing on the first frame. A screen hides a part of the way. Needs the extra
`scenes`.
"""

import time
from collections import defaultdict
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np

from sam3_node.calibration import Calibration
from sam3_node.geometry import Array, invert, pose_of, rigid, rotation_from_vector, transform_points
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.perception.pipeline import Pipeline, Surroundings
from sam3_node.perception.robot import RobotPixels
from sam3_node.perception.step import StepFrame
from sam3_node.settings import SpatialSettings, TrackerSettings
from sam3_node.types import NANOSECONDS, Frame, Instance, Intrinsics, JointState, Mask, Plane, RobotState
from sam3_node.wire import GRASPED, encode_depth
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.measuring import Measuring
from tools.bench.accuracy.robot import Scene
from tools.bench.accuracy.spatial import add_noise, compute_truth
from tools.bench.common import Figures, make_parser
from tools.scenes.render import load_mujoco
from tools.scenes.stage import Rng, frames, keyframes

SIZE = (240, 320)
FPS = 15.0
LENS = Intrinsics(277.0, 277.0, 159.5, 119.5)
PINHOLE = {"width_px": 320, "height_px": 240, "fx_px": 277, "fy_px": 277, "cx_px": 159.5, "cy_px": 119.5}
SPOTS = [(x, y) for x in (-0.3, -0.1, 0.1, 0.3) for y in (-0.12, 0.1)]
# MuJoCo's kinds of geoms
SPHERE = 2
CYLINDER = 5
BOX = 6
ROOM = (((2, 2, 0.05), (0, 0, -0.8)), ((0.45, 0.35, 0.02), (0, 0, -0.02)))
"""Floor and table."""
FIRST = 3
"""The geom of the first thing."""
THINGS = 5
TRACKED = 3
"""How many of the things are tracked."""
SEEN_PX = 30
"""Pixels from which a tracker would follow a thing."""
# times of a clip with a pick
GRASP_S = 1.8
RELEASE_S = 5.3
PUSH_S = (6.9, 8.3)
GUARD_S = 0.5
"""Time after a grasp and a release in which either answer counts as right."""
TIMES = np.arange(0, 9.0, 1 / FPS)
COLOURS = [(0.8, 0.1, 0.1, 1), (0.1, 0.5, 0.8, 1), (0.9, 0.8, 0.1, 1), (0.1, 0.6, 0.2, 1), (0.6, 0.2, 0.7, 1)]
"""Of the things, red, green, blue and opacity in 0..1; the gripper is grey."""
GREY = (0.35, 0.35, 0.35, 1)


SLIP_S = 0.2
"""Time in which a thing slips out of a gripper that fails to take it."""

Motion = Literal["pick", "pass", "fail"]
"""pick: the gripper picks the first thing and pushes the second one. pass: it reaches around each thing and leaves it.
fail: as pick, but the first thing slips aside while the gripper closes."""


class Clip(NamedTuple):
    """Geoms (kind, size, place) and table_from_body [n, 4, 4] of the things and of the gripper, which is the last body.

    The table is z = 0.
    """

    geoms: list[list[tuple[int, Any, Any]]]
    poses: list[Array]
    camera: Array
    screen: Array


def main() -> None:
    parser = make_parser(__doc__)
    text = "clips with a pick, half as many that pass, and a quarter that fail (default 40)"
    parser.add_argument("--clips", type=int, default=40, help=text)
    parser.add_argument("--tracker", help="tracker that makes the masks, such as nano (default: true masks)")
    args = parser.parse_args()
    figures = Figures("accuracy.held")
    found = defaultdict[str, list[float]](list)
    model = load_tracker(args.tracker) if args.tracker else None
    motions: list[Motion] = ["pick"] * args.clips
    motions += ["pass"] * (args.clips // 2)
    motions += ["fail"] * (args.clips // 4)
    for seed, motion in enumerate(motions):
        random = np.random.default_rng(seed)
        if model is None:
            run_clip(random, motion, found)
        else:
            run_tracked_clip(model, random, motion, found)
    names = ("right", "wrong", "missed", "once", "strange", "passing", "failed")
    right, wrong, missed, once, strange, passing, failed = (sum(found.pop(name, [0])) for name in names)
    figures.add("held, frames of clips with a pick: precision", right / max(1, right + wrong), "of 1", "0.95")
    figures.add("held, frames of clips with a pick: recall", right / max(1, right + missed), "of 1", "0.95")
    figures.add("clips with a pick whose object is `grasped` once", once / args.clips, "of 1")
    figures.add("`grasped` of other objects in clips with a pick", strange, "")
    figures.add("`grasped` in clips that pass", passing, "", "0")
    figures.add("`grasped` in clips whose grasp fails", failed, "", "0")
    for name, values in found.items():
        figures.add_percentiles(f"{name[:-3]}:", values, name[-2:])
    figures.write(args.json)


def make_clip(random: Rng, motion: Motion) -> Clip:
    """Draw a clip at random."""
    azimuth = random.uniform(0, 2 * np.pi)
    elevation = np.radians(random.uniform(30, 65))
    away = np.array([np.cos(azimuth), np.sin(azimuth), np.tan(elevation)]) * np.cos(elevation)
    eye = frames(-away[None], np.cross(-away, (0, 0, 1.0)))[0]
    spots = random.permutation(SPOTS) + random.uniform(-0.02, 0.02, (len(SPOTS), 2))
    geoms = list[Any]()
    poses = list[Array]()
    for x, y in spots[:THINGS]:
        kind = int(random.choice([SPHERE, CYLINDER, BOX]))
        size = random.uniform(0.018, 0.035, 3)
        half = size[{SPHERE: 0, CYLINDER: 1, BOX: 2}[kind]]
        turn = rotation_from_vector([0, 0, random.uniform(0, np.pi)])
        geoms.append([(kind, size, np.zeros(3))])
        poses.append(np.tile(rigid(turn, [x, y, half]), (len(TIMES), 1, 1)))
    homes = np.array([pose[0, :3, 3] * (1, 1, 1.2) for pose in poses])
    # the first thing goes to the free spot that is farthest to the side
    goal = np.append(max(spots[THINGS:], key=lambda spot: abs((spot - spots[0]) @ eye[:2, 0])), homes[0, 2])
    if motion == "pass":
        keys = plan_pass(random, homes)
    else:
        keys = plan_pick(random, homes, goal, geoms[1][0][1].max() + 0.02)
    tip = keyframes(TIMES, keys)
    lean = np.append(random.uniform(-0.3, 0.3, 2), random.uniform(-0.5, 0.5))
    leans = [(2.0, np.zeros(3)), (3.6, lean), (5.0, lean * (0, 0, 2))]
    turns = [rotation_from_vector(turn) @ np.diag([1, -1, -1]) for turn in keyframes(TIMES, leans)]
    gripper = np.array([rigid(turn, place) for turn, place in zip(turns, tip, strict=True)])
    grasp, release, begin, end = (round(when * FPS) for when in (GRASP_S, RELEASE_S, *PUSH_S))
    if motion == "pick":
        poses[0][grasp:] = gripper[grasp:] @ invert(gripper[grasp]) @ poses[0][0]
        poses[0][release:] = poses[0][release]
    if motion == "fail":
        aside = random.uniform(0, 2 * np.pi)
        way = random.uniform(0.05, 0.1) * np.array([np.cos(aside), np.sin(aside), 0])
        poses[0][:, :3, 3] += ((TIMES - GRASP_S) / SLIP_S).clip(0, 1)[:, None] * way
    if motion != "pass":
        poses[1][begin:, :2, 3] += tip[np.arange(begin, len(TIMES)).clip(max=end), :2] - tip[begin, :2]
    opening = geoms[0][0][1].max() + 0.008
    fingers = [(BOX, (0.006, 0.012, 0.04), (side * opening, 0, -0.03)) for side in (-1, 1)]
    geoms.append([(BOX, (0.05, 0.022, 0.02), (0, 0, -0.09)), *fingers])
    camera = rigid(eye, random.uniform(0.8, 1.1) * away)
    middle = (homes[0] + goal) / 2 + (0, 0, 0.1)
    return Clip(geoms, [*poses, gripper], camera, middle + 0.35 * (camera[:3, 3] - middle))


def plan_pick(random: Rng, homes: Array, goal: Array, reach: float) -> list[tuple[float, Array]]:
    """Return keys of the gripper's tip: it carries the first thing to `goal`, and pushes the second one."""
    up = np.array([0, 0, random.uniform(0.08, 0.15)])
    angle = random.uniform(0, 6)
    bend = random.uniform(-0.8, 0.8)
    ways = [0.06 * np.array([np.cos(turn), np.sin(turn), 0]) for turn in (angle, angle + bend)]
    first = homes[0]
    behind = homes[1] - reach / 0.06 * ways[0]
    keys = [(0.0, first + 2 * up), (1.0, first + up), (1.6, first), (GRASP_S, first), (2.6, first + up)]
    keys += [(4.6, goal + up), (5.2, goal), (RELEASE_S, goal), (5.9, goal + up), (6.5, behind + up)]
    pushed = behind + ways[0], behind + ways[0] + ways[1]
    return [*keys, (PUSH_S[0], behind), (7.6, pushed[0]), (PUSH_S[1], pushed[1]), (8.9, pushed[1] + up)]


def plan_pass(random: Rng, homes: Array) -> list[tuple[float, Array]]:
    """Return keys of a gripper that reaches around each thing, and leaves it."""
    keys = []
    for index, home in enumerate(random.permutation(homes)):
        over = home + np.array([0, 0, random.uniform(0.05, 0.15)])
        beside = home + random.uniform(-0.01, 0.02, 3)
        places = ((0, over), (0.5, beside), (0.7, home), (1.2, over))
        keys += [(1.6 * index + gap, place) for gap, place in places]
    return keys


def build(clip: Clip) -> Any:
    """Return MuJoCo's specification: floor, table, screen, things and the gripper."""
    spec = load_mujoco().MjSpec()
    for size, place in (*ROOM, ((0.03, 0.03, 0.05), clip.screen)):
        spec.worldbody.add_geom(type=BOX, size=size, pos=place)
    spec.worldbody.add_light(pos=(0.5, 0.5, 2), dir=(-0.2, -0.2, -1))
    for geoms, colour in zip(clip.geoms, [*COLOURS, GREY], strict=True):
        body = spec.worldbody.add_body(mocap=True)
        for kind, size, place in geoms:
            body.add_geom(type=kind, size=size, pos=place, contype=0, conaffinity=0, rgba=colour)
    return spec


def run_clip(random: Rng, motion: Motion, found: dict[str, list[float]]) -> None:
    """Add the figures of one clip."""
    clip = make_clip(random, motion)
    scene = Scene(build(clip), clip.camera, SIZE, LENS)
    # the base is tilted against the table
    base = rigid(rotation_from_vector(random.uniform(-0.08, 0.08, 3)), random.uniform(-0.3, 0.3, 3))
    eye = base @ clip.camera
    grasped = []
    held = []
    seen_m = np.zeros(3)
    mount = pose_of(eye, "camera", "base", 0, "system")
    hand_eye = {"kind": "eye_to_hand", "translation_m": mount.position_m}
    hand_eye["rotation_quaternion_xyzw"] = mount.quaternion_xyzw
    calibration = Calibration(intrinsics=PINHOLE, hand_eye=hand_eye)
    stages = [Measuring(SpatialSettings(table=on), calibration) for on in (False, True)]
    for seq, now_s in enumerate(TIMES):
        for index, pose in enumerate(clip.poses):
            scene.data.mocap_pos[index] = pose[seq, :3, 3]
            scene.mujoco.mju_mat2Quat(scene.data.mocap_quat[index], pose[seq, :3, :3].ravel())
        geoms, depth_m = scene.render()
        depth = add_noise(depth_m.astype(np.float64), random)
        stamp_ns = round(now_s * NANOSECONDS)
        packed = encode_depth(depth, "z16", 0.001, True)
        frame = Frame("cam0", seq, stamp_ns, *SIZE[::-1], "bgr8", b"", depth=packed)
        gripper = pose_of(base @ clip.poses[-1][seq], "gripper", "base", stamp_ns, "system")
        instances = [see(index, geoms == FIRST + index, random) for index in range(TRACKED)]
        spent = []
        robot = RobotPixels(JointState("robot", stamp_ns, {}), geoms >= FIRST + THINGS, np.eye(4))
        for stage, given in zip(stages, (None, gripper), strict=True):
            begin = time.process_time()
            step = stage.measure(frame, instances, given, robot=robot)
            spent.append(1000 * (time.process_time() - begin))
        found["table and held, 3 objects: time of one core ms"].append(spent[1] - spent[0])
        grasped += [event.id for event in step.events if event.op == GRASPED]
        measured = step.instances
        held.append([item.held for item in measured])
        body = base @ clip.poses[0][seq]
        target = measured[0]
        inside = geoms == FIRST
        if target.area and inside.any():
            seen_m = transform_points(invert(body) @ eye, compute_truth(depth_m, inside, scene.rays))
        elif target.held and not target.area and target.position_m is not None:
            error_m = np.linalg.norm(transform_points(body, seen_m) - target.position_m)
            found["position of a held object while it is hidden mm"].append(1000 * float(error_m))
        judge_table(base, step.table, measured[2].heights_m, clip.poses[2][0, 2, 3], found)
    scene.renderer.close()
    count_held(np.array(held), motion, found)
    count_grasped(grasped, 0, motion, found)


def run_tracked_clip(model: TrackerModel, random: Rng, motion: Motion, found: dict[str, list[float]]) -> None:
    """Add the figures of one clip whose masks a tracker makes from colour, at default settings."""
    clip = make_clip(random, motion)
    scene = Scene(build(clip), clip.camera, SIZE, LENS)
    mount = pose_of(clip.camera, "camera", "base", 0, "system")
    hand_eye = {"kind": "eye_to_hand", "translation_m": mount.position_m}
    hand_eye["rotation_quaternion_xyzw"] = mount.quaternion_xyzw
    calibration = Calibration(intrinsics=PINHOLE, hand_eye=hand_eye)
    pipeline = Pipeline(model, TrackerSettings(), "cam0", surroundings=Surroundings(calibration=calibration))
    grasped = []
    held = []
    ids: dict[int, int] = {}
    for seq, now_s in enumerate(TIMES):
        for index, pose in enumerate(clip.poses):
            scene.data.mocap_pos[index] = pose[seq, :3, 3]
            scene.mujoco.mju_mat2Quat(scene.data.mocap_quat[index], pose[seq, :3, :3].ravel())
        geoms, depth_m = scene.render()
        scene.renderer.update_scene(scene.data, "camera")
        colour = np.ascontiguousarray(scene.renderer.render()[..., ::-1])
        packed = encode_depth(add_noise(depth_m.astype(np.float64), random), "z16", 0.001, True)
        stamp_ns = round(now_s * NANOSECONDS)
        frame = Frame("cam0", seq, stamp_ns, *SIZE[::-1], "bgr8", colour.tobytes(), depth=packed)
        gripper = pose_of(clip.poses[-1][seq], "gripper", "base", stamp_ns, "system")
        step = StepFrame(frame, robot_state=RobotState(gripper))
        masks = pipeline.step(step)
        # a prompt needs a frame before it; the object comes with the next one
        for index in range(TRACKED):
            shown = Mask.from_full(geoms == FIRST + index)
            if index not in ids and shown.area >= SEEN_PX:
                ids[index] = pipeline.add(FramePrompt(box=shown.box)).id
        grasped += [event.id for event in step.events if event.op == GRASPED]
        found_by_id = {item.id: item for item in masks.instances}
        seen = [found_by_id.get(ids.get(index, 0)) for index in range(TRACKED)]
        held.append([item is not None and item.held for item in seen])
        first = seen[0]
        if first is not None and first.held and first.position_m is not None:
            error_m = np.linalg.norm(np.subtract(first.position_m, clip.poses[0][seq, :3, 3]))
            found["position of a held object, from its middle mm"].append(1000 * float(error_m))
    scene.renderer.close()
    count_held(np.array(held), motion, found)
    count_grasped(grasped, ids.get(0, 0), motion, found)


def count_grasped(grasped: list[int], picked: int, motion: Motion, found: dict[str, list[float]]) -> None:
    """Count the events of a clip. `picked` is the id of the thing that a pick takes."""
    if motion == "pass":
        found["passing"].append(len(grasped))
    elif motion == "fail":
        found["failed"].append(len(grasped))
    else:
        found["strange"].append(len(grasped) - grasped.count(picked))
        found["once"].append(grasped.count(picked) == 1)


def count_held(held: np.ndarray, motion: Motion, found: dict[str, list[float]]) -> None:
    """Compare what is held [frames, objects] with the truth. Either answer counts as right for GUARD_S."""
    true = np.zeros_like(held)
    sure = np.ones_like(held)
    true[:, 0] = (TIMES >= GRASP_S) & (TIMES < RELEASE_S) & (motion == "pick")
    for after_s in (TIMES - GRASP_S, TIMES - RELEASE_S):
        sure[:, 0] &= (after_s < 0) | (after_s >= GUARD_S)
    for name, cases in (("right", held & true), ("wrong", held & ~true), ("missed", ~held & true)):
        found[name].append(int((cases & sure).sum()))


def judge_table(
    base: Array, table: Plane | None, heights_m: Any, half_m: float, found: dict[str, list[float]]
) -> None:
    """Add the errors of the plane, and of the top of a thing that stands still and is twice as high as `half_m`."""
    assert table is not None
    tilt = float(base[:3, 2] @ table.normal)
    middle_m = float(base[:3, 3] @ table.normal)
    found["table: tilt dg"].append(float(np.degrees(np.arccos(min(1.0, tilt)))))
    found["table: distance at its middle mm"].append(1000 * abs(middle_m - table.offset_m))
    if heights_m:
        found["height of an object's top mm"].append(1000 * abs(heights_m[1] - 2 * half_m))


def see(index: int, inside: np.ndarray, random: Rng) -> Instance:
    """Return an instance with a disturbed mask, or without one if a tracker would not see the object."""
    change = random.integers(3)
    mask = inside.astype(np.uint8)
    if change < 2:
        mask = (cv2.erode, cv2.dilate)[change](mask, np.ones((3, 3), np.uint8))
    if np.count_nonzero(mask) < SEEN_PX:
        return Instance(index, "", 0.0, "occluded", 0, 1, Mask.empty(SIZE))
    return Instance(index, "", 1.0, "tracked", 0, 0, Mask.from_full(mask > 0))


if __name__ == "__main__":
    main()
