"""Named colours, and textures of objects and surfaces; images are RGB uint8 [h, w, 3]."""

import colorsys
import math
from collections.abc import Callable

import cv2
import numpy as np
import numpy.typing as npt

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
Texture = npt.NDArray[np.uint8]
Field = npt.NDArray[np.float32]  # [n, n] in 0..1
Canvas = npt.NDArray[np.float32]  # [n, n, 3] in 0..1
Rng = np.random.Generator
SKIN_SIZE = 128
SURFACE_SIZE = 512
WOODS: tuple[Color, ...] = ((0.55, 0.36, 0.2), (0.75, 0.58, 0.38), (0.36, 0.22, 0.13), (0.85, 0.74, 0.58))
SkinMaker = Callable[[Rng, int, Color], Canvas]
SurfaceMaker = Callable[[Rng, int], Canvas]
SKIN_WEIGHTS = (0.4, 0.1, 0.12, 0.08, 0.06, 0.14, 0.1)
SURFACE_WEIGHTS = (0.24, 0.05, 0.05, 0.12, 0.14, 0.1, 0.14, 0.08, 0.08)


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


def noise(rng: Rng, size: int, cells: tuple[float, float], octaves: int = 4) -> Field:
    """Return value noise of several octaves, stretched to 0..1; the coarsest has `cells` along rows and columns."""
    total = np.zeros((size, size), np.float32)
    for octave in range(octaves):
        rows, columns = (max(2, round(count * 2**octave)) for count in cells)
        grid = rng.random((min(rows, size), min(columns, size)), np.float32)
        total += cv2.resize(grid, (size, size), interpolation=cv2.INTER_CUBIC) * 0.5**octave
    low = total.min()
    high = total.max()
    return (total - low) / max(high - low, 1e-6)


def blend(weight: Field, first: Color, second: Color) -> Canvas:
    """Return colours between two; weight 0 gives the first."""
    start = np.array(first, np.float32)
    return start + weight[..., None] * (np.array(second, np.float32) - start)


def surface(rng: Rng, kind: str = "", size: int = SURFACE_SIZE) -> Texture:
    """Return the texture of a table, floor or wall, of a kind in SURFACES or of a random one."""
    chosen = kind or str(rng.choice(list(SURFACES), p=SURFACE_WEIGHTS))
    return _finish(SURFACES[chosen](rng, size))


def skin(rng: Rng, color: Color, labelled: bool = False, size: int = SKIN_SIZE) -> Texture:
    """Return an object's texture, mainly of one colour; `labelled` adds a printed label around its middle."""
    make = SKINS[rng.choice(len(SKINS), p=SKIN_WEIGHTS)]
    canvas = make(rng, size, color)
    return _finish(print_label(rng, canvas, color) if labelled else canvas)


def poster(rng: Rng, color: Color, size: int = SKIN_SIZE) -> Canvas:
    """Return a printed side of a package: a ground, shapes and lines like text."""
    canvas = blend(noise(rng, size, (2, 2), 1) * rng.uniform(0, 0.6), color, contrast(rng, color))
    for _ in range(rng.integers(1, 4)):
        draw_shape(rng, canvas, contrast(rng, color))
    for _ in range(rng.integers(0, 4)):
        draw_words(rng, canvas, contrast(rng, color))
    return canvas


def draw_shape(rng: Rng, canvas: Canvas, color: Color) -> None:
    """Draw one logo-like shape: a disc, ring, bar or polygon."""
    size = canvas.shape[0]
    centre = rng.uniform(0.15, 0.85, 2) * size
    radius = rng.uniform(0.08, 0.3) * size
    x, y = (int(value) for value in centre)
    form = rng.integers(4)
    if form == 0:
        cv2.circle(canvas, (x, y), int(radius), color, -1, cv2.LINE_AA)
    elif form == 1:
        cv2.circle(canvas, (x, y), int(radius), color, max(2, int(0.3 * radius)), cv2.LINE_AA)
    elif form == 2:
        half = (radius * rng.uniform(0.3, 1.2), radius * rng.uniform(0.3, 1.2))
        _polygon(canvas, _corners(centre, half, rng.uniform(0, math.pi)), color)
    else:
        angles = np.sort(rng.uniform(0, 2 * math.pi, rng.integers(3, 8)))
        _polygon(canvas, centre + radius * np.stack([np.cos(angles), np.sin(angles)], -1), color)


def draw_words(rng: Rng, canvas: Canvas, color: Color) -> None:
    """Draw a row of short bars, which looks like a distant line of print."""
    size = canvas.shape[0]
    row = int(rng.uniform(0.1, 0.85) * size)
    height = int(rng.uniform(0.02, 0.09) * size) + 1
    x = int(rng.uniform(0.05, 0.3) * size)
    end = int(rng.uniform(0.6, 0.98) * size)
    while x < end:
        width = int(rng.uniform(0.5, 2.5) * height) + 1
        canvas[row : row + height, x : min(x + width, end)] = color
        x += width + max(1, height // 3)


def print_label(rng: Rng, canvas: Canvas, color: Color) -> Canvas:
    """Return the canvas with a printed band around it."""
    size = canvas.shape[0]
    low = int(rng.uniform(0.15, 0.35) * size)
    high = int(rng.uniform(0.55, 0.85) * size)
    ground = contrast(rng, color)
    label = poster(rng, ground, size)
    canvas[low:high] = cv2.resize(label, (size, high - low), interpolation=cv2.INTER_AREA)
    return canvas


def _corners(
    centre: npt.NDArray[np.float64], half: tuple[float, float], angle: float
) -> npt.NDArray[np.float64]:
    along = np.array([math.cos(angle), math.sin(angle)])
    across = np.array([-along[1], along[0]])
    signs = ((1, 1), (1, -1), (-1, -1), (-1, 1))
    return np.stack([centre + a * half[0] * along + b * half[1] * across for a, b in signs])


def _polygon(canvas: Canvas, points: npt.NDArray[np.float64], color: Color) -> None:
    cv2.fillPoly(canvas, [np.round(points).astype(np.int32)], color, cv2.LINE_AA)


def _finish(canvas: Canvas) -> Texture:
    return (np.clip(canvas, 0, 1) * 255).astype(np.uint8)


def _plain(rng: Rng, size: int, color: Color) -> Canvas:
    return blend(noise(rng, size, (8, 8)) * rng.uniform(0, 0.15), color, scaled(color, 0.5))


def _mottled(rng: Rng, size: int, color: Color) -> Canvas:
    cells = rng.uniform(2, 12)
    return blend(noise(rng, size, (cells, cells)) ** 2 * rng.uniform(0.3, 0.9), color, any_color(rng))


def _bands(rng: Rng, size: int, color: Color) -> Canvas:
    canvas = _plain(rng, size, color)
    other = contrast(rng, color)
    for _ in range(rng.integers(1, 4)):
        start = int(rng.uniform(0, 0.9) * size)
        canvas[start : start + int(rng.uniform(0.04, 0.25) * size)] = other
    return canvas


def _stripes(rng: Rng, size: int, color: Color) -> Canvas:
    count = rng.integers(2, 9)
    tilt = rng.integers(-2, 3)
    grid = np.arange(size) / size
    phase = count * grid[None] + tilt * grid[:, None]
    return blend((phase % 1 < rng.uniform(0.2, 0.5)).astype(np.float32), color, contrast(rng, color))


def _spots(rng: Rng, size: int, color: Color) -> Canvas:
    canvas = _plain(rng, size, color)
    other = contrast(rng, color)
    radius = max(2, int(rng.uniform(0.02, 0.08) * size))
    for x, y in rng.integers(0, size, (int(rng.integers(8, 40)), 2)):
        cv2.circle(canvas, (int(x), int(y)), radius, other, -1, cv2.LINE_AA)
    return canvas


def _logo(rng: Rng, size: int, color: Color) -> Canvas:
    canvas = _plain(rng, size, color)
    draw_shape(rng, canvas, contrast(rng, color))
    draw_words(rng, canvas, contrast(rng, color))
    return canvas


def _two_tone(rng: Rng, size: int, color: Color) -> Canvas:
    canvas = _plain(rng, size, color)
    canvas[int(rng.uniform(0.5, 0.8) * size) :] = contrast(rng, color)
    return canvas


def _wood(rng: Rng, size: int) -> Canvas:
    color = WOODS[rng.integers(len(WOODS))]
    grain = noise(rng, size, (rng.uniform(12, 40), rng.uniform(1, 3)))
    rings = 0.5 + 0.5 * np.sin(rng.uniform(20, 60) * noise(rng, size, (3, 1), 2))
    weight = (0.6 * grain + 0.4 * rings).astype(np.float32)
    canvas = blend(weight, scaled(color, rng.uniform(0.8, 1.2)), scaled(color, 0.6))
    if rng.random() < 0.5:
        canvas[:: size // int(rng.integers(3, 9))] *= 0.5
    return canvas


def _checker(rng: Rng, size: int) -> Canvas:
    count = rng.integers(3, 14)
    cells = (np.arange(size) * count // size)[:, None] + (np.arange(size) * count // size)[None]
    first = any_color(rng)
    canvas = blend((cells % 2).astype(np.float32), first, contrast(rng, first))
    return canvas * _uneven(rng, size)


def _lines(rng: Rng, size: int) -> Canvas:
    return _stripes(rng, size, any_color(rng)) * _uneven(rng, size)


def _uneven(rng: Rng, size: int) -> Field:
    return (0.85 + 0.15 * noise(rng, size, (6, 6)))[..., None]


def _speckle(rng: Rng, size: int) -> Canvas:
    grain = cv2.GaussianBlur(rng.random((size, size), np.float32), (0, 0), rng.uniform(0.6, 2.0))
    grain = np.clip((grain - grain.mean()) / (6 * grain.std()) + 0.5, 0, 1)
    return blend(grain, any_color(rng), any_color(rng))


def _even(rng: Rng, size: int) -> Canvas:
    return _plain(rng, size, any_color(rng))


def _cloud(rng: Rng, size: int) -> Canvas:
    cells = rng.uniform(1.5, 6)
    return np.stack([noise(rng, size, (cells, cells), 5) for _ in range(3)], -1)


def _shapes(rng: Rng, size: int) -> Canvas:
    canvas = blend(noise(rng, size, (2, 2), 1), any_color(rng), any_color(rng))
    for _ in range(rng.integers(4, 25)):
        draw_shape(rng, canvas, any_color(rng))
    return cv2.GaussianBlur(canvas, (0, 0), rng.uniform(0.5, 4.0))


def _tiles(rng: Rng, size: int) -> Canvas:
    canvas = _mottled(rng, size, any_color(rng))
    step = size // int(rng.integers(3, 10))
    width = max(1, size // 120)
    for start in range(0, size, step):
        canvas[start : start + width] *= 0.5
        canvas[:, start : start + width] *= 0.5
    return canvas


def _cloth(rng: Rng, size: int) -> Canvas:
    grid = np.arange(size, dtype=np.float32)
    count = rng.uniform(0.4, 1.6)
    weave = 0.5 + 0.25 * np.sin(count * grid)[:, None] + 0.25 * np.sin(count * grid)[None]
    _, color = draw_color(rng)
    return blend((0.5 * weave + 0.5 * noise(rng, size, (4, 4))).astype(np.float32), color, scaled(color, 0.5))


SKINS: tuple[SkinMaker, ...] = (_plain, _mottled, _bands, _stripes, _spots, _logo, _two_tone)
SURFACES: dict[str, SurfaceMaker] = {
    "wood": _wood,
    "checker": _checker,
    "lines": _lines,
    "speckle": _speckle,
    "plain": _even,
    "cloud": _cloud,
    "shapes": _shapes,
    "tiles": _tiles,
    "cloth": _cloth,
}
