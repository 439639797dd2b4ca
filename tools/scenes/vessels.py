"""Vessels: mugs, cups, glasses, bottles, cans, bowls, jars, plates, vases, pans, funnels."""

from __future__ import annotations

import math

import numpy as np

from tools.scenes.colors import Color, any_color, contrast, draw_color, scaled
from tools.scenes.meshes import Mesh, lathe, tube
from tools.scenes.parts import ALONG_Y, Finish, Maker, Part, Shape, arc, gloss, profile
from tools.scenes.textures import skin

Rng = np.random.Generator

WET = Finish(1.0, 0.9)
LIP_ANGLES = np.linspace(-math.pi, math.pi, 7)
LYING = 0.25  # of bottles and cans
METALS: tuple[Color, ...] = ((0.75, 0.75, 0.78), (0.55, 0.56, 0.6), (0.8, 0.7, 0.45))


def _open_vessel(base: float, rim: float, height: float, bulge: float = 0.0, wall: float = 0.003) -> Mesh:
    """Return a vessel open at the top, with its inside; radii at base and rim."""
    outside = arc((base, 0), (rim, height), bulge)
    inside = arc((rim - wall, height), (base - wall, wall), bulge)
    return lathe(profile((0, 0), *outside, *inside, (0, wall)))


def _handle(rng: Rng, radius: float, height: float) -> Mesh:
    t = np.linspace(-np.pi / 2, np.pi / 2, 12)
    reach, rise = height * rng.uniform(0.25, 0.4), height * rng.uniform(0.25, 0.36)
    middle = height * rng.uniform(0.48, 0.56)
    path = np.stack([radius * 0.94 + reach * np.cos(t), np.zeros(12), middle + rise * np.sin(t)], -1)
    return tube(path, height * rng.uniform(0.04, 0.07), 8)


def _maybe_lying(rng: Rng, color: str, parts: tuple[Part, ...]) -> Shape:
    if rng.random() >= LYING:
        return Shape(color, parts)
    turned = (Part(p.mesh.turned(ALONG_Y), p.color, p.texture, p.alpha, p.finish) for p in parts)
    return Shape(color, tuple(turned), rolls=True)


def mug(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius, height, finish = rng.uniform(0.036, 0.048), rng.uniform(0.08, 0.115), gloss(rng)
    body = _open_vessel(radius * rng.uniform(0.8, 1.0), radius, height, radius * rng.uniform(0, 0.12))
    handle_color = color if rng.random() < 0.8 else contrast(rng, color)
    handle = Part(_handle(rng, radius, height), handle_color, finish=finish)
    return Shape(name, (Part(body, texture=skin(rng, color), finish=finish), handle))


def cup(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    rim, height = rng.uniform(0.035, 0.05), rng.uniform(0.07, 0.13)
    body = _open_vessel(rim * rng.uniform(0.6, 0.85), rim, height)
    return Shape(name, (Part(body, texture=skin(rng, color), finish=gloss(rng)),))


def glass(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("white", "blue", "green", "teal", "brown", "pink"))
    rim, height = rng.uniform(0.03, 0.042), rng.uniform(0.09, 0.15)
    side = arc((rim * rng.uniform(0.7, 1.0), 0), (rim, height), rim * rng.uniform(0, 0.2))
    body = lathe(profile((0, 0), *side))  # one wall: two would be drawn through each other in any order
    lip = lathe(profile(*((rim + 0.0015 * math.cos(a), height + 0.0015 * math.sin(a)) for a in LIP_ANGLES)))
    alpha = rng.uniform(0.25, 0.55)
    parts = [
        Part(body, scaled(color, 1.1), alpha=alpha, finish=WET),
        Part(lip, scaled(color, 1.2), alpha=0.9, finish=WET),
    ]
    if rng.random() < 0.5:
        level = height * rng.uniform(0.3, 0.8)
        drink = lathe(profile((0, 0.004), (rim * 0.66, 0.004), (rim * 0.68, level), (0, level)))
        parts.insert(0, Part(drink, any_color(rng), alpha=rng.uniform(0.7, 1.0)))
    return Shape(f"clear {name}" if name != "white" else "clear", tuple(parts))


def bottle(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius, height = rng.uniform(0.028, 0.042), rng.uniform(0.17, 0.28)
    shoulder, neck = height * rng.uniform(0.5, 0.72), radius * rng.uniform(0.3, 0.5)
    collar = shoulder + (height - shoulder) * rng.uniform(0.35, 0.7)
    curve = arc((radius, shoulder), (neck, collar), radius * rng.uniform(0, 0.2))
    body = lathe(
        profile((0, 0), (radius * 0.9, 0), (radius, radius * 0.15), *curve, (neck, height), (0, height))
    )
    clear = rng.random() < 0.25
    label_texture = None if clear else skin(rng, color, labelled=rng.random() < 0.7)
    finish = WET if clear else gloss(rng)
    bottom = height - (height - collar) * rng.uniform(0.4, 0.9)
    wide = neck * 1.2
    cap = lathe(profile((0, bottom), (wide, bottom), (wide, height * 1.01), (0, height * 1.01)))
    parts = (
        Part(body, color, label_texture, alpha=0.5 if clear else 1.0, finish=finish),
        Part(cap, contrast(rng, color)),
    )
    return _maybe_lying(rng, name, parts)


def can(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius, height = rng.uniform(0.028, 0.045), rng.uniform(0.08, 0.16)
    metal = METALS[rng.integers(len(METALS))]
    lip = radius * 0.92
    side = lathe(profile((lip, 0.003), (radius, 0.008), (radius, height - 0.008), (lip, height - 0.003)))
    rim = profile(
        (0, 0),
        (lip, 0),
        (lip, height),
        (lip * 0.93, height),
        (lip * 0.9, height - 0.004),
        (0, height - 0.004),
    )
    tin = Part(lathe(rim), metal, finish=Finish(1.0, 0.7))
    parts = (tin, Part(side, texture=skin(rng, color, labelled=rng.random() < 0.6), finish=gloss(rng)))
    return _maybe_lying(rng, name, parts)


def bowl(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    rim, height = rng.uniform(0.06, 0.09), rng.uniform(0.04, 0.075)
    body = _open_vessel(rim * rng.uniform(0.35, 0.55), rim, height, rim * rng.uniform(0.08, 0.16), 0.004)
    return Shape(name, (Part(body, texture=skin(rng, color), finish=gloss(rng)),))


def plate(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    rim = rng.uniform(0.075, 0.115)
    low = rim * rng.uniform(0.55, 0.7)
    points = ((0, 0), (low, 0), (rim, 0.018), (rim, 0.021), (low, 0.005), (0, 0.005))
    return Shape(name, (Part(lathe(profile(*points), 32), texture=skin(rng, color), finish=gloss(rng)),))


def jar(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    radius, height = rng.uniform(0.032, 0.05), rng.uniform(0.07, 0.13)
    neck = radius * rng.uniform(0.75, 0.95)
    body = lathe(
        profile(
            (0, 0), (radius, 0), (radius, height * 0.8), (neck, height * 0.88), (neck, height), (0, height)
        )
    )
    lid = lathe(profile((0, height), (neck * 1.06, height), (neck * 1.06, height * 1.18), (0, height * 1.18)))
    look = skin(rng, color, labelled=rng.random() < 0.6)
    return Shape(
        name,
        (Part(body, texture=look, finish=gloss(rng)), Part(lid, contrast(rng, color), finish=gloss(rng))),
    )


def vase(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    height, base = rng.uniform(0.14, 0.22), rng.uniform(0.022, 0.032)
    belly, waist = arc((base, 0), (base * 0.8, height * 0.7), base * rng.uniform(0.6, 1.0)), base * 0.8
    rim = arc((waist, height * 0.72), (base * rng.uniform(1.0, 1.5), height), -base * 0.1, 5)
    body = lathe(profile((0, 0), *belly, *rim, (waist * 0.8, height * 0.75), (0, height * 0.72)))
    return Shape(name, (Part(body, texture=skin(rng, color), finish=gloss(rng)),))


def pan(rng: Rng) -> Shape:
    name, color = draw_color(rng, ("black", "grey", "red", "blue", "white"))
    rim, height = rng.uniform(0.06, 0.09), rng.uniform(0.03, 0.06)
    body = _open_vessel(rim * 0.88, rim, height)
    reach = np.array([(rim * 0.97, 0, height * 0.8), (rim * 1.4, 0, height), (rim * 2.1, 0, height * 1.15)])
    finish = gloss(rng)
    handle = Part(tube(reach, 0.008, 8), scaled(contrast(rng, color), 0.5))
    return Shape(name, (Part(body, color, finish=finish), handle))


def funnel(rng: Rng) -> Shape:
    name, color = draw_color(rng)
    rim, height = rng.uniform(0.045, 0.065), rng.uniform(0.09, 0.13)
    points = ((rim, 0), (rim, 0.006), (rim * 0.2, height * 0.55), (rim * 0.12, height), (rim * 0.08, height))
    body = lathe(profile(*points, (rim * 0.15, height * 0.5), (rim * 0.95, 0)))
    return Shape(name, (Part(body, texture=skin(rng, color), finish=gloss(rng)),))


MAKERS: dict[str, Maker] = {
    "mug": mug,
    "cup": cup,
    "glass": glass,
    "bottle": bottle,
    "can": can,
    "bowl": bowl,
    "plate": plate,
    "jar": jar,
    "vase": vase,
    "pan": pan,
    "funnel": funnel,
}
