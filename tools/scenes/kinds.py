"""Shapes of the kinds of objects: vessels, goods and hand tools."""

import math

import cv2
import numpy as np

from tools.scenes.meshes import (
    ALONG_X,
    ALONG_Y,
    Array,
    Finish,
    Maker,
    Mesh,
    Part,
    Shape,
    arc,
    box,
    gloss,
    lathe,
    prism,
    profile,
    superellipsoid,
    tube,
)
from tools.scenes.textures import Color, Texture, any_color, contrast, draw_color, poster, scaled, skin

Rng = np.random.Generator

WET = Finish(1.0, 0.9)
LIP_ANGLES = np.linspace(-math.pi, math.pi, 7)
LYING = 0.25  # of bottles and cans
METALS: tuple[Color, ...] = ((0.75, 0.75, 0.78), (0.55, 0.56, 0.6), (0.8, 0.7, 0.45))
STEEL: Color = (0.62, 0.63, 0.66)
SHINY = Finish(1.0, 0.8)


def _open_vessel(base: float, rim: float, height: float, bulge: float = 0.0, wall: float = 0.003) -> Mesh:
    """Return a vessel open at the top, with its inside; radii at base and rim."""
    outside = arc((base, 0), (rim, height), bulge)
    inside = arc((rim - wall, height), (base - wall, wall), bulge)
    return lathe(profile((0, 0), *outside, *inside, (0, wall)))


def _handle(rng: Rng, radius: float, height: float) -> Mesh:
    t = np.linspace(-np.pi / 2, np.pi / 2, 12)
    reach = height * rng.uniform(0.25, 0.4)
    rise = height * rng.uniform(0.25, 0.36)
    middle = height * rng.uniform(0.48, 0.56)
    path = np.stack([radius * 0.94 + reach * np.cos(t), np.zeros(12), middle + rise * np.sin(t)], -1)
    return tube(path, height * rng.uniform(0.04, 0.07), 8)


def _maybe_lying(rng: Rng, shape: Shape) -> Shape:
    return shape.turned(ALONG_Y, rolls=True) if rng.random() < LYING else shape


def _solid(rng: Rng, name: str, color: Color, mesh: Mesh, rolls: bool = False, ball: bool = False) -> Shape:
    """Return a shape of one part, with a skin of a colour."""
    return Shape(name, (Part(mesh, texture=skin(rng, color), finish=gloss(rng)),), rolls, ball)


def named(*makers: Maker) -> dict[str, Maker]:
    """Return makers by the names of their functions."""
    return {maker.__name__.replace("_", " "): maker for maker in makers}


def mug(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius = rng.uniform(0.036, 0.048)
    height = rng.uniform(0.08, 0.115)
    finish = gloss(rng)
    body = _open_vessel(radius * rng.uniform(0.8, 1.0), radius, height, radius * rng.uniform(0, 0.12))
    handle_color = color if rng.random() < 0.8 else contrast(rng, color)
    handle = Part(_handle(rng, radius, height), handle_color, finish=finish)
    return Shape(name, (Part(body, texture=skin(rng, color), finish=finish), handle))


def cup(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    rim = rng.uniform(0.035, 0.05)
    height = rng.uniform(0.07, 0.13)
    return _solid(rng, name, color, _open_vessel(rim * rng.uniform(0.6, 0.85), rim, height))


def glass(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("white", "blue", "green", "teal", "brown", "pink"))
    rim = rng.uniform(0.03, 0.042)
    height = rng.uniform(0.09, 0.15)
    side = arc((rim * rng.uniform(0.7, 1.0), 0), (rim, height), rim * rng.uniform(0, 0.2))
    body = lathe(profile((0, 0), *side))  # one wall: two would be drawn through each other in any order
    lip = lathe(profile(*((rim + 0.0015 * math.cos(a), height + 0.0015 * math.sin(a)) for a in LIP_ANGLES)))
    alpha = rng.uniform(0.25, 0.55)
    parts = [Part(body, scaled(color, 1.1), None, alpha, WET), Part(lip, scaled(color, 1.2), None, 0.9, WET)]
    if rng.random() < 0.5:
        level = height * rng.uniform(0.3, 0.8)
        drink = lathe(profile((0, 0.004), (rim * 0.66, 0.004), (rim * 0.68, level), (0, level)))
        parts.insert(0, Part(drink, any_color(rng), alpha=rng.uniform(0.7, 1.0)))
    return Shape(f"clear {name}" if name != "white" else "clear", tuple(parts))


def bottle(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius = rng.uniform(0.028, 0.042)
    height = rng.uniform(0.17, 0.28)
    shoulder = height * rng.uniform(0.5, 0.72)
    neck = radius * rng.uniform(0.3, 0.5)
    collar = shoulder + (height - shoulder) * rng.uniform(0.35, 0.7)
    curve = arc((radius, shoulder), (neck, collar), radius * rng.uniform(0, 0.2))
    foot = ((0, 0), (radius * 0.9, 0), (radius, radius * 0.15))
    body = lathe(profile(*foot, *curve, (neck, height), (0, height)))
    clear = rng.random() < 0.25
    label_texture = None if clear else skin(rng, color, labelled=rng.random() < 0.7)
    finish = WET if clear else gloss(rng)
    bottom = height - (height - collar) * rng.uniform(0.4, 0.9)
    wide = neck * 1.2
    cap = lathe(profile((0, bottom), (wide, bottom), (wide, height * 1.01), (0, height * 1.01)))
    side = Part(body, color, label_texture, alpha=0.5 if clear else 1.0, finish=finish)
    return _maybe_lying(rng, Shape(name, (side, Part(cap, contrast(rng, color)))))


def can(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius = rng.uniform(0.028, 0.045)
    height = rng.uniform(0.08, 0.16)
    metal = METALS[rng.integers(len(METALS))]
    lip = radius * 0.92
    side = lathe(profile((lip, 0.003), (radius, 0.008), (radius, height - 0.008), (lip, height - 0.003)))
    lid = ((lip, height), (lip * 0.93, height), (lip * 0.9, height - 0.004), (0, height - 0.004))
    tin = Part(lathe(profile((0, 0), (lip, 0), *lid)), metal, finish=Finish(1.0, 0.7))
    parts = (tin, Part(side, texture=skin(rng, color, labelled=rng.random() < 0.6), finish=gloss(rng)))
    return _maybe_lying(rng, Shape(name, parts))


def bowl(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    rim = rng.uniform(0.06, 0.09)
    height = rng.uniform(0.04, 0.075)
    body = _open_vessel(rim * rng.uniform(0.35, 0.55), rim, height, rim * rng.uniform(0.08, 0.16), 0.004)
    return _solid(rng, name, color, body)


def plate(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    rim = rng.uniform(0.075, 0.115)
    low = rim * rng.uniform(0.55, 0.7)
    points = ((0, 0), (low, 0), (rim, 0.018), (rim, 0.021), (low, 0.005), (0, 0.005))
    return _solid(rng, name, color, lathe(profile(*points), 32))


def jar(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius = rng.uniform(0.032, 0.05)
    height = rng.uniform(0.07, 0.13)
    neck = radius * rng.uniform(0.75, 0.95)
    shoulder = ((radius, height * 0.8), (neck, height * 0.88))
    body = lathe(profile((0, 0), (radius, 0), *shoulder, (neck, height), (0, height)))
    lid = lathe(profile((0, height), (neck * 1.06, height), (neck * 1.06, height * 1.18), (0, height * 1.18)))
    glazed = Part(body, texture=skin(rng, color, labelled=rng.random() < 0.6), finish=gloss(rng))
    return Shape(name, (glazed, Part(lid, contrast(rng, color), finish=gloss(rng))))


def vase(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    height = rng.uniform(0.14, 0.22)
    base = rng.uniform(0.022, 0.032)
    belly = arc((base, 0), (base * 0.8, height * 0.7), base * rng.uniform(0.6, 1.0))
    waist = base * 0.8
    rim = arc((waist, height * 0.72), (base * rng.uniform(1.0, 1.5), height), -base * 0.1, 5)
    outline = profile((0, 0), *belly, *rim, (waist * 0.8, height * 0.75), (0, height * 0.72))
    return _solid(rng, name, color, lathe(outline))


def pan(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("black", "grey", "red", "blue", "white"))
    rim = rng.uniform(0.06, 0.09)
    height = rng.uniform(0.03, 0.06)
    body = _open_vessel(rim * 0.88, rim, height)
    reach = np.array([(rim * 0.97, 0, height * 0.8), (rim * 1.4, 0, height), (rim * 2.1, 0, height * 1.15)])
    finish = gloss(rng)
    handle = Part(tube(reach, 0.008, 8), scaled(contrast(rng, color), 0.5))
    return Shape(name, (Part(body, color, finish=finish), handle))


def funnel(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    rim = rng.uniform(0.045, 0.065)
    height = rng.uniform(0.09, 0.13)
    points = ((rim, 0), (rim, 0.006), (rim * 0.2, height * 0.55), (rim * 0.12, height), (rim * 0.08, height))
    return _solid(rng, name, color, lathe(profile(*points, (rim * 0.15, height * 0.5), (rim * 0.95, 0))))


VESSELS = named(mug, cup, glass, bottle, can, bowl, plate, jar, vase, pan, funnel)


def _printed(rng: Rng, color: Color, size: int = 192) -> Texture:
    """Return an atlas for `box`: a poster on the big sides, narrower prints on the others."""
    atlas = np.empty((size, size, 3), np.float32)
    front = poster(rng, color)
    for side in range(6):
        x = side % 3 * size // 3
        y = side // 3 * size // 2
        look = front if side < 2 else poster(rng, color)
        cell = cv2.resize(look, (size // 3, size // 2), interpolation=cv2.INTER_AREA)
        atlas[y : y + size // 2, x : x + size // 3] = cell
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
    cover = 0.0025
    depth = size[2]
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
    side = rng.uniform(0.06, 0.08)
    height = rng.uniform(0.13, 0.18)
    body = Part(box((side, side, height)), texture=_printed(rng, color), finish=gloss(rng))
    roof = np.array([(-side / 2, 0), (side / 2, 0), (0.002, side * 0.4), (-0.002, side * 0.4)])
    ridge = prism(roof - (0, side * 0.1), side).moved((0, 0, -side / 2))
    upright = ridge.turned(np.array([(1.0, 0, 0), (0, 0, -1.0), (0, 1.0, 0)]))
    return Shape(name, (body, Part(upright.moved((0, 0, height + side * 0.1)), color)))


def ball(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius = rng.uniform(0.022, 0.042)
    return _solid(rng, name, color, superellipsoid((radius, radius, radius), 1, 1), rolls=True, ball=True)


def fruit(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("yellow", "green", "orange", "red"))
    radius = rng.uniform(0.024, 0.036)
    stretch = rng.uniform(1.0, 1.45)
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
    path = length * np.stack([np.sin(bend * t) / bend, (1 - np.cos(bend * t)) / bend, np.zeros(16)], -1)
    radii = 0.018 * np.clip(1.02 - np.abs(t) ** 3, 0.2, 1)
    tips = tube(path[:2] + (path[:1] - path[1:2]), 0.005, 8)
    return Shape(name, (Part(tube(path, radii), texture=skin(rng, color)), Part(tips, (0.25, 0.2, 0.1))))


def pear(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("green", "yellow", "red", "brown"))
    wide = rng.uniform(0.03, 0.037)
    height = rng.uniform(0.08, 0.1)
    radii = 0, 0.6, 0.95, 1, 0.8, 0.5, 0.42, 0.25, 0
    heights = 0, 0.02, 0.2, 0.35, 0.58, 0.75, 0.9, 0.98, 1
    mesh = lathe(np.stack([radii, heights], -1) * (wide, height))
    line = np.array([(0, 0, height * 0.97), (0.001, 0, height * 1.05), (0.005, 0, height * 1.15)])
    stem = tube(line, 0.0025, 6)
    return Shape(name, (Part(mesh, texture=skin(rng, color)), Part(stem, (0.3, 0.2, 0.1))))


def carrot(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("orange", "orange", "purple", "white"))
    length = rng.uniform(0.12, 0.17)
    wide = rng.uniform(0.014, 0.02)
    side = arc((wide, 0.02), (0.002, length), 0.002)
    root = lathe(profile((0, 0), (wide * 0.8, 0.002), (wide, 0.012), *side, (0, length)))
    leaves = [tube(_leaf(rng), np.linspace(0.003, 0.006, 5), 6) for _ in range(5)]
    green = draw_color(rng, ("green",))[1]
    body = Part(root, texture=skin(rng, color))
    top = (Part(leaf, scaled(green, rng.uniform(0.7, 1.3))) for leaf in leaves)
    return Shape(name, (body, *top)).turned(ALONG_X)


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
        return _solid(rng, name, color, mesh)

    return make


def toy_car(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    length = rng.uniform(0.09, 0.13)
    wide = rng.uniform(0.042, 0.055)
    finish = gloss(rng)
    body = superellipsoid((length / 2, wide / 2, length * 0.12), 0.4, 0.3).moved((0, 0, length * 0.18))
    cabin = superellipsoid((length * 0.26, wide * 0.42, length * 0.12), 0.5, 0.4)
    cabin = cabin.moved((-length * 0.05, 0, length * 0.32))
    wheel = lathe(profile((0, 0), (length * 0.1, 0), (length * 0.1, 0.012), (0, 0.012)), 16).turned(ALONG_Y)
    places = [(x * length * 0.3, y * wide * 0.45 - 0.006, length * 0.1) for x in (-1, 1) for y in (-1, 1)]
    wheels = [Part(wheel.moved(place), (0.08, 0.08, 0.08)) for place in places]
    top = scaled(any_color(rng), 0.7) if rng.random() < 0.5 else contrast(rng, color)
    painted = Part(body, texture=skin(rng, color), finish=finish)
    return Shape(name, (painted, Part(cabin, top, finish=finish), *wheels))


GOODS: dict[str, Maker] = {
    "box": package,
    **named(cereal_box, book, block, star, carton, ball, fruit, egg, banana, pear, carrot),
    "sponge": rounded(((0.08, 0.12), (0.05, 0.075), (0.025, 0.045)), (0.15, 0.3)),
    "soap": rounded(((0.07, 0.1), (0.045, 0.06), (0.02, 0.035)), (0.5, 0.9)),
    "phone": rounded(((0.065, 0.08), (0.13, 0.16), (0.009, 0.013)), (0.1, 0.25)),
    **named(toy_car),
}


Point = tuple[float, float, float]


def _rod(start: Point, end: Point, radius: float, segments: int = 10) -> Mesh:
    return tube(np.linspace(start, end, 3), radius, segments)


def _ring(radius: float, thickness: float, height: float) -> Mesh:
    inner = radius - thickness
    outer = radius
    return lathe(profile((inner, 0), (outer, 0), (outer, height), (inner, height), (inner, 0)))


def screwdriver(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    grip = rng.uniform(0.08, 0.11)
    thick = rng.uniform(0.011, 0.017)
    blade = rng.uniform(0.07, 0.12)
    knob = ((0, 0), (thick * 0.8, 0.002), (thick, 0.015), (thick, grip * 0.7))
    collar = ((thick * 0.6, grip * 0.82), (thick * 0.75, grip), (0, grip))
    handle = lathe(profile(*knob, *collar)).turned(ALONG_X)
    shaft = _rod((grip, 0, 0), (grip + blade, 0, 0), rng.uniform(0.003, 0.0045))
    tip = box((0.012, 0.007, 0.002)).moved((grip + blade, 0, -0.001))
    held = Part(handle, texture=skin(rng, color), finish=gloss(rng))
    return Shape(name, (held, *(Part(mesh, STEEL, finish=SHINY) for mesh in (shaft, tip))))


def hammer(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    length = rng.uniform(0.2, 0.27)
    thick = rng.uniform(0.012, 0.016)
    handle = superellipsoid((length / 2, thick, thick * 0.8), 0.6, 0.3)
    half = rng.uniform(0.04, 0.055)
    head = _rod((length / 2, -half, 0), (length / 2, half * 0.6, 0), rng.uniform(0.012, 0.017), 12)
    peen = superellipsoid((0.01, half * 0.5, 0.004), 0.5, 0.5).moved((length / 2, half * 0.9, 0))
    steel = scaled(STEEL, rng.uniform(0.4, 1.1))
    held = Part(handle, texture=skin(rng, color))
    return Shape(name, (held, *(Part(mesh, steel, finish=SHINY) for mesh in (head, peen))))


def spanner(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("grey", "grey", "black", "red", "blue"))
    length = rng.uniform(0.15, 0.22)
    thick = rng.uniform(0.006, 0.01)
    radius = rng.uniform(0.014, 0.02)
    bar = box((length, radius * 0.9, thick))
    ring = _ring(radius, radius * 0.4, thick * 1.3).moved((length / 2 + radius * 0.7, 0, 0))
    jaw = box((radius * 1.6, radius * 0.55, thick * 1.3))
    ends = (-length / 2 - radius * 0.6, radius * 0.75)
    jaws = [jaw.moved((ends[0], y * ends[1], 0)) for y in (-1, 1)]
    heel = box((radius * 0.8, radius * 2, thick * 1.3)).moved((-length / 2, 0, 0))
    return Shape(name, tuple(Part(mesh, color, finish=SHINY) for mesh in (bar, ring, heel, *jaws)))


def pliers(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    spread = rng.uniform(0.014, 0.03)
    arms: list[Part] = []
    for side in (-1.0, 1.0):
        wide = side * spread
        path = np.array([(0, 0, 0), (0.03, wide * 0.9, 0), (0.07, wide, 0), (0.11, wide * 0.7, 0)])
        arms.append(Part(tube(path, np.array([0.005, 0.007, 0.008, 0.007])), color, finish=gloss(rng)))
        jaw = np.array([(0, 0, 0), (-0.02, side * 0.007, 0), (-0.05, side * 0.003, 0)])
        arms.append(Part(tube(jaw, np.array([0.007, 0.008, 0.003])), scaled(STEEL, 0.7), finish=SHINY))
    return Shape(name, tuple(arms))


def marker(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    length = rng.uniform(0.11, 0.15)
    radius = rng.uniform(0.007, 0.011)
    cap = rng.uniform(0.6, 0.75) * length
    barrel = lathe(profile((0, 0), (radius * 0.9, 0), (radius * 0.9, cap), (0, cap)), 14)
    top = lathe(profile((0, cap), (radius, cap), (radius * 0.9, length), (0, length)), 14)
    shades = (color, contrast(rng, color)) if rng.random() < 0.5 else (color, scaled(color, 0.5))
    parts = (Part(barrel.turned(ALONG_Y), texture=skin(rng, shades[0])), Part(top.turned(ALONG_Y), shades[1]))
    return Shape(name, parts, rolls=True)


def tape_roll(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius = rng.uniform(0.032, 0.052)
    height = rng.uniform(0.018, 0.045)
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
    turns = rng.uniform(0.6, 3.2)
    radius = rng.uniform(0.035, 0.065)
    sway = 0.012 * np.sin(2 * np.pi * rng.uniform(1, 3) * t + rng.uniform(0, 6))
    distance = radius * (0.75 + 0.5 * t) + sway
    drift = rng.uniform(-0.05, 0.05, 2)
    angle = 2 * np.pi * turns * t
    rise = 0.006 * (1 + np.sin(2 * np.pi * turns * t * 0.5)) * (turns > 1)
    x, y = (distance * wave(angle) + away * t for wave, away in zip((np.cos, np.sin), drift, strict=True))
    return np.stack([x, y, rise], -1)


def remote(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("black", "grey", "white", "blue"))
    half = (rng.uniform(0.018, 0.026), rng.uniform(0.065, 0.095), 0.009)
    body = superellipsoid(half, 0.25, 0.2)
    buttons = []
    for row in range(int(rng.integers(4, 8))):
        for column in range(3):
            place = ((column - 1) * half[0] * 0.55, half[1] * (0.75 - 0.2 * row), half[2] - 0.001)
            button = box((half[0] * 0.35, half[1] * 0.1, 0.003)).moved(place)
            buttons.append(Part(button, contrast(rng, color)))
    return Shape(name, (Part(body, color, finish=gloss(rng)), *buttons))


def spoon(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("grey", "grey", "brown", "white", "red", "green"))
    length = rng.uniform(0.11, 0.17)
    finish = SHINY if name == "grey" else gloss(rng)
    path = np.array([(0.03, 0, 0), (0.05, 0, 0.006), (length * 0.6, 0, 0.007), (length, 0, 0.004)])
    scoop = superellipsoid((0.03, rng.uniform(0.018, 0.024), 0.006), 1, 1)
    handle = tube(path, np.array([0.004, 0.003, 0.004, 0.006]))
    return Shape(name, tuple(Part(mesh, color, finish=finish) for mesh in (scoop, handle)))


def torch(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    length = rng.uniform(0.11, 0.17)
    radius = rng.uniform(0.013, 0.018)
    head = radius * rng.uniform(1.3, 1.7)
    shaft = ((0, 0), (radius, 0), (radius, length * 0.7))
    body = lathe(profile(*shaft, (head, length * 0.8), (head, length), (0, length)))
    lens = lathe(profile((0, length), (head * 0.8, length), (head * 0.8, length * 1.02), (0, length * 1.02)))
    held = Part(body, texture=skin(rng, color), finish=gloss(rng))
    return Shape(name, (held, Part(lens, (0.9, 0.95, 1.0), finish=SHINY))).turned(ALONG_X)


HAND_TOOLS = named(screwdriver, hammer, spanner, pliers, marker, tape_roll, cable, remote, spoon, torch)
