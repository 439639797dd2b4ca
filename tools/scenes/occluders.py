"""Occluders: boards, covers and screens."""

from __future__ import annotations

import numpy as np

from tools.scenes.colors import draw_color
from tools.scenes.identity import object_rng
from tools.scenes.meshes import box, lathe
from tools.scenes.objects import ObjectModel, build
from tools.scenes.parts import Part, Shape, gloss, profile
from tools.scenes.textures import skin

Rng = np.random.Generator


def board_model(rng: Rng, identity: int, size: tuple[float, float]) -> ObjectModel:
    """Return a thin board whose base is one of its large sides; width and height in metres."""
    return _slab(identity, "board", (size[0], size[1], rng.uniform(0.004, 0.02)))


def screen_model(rng: Rng, identity: int, size: tuple[float, float, float]) -> ObjectModel:
    """Return a box that stands on the table."""
    return _slab(identity, "big box", (size[0], size[1] * rng.uniform(1, 3), size[2]))


def cover_model(rng: Rng, identity: int, hidden: ObjectModel) -> ObjectModel:
    """Return an upside-down bucket or box with room for an object."""
    looks = object_rng(identity)
    name, color = draw_color(looks)
    radius, height = hidden.radius * 1.12 + 0.006, hidden.height * 1.1 + 0.012
    if rng.random() < 0.5:
        mesh = box((2 * radius, 2 * radius, height))
    else:
        top = radius * rng.uniform(0.85, 1.0)
        mesh = lathe(profile((radius * 1.18, 0), (top * 1.18, height), (0, height)))
    return build(
        identity, "cover", Shape(name, (Part(mesh, texture=skin(looks, color), finish=gloss(looks)),))
    )


def _slab(identity: int, kind: str, size: tuple[float, float, float]) -> ObjectModel:
    looks = object_rng(identity)
    name, color = draw_color(looks)
    part = Part(box(size), texture=skin(looks, color, labelled=looks.random() < 0.3), finish=gloss(looks))
    return build(identity, kind, Shape(name, (part,)))
