"""Solids that no word names, as further training objects: random shapes, turned, cut, joined and bent.

A detector that has only seen things with a name gives every other thing one of them. These have colours and no kind, so
that a query for a kind never means them. Their kinds say how they are made, and are no words of the detector.
"""

import numpy as np

from tools.scenes.meshes import (
    ALONG_X,
    ALONG_Y,
    Array,
    Maker,
    Mesh,
    Part,
    Shape,
    box,
    gloss,
    lathe,
    prism,
    profile,
    superellipsoid,
    tube,
)
from tools.scenes.textures import Color, contrast, draw_color, scaled, skin

Rng = np.random.Generator

WAIST = 0.25  # least depth of a waist or bulge of what is turned, as a share of its widest radius
STEPS = 24  # of a curve
LYING = 0.3


def _clothe(rng: Rng, meshes: list[Mesh]) -> Shape:
    """Return a shape of one main colour, whose smaller parts may have another."""
    name, color = draw_color(rng)
    finish = gloss(rng)
    second = _second(rng, color)
    first, *others = meshes
    parts = [Part(first, texture=skin(rng, color), finish=finish)]
    parts += [Part(mesh, color if rng.random() < 0.5 else second, finish=finish) for mesh in others]
    return Shape(name, tuple(parts))


def _second(rng: Rng, color: Color) -> Color:
    return contrast(rng, color) if rng.random() < 0.4 else scaled(color, rng.uniform(0.6, 1.3))


def _wave(rng: Rng) -> Array:
    """Return radii [STEPS] up to 1 along a turned body, with at least one waist or bulge."""
    while True:
        knots = rng.uniform(0.2, 1.0, rng.integers(4, 7))
        wave = np.interp(np.linspace(0, 1, STEPS), np.linspace(0, 1, len(knots)), knots)
        wave = np.convolve(np.pad(wave, 2, mode="edge"), np.ones(5) / 5, mode="valid")
        wave /= wave.max()
        steps = np.diff(wave)
        if min(steps.clip(min=0).sum(), -steps.clip(max=0).sum()) > WAIST:
            return np.asarray(wave)


def _turned(rng: Rng) -> Shape:
    radius = rng.uniform(0.018, 0.05)
    height = rng.uniform(0.05, 0.2)
    wave = np.stack([radius * _wave(rng), np.linspace(0, height, STEPS)], -1)
    meshes = [lathe(np.concatenate([profile((0, 0)), wave, profile((0, height))]))]
    if rng.random() < 0.4:
        knob = radius * rng.uniform(0.3, 0.7)
        meshes.append(superellipsoid((knob, knob, knob * rng.uniform(0.6, 1.5)), 1, 1).moved((0, 0, height)))
    shape = _clothe(rng, meshes)
    return shape.turned(ALONG_Y) if rng.random() < LYING else shape


def _open(rng: Rng) -> Shape:
    radius = rng.uniform(0.025, 0.055)
    height = rng.uniform(0.05, 0.18)
    wall = 0.003
    wave = np.stack([radius * _wave(rng), np.linspace(0, height, STEPS)], -1)
    inside = np.maximum(wave[::-1] - (wall, 0), (wall, wall))
    meshes = [lathe(np.concatenate([profile((0, 0)), wave, inside, profile((0, wall))]))]
    bow = np.linspace(-np.pi / 2, np.pi / 2, 12)
    for side in (-1, 1)[: rng.integers(0, 3)]:
        reach = rng.uniform(0.2, 0.5) * height
        rise = rng.uniform(0.2, 0.4) * height
        x = side * (0.6 * radius + reach * np.cos(bow))
        path = np.stack([x, np.zeros(12), height / 2 + rise * np.sin(bow)], -1)
        meshes.append(tube(path, height * rng.uniform(0.03, 0.07), 8))
    return _clothe(rng, meshes)


def _flat(rng: Rng) -> Shape:
    angles = 2 * np.pi * np.arange(48) / 48
    waves = sum(rng.normal(0, 0.3 / k) * np.cos(k * angles + rng.uniform(0, 2 * np.pi)) for k in range(2, 6))
    radii = rng.uniform(0.025, 0.06) * np.clip(1 + waves, 0.3, 2)
    outline = radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], -1) * (rng.uniform(1, 2), 1)
    return _clothe(rng, [prism(outline, rng.uniform(0.008, 0.045))])


def _long(rng: Rng) -> Shape:
    length = rng.uniform(0.1, 0.2)
    x = np.linspace(-length / 2, length / 2, STEPS)
    thick = rng.uniform(0.005, 0.014)
    handle = tube(np.stack([x, 0 * x, 0 * x], -1), thick * (0.4 + 0.6 * _wave(rng)), 10)
    ends = [_piece(rng, rng.uniform(0.012, 0.03)).moved((side * length / 2, 0, 0)) for side in (-1, 1)]
    return _clothe(rng, [handle, *ends[: rng.integers(1, 3)]])


def _stacked(rng: Rng) -> Shape:
    meshes = []
    top = 0.0
    for _ in range(rng.integers(2, 5)):
        size = rng.uniform(0.02, 0.05)
        mesh = _piece(rng, size)
        low = mesh.vertices[:, 2].min()
        high = mesh.vertices[:, 2].max()
        meshes.append(mesh.moved((*rng.normal(0, 0.15 * size, 2), top - low)))
        top += 0.95 * (high - low)
    return _clothe(rng, meshes)


def _clustered(rng: Rng) -> Shape:
    spread = rng.uniform(0.02, 0.045)
    count = int(rng.integers(3, 7))
    places = rng.normal(0, spread, (count, 3)) * (1, 0.7, 0.4)
    return _clothe(rng, [_piece(rng, rng.uniform(0.4, 1.1) * spread).moved((x, y, z)) for x, y, z in places])


def _bent(rng: Rng) -> Shape:
    turn = np.cumsum(np.convolve(rng.normal(0, 0.5, STEPS), np.ones(5) / 5, mode="same"))
    step = rng.uniform(0.12, 0.3) / STEPS
    path = np.stack([np.cumsum(step * np.cos(turn)), np.cumsum(step * np.sin(turn)), np.zeros(STEPS)], -1)
    thick = rng.uniform(0.005, 0.014)
    meshes = [tube(path, thick, 10)]
    if rng.random() < 0.6:
        meshes.append(_piece(rng, thick * rng.uniform(1.2, 2.5)).moved(tuple(path[-1])))
    return _clothe(rng, meshes)


def _looped(rng: Rng) -> Shape:
    thick = rng.uniform(0.004, 0.01)
    radius = rng.uniform(0.02, 0.05)
    round_ = np.linspace(0, 2 * np.pi, 9)
    ring = lathe(np.stack([radius + thick * np.cos(round_), thick * np.sin(round_)], -1))
    x = np.array([radius, radius + rng.uniform(0.02, 0.06), radius + rng.uniform(0.07, 0.12)])
    meshes = [ring, tube(np.stack([x, 0 * x, 0 * x], -1), thick * rng.uniform(0.7, 1.6), 8)]
    shape = _clothe(rng, meshes)
    return shape.turned(ALONG_X) if rng.random() < LYING else shape


def _piece(rng: Rng, size: float) -> Mesh:
    """Return a simple body of about this half size about the origin."""
    a, b, c = (size * rng.uniform(0.5, 1.1) for _ in range(3))
    form = rng.integers(4)
    if form == 0:
        return box((2 * a, 2 * b, 2 * c)).moved((0, 0, -c))
    if form == 1:
        return superellipsoid((a, b, c), rng.uniform(0.2, 1.2), rng.uniform(0.2, 1.2))
    if form == 2:
        return lathe(profile((0, -c), (a, -c), (b, c), (0, c)))
    return lathe(np.stack([a * _wave(rng), np.linspace(-c, c, STEPS)], -1))


MAKERS: dict[str, Maker] = {
    f"{maker.__name__[1:]} thing": maker
    for maker in (_turned, _open, _flat, _long, _stacked, _clustered, _bent, _looped)
}
