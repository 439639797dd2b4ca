"""The surroundings of the objects: table, floor, walls and lights, drawn at random."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tools.scenes.camera import Viewpoint
from tools.scenes.colors import Color, any_color
from tools.scenes.identity import Split, draw_identity, surface_rng
from tools.scenes.motion import Array, Rng
from tools.scenes.textures import Texture, surface

TABLE_HEIGHT = 0.75


@dataclass(frozen=True)
class Light:
    """A directional light; colours are RGB. shadow: True if it casts one."""

    position: tuple[float, float, float]
    color: Color
    shadow: bool


@dataclass(frozen=True)
class Room:
    """table: half sizes along the view's right and forward, and its yaw; surfaces: of table, floor and walls."""

    table: tuple[float, float]
    yaw: float
    centre: tuple[float, float]
    table_texture: Texture
    floor_texture: Texture
    wall_texture: Texture
    wall_distance: float
    lights: tuple[Light, ...]
    ambient: float
    reflectance: float
    sky: Color


def draw_room(rng: Rng, view: Viewpoint, split: Split, places: Array) -> Room:
    """Draw a room with a table under all `places` [n, 2]."""
    textures = [surface(surface_rng(draw_identity(rng, split))) for _ in range(3)]
    yaw = view.azimuth + math.pi / 2 + rng.normal(0, 0.15)
    axes = np.array([(math.cos(yaw), math.sin(yaw)), (-math.sin(yaw), math.cos(yaw))])
    along = places @ axes.T
    low, high = along.min(0) - rng.uniform(0.05, 0.5, 2), along.max(0) + rng.uniform(0.05, 0.5, 2)
    centre = (low + high) / 2 @ axes
    half = (high - low) / 2
    shadows = rng.random() < 0.6
    lights = tuple(_light(rng, shadows and index == 0) for index in range(rng.integers(1, 4)))
    return Room(
        (float(half[0]), float(half[1])),
        yaw,
        (float(centre[0]), float(centre[1])),
        textures[0],
        textures[1],
        textures[2],
        float(half.max() + rng.uniform(0.6, 3.0)),
        lights,
        rng.uniform(0.15, 0.4),
        rng.uniform(0.05, 0.35) if rng.random() < 0.1 else 0.0,
        any_color(rng),
    )


def _light(rng: Rng, shadow: bool) -> Light:
    azimuth, height = rng.uniform(0, 2 * math.pi), rng.uniform(0.5, 2.5)
    warmth = rng.uniform(-0.12, 0.12)
    level = rng.uniform(0.2, 0.5)
    color = (level * (1 + warmth), level, level * (1 - warmth))
    return Light((math.cos(azimuth), math.sin(azimuth), height), color, shadow)
