"""The layout of a scene: objects on the table, and a room with lights around them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tools.scenes.camera import Viewpoint
from tools.scenes.meshes import Maker
from tools.scenes.objects import ObjectModel, Split, draw_identity, draw_object, surface_rng
from tools.scenes.stage import Actor, Array, Rng
from tools.scenes.textures import Color, Texture, any_color, surface

COUNT = (4, 11)
SHARE = (0.18, 0.4)  # of the view's width that the middle object takes
EXTREMES = (0.1, 0.6)  # smallest and largest share of any object
GAP = 0.002
TRIES = 60
SIMILAR_TRIES = 500  # objects among which similar ones are looked for
TABLE_HEIGHT = 0.75


def draw_models(rng: Rng, split: Split, more: Mapping[str, Maker]) -> tuple[list[ObjectModel], float]:
    """Draw objects that fit together, and the width of a view in which they have a useful size.

    more: further kinds of objects.
    """
    return fit_view(rng, [draw_object(rng, split, more) for _ in range(rng.integers(*COUNT))])


def draw_similar(rng: Rng, split: Split, more: Mapping[str, Maker]) -> tuple[list[ObjectModel], float]:
    """Draw an object, up to three others of its kind, of its colour, one of both, and a few more; see `draw_models`."""
    first = draw_object(rng, split, more)
    wanted = {
        (True, False): rng.integers(1, 4),
        (False, True): rng.integers(1, 4),
        (True, True): rng.integers(0, 2),
        (False, False): rng.integers(0, 3),
    }
    models = [first]
    for _ in range(SIMILAR_TRIES):  # some kinds have one colour only
        model = draw_object(rng, split, more)
        shared = (model.kind == first.kind, model.color == first.color)
        if wanted[shared]:
            wanted[shared] -= 1
            models.append(model)
    return fit_view(rng, models)


def fit_view(rng: Rng, models: list[ObjectModel]) -> tuple[list[ObjectModel], float]:
    """Return the models that fit together, and the width of a view in which they have a useful size."""
    width = float(np.median([model.extent for model in models]) / rng.uniform(*SHARE))
    fitting = [model for model in models if EXTREMES[0] < model.extent / width < EXTREMES[1]]
    return fitting, width


def on_table(view: Viewpoint, right: float, forward: float) -> Array:
    """Return the point [3] of the table at a distance from the view's centre in half widths of the view."""
    half = view.width / 2
    depth = half * min(1.2, 0.75 / max(np.sin(view.elevation), 0.3))
    point = view.centre + right * half * view.right + forward * depth * view.forward
    return np.array([point[0], point[1], 0.0])


def clear(place: Array, radius: float, actors: Sequence[Actor]) -> bool:
    """Return True if a disc on the table touches no object."""
    return all(np.linalg.norm(place[:2] - a.place[:2]) > radius + a.model.radius + GAP for a in actors)


def clear_way(start: Array, end: Array, radius: float, actors: Sequence[Actor]) -> bool:
    """Return True if a disc can move straight from start to end."""
    return all(clear(start + t * (end - start), radius, actors) for t in np.linspace(0, 1, 12))


def arrange(rng: Rng, view: Viewpoint, models: Sequence[ObjectModel], count: int) -> list[Actor]:
    """Place objects apart from each other; leave out those that find no space. `count` is the number of times."""
    actors: list[Actor] = []
    for model in models:
        place = free_place(rng, view, model.radius, actors, 0.8)
        if place is not None:
            actors.append(Actor.stand(model, len(actors) + 1, place, rng.uniform(0, 2 * np.pi), count))
    return actors


def free_place(
    rng: Rng, view: Viewpoint, radius: float, actors: Sequence[Actor], spread: float
) -> Array | None:
    """Find a place in view for a disc of this radius, or None; spread 1 reaches the border of the view."""
    for _ in range(TRIES):
        place = on_table(view, *(spread * rng.uniform(-1, 1, 2)))
        if clear(place, radius, actors):
            return place
    return None


def destination(rng: Rng, view: Viewpoint, actor: Actor, actors: Sequence[Actor], way: bool) -> Array | None:
    """Find a new place for an object, with a free way there if `way`; None if there is none."""
    others = [other for other in actors if other is not actor]
    for _ in range(TRIES):
        place = on_table(view, *(0.85 * rng.uniform(-1, 1, 2)))
        radius = actor.model.radius
        can_go = not way or clear_way(actor.place, place, radius, others)
        far = np.linalg.norm(place - actor.place) > 0.15 * view.width
        if can_go and far and clear(place, radius, others):
            return place
    return None


def tinted(model: ObjectModel, factor: Array) -> ObjectModel:
    """Return the same object with its colours multiplied by a factor for each of red, green and blue."""

    def dyed(texture: Texture | None) -> Texture | None:
        return None if texture is None else np.clip(texture * factor, 0, 255).astype(np.uint8)

    parts = []
    for part in model.parts:
        red, green, blue = (float(value) for value in np.clip(np.asarray(part.color) * factor, 0, 1))
        parts.append(replace(part, color=(red, green, blue), texture=dyed(part.texture)))
    return replace(model, parts=tuple(parts))


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
    table, floor, wall = (surface(surface_rng(draw_identity(rng, split))) for _ in range(3))
    yaw = view.azimuth + math.pi / 2 + rng.normal(0, 0.15)
    axes = np.array([(math.cos(yaw), math.sin(yaw)), (-math.sin(yaw), math.cos(yaw))])
    along = places @ axes.T
    low = along.min(0) - rng.uniform(0.05, 0.5, 2)
    high = along.max(0) + rng.uniform(0.05, 0.5, 2)
    (x, y) = ((low + high) / 2 @ axes).tolist()
    (wide, deep) = ((high - low) / 2).tolist()
    shadows = rng.random() < 0.6
    lights = tuple(_light(rng, shadows and index == 0) for index in range(rng.integers(1, 4)))
    distance = max(wide, deep) + rng.uniform(0.6, 3.0)
    ambient = rng.uniform(0.15, 0.4)
    shine = rng.uniform(0.05, 0.35) if rng.random() < 0.1 else 0.0
    look = (table, floor, wall, distance, lights, ambient, shine, any_color(rng))
    return Room((wide, deep), yaw, (x, y), *look)


def _light(rng: Rng, shadow: bool) -> Light:
    azimuth = rng.uniform(0, 2 * math.pi)
    height = rng.uniform(0.5, 2.5)
    warmth = rng.uniform(-0.12, 0.12)
    level = rng.uniform(0.2, 0.5)
    color = (level * (1 + warmth), level, level * (1 - warmth))
    return Light((math.cos(azimuth), math.sin(azimuth), height), color, shadow)
