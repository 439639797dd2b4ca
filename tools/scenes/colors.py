"""Named colours and shades of them."""

from __future__ import annotations

import colorsys

import numpy as np

Color = tuple[float, float, float]  # RGB, 0..1

# name: ranges of hue (turns), saturation and value
NAMED: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red": ((-0.02, 0.015), (0.75, 0.95), (0.55, 0.85)),
    "orange": ((0.05, 0.085), (0.8, 1.0), (0.8, 1.0)),
    "yellow": ((0.12, 0.155), (0.7, 0.95), (0.8, 1.0)),
    "green": ((0.28, 0.4), (0.5, 0.9), (0.35, 0.7)),
    "teal": ((0.46, 0.51), (0.6, 0.9), (0.4, 0.7)),
    "blue": ((0.56, 0.65), (0.6, 0.95), (0.45, 0.9)),
    "purple": ((0.73, 0.8), (0.45, 0.8), (0.4, 0.7)),
    "pink": ((0.89, 0.95), (0.35, 0.65), (0.85, 1.0)),
    "brown": ((0.04, 0.08), (0.5, 0.7), (0.25, 0.45)),
    "beige": ((0.08, 0.12), (0.2, 0.35), (0.75, 0.9)),
    "white": ((0.0, 1.0), (0.0, 0.05), (0.88, 1.0)),
    "grey": ((0.0, 1.0), (0.0, 0.08), (0.35, 0.65)),
    "black": ((0.0, 1.0), (0.0, 0.2), (0.04, 0.14)),
}


def draw_color(rng: np.random.Generator, names: tuple[str, ...] = tuple(NAMED)) -> tuple[str, Color]:
    """Draw a colour's name and a shade of it."""
    name = str(rng.choice(names))
    return name, shade(rng, name)


def shade(rng: np.random.Generator, name: str) -> Color:
    """Return a random colour that has this name."""
    hue, saturation, value = (rng.uniform(*ends) for ends in NAMED[name])
    return colorsys.hsv_to_rgb(hue % 1.0, saturation, value)


def any_color(rng: np.random.Generator) -> Color:
    """Return any colour, more often a dull one than a bright one."""
    return colorsys.hsv_to_rgb(rng.uniform(), rng.beta(1.3, 2.0), rng.uniform(0.1, 1.0))


def contrast(rng: np.random.Generator, color: Color) -> Color:
    """Return a colour that differs visibly from another."""
    for _ in range(20):
        other = any_color(rng)
        if np.abs(np.subtract(other, color)).sum() > 0.7:
            return other
    return (1.0, 1.0, 1.0) if sum(color) < 1.5 else (0.05, 0.05, 0.05)


def scaled(color: Color, factor: float) -> Color:
    """Return the same colour, darker or lighter."""
    red, green, blue = (min(1.0, channel * factor) for channel in color)
    return red, green, blue
