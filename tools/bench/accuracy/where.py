"""Ask where objects are that a camera on a gripper saw before it looked away, on rendered scenes with depth.

    python -m tools.bench.accuracy.where [--clips N] [--tracker NAME] [--json FILE]

The gripper moves over a table for three seconds, turns away for four, and turns back. Depth has the noise of a D435, at
320x240 and 15 Hz. The tracker follows three things after a box around each. While the camera looks away, `where` is
compared with the truth: the mean of the surface's points that were visible when the thing was seen last, in the base.
A thing that was never in view is asked for, too. Rendering needs the extra `scenes`.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from sam3_node.calibration import Calibration
from sam3_node.geometry import Array, invert, pose_of, rigid, rotation_from_vector, transform_points
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.perception.pipeline import Pipeline, Surroundings
from sam3_node.perception.step import StepFrame
from sam3_node.settings import TrackerSettings
from sam3_node.types import NANOSECONDS, Frame, Mask, RobotState
from sam3_node.wire import encode_depth
from sam3_node.wire.frame_prompt import FramePrompt
from tools.bench.accuracy.rendered_table import FIRST, PINHOLE, SIZE, Scene, draw_table
from tools.bench.accuracy.spatial import add_noise, compute_truth
from tools.bench.common import Figures, make_parser

FPS = 15.0
TRACKED = 3
"""How many of the things are tracked."""
SEEN_PX = 30
"""Pixels from which a tracker would follow a thing."""
LOOKS_S = 3.0
"""Time for which the camera looks at the table."""
TURN_S = 0.5
"""Time in which it turns away, and back."""
AWAY_S = 4.0
"""Time for which it looks away."""
NEAR_MM = 10.0
"""Error up to which an answer is right."""
AWAY_RAD = 1.6
"""Angle by which it turns."""
SWAY_M = 0.04
"""Way of the camera to each side while it looks."""
MOUNT = rigid(rotation_from_vector([0.02, -0.03, 0.8]), [0.03, -0.05, 0.04])
"""Place of the camera in the gripper."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clips", type=int, default=20, help="rendered clips (default 20)")
    parser.add_argument("--tracker", default="nano", help="tracker that makes the masks")
    args = parser.parse_args()
    figures = Figures("accuracy.where")
    model = load_tracker(args.tracker)
    found = defaultdict[str, list[float]](list)
    for seed in range(args.clips):
        run_clip(model, np.random.default_rng(1000 + seed), found)
        print(f"{seed + 1} of {args.clips} clips", flush=True)
    figures.add("where, while the camera looks away: answers", len(found["mm"]), "")
    figures.add_percentiles("where, while the camera looks away: error", found["mm"], "mm", "10")
    within = float(np.mean(np.array(found["mm"]) <= NEAR_MM))
    figures.add(f"where, while the camera looks away: answers within {NEAR_MM:g} mm", within, "of 1")
    figures.add("where: error of the age at most", max(found["age"]), "s", "0")
    figures.add("where: objects in the answer for a name that was never seen", sum(found["strange"]), "", "0")
    figures.add("where: objects said to be in view that are not", sum(found["false"]), "", "0")
    back = float(np.mean(found["back"]))
    figures.add("where: objects under their ids when the camera has been back for 3 s", back, "of 1")
    figures.write(args.json)


def run_clip(model: TrackerModel, random: np.random.Generator, found: dict[str, list[float]]) -> None:
    """Add the figures of one clip."""
    table = draw_table(random)
    scene = Scene(table)
    mount = pose_of(MOUNT, "camera", "gripper", 0, "system")
    hand_eye: dict[str, Any] = {"kind": "eye_in_hand", "translation_m": mount.position_m}
    hand_eye["rotation_quaternion_xyzw"] = mount.quaternion_xyzw
    calibration = Calibration(intrinsics=PINHOLE, hand_eye=hand_eye)
    pipeline = Pipeline(model, TrackerSettings(), "cam0", surroundings=Surroundings(calibration=calibration))
    ids: dict[int, int] = {}
    truths: dict[tuple[int, int], Array] = {}
    frames = round((2 * LOOKS_S + 2 * TURN_S + AWAY_S) * FPS)
    for seq in range(frames):
        now_s = seq / FPS
        camera = move(table.camera, now_s)
        scene.aim(camera)
        colour, geoms, depth_m = scene.render()
        packed = encode_depth(add_noise(depth_m.astype(np.float64), random), "z16", 0.001, True)
        stamp_ns = round(now_s * NANOSECONDS)
        frame = Frame("cam0", seq, stamp_ns, *SIZE[::-1], "bgr8", colour.tobytes(), depth=packed)
        gripper = pose_of(camera @ invert(MOUNT), "gripper", "base", stamp_ns, "system")
        masks = pipeline.step(StepFrame(frame, robot_state=RobotState(gripper)))
        for index in range(TRACKED):
            inside = geoms == FIRST + index
            shown = Mask.from_full(inside)
            if index not in ids and shown.area >= SEEN_PX:
                ids[index] = pipeline.add(FramePrompt(box=shown.box), f"thing {index}").id
            if shown.area:
                truths[index, seq] = transform_points(camera, compute_truth(depth_m, inside, scene.rays))
        turned = LOOKS_S + TURN_S <= now_s < LOOKS_S + TURN_S + AWAY_S
        if turned and not np.isin(geoms, range(FIRST, FIRST + TRACKED)).any():
            judge(pipeline, ids, truths, seq, found)
    tracked = {each.id for each in masks.instances if each.state == "tracked"}
    found["back"] += [float(ids[index] in tracked) for index in ids]
    scene.renderer.close()


def judge(
    pipeline: Pipeline,
    ids: dict[int, int],
    truths: dict[tuple[int, int], Array],
    seq: int,
    found: dict[str, list[float]],
) -> None:
    """Compare what is said of each thing with the truth, on a frame that shows none."""
    found["strange"].append(len(pipeline.where(None, "spoon")))
    for index, object_id in ids.items():
        (said,) = pipeline.where(object_id, None)
        found["false"].append(float(said.in_view))
        if said.position_m is None or said.seq is None or (index, said.seq) not in truths:
            continue
        found["mm"].append(1000 * float(np.linalg.norm(truths[index, said.seq] - said.position_m)))
        found["age"].append(abs((said.age_s or 0.0) - (seq - said.seq) / FPS))


def move(start: Array, now_s: float) -> Array:
    """Return base_from_camera at a time."""
    away = np.clip((now_s - LOOKS_S) / TURN_S, 0, 1) - np.clip(
        (now_s - LOOKS_S - TURN_S - AWAY_S) / TURN_S, 0, 1
    )
    turn = rigid(rotation_from_vector([0, AWAY_RAD * away, 0]), [0, 0, 0])
    sway = rigid(np.eye(3), [SWAY_M * np.sin(2 * now_s), SWAY_M * np.cos(1.3 * now_s) - SWAY_M, 0])
    moved: Array = start @ sway @ turn
    return moved


if __name__ == "__main__":
    main()
