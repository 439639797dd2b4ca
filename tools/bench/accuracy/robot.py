"""Measure the robot's silhouette from its URDF, without errors and with those of a usual calibration and clock.

python -m tools.bench.accuracy.robot --urdf FILE [--clips N] [--json FILE]

An arm swings in front of a wall. The truth are MuJoCo's pictures of the URDF's collision geometry. Needs
the extras `robot` and `scenes`.
"""

import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from sam3_node.errors import require
from sam3_node.geometry import Array, invert, rigid, rotation_from_vector
from sam3_node.perception.robot import LensView, RobotBody
from sam3_node.perception.surfaces import DepthMap, RayMap
from sam3_node.types import Intrinsics
from tools.bench.common import Figures, make_parser
from tools.scenes.render import load_mujoco

SIZE = (480, 640)
LENS = Intrinsics(554.0, 554.0, 319.5, 239.5)
FRAMES = 60
PERIOD_S = 0.1
HAND_EYE_M = 0.005
HAND_EYE_DEG = 0.3
CLOCK_S = 0.01
SPEED = 1.0
REACH = 0.3
WALL_M = -0.7
CAMERA = rigid([[0, 0, -1], [1, 0, 0], [0, -1, 0]], (1.9, 0, 0.6))
OPTIONS = 'strippath="false" fusestatic="false" balanceinertia="true" boundmass="0.01" boundinertia="0.01"'


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--urdf", type=Path, required=True, help="the arm's URDF")
    parser.add_argument("--clips", type=int, default=4, help="rendered clips (default 4)")
    args = parser.parse_args()
    figures = Figures("accuracy.robot")
    runs = defaultdict[str, list[float]](list)
    for seed in range(args.clips):
        for name, values in run_clip(args.urdf, seed).items():
            runs[name].append(float(np.mean(values)))
    for name, found in runs.items():
        figures.add(name, found, "ms" if "time" in name else "of 1")
    figures.write(args.json)


def build(urdf: Path) -> Any:
    """Return MuJoCo's specification of a URDF before a wall, whose geom belongs to the world."""
    find = require("yourdfpy.urdf", "robot").filename_handler_magic
    text = re.sub(r"<visual>.*?</visual>", "", urdf.read_text(), flags=re.S)
    text = re.sub(r'filename="([^"]*)"', lambda name: f'filename="{find(name[1], str(urdf.parent))}"', text)
    text = text.replace("</robot>", f"<mujoco><compiler {OPTIONS}/></mujoco></robot>")
    spec = load_mujoco().MjSpec.from_string(text)
    spec.worldbody.add_geom(type=6, size=[0.02, 3, 3], pos=[WALL_M, 0, 0])
    spec.worldbody.add_light(pos=[2, 1, 3], dir=[-0.6, -0.3, -0.7])
    return spec


class Scene:
    """A compiled specification with a camera at world_from_camera, whose field of view is 46.84 degrees high."""

    def __init__(self, spec: Any, camera: Array, size: tuple[int, int], lens: Intrinsics) -> None:
        axes = (camera[:3, :2] * (1, -1)).T.ravel()
        spec.worldbody.add_camera(name="camera", pos=camera[:3, 3], xyaxes=axes, fovy=46.84)
        self.mujoco = load_mujoco()
        self.model = spec.compile()
        self.rays = RayMap().rays(lens, size)
        self.data = self.mujoco.MjData(self.model)
        self.renderer = self.mujoco.Renderer(self.model, *size)

    def render(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the geom of each pixel, and the depth in metres."""
        self.mujoco.mj_forward(self.model, self.data)
        made = []
        for name in ("segmentation", "depth"):
            getattr(self.renderer, f"enable_{name}_rendering")()
            self.renderer.update_scene(self.data, "camera")
            made.append(self.renderer.render().copy())
            getattr(self.renderer, f"disable_{name}_rendering")()
        return made[0][..., 0], made[1]


def run_clip(urdf: Path, seed: int) -> dict[str, list[float]]:
    """Return the figures of each frame of one clip."""
    random = np.random.default_rng(seed)
    found = defaultdict[str, list[float]](list)
    scene = Scene(build(urdf), CAMERA, SIZE, LENS)
    body = RobotBody(urdf)
    view = LensView(LENS, SIZE)
    model = scene.model
    names = [model.joint(index).name for index in range(model.njnt)]
    (low, high) = model.jnt_range.T
    rest = (low + high) / 2 + (high - low) * random.uniform(-REACH, REACH, model.njnt)
    rate = random.uniform(-SPEED, SPEED, model.njnt)
    axis, shift = (ray / np.linalg.norm(ray) for ray in random.normal(size=(2, 3)))
    wrong = CAMERA @ rigid(rotation_from_vector(np.radians(HAND_EYE_DEG) * axis), HAND_EYE_M * shift)
    for seq in range(FRAMES):
        now, late = (np.clip(rest + rate * np.sin(seq * PERIOD_S + gap), low, high) for gap in (0, CLOCK_S))
        scene.data.qpos[:] = now
        geoms, depth = scene.render()
        robot = (geoms >= 0) & (model.geom_bodyid[geoms] > 0)
        measured = DepthMap(np.round(1000 * depth).astype(np.uint16), 0.001, scene.rays, LENS.fx)
        for error, joints, camera in (("", now, CAMERA), (", 5 mm, 0.3 degrees, 10 ms off", late, wrong)):
            positions = dict(zip(names, joints.tolist(), strict=True))
            for name, used in (("silhouette", None), ("silhouette by depth", measured)):
                begin = time.process_time()
                drawn = body.draw(invert(camera) @ body.place(positions), view, used, 0.03)
                found[f"{name}: time of one core"].append(1000 * (time.process_time() - begin))
                found[f"{name}{error}: IoU"].append((drawn & robot).sum() / max(1, (drawn | robot).sum()))
    scene.renderer.close()
    return found


if __name__ == "__main__":
    main()
