"""Cameras: their positions over time, their angle of view, and their effects on a picture."""

import math
from dataclasses import dataclass

import cv2
import numpy as np

from sam3_node.types import Image
from tools.scenes.stage import Array, Rng, eased, frames, minimum_jerk, unit, wobble

UP = np.array([0.0, 0.0, 1.0])
# OpenGL's camera axes (x right, y up, z back) to OpenCV's (y down, z forward)
FLIP = np.diag([1.0, -1.0, -1.0])
STYLES = ("fixed", "handheld", "orbit", "approach", "roaming")
STYLE_WEIGHTS = (0.2, 0.36, 0.2, 0.14, 0.1)
WALK = "walk"
"""A style that is never drawn at random: somebody walks up to the table or away from it, and past it."""
WALK_FAR = (1.1, 1.9)
"""Distance of the far end of a walk, in distances of the viewpoint."""
WALK_NEARER = (1.6, 4.0)
"""How many times nearer the other end is: objects of the table grow by as much in the picture."""
WALK_PAST_DEG = 30.0
"""Largest angle by which a walk leads around the table."""
STEPS_HZ = 1.8
STEP = 0.012
"""Height of a step, in distances of the viewpoint. Twice it is what the horizon jumps at normal distance."""
FIELD_DEG = (40.0, 75.0)


@dataclass(frozen=True)
class Viewpoint:
    """The general viewpoint of a camera: at `distance` from `centre`, with `width` metres in view.

    azimuth and elevation (radians) are of the camera seen from the centre; field is the horizontal angle of view.
    """

    centre: Array
    width: float
    azimuth: float
    elevation: float
    field: float

    @property
    def distance(self) -> float:
        """Metres from the camera to the centre."""
        return self.width / (2 * math.tan(self.field / 2))

    @property
    def forward(self) -> Array:
        """Unit vector [3] along the table away from the camera."""
        return np.array([-math.cos(self.azimuth), -math.sin(self.azimuth), 0.0])

    @property
    def right(self) -> Array:
        """Unit vector [3] along the table to the right of the image."""
        return np.array([-math.sin(self.azimuth), math.cos(self.azimuth), 0.0])

    @property
    def eye(self) -> Array:
        """The camera's position [3]."""
        flat = math.cos(self.elevation)
        high = math.sin(self.elevation)
        return self.centre + self.distance * (-flat * self.forward + high * UP)


@dataclass(frozen=True)
class Camera:
    """A camera over time: positions [n, 3] and rotations [n, 3, 3] to the world with OpenGL's axes; fov in degrees."""

    positions: Array
    rotations: Array
    fov_y: float

    def poses(self) -> Array:
        """Return camera to world [n, 4, 4] with OpenCV's axes."""
        matrices = np.tile(np.eye(4), (len(self.positions), 1, 1))
        matrices[:, :3, :3] = self.rotations @ FLIP
        matrices[:, :3, 3] = self.positions
        return matrices


def intrinsics(fov_y: float, width: int, height: int) -> dict[str, float]:
    """Return fx, fy, cx, cy in pixels; the origin is the top left corner of the image."""
    focal = height / 2 / math.tan(math.radians(fov_y) / 2)
    return {"fx": focal, "fy": focal, "cx": width / 2, "cy": height / 2}


def vertical_field(field: float, width: int, height: int) -> float:
    """Return the vertical angle of view in degrees for a horizontal one in radians."""
    return math.degrees(2 * math.atan(math.tan(field / 2) * height / width))


def draw_view(rng: Rng, width: float) -> Viewpoint:
    """Draw a view of the table at random, `width` metres across."""
    field = math.radians(rng.uniform(*FIELD_DEG))
    elevation = math.radians(rng.triangular(14, 40, 80))
    centre = np.array([0.0, 0.0, rng.uniform(0.0, 0.05)])
    return Viewpoint(centre, width, rng.uniform(0, 2 * math.pi), elevation, field)


def film(
    rng: Rng, view: Viewpoint, times: Array, aspect: tuple[int, int], style: str = "", calm: float = 1.0
) -> Camera:
    """Return a camera in a style (a random one of STYLES if empty) over `times`; `calm` below 1 reduces its motion."""
    style = style or str(rng.choice(STYLES, p=STYLE_WEIGHTS))
    if style == WALK:
        return _walk(rng, view, times, aspect)
    seconds = max(times[-1] - times[0], 1e-6)
    azimuth, elevation, scale = (np.zeros(len(times)) for _ in range(3))
    progress = (times - times[0]) / seconds
    progress = minimum_jerk(progress) if rng.random() < 0.5 else progress
    if style in ("orbit", "roaming"):
        swing = calm * seconds**0.7 * (progress - 0.5)
        azimuth = rng.choice([-1, 1]) * math.radians(rng.uniform(8, 25)) * swing
        elevation = math.radians(rng.uniform(-6, 6)) * swing
    if style in ("approach", "roaming"):
        scale = calm * rng.uniform(-0.25, 0.25) * seconds**0.4 * progress
    moved = _around(view, azimuth, np.clip(view.elevation + elevation, 0.15, 1.45), np.exp(scale))
    hand = {"fixed": 0.0, "roaming": 0.4}.get(style, 1.0 if style == "handheld" else 0.3) * calm
    return _look(rng, view, times, moved, hand, vertical_field(view.field, *aspect))


def _walk(rng: Rng, view: Viewpoint, times: Array, aspect: tuple[int, int]) -> Camera:
    """Return the camera of somebody who walks up to the table, or away from it, in steps."""
    progress = (times - times[0]) / max(times[-1] - times[0], 1e-6)
    if rng.random() < 0.5:
        progress = 1 - progress
    nearer = np.exp(rng.uniform(*np.log(WALK_NEARER)))
    scale = rng.uniform(*WALK_FAR) * nearer**-progress
    azimuth = math.radians(rng.uniform(-WALK_PAST_DEG, WALK_PAST_DEG)) * (progress - 0.5)
    moved = _around(view, azimuth, np.full(len(times), np.clip(view.elevation, 0.15, 1.45)), scale)
    moved[:, 2] += STEP * view.distance * np.sin(2 * math.pi * (STEPS_HZ * times + rng.random()))
    return _look(rng, view, times, moved, 1.0, vertical_field(view.field, *aspect))


def pan(camera: Camera, view: Viewpoint, times: Array, start: float, end: float, shift: float) -> Camera:
    """Return the camera moved to the right by `shift` metres and back again between two times."""
    half = (end - start) / 2
    away = eased(times, start, start + 0.7 * half) - eased(times, end - 0.7 * half, end)
    return Camera(camera.positions + shift * away[:, None] * view.right, camera.rotations, camera.fov_y)


def _around(view: Viewpoint, azimuth: Array, elevation: Array, scale: Array) -> Array:
    angle = view.azimuth + azimuth
    flat = np.cos(elevation)
    ray = np.stack([flat * np.cos(angle), flat * np.sin(angle), np.sin(elevation)], -1)
    return view.centre + view.distance * scale[:, None] * ray


def _look(rng: Rng, view: Viewpoint, times: Array, positions: Array, hand: float, fov_y: float) -> Camera:
    period = rng.uniform(1.5, 4.0)
    positions = positions + hand * 0.018 * view.distance * wobble(rng, times, period, 3)
    positions[:, 2] = np.maximum(positions[:, 2], 0.06)
    target = view.centre + hand * 0.02 * view.width * wobble(rng, times, period, 3)
    lean = math.radians(rng.normal(0, 3)) + hand * 0.015 * wobble(rng, times, period, 1)
    back = unit(positions - target)
    side = np.cross(UP, back)
    tilted = np.cos(lean) * unit(side) + np.sin(lean) * np.cross(back, unit(side))
    return Camera(positions, frames(back, tilted), fov_y)


@dataclass(frozen=True)
class Effects:
    """Settings of the effects. brightness: target mean grey level.

    gains: of blue, green and red. blur: standard deviation in pixels. noise: in grey levels of 255.

    supersample: pixels rendered per pixel along each axis. shutter: part of the frame interval in which `samples`
    pictures are averaged. jpeg: quality of the files.
    """

    brightness: float = 115.0
    gains: tuple[float, float, float] = (1.0, 1.0, 1.0)
    gamma: float = 1.0
    contrast: float = 1.0
    blur: float = 0.0
    noise: float = 0.0
    supersample: int = 2
    samples: int = 1
    shutter: float = 0.0
    jpeg: int = 92


def draw_effects(rng: Rng) -> Effects:
    """Draw a camera of random quality."""
    balance = np.exp(rng.normal(0, 0.07, 3))
    blurred = rng.random() < 0.15
    return Effects(
        brightness=rng.triangular(60, 115, 165),
        gains=(float(balance[0]), float(balance[1]), float(balance[2])),
        gamma=float(np.exp(rng.normal(0, 0.15))),
        contrast=rng.uniform(0.8, 1.15),
        blur=rng.uniform(0.3, 1.1) if rng.random() < 0.5 else 0.0,
        noise=rng.uniform(1, 8) if rng.random() < 0.6 else 0.0,
        supersample=2 if rng.random() < 0.5 and not blurred else 1,
        samples=3 if blurred else 1,
        shutter=rng.uniform(0.2, 0.5) if blurred else 0.0,
        jpeg=int(rng.integers(70, 96)),
    )


def develop(rng: Rng, image: Image, effects: Effects, exposure: float = 1.0) -> Image:
    """Return a rendered picture, BGR uint8 [h, w, 3], with this camera's effects."""
    if effects.blur:
        image = cv2.GaussianBlur(image, (0, 0), effects.blur)
    curve = np.arange(256)[:, None] / 255 * exposure * np.array(effects.gains)
    curve = np.clip(curve, 0, 1) ** effects.gamma
    curve = (curve - 0.5) * effects.contrast + 0.5
    table = np.clip(255 * curve, 0, 255).astype(np.uint8)[:, None]
    image = cv2.LUT(image, table.transpose(1, 0, 2))
    if effects.noise:
        grain = rng.normal(0, effects.noise, image.shape).astype(np.float32)
        image = np.clip(image + grain, 0, 255).astype(np.uint8)
    return image
