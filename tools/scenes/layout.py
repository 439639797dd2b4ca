"""Places of objects: apart from each other, spread over the view, with free ways between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tools.scenes.camera import Viewpoint
from tools.scenes.identity import Split
from tools.scenes.motion import Array, Rng
from tools.scenes.objects import ObjectModel, draw_object
from tools.scenes.parts import Maker
from tools.scenes.stage import Actor
from tools.scenes.textures import Texture

COUNT = (4, 11)
SHARE = (0.18, 0.4)  # of the view's width that the middle object takes
EXTREMES = (0.1, 0.6)  # smallest and largest share of any object
GAP = 0.002
TRIES = 60
SIMILAR_TRIES = 500  # objects among which similar ones are looked for


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
    """Return those of the models that fit together, and the width of a view in which they have a useful size."""
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
        if way and not clear_way(actor.place, place, actor.model.radius, others):
            continue
        far = np.linalg.norm(place - actor.place) > 0.15 * view.width
        if far and clear(place, actor.model.radius, others):
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
