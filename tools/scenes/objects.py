"""Object models: the shape and name of an integer identity, and its position on a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tools.scenes import goods, handtools, vessels
from tools.scenes.identity import Split, draw_identity, get_split, object_rng
from tools.scenes.parts import Maker, Part, Shape

MAKERS: dict[str, Maker] = {**vessels.MAKERS, **goods.MAKERS, **handtools.MAKERS}
TEST_KINDS = ("vase", "spanner", "toy car", "pear", "funnel")  # drawn for testing only
TRAIN_KINDS = tuple(kind for kind in MAKERS if kind not in TEST_KINDS)
NO_MORE: Mapping[str, Maker] = {}
SCALE = (0.85, 1.2)


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
    rng, split = object_rng(identity), get_split(identity)
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
    low, high = points.min(0), points.max(0)
    x, y = (low[:2] + high[:2]) / 2
    parts = tuple(replace(part, mesh=part.mesh.moved((-x, -y, -low[2]))) for part in parts)
    radius = float(np.linalg.norm(points[:, :2] - (x, y), axis=-1).max())
    sides = high - low
    grasp = float(min(sides[0], sides[1]) / 2)
    yaw = 0.0 if sides[0] <= sides[1] else np.pi / 2
    roll = float(sides[2] / 2) if shape.rolls else 0.0
    return ObjectModel(
        identity, kind, shape.color, parts, radius, float(sides[2]), roll, shape.ball, grasp, yaw
    )
