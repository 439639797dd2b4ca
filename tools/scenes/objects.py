"""Object models: the shape and name of an integer identity, its position on a table, and occluders.

An object model and a surface texture are functions of one integer each. Integers that end in 0..7 are for training, in
8 for validation, in 9 for testing, so that the splits share no object and no surface. Some whole kinds of objects
(TEST_KINDS) are drawn for testing only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tools.scenes.kinds import GOODS, HAND_TOOLS, VESSELS
from tools.scenes.meshes import Maker, Part, Shape, box, gloss, lathe, profile
from tools.scenes.textures import draw_color, skin

Split = Literal["train", "val", "test"]

SPLITS: tuple[Split, ...] = ("train", "val", "test")
ENDINGS: dict[Split, tuple[int, ...]] = {"train": tuple(range(8)), "val": (8,), "test": (9,)}
POOL = 100_000  # tens of integers to draw from
OBJECT_SALT = 71
SURFACE_SALT = 72
MAKERS: dict[str, Maker] = {**VESSELS, **GOODS, **HAND_TOOLS}
TEST_KINDS = ("vase", "spanner", "toy car", "pear", "funnel")  # drawn for testing only
NO_MORE: Mapping[str, Maker] = {}
SCALE = (0.85, 1.2)
Rng = np.random.Generator


def get_split(identity: int) -> Split:
    """Return the split of an object's or surface's integer."""
    return next(split for split, endings in ENDINGS.items() if identity % 10 in endings)


def draw_identity(rng: np.random.Generator, split: Split) -> int:
    """Draw an integer of a split."""
    return int(10 * rng.integers(POOL) + rng.choice(ENDINGS[split]))


def object_rng(identity: int) -> np.random.Generator:
    """Return the generator of all random choices of an object model."""
    return np.random.default_rng([OBJECT_SALT, identity])


def surface_rng(identity: int) -> np.random.Generator:
    """Return the generator of all random choices of a surface's texture."""
    return np.random.default_rng([SURFACE_SALT, identity])


TRAIN_KINDS = tuple(kind for kind in MAKERS if kind not in TEST_KINDS)


@dataclass(frozen=True)
class ObjectModel:
    """An object with its base at z = 0, centred on the z axis; metres.

    radius: of the circle about its footprint. roll: radius with which it rolls (along x, about y where it is no ball),
    or 0. grasp: half its narrower side; grasp_yaw: the direction of that side, 0 is x.
    """

    identity: int
    kind: str
    color: str
    parts: tuple[Part, ...]
    radius: float
    height: float
    roll: float
    ball: bool
    grasp: float
    grasp_yaw: float

    @property
    def name(self) -> str:
        """Colour and kind, as in "red mug"."""
        return f"{self.color} {self.kind}"

    @property
    def extent(self) -> float:
        """The larger of its width and height."""
        return max(2 * self.radius, self.height)


def make_object(identity: int, kinds: Sequence[str] = (), more: Mapping[str, Maker] = NO_MORE) -> ObjectModel:
    """Make the object model of an integer.

    kinds: allowed kinds, by default all of its split. more: further kinds, for training only.
    """
    rng = object_rng(identity)
    split = get_split(identity)
    makers = {**MAKERS, **more} if split == "train" else MAKERS
    allowed = tuple(kinds) or list_kinds(split) + tuple(kind for kind in makers if kind not in MAKERS)
    kind = str(rng.choice(allowed))
    return build(identity, kind, makers[kind](rng), rng.uniform(*SCALE))


def list_kinds(split: Split) -> tuple[str, ...]:
    """Return the kinds of objects of a split; test has its own kinds twice as often."""
    return (*MAKERS, *TEST_KINDS) if split == "test" else TRAIN_KINDS


def draw_object(rng: np.random.Generator, split: Split, more: Mapping[str, Maker] = NO_MORE) -> ObjectModel:
    """Draw an object model of a split."""
    return make_object(draw_identity(rng, split), more=more)


def build(identity: int, kind: str, shape: Shape, scale: float = 1.0) -> ObjectModel:
    """Build the object model of a shape: on its base, centred and measured."""
    parts = tuple(replace(part, mesh=part.mesh.turned(np.eye(3) * scale)) for part in shape.parts)
    points = np.concatenate([part.mesh.vertices for part in parts])
    low = points.min(0)
    high = points.max(0)
    x, y = (low[:2] + high[:2]) / 2
    parts = tuple(replace(part, mesh=part.mesh.moved((-x, -y, -low[2]))) for part in parts)
    radius = float(np.linalg.norm(points[:, :2] - (x, y), axis=-1).max())
    wide, deep, tall = (high - low).tolist()
    grasp = min(wide, deep) / 2
    yaw = 0.0 if wide <= deep else np.pi / 2
    roll = tall / 2 if shape.rolls else 0.0
    return ObjectModel(identity, kind, shape.color, parts, radius, tall, roll, shape.ball, grasp, yaw)


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
    radius = hidden.radius * 1.12 + 0.006
    height = hidden.height * 1.1 + 0.012
    if rng.random() < 0.5:
        mesh = box((2 * radius, 2 * radius, height))
    else:
        top = radius * rng.uniform(0.85, 1.0)
        mesh = lathe(profile((radius * 1.18, 0), (top * 1.18, height), (0, height)))
    part = Part(mesh, texture=skin(looks, color), finish=gloss(looks))
    return build(identity, "cover", Shape(name, (part,)))


def _slab(identity: int, kind: str, size: tuple[float, float, float]) -> ObjectModel:
    looks = object_rng(identity)
    name, color = draw_color(looks)
    part = Part(box(size), texture=skin(looks, color, labelled=looks.random() < 0.3), finish=gloss(looks))
    return build(identity, kind, Shape(name, (part,)))
