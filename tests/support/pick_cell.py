"""A table with three things, a gripper over it and a camera beside it: colour, depth and the truth, drawn by rays.

The base is the table's middle, z is up, lengths are in metres. The gripper does not turn; its frame is at its tips.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sam3_node.geometry import Array, deproject, pose_of, rigid
from sam3_node.types import Intrinsics

WIDTH = 320
HEIGHT = 240
LENS = Intrinsics(300.0, 300.0, 159.5, 119.5)
EYE = np.array([0.05, -0.62, 0.48])
"""Place of the camera."""
GAZE = np.array([0.02, 0.0, 0.04])
"""What the camera looks at."""
LIGHT = np.array([0.3, -0.5, 0.8])
"""Direction to the light."""
PALM = np.array([0.05, 0.02, 0.02])
"""Half sides of the palm."""
FINGER = np.array([0.006, 0.012, 0.04])
"""Half sides of a finger."""
PALM_UP = 0.09
"""Height of the palm's middle above the tips."""
FINGER_UP = 0.03
"""Height of the fingers' middles above the tips."""
OPEN = 0.045
"""Distance of each finger from the middle of an open gripper."""
GRASP_M = 0.03
"""Largest distance of the tips from a thing's middle at which closing takes it."""
DEPTH_NOISE_M = 0.001
"""Standard deviation of the depth's noise."""
FLOOR_M = -0.7
"""Height of the floor."""
TABLE = np.array([0.45, 0.35])
"""Half sides of the table."""
GREY = (90, 90, 90)
"""Colour of the gripper, BGR."""
WOOD = (120, 160, 190)
"""Colour of the table, BGR."""
STONE = (70, 75, 80)
"""Colour of the floor, BGR."""

URDF = f"""<robot name="cell">
  <link name="base"/>
  <link name="x"/>
  <link name="y"/>
  <link name="palm"><collision><origin xyz="0 0 {PALM_UP}"/>
    <geometry><box size="{2 * PALM[0]} {2 * PALM[1]} {2 * PALM[2]}"/></geometry></collision></link>
  <link name="left"><collision><origin xyz="0 0 {FINGER_UP}"/>
    <geometry><box size="{2 * FINGER[0]} {2 * FINGER[1]} {2 * FINGER[2]}"/></geometry></collision></link>
  <link name="right"><collision><origin xyz="0 0 {FINGER_UP}"/>
    <geometry><box size="{2 * FINGER[0]} {2 * FINGER[1]} {2 * FINGER[2]}"/></geometry></collision></link>
  <joint name="slide_x" type="prismatic"><parent link="base"/><child link="x"/><axis xyz="1 0 0"/>
    <limit lower="-1" upper="1" effort="1" velocity="1"/></joint>
  <joint name="slide_y" type="prismatic"><parent link="x"/><child link="y"/><axis xyz="0 1 0"/>
    <limit lower="-1" upper="1" effort="1" velocity="1"/></joint>
  <joint name="slide_z" type="prismatic"><parent link="y"/><child link="palm"/><axis xyz="0 0 1"/>
    <limit lower="-1" upper="1" effort="1" velocity="1"/></joint>
  <joint name="finger_left" type="prismatic"><parent link="palm"/><child link="left"/><axis xyz="-1 0 0"/>
    <limit lower="0" upper="0.1" effort="1" velocity="1"/></joint>
  <joint name="finger_right" type="prismatic"><parent link="palm"/><child link="right"/><axis xyz="1 0 0"/>
    <limit lower="0" upper="0.1" effort="1" velocity="1"/></joint>
</robot>
"""


class Thing(NamedTuple):
    """A box with these half sides, or a ball where all are one radius."""

    name: str
    half: Array
    colour: tuple[int, int, int]
    """BGR"""
    is_ball: bool = False


class Picture(NamedTuple):
    """What the camera sees."""

    colour: npt.NDArray[np.uint8]
    """[h, w, 3], BGR"""
    depth: npt.NDArray[np.uint16]
    """[h, w], millimetres"""
    things: npt.NDArray[np.int8]
    """[h, w]: index of the thing; -1 where there is none"""
    surfaces: list[Array | None]
    """for each thing, the mean of its true visible surface in the base; None if it is hidden"""


def write_files(folder: Path) -> tuple[Path, Path]:
    """Write the calibration of the camera and the robot's URDF."""
    mount = pose_of(base_from_camera(), "camera", "base", 0, "system")
    calibration = folder / "cell.toml"
    calibration.write_text(f"""[intrinsics]
width_px = {WIDTH}
height_px = {HEIGHT}
fx_px = {LENS.fx}
fy_px = {LENS.fy}
cx_px = {LENS.cx}
cy_px = {LENS.cy}

[hand_eye]
kind = "eye_to_hand"
translation_m = {list(mount.position_m)}
rotation_quaternion_xyzw = {list(mount.quaternion_xyzw)}
""")
    urdf = folder / "cell.urdf"
    urdf.write_text(URDF)
    return calibration, urdf


def base_from_camera() -> Array:
    """Return the camera's pose in the base."""
    forward = (GAZE - EYE) / np.linalg.norm(GAZE - EYE)
    right = np.cross(forward, (0, 0, 1.0))
    right /= np.linalg.norm(right)
    return rigid(np.stack([right, np.cross(forward, right), forward], axis=1), EYE)


class Cell:
    """The things, and the gripper, which is open at first."""

    def __init__(self) -> None:
        self.things = [
            Thing("red block", np.array([0.025, 0.025, 0.035]), (40, 40, 200)),
            Thing("blue ball", np.full(3, 0.03), (200, 90, 40), is_ball=True),
            Thing("yellow block", np.array([0.03, 0.025, 0.025]), (40, 200, 220)),
        ]
        spots = ((-0.12, 0.02), (0.14, 0.06), (0.04, -0.1))
        self.places = [
            np.array([*spot, thing.half[2]]) for spot, thing in zip(spots, self.things, strict=True)
        ]
        self.tip = np.array([0.0, 0.12, 0.25])
        self.carried: int | None = None
        """index of the thing that the gripper holds"""
        self.opening = OPEN
        self._random = np.random.default_rng(5)
        rows, columns = np.mgrid[:HEIGHT, :WIDTH].reshape(2, -1)
        rays = deproject(np.stack([columns, rows], axis=1), np.ones(WIDTH * HEIGHT), LENS)
        self._rays = rays @ base_from_camera()[:3, :3].T
        self._grain = self._random.normal(0, 6, (HEIGHT * WIDTH, 1))

    def close(self) -> None:
        """Close the gripper; it takes the thing between its fingers, if there is one."""
        ways_m = [float(np.linalg.norm(self.tip - place)) for place in self.places]
        nearest = int(np.argmin(ways_m))
        if ways_m[nearest] <= GRASP_M:
            self.carried = nearest
            self.opening = self.things[nearest].half[0] + FINGER[0]

    def open(self) -> None:
        """Open the gripper. What it held stays where it is."""
        self.carried = None
        self.opening = OPEN

    def move(self, way: Array) -> None:
        """Move the gripper, and what it holds."""
        self.tip = self.tip + way
        if self.carried is not None:
            self.places[self.carried] = self.places[self.carried] + way

    def joints(self) -> dict[str, float]:
        """Return the positions of the joints of URDF."""
        names = ("slide_x", "slide_y", "slide_z", "finger_left", "finger_right")
        return dict(zip(names, [*self.tip.tolist(), self.opening, self.opening], strict=True))

    def render(self) -> Picture:
        """Draw what the camera sees now."""
        count = WIDTH * HEIGHT
        nearest_m = np.full(count, np.inf)
        things = np.full(count, -1, np.int8)
        colour = np.zeros((count, 3))

        def paint(ways_m: Array, normals: Array, paint_colour: Any, index: int) -> None:
            """Draw what is nearer than all before. A ray has z = 1 in the camera, so its way is the depth."""
            inside = ways_m < nearest_m
            nearest_m[inside] = ways_m[inside]
            things[inside] = index
            shade = 0.65 + 0.35 * np.clip(normals[inside] @ (LIGHT / np.linalg.norm(LIGHT)), 0, 1)
            colour[inside] = np.multiply(paint_colour, shade[:, None])

        upward = np.tile([0.0, 0.0, 1.0], (count, 1))
        for height_m, sides, paint_colour in ((FLOOR_M, (9, 9), STONE), (0.0, TABLE, WOOD)):
            ways_m = (height_m - EYE[2]) / self._rays[:, 2]
            hits = EYE + ways_m[:, None] * self._rays
            is_hit = (ways_m > 0) & (np.abs(hits[:, :2]) < sides).all(axis=1)
            paint(np.where(is_hit, ways_m, np.inf), upward, paint_colour, -1)
        for index, (thing, place) in enumerate(zip(self.things, self.places, strict=True)):
            cast = _cast_ball if thing.is_ball else _cast_box
            paint(*cast(self._rays, place, thing.half), thing.colour, index)
        paint(*_cast_box(self._rays, np.add(self.tip, (0, 0, PALM_UP)), PALM), GREY, -1)
        for side in (-1, 1):
            paint(
                *_cast_box(self._rays, np.add(self.tip, (side * self.opening, 0, FINGER_UP)), FINGER),
                GREY,
                -1,
            )

        noisy_m = nearest_m + self._random.normal(0, DEPTH_NOISE_M, count)
        depth = np.round(1000 * noisy_m).astype(np.uint16).reshape(HEIGHT, WIDTH)
        pixels = np.clip(colour + self._grain, 0, 255).astype(np.uint8).reshape(HEIGHT, WIDTH, 3)
        points_m = EYE + nearest_m[:, None] * self._rays
        seen = [points_m[things == index] for index in range(len(self.things))]
        surfaces = [points.mean(axis=0) if len(points) else None for points in seen]
        return Picture(pixels, depth, things.reshape(HEIGHT, WIDTH), surfaces)


def _cast_box(rays: Array, place: Array, half: Array) -> tuple[Array, Array]:
    """Return the ways of rays from EYE to a box, infinite where they miss it, and the normals there."""
    with np.errstate(divide="ignore", invalid="ignore"):
        first_m = (place - half - EYE) / rays
        second_m = (place + half - EYE) / rays
    enter_m = np.minimum(first_m, second_m)
    side = enter_m.argmax(axis=1)
    ways_m = enter_m.max(axis=1)
    is_hit = (ways_m > 0) & (ways_m < np.maximum(first_m, second_m).min(axis=1))
    normals = np.zeros(rays.shape)
    rows = np.arange(len(rays))
    normals[rows, side] = -np.sign(rays[rows, side])
    return np.where(is_hit, ways_m, np.inf), normals


def _cast_ball(rays: Array, place: Array, half: Array) -> tuple[Array, Array]:
    """Return the ways of rays from EYE to a ball, infinite where they miss it, and the normals there."""
    squares = (rays**2).sum(axis=1)
    along = rays @ (place - EYE)
    rest = along**2 - squares * (((place - EYE) ** 2).sum() - half[0] ** 2)
    ways_m = np.where(rest > 0, (along - np.sqrt(np.maximum(rest, 0))) / squares, np.inf)
    hits = EYE + np.where(rest > 0, ways_m, 0.0)[:, None] * rays
    return ways_m, (hits - place) / half[0]
