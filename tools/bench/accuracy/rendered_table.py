"""A table with a few things and a screen, drawn at random and rendered with its geoms and its depth by MuJoCo."""

from typing import Any, NamedTuple

import numpy as np

from sam3_node.geometry import Array, RayMap, rigid, rotation_from_vector
from sam3_node.types import Intrinsics
from tools.scenes.render import load_mujoco
from tools.scenes.stage import Rng, frames

SIZE = (240, 320)
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
COLOURS = [(0.8, 0.1, 0.1, 1), (0.1, 0.5, 0.8, 1), (0.9, 0.8, 0.1, 1), (0.1, 0.6, 0.2, 1), (0.6, 0.2, 0.7, 1)]
"""Of the things, red, green, blue and opacity in 0..1."""


class Table(NamedTuple):
    """Geoms (kind, size) and table_from_thing of the things, table_from_camera, and the place of the screen.

    The table is z = 0.
    """

    geoms: list[tuple[int, Array]]
    poses: list[Array]
    camera: Array
    screen: Array


class Scene:
    """A table seen by a camera whose field of view is 46.84 degrees high."""

    def __init__(self, table: Table) -> None:
        self.mujoco = load_mujoco()
        spec = build(table)
        axes = (table.camera[:3, :2] * (1, -1)).T.ravel()
        spec.worldbody.add_camera(name="camera", pos=table.camera[:3, 3], xyaxes=axes, fovy=46.84)
        self.model = spec.compile()
        self.rays = RayMap().rays(LENS, SIZE)
        self.data = self.mujoco.MjData(self.model)
        self.renderer = self.mujoco.Renderer(self.model, *SIZE)
        for index, pose in enumerate(table.poses):
            self.data.mocap_pos[index] = pose[:3, 3]
            self.mujoco.mju_mat2Quat(self.data.mocap_quat[index], pose[:3, :3].ravel())

    def aim(self, camera: Array) -> None:
        """Put the camera at table_from_camera. MuJoCo's cameras look along -z, with y up."""
        self.model.cam_pos[0] = camera[:3, 3]
        self.mujoco.mju_mat2Quat(self.model.cam_quat[0], (camera[:3, :3] @ np.diag([1.0, -1, -1])).ravel())

    def render(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return colour in BGR, the geom of each pixel, and the depth in metres."""
        self.mujoco.mj_forward(self.model, self.data)
        made = []
        for name in ("segmentation", "depth"):
            getattr(self.renderer, f"enable_{name}_rendering")()
            self.renderer.update_scene(self.data, "camera")
            made.append(self.renderer.render().copy())
            getattr(self.renderer, f"disable_{name}_rendering")()
        self.renderer.update_scene(self.data, "camera")
        colour = np.ascontiguousarray(self.renderer.render()[..., ::-1])
        return colour, made[0][..., 0], made[1]


def draw_table(random: Rng) -> Table:
    """Draw a table at random."""
    azimuth = random.uniform(0, 2 * np.pi)
    elevation = np.radians(random.uniform(30, 65))
    away = np.array([np.cos(azimuth), np.sin(azimuth), np.tan(elevation)]) * np.cos(elevation)
    eye = frames(-away[None], np.cross(-away, (0, 0, 1.0)))[0]
    spots = random.permutation(SPOTS) + random.uniform(-0.02, 0.02, (len(SPOTS), 2))
    geoms = list[tuple[int, Array]]()
    poses = list[Array]()
    for x, y in spots[: len(COLOURS)]:
        kind = int(random.choice([SPHERE, CYLINDER, BOX]))
        size = random.uniform(0.018, 0.035, 3)
        half = size[{SPHERE: 0, CYLINDER: 1, BOX: 2}[kind]]
        turn = rotation_from_vector([0, 0, random.uniform(0, np.pi)])
        geoms.append((kind, size))
        poses.append(rigid(turn, [x, y, half]))
    first = poses[0][:3, 3]
    # the screen stands between the camera and the middle of the first thing's way to the free spot at the side
    goal = max(spots[len(COLOURS) :], key=lambda spot: abs((spot - spots[0]) @ eye[:2, 0]))
    camera = rigid(eye, random.uniform(0.8, 1.1) * away)
    middle = (first + np.append(goal, first[2])) / 2 + (0, 0, 0.1)
    return Table(geoms, poses, camera, middle + 0.35 * (camera[:3, 3] - middle))


def build(table: Table) -> Any:
    """Return MuJoCo's specification: floor, table, screen and things."""
    spec = load_mujoco().MjSpec()
    solids: list[tuple[Any, Any]] = [*ROOM, ((0.03, 0.03, 0.05), table.screen)]
    for size, place in solids:
        spec.worldbody.add_geom(type=BOX, size=size, pos=place)
    spec.worldbody.add_light(pos=(0.5, 0.5, 2), dir=(-0.2, -0.2, -1))
    for (kind, size), colour in zip(table.geoms, COLOURS, strict=True):
        body = spec.worldbody.add_body(mocap=True)
        body.add_geom(type=kind, size=size, contype=0, conaffinity=0, rgba=colour)
    return spec
