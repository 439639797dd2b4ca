"""Tools and stationery: screwdrivers, hammers, spanners, pens, tape, cables, remotes, spoons."""

from __future__ import annotations

import numpy as np

from tools.scenes.colors import Color, contrast, draw_color, scaled
from tools.scenes.meshes import Array, Mesh, box, lathe, superellipsoid, tube
from tools.scenes.parts import ALONG_X, ALONG_Y, Finish, Maker, Part, Shape, gloss, profile
from tools.scenes.textures import skin

Rng = np.random.Generator

STEEL: Color = (0.62, 0.63, 0.66)
SHINY = Finish(1.0, 0.8)


def _rod(
    start: tuple[float, float, float], end: tuple[float, float, float], radius: float, segments: int = 10
) -> Mesh:
    return tube(np.linspace(start, end, 3), radius, segments)


def _ring(radius: float, thickness: float, height: float) -> Mesh:
    inner, outer = radius - thickness, radius
    return lathe(profile((inner, 0), (outer, 0), (outer, height), (inner, height), (inner, 0)))


def screwdriver(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    grip, thick, blade = rng.uniform(0.08, 0.11), rng.uniform(0.011, 0.017), rng.uniform(0.07, 0.12)
    knob = profile(
        (0, 0),
        (thick * 0.8, 0.002),
        (thick, 0.015),
        (thick, grip * 0.7),
        (thick * 0.6, grip * 0.82),
        (thick * 0.75, grip),
        (0, grip),
    )
    handle = lathe(knob).turned(ALONG_X)
    shaft = _rod((grip, 0, 0), (grip + blade, 0, 0), rng.uniform(0.003, 0.0045))
    tip = box((0.012, 0.007, 0.002)).moved((grip + blade, 0, -0.001))
    parts = (
        Part(handle, texture=skin(rng, color), finish=gloss(rng)),
        Part(shaft, STEEL, finish=SHINY),
        Part(tip, STEEL, finish=SHINY),
    )
    return Shape(name, parts)


def hammer(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    length, thick = rng.uniform(0.2, 0.27), rng.uniform(0.012, 0.016)
    handle = superellipsoid((length / 2, thick, thick * 0.8), 0.6, 0.3)
    half = rng.uniform(0.04, 0.055)
    head = _rod((length / 2, -half, 0), (length / 2, half * 0.6, 0), rng.uniform(0.012, 0.017), 12)
    peen = superellipsoid((0.01, half * 0.5, 0.004), 0.5, 0.5).moved((length / 2, half * 0.9, 0))
    steel = scaled(STEEL, rng.uniform(0.4, 1.1))
    return Shape(
        name,
        (
            Part(handle, texture=skin(rng, color)),
            Part(head, steel, finish=SHINY),
            Part(peen, steel, finish=SHINY),
        ),
    )


def spanner(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("grey", "grey", "black", "red", "blue"))
    length, thick, radius = rng.uniform(0.15, 0.22), rng.uniform(0.006, 0.01), rng.uniform(0.014, 0.02)
    bar = box((length, radius * 0.9, thick))
    ring = _ring(radius, radius * 0.4, thick * 1.3).moved((length / 2 + radius * 0.7, 0, 0))
    jaws = [
        box((radius * 1.6, radius * 0.55, thick * 1.3)).moved(
            (-length / 2 - radius * 0.6, y * radius * 0.75, 0)
        )
        for y in (-1, 1)
    ]
    heel = box((radius * 0.8, radius * 2, thick * 1.3)).moved((-length / 2, 0, 0))
    return Shape(name, tuple(Part(mesh, color, finish=SHINY) for mesh in (bar, ring, heel, *jaws)))


def pliers(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    spread = rng.uniform(0.014, 0.03)
    arms: list[Part] = []
    for side in (-1.0, 1.0):
        path = np.array(
            [
                (0, 0, 0),
                (0.03, side * spread * 0.9, 0),
                (0.07, side * spread, 0),
                (0.11, side * spread * 0.7, 0),
            ]
        )
        arms.append(Part(tube(path, np.array([0.005, 0.007, 0.008, 0.007])), color, finish=gloss(rng)))
        jaw = np.array([(0, 0, 0), (-0.02, side * 0.007, 0), (-0.05, side * 0.003, 0)])
        arms.append(Part(tube(jaw, np.array([0.007, 0.008, 0.003])), scaled(STEEL, 0.7), finish=SHINY))
    return Shape(name, tuple(arms))


def marker(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    length, radius = rng.uniform(0.11, 0.15), rng.uniform(0.007, 0.011)
    cap = rng.uniform(0.6, 0.75) * length
    barrel = lathe(profile((0, 0), (radius * 0.9, 0), (radius * 0.9, cap), (0, cap)), 14)
    top = lathe(profile((0, cap), (radius, cap), (radius * 0.9, length), (0, length)), 14)
    shades = (color, contrast(rng, color)) if rng.random() < 0.5 else (color, scaled(color, 0.5))
    parts = (Part(barrel.turned(ALONG_Y), texture=skin(rng, shades[0])), Part(top.turned(ALONG_Y), shades[1]))
    return Shape(name, parts, rolls=True)


def tape(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius, height = rng.uniform(0.032, 0.052), rng.uniform(0.018, 0.045)
    thick = radius * rng.uniform(0.2, 0.45)
    roll = Part(_ring(radius, thick, height), color, finish=gloss(rng))
    core = Part(_ring(radius - thick, 0.003, height), (0.7, 0.6, 0.45))
    return Shape(name, (roll, core))


def cable(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius = rng.uniform(0.003, 0.006)
    mesh = tube(_winding(rng) + np.array([0.0, 0.0, radius]), radius, 7)
    ends = [box((0.022, 0.011, 0.009)).moved((float(x), float(y), 0)) for x, y in mesh.vertices[[8, -9], :2]]
    plugs = contrast(rng, color) if rng.random() < 0.5 else scaled(color, 0.6)
    return Shape(name, (Part(mesh, color, finish=gloss(rng)), *(Part(end, plugs) for end in ends)))


def _winding(rng: Rng) -> Array:
    """Return a loose coil or a wavy line on the plane z = 0, [n, 3]."""
    t = np.linspace(0, 1, 90)
    turns, radius = rng.uniform(0.6, 3.2), rng.uniform(0.035, 0.065)
    sway = 0.012 * np.sin(2 * np.pi * rng.uniform(1, 3) * t + rng.uniform(0, 6))
    distance = radius * (0.75 + 0.5 * t) + sway
    drift = rng.uniform(-0.05, 0.05, 2)
    angle = 2 * np.pi * turns * t
    rise = 0.006 * (1 + np.sin(2 * np.pi * turns * t * 0.5)) * (turns > 1)
    return np.stack(
        [distance * np.cos(angle) + drift[0] * t, distance * np.sin(angle) + drift[1] * t, rise], -1
    )


def remote(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("black", "grey", "white", "blue"))
    half = (rng.uniform(0.018, 0.026), rng.uniform(0.065, 0.095), 0.009)
    body = superellipsoid(half, 0.25, 0.2)
    buttons = []
    for row in range(int(rng.integers(4, 8))):
        for column in range(3):
            place = ((column - 1) * half[0] * 0.55, half[1] * (0.75 - 0.2 * row), half[2] - 0.001)
            buttons.append(
                Part(box((half[0] * 0.35, half[1] * 0.1, 0.003)).moved(place), contrast(rng, color))
            )
    return Shape(name, (Part(body, color, finish=gloss(rng)), *buttons))


def spoon(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("grey", "grey", "brown", "white", "red", "green"))
    length = rng.uniform(0.11, 0.17)
    finish = SHINY if name == "grey" else gloss(rng)
    path = np.array([(0.03, 0, 0), (0.05, 0, 0.006), (length * 0.6, 0, 0.007), (length, 0, 0.004)])
    scoop = superellipsoid((0.03, rng.uniform(0.018, 0.024), 0.006), 1, 1)
    return Shape(
        name,
        (
            Part(scoop, color, finish=finish),
            Part(tube(path, np.array([0.004, 0.003, 0.004, 0.006])), color, finish=finish),
        ),
    )


def torch(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    length, radius = rng.uniform(0.11, 0.17), rng.uniform(0.013, 0.018)
    head = radius * rng.uniform(1.3, 1.7)
    body = lathe(
        profile(
            (0, 0), (radius, 0), (radius, length * 0.7), (head, length * 0.8), (head, length), (0, length)
        )
    )
    lens = lathe(profile((0, length), (head * 0.8, length), (head * 0.8, length * 1.02), (0, length * 1.02)))
    parts = (
        Part(body.turned(ALONG_X), texture=skin(rng, color), finish=gloss(rng)),
        Part(lens.turned(ALONG_X), (0.9, 0.95, 1.0), finish=SHINY),
    )
    return Shape(name, parts)


MAKERS: dict[str, Maker] = {
    "screwdriver": screwdriver,
    "hammer": hammer,
    "spanner": spanner,
    "pliers": pliers,
    "marker": marker,
    "tape roll": tape,
    "cable": cable,
    "remote": remote,
    "spoon": spoon,
    "torch": torch,
}
