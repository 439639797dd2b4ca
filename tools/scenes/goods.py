"""Packages, blocks, fruit and toys."""

from __future__ import annotations

import cv2
import numpy as np

from tools.scenes.colors import Color, any_color, contrast, draw_color, scaled
from tools.scenes.meshes import Array, box, lathe, prism, superellipsoid, tube
from tools.scenes.parts import ALONG_X, ALONG_Y, Maker, Part, Shape, arc, gloss, profile
from tools.scenes.textures import Texture, poster, skin

Rng = np.random.Generator


def _printed(rng: Rng, color: Color, plain_sides: tuple[int, ...] = (), size: int = 192) -> Texture:
    """Return an atlas for `box`: a poster on the big sides, narrower prints on the others."""
    atlas = np.empty((size, size, 3), np.float32)
    front = poster(rng, color)
    for side in range(6):
        x, y = side % 3 * size // 3, side // 3 * size // 2
        look = front if side < 2 else poster(rng, color)
        cell = cv2.resize(look, (size // 3, size // 2), interpolation=cv2.INTER_AREA)
        atlas[y : y + size // 2, x : x + size // 3] = (
            np.array(color, np.float32) if side in plain_sides else cell
        )
    return (np.clip(atlas, 0, 1) * 255).astype(np.uint8)


def package(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    size = (rng.uniform(0.06, 0.14), rng.uniform(0.04, 0.1), rng.uniform(0.04, 0.11))
    look = _printed(rng, color) if rng.random() < 0.6 else skin(rng, color)
    return Shape(name, (Part(box(size), texture=look, finish=gloss(rng)),))


def cereal_box(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    size = [rng.uniform(0.1, 0.15), rng.uniform(0.035, 0.055), rng.uniform(0.15, 0.22)]
    mesh = box((size[0], size[1], size[2]))
    if rng.random() < 0.25:
        mesh = mesh.turned(np.array([(1.0, 0, 0), (0, 0, 1.0), (0, -1.0, 0)]))
    return Shape(name, (Part(mesh, texture=_printed(rng, color), finish=gloss(rng)),))


def book(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    size = (rng.uniform(0.1, 0.15), rng.uniform(0.14, 0.2), rng.uniform(0.012, 0.035))
    cover, depth = 0.0025, size[2]
    pages = box((size[0] * 0.96, size[1] * 0.97, depth - 2 * cover)).moved((0.004, 0, cover))
    look = _printed(rng, color)
    boards = [Part(box((size[0], size[1], cover)).moved((0, 0, z)), texture=look) for z in (0, depth - cover)]
    spine = Part(box((cover, size[1], depth)).moved((-size[0] / 2, 0, 0)), color)
    return Shape(name, (*boards, spine, Part(pages, (0.93, 0.9, 0.82))))


def block(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    side = rng.uniform(0.03, 0.06)
    count = int(rng.choice([3, 4, 4, 4, 6]))
    finish = gloss(rng)
    if count == 4:
        mesh = box((side, side * rng.uniform(1, 1.8), side))
    else:
        angles = 2 * np.pi * np.arange(count) / count
        mesh = prism(side * 0.7 * np.stack([np.cos(angles), np.sin(angles)], -1), side)
    return Shape(name, (Part(mesh, texture=skin(rng, color), finish=finish),))


def star(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    count = 2 * int(rng.integers(4, 8))
    radii = np.where(np.arange(count) % 2, rng.uniform(0.4, 0.8), 1.0) * rng.uniform(0.035, 0.055)
    angles = 2 * np.pi * np.arange(count) / count
    outline = radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], -1)
    return Shape(name, (Part(prism(outline, rng.uniform(0.012, 0.035)), color, finish=gloss(rng)),))


def carton(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    side, height = rng.uniform(0.06, 0.08), rng.uniform(0.13, 0.18)
    body = Part(box((side, side, height)), texture=_printed(rng, color), finish=gloss(rng))
    roof = np.array([(-side / 2, 0), (side / 2, 0), (0.002, side * 0.4), (-0.002, side * 0.4)])
    ridge = prism(roof - (0, side * 0.1), side).moved((0, 0, -side / 2))
    upright = ridge.turned(np.array([(1.0, 0, 0), (0, 0, -1.0), (0, 1.0, 0)])).moved(
        (0, 0, height + side * 0.1)
    )
    return Shape(name, (body, Part(upright, color)))


def ball(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius = rng.uniform(0.022, 0.042)
    mesh = superellipsoid((radius, radius, radius), 1, 1)
    return Shape(name, (Part(mesh, texture=skin(rng, color), finish=gloss(rng)),), rolls=True, ball=True)


def fruit(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("yellow", "green", "orange", "red"))
    radius, stretch = rng.uniform(0.024, 0.036), rng.uniform(1.0, 1.45)
    mesh = superellipsoid((radius, radius * stretch, radius), 1, 1)
    stem = tube(np.array([(0, 0, radius * 0.9), (0.001, 0, radius), (0.004, 0, radius * 1.15)]), 0.0025, 6)
    return Shape(name, (Part(mesh, texture=skin(rng, color), finish=gloss(rng)), Part(stem, (0.3, 0.2, 0.1))))


def egg(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("white", "beige", "brown"))
    t = np.linspace(-np.pi / 2, np.pi / 2, 14)
    outline = np.stack([0.021 * np.cos(t) * (1 - 0.12 * np.sin(t)), 0.029 * np.sin(t)], -1)
    mesh = lathe(np.abs(outline) * np.sign([1, 1]) * np.stack([np.ones(14), np.sign(t)], -1)).turned(ALONG_Y)
    return Shape(name, (Part(mesh, texture=skin(rng, color)),), rolls=True)


def banana(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("yellow", "yellow", "green"))
    t = np.linspace(-1, 1, 16)
    bend = rng.uniform(0.55, 0.9)
    length = rng.uniform(0.07, 0.095)
    path = np.stack(
        [length * np.sin(bend * t) / bend, length * (1 - np.cos(bend * t)) / bend, np.zeros(16)], -1
    )
    radii = 0.018 * np.clip(1.02 - np.abs(t) ** 3, 0.2, 1)
    tips = tube(path[:2] + (path[:1] - path[1:2]), 0.005, 8)
    return Shape(name, (Part(tube(path, radii), texture=skin(rng, color)), Part(tips, (0.25, 0.2, 0.1))))


def pear(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("green", "yellow", "red", "brown"))
    wide, height = rng.uniform(0.03, 0.037), rng.uniform(0.08, 0.1)
    points = (
        (0, 0),
        (0.6, 0.02),
        (0.95, 0.2),
        (1, 0.35),
        (0.8, 0.58),
        (0.5, 0.75),
        (0.42, 0.9),
        (0.25, 0.98),
        (0, 1),
    )
    mesh = lathe(np.array(points) * (wide, height))
    stem = tube(
        np.array([(0, 0, height * 0.97), (0.001, 0, height * 1.05), (0.005, 0, height * 1.15)]), 0.0025, 6
    )
    return Shape(name, (Part(mesh, texture=skin(rng, color)), Part(stem, (0.3, 0.2, 0.1))))


def carrot(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("orange", "orange", "purple", "white"))
    length, wide = rng.uniform(0.12, 0.17), rng.uniform(0.014, 0.02)
    root = lathe(
        profile(
            (0, 0),
            (wide * 0.8, 0.002),
            (wide, 0.012),
            *arc((wide, 0.02), (0.002, length), 0.002),
            (0, length),
        )
    )
    leaves = [tube(_leaf(rng), np.linspace(0.003, 0.006, 5), 6) for _ in range(5)]
    green = draw_color(rng, ("green",))[1]
    parts = [
        Part(root, texture=skin(rng, color)),
        *(Part(leaf, scaled(green, rng.uniform(0.7, 1.3))) for leaf in leaves),
    ]
    return Shape(name, tuple(Part(p.mesh.turned(ALONG_X), p.color, p.texture) for p in parts))


def _leaf(rng: Rng) -> Array:
    t = np.linspace(0, 1, 5)
    lean = rng.uniform(-0.02, 0.02, 2)
    return np.stack([lean[0] * t**2, lean[1] * t**2, -rng.uniform(0.03, 0.06) * t], -1)


def rounded(kind_size: tuple[tuple[float, float], ...], sharp: tuple[float, float]) -> Maker:
    """Return a maker of rounded boxes: sponges, soaps, telephones."""

    def make(rng: Rng) -> Shape:
        name, color = draw_color(rng)
        half = tuple(rng.uniform(*ends) / 2 for ends in kind_size)
        mesh = superellipsoid((half[0], half[1], half[2]), rng.uniform(*sharp), rng.uniform(*sharp))
        return Shape(name, (Part(mesh, texture=skin(rng, color), finish=gloss(rng)),))

    return make


def toy_car(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    length, wide, finish = rng.uniform(0.09, 0.13), rng.uniform(0.042, 0.055), gloss(rng)
    body = superellipsoid((length / 2, wide / 2, length * 0.12), 0.4, 0.3).moved((0, 0, length * 0.18))
    cabin = superellipsoid((length * 0.26, wide * 0.42, length * 0.12), 0.5, 0.4).moved(
        (-length * 0.05, 0, length * 0.32)
    )
    wheel = lathe(profile((0, 0), (length * 0.1, 0), (length * 0.1, 0.012), (0, 0.012)), 16).turned(ALONG_Y)
    places = [(x * length * 0.3, y * wide * 0.45 - 0.006, length * 0.1) for x in (-1, 1) for y in (-1, 1)]
    wheels = [Part(wheel.moved(place), (0.08, 0.08, 0.08)) for place in places]
    top = scaled(any_color(rng), 0.7) if rng.random() < 0.5 else contrast(rng, color)
    return Shape(
        name, (Part(body, texture=skin(rng, color), finish=finish), Part(cabin, top, finish=finish), *wheels)
    )


MAKERS: dict[str, Maker] = {
    "box": package,
    "cereal box": cereal_box,
    "book": book,
    "block": block,
    "star": star,
    "carton": carton,
    "ball": ball,
    "fruit": fruit,
    "egg": egg,
    "banana": banana,
    "pear": pear,
    "carrot": carrot,
    "sponge": rounded(((0.08, 0.12), (0.05, 0.075), (0.025, 0.045)), (0.15, 0.3)),
    "soap": rounded(((0.07, 0.1), (0.045, 0.06), (0.02, 0.035)), (0.5, 0.9)),
    "phone": rounded(((0.065, 0.08), (0.13, 0.16), (0.009, 0.013)), (0.1, 0.25)),
    "toy car": toy_car,
}
