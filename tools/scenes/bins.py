"""Bins with heaps of boxes, cans and bags of parts, which MuJoCo's physics settles, with the truth of each picture.

A heap is drawn from a seed. Its things fall into the bin, come to rest, and are seen by a camera above them. The base
is on the table, z = 0, below the middle of the bin. The truth of a picture is its exact depth, the thing of each pixel,
and for each thing what lies above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sam3_node.geometry import Array, Float, rigid
from sam3_node.types import Image, Intrinsics
from tools.scenes.render import load_mujoco
from tools.scenes.stage import Rng, frames

SIZE = (480, 640)
LENS = Intrinsics(600.0, 600.0, 319.5, 239.5)
FOV_DEG = float(np.degrees(2 * np.arctan(SIZE[0] / 2 / LENS.fy)))
"""Height of the field of view of LENS."""
INSIDE_M = (0.36, 0.26, 0.12)
"""Sides of the bin, inside."""
WALL_M = 0.006
"""Thickness of walls and floor of the bin."""
ROUNDS = 4
"""Times at which things fall, each as many as lie beside each other."""
STEP_S = 0.002
FALL_S = 0.45
"""Time from one round to the next."""
REST_S = 1.2
"""Time to come to rest after the last round."""
LUMPS = 14
"""Parts whose shape shows through a bag."""
LUMP_M = (0.008, 0.012)
"""Radii of these, least and largest."""
RISE_M = (0.0, 0.002)
"""How far they rise out of the bag, least and largest."""
CELL_M = 0.003
"""Distance of the vertical lines by which things above each other are found."""
TOUCH_M = 0.001
"""Overlap in height of two things that touch."""
HEIGHTS_M = (0.62, 0.78)
"""Heights of the camera above the table, least and largest."""
TILT_DEG = 20.0
"""Largest angle of the camera's axis with the vertical."""
KINDS = ("box", "can", "bag")
# MuJoCo's kinds of geoms
SPHERE = 2
ELLIPSOID = 4
CYLINDER = 5
BOX = 6


class Thing(NamedTuple):
    """A thing of a heap, before it falls."""

    kind: str
    """one of KINDS"""
    half_m: Array
    """[3], half its sides"""
    colour: Array
    """[3], red, green and blue in 0..1"""


class BinPicture(NamedTuple):
    """A picture of a bin with its truth."""

    colour: Image
    """BGR [h, w, 3]"""
    depth_m: Array
    """[h, w], exact, along the optical axis"""
    labels: npt.NDArray[np.int32]
    """[h, w], the number of the thing, from 1; 0 for bin, table and floor"""


def draw_things(random: Rng, count: int) -> list[Thing]:
    """Draw things at random, of each kind about as many."""
    things = []
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        if kind == "box":
            half = random.uniform((0.02, 0.015, 0.01), (0.05, 0.035, 0.025))
        elif kind == "can":
            radius = random.uniform(0.015, 0.033)
            half = np.array([radius, radius, random.uniform(0.025, 0.05)])
        else:
            half = random.uniform((0.03, 0.025, 0.01), (0.05, 0.04, 0.018))
        things.append(Thing(kind, half, random.uniform(0.15, 0.95, 3)))
    return things


class BinScene:
    """A bin with a heap at rest, seen by a camera. Things that fell out of the bin are left out."""

    def __init__(self, seed: int, count: int = 20) -> None:
        random = np.random.default_rng([seed, count])
        self._mujoco = load_mujoco()
        self.things = draw_things(random, count)
        self.base_from_camera = _draw_camera(random)
        self.model = self._build(random)
        self.data = self._mujoco.MjData(self.model)
        self._settle(random)
        inside = (
            np.abs(self.places_m[:, :2]) < np.array(INSIDE_M[:2]) / 2 if count else np.zeros((0, 2), bool)
        )
        self.labels = tuple(int(index) + 1 for index in np.flatnonzero(inside.all(axis=1)))
        """Numbers of the things in the bin, from 1"""

    @property
    def places_m(self) -> Array:
        """Places of the things in the base, [n, 3]."""
        return np.array(self.data.xpos[-len(self.things) :]) if self.things else np.zeros((0, 3))

    def render(self, without: Sequence[int] = ()) -> BinPicture:
        """Return a picture with its truth, without these things."""
        self._hide(without)
        renderer = self._renderer
        labels = self._render_labels()
        renderer.enable_depth_rendering()
        renderer.update_scene(self.data, "camera")
        depth_m = renderer.render().astype(np.float64)
        renderer.disable_depth_rendering()
        renderer.update_scene(self.data, "camera")
        colour = np.ascontiguousarray(renderer.render()[..., ::-1])
        self._hide(())
        return BinPicture(colour, depth_m, labels)

    def count_alone(self, label: int) -> int:
        """Return how many pixels a thing would have if it were alone in the bin."""
        self._hide([other for other in self.labels if other != label])
        count = int(np.count_nonzero(self._render_labels() == label))
        self._hide(())
        return count

    @cached_property
    def _renderer(self) -> Any:
        return self._mujoco.Renderer(self.model, *SIZE)

    def close(self) -> None:
        """Free the renderer."""
        self._renderer.close()

    @cached_property
    def _alphas(self) -> Float:
        return np.array(self.model.geom_rgba[:, 3])

    @property
    def _first(self) -> int:
        """The body of the first thing."""
        return int(self.model.nbody) - len(self.things)

    def _hide(self, labels: Sequence[int]) -> None:
        """Hide these things alone."""
        hidden = np.isin(self.model.geom_bodyid, [self._first + label - 1 for label in labels])
        self.model.geom_rgba[:, 3] = np.where(hidden, 0.0, self._alphas)

    def _render_labels(self) -> npt.NDArray[np.int32]:
        self._renderer.enable_segmentation_rendering()
        self._renderer.update_scene(self.data, "camera")
        geoms = self._renderer.render()[..., 0]
        self._renderer.disable_segmentation_rendering()
        # -1, where nothing is seen, becomes the last one: the world
        bodies = np.append(self.model.geom_bodyid, 0)[geoms]
        labels = np.where(bodies >= self._first, bodies - self._first + 1, 0)
        labels[~np.isin(labels, self.labels)] = 0
        return labels.astype(np.int32)

    @cached_property
    def covered(self) -> dict[int, dict[int, float]]:
        """The things above each thing, with the share of its area, seen from above, that each hides."""
        maps = {label: self._trace_vertically(label) for label in self.labels}
        found: dict[int, dict[int, float]] = {}
        for label, (_, high) in maps.items():
            area = np.isfinite(high)
            found[label] = {}
            for other, (other_low, other_high) in maps.items():
                above = area & (other_low > high - TOUCH_M) & np.isfinite(other_high)
                if other != label and above.any():
                    found[label][other] = float(above.sum() / area.sum())
        return found

    @cached_property
    def resting(self) -> dict[int, set[int]]:
        """The things that rest on each thing: those that press on it from above."""
        found: dict[int, set[int]] = {label: set() for label in self.labels}
        first = self._first
        force = np.zeros(6)
        for index in range(self.data.ncon):
            contact = self.data.contact[index]
            lower, upper = (int(self.model.geom_bodyid[geom]) - first + 1 for geom in contact.geom)
            if lower < 1 or upper < 1:
                continue
            self._mujoco.mj_contactForce(self.model, self.data, index, force)
            # the normal points from the first geom to the second
            lift = float(contact.frame[:3] @ (0, 0, 1)) * float(force[0])
            if lift < 0:
                lower, upper = upper, lower
            weight = float(self.model.body_mass[first + upper - 1]) * 9.81
            if abs(lift) > 0.1 * weight and lower in found:
                found[lower].add(upper)
        return found

    def list_top(self, label: int) -> Array:
        """Return points of a thing's upper surface in the base, [n, 3], without the lumps of a bag."""
        x, y = np.meshgrid(*_list_lines())
        high = self._trace_vertically(label)[1]
        hits = np.isfinite(high)
        return np.column_stack([x[hits], y[hits], high[hits]])

    def _build(self, random: Rng) -> Any:
        spec = self._mujoco.MjSpec()
        spec.option.timestep = STEP_S
        world = spec.worldbody
        visual = spec.visual
        visual.global_.offwidth = SIZE[1]
        visual.global_.offheight = SIZE[0]
        visual.map.znear = 0.05
        visual.map.zfar = 5.0
        spec.stat.extent = 1.0
        world.add_geom(type=BOX, size=(1.5, 1.5, 0.02), pos=(0, 0, -0.02), rgba=(0.55, 0.5, 0.45, 1))
        wide, deep, tall = INSIDE_M
        grey = (*random.uniform(0.2, 0.7, 3), 1)
        half = WALL_M / 2
        world.add_geom(type=BOX, size=(wide / 2, deep / 2, half), pos=(0, 0, half), rgba=grey)
        for sign in (-1, 1):
            size = (half, deep / 2 + WALL_M, tall / 2)
            world.add_geom(type=BOX, size=size, pos=(sign * (wide / 2 + half), 0, tall / 2), rgba=grey)
            size = (wide / 2 + WALL_M, half, tall / 2)
            world.add_geom(type=BOX, size=size, pos=(0, sign * (deep / 2 + half), tall / 2), rgba=grey)
        world.add_light(pos=(0.4, 0.3, 2), dir=(-0.2, -0.15, -1))
        axes = (self.base_from_camera[:3, :2] * (1, -1)).T.ravel()
        world.add_camera(name="camera", pos=self.base_from_camera[:3, 3], xyaxes=axes, fovy=FOV_DEG)
        for thing in self.things:
            self._add(world, thing, random)
        return spec.compile()

    def _add(self, world: Any, thing: Thing, random: Rng) -> None:
        # they wait below the table, where nothing touches them, until their round
        body = world.add_body(pos=(0, 0, -5))
        body.add_freejoint()
        rgba = (*thing.colour, 1)
        sizes = {"box": thing.half_m, "can": (thing.half_m[0], thing.half_m[2], 0), "bag": thing.half_m}
        kind = {"box": BOX, "can": CYLINDER, "bag": ELLIPSOID}[thing.kind]
        body.add_geom(type=kind, size=sizes[thing.kind], rgba=rgba, density=400, friction=(0.6, 0.01, 0.001))
        if thing.kind != "bag":
            return
        for way in random.normal(size=(LUMPS, 3)):
            way = way / np.linalg.norm(way)
            outward = way / thing.half_m
            outward /= np.linalg.norm(outward)
            radius = random.uniform(*LUMP_M)
            place = thing.half_m * way - (radius - random.uniform(*RISE_M)) * outward
            shade = (*np.clip(thing.colour * random.uniform(0.7, 1.1), 0, 1), 1)
            size = (radius, 0, 0)
            body.add_geom(type=SPHERE, size=size, pos=place, rgba=shade, density=0, contype=0, conaffinity=0)

    def _settle(self, random: Rng) -> None:
        """Let the things fall in rounds, and wait until they rest."""
        spread = np.array(INSIDE_M[:2]) / 2 - 0.06
        fallen = 0
        for chosen in np.array_split(np.arange(len(self.things)), ROUNDS):
            for number, index in enumerate(chosen.tolist()):
                turn = random.normal(size=4)
                start = 7 * index
                self.data.qpos[start : start + 3] = (*random.uniform(-spread, spread), 0.2 + 0.07 * number)
                self.data.qpos[start + 3 : start + 7] = turn / np.linalg.norm(turn)
                self.data.qvel[6 * index : 6 * index + 6] = 0
            fallen += len(chosen)
            self._run(FALL_S, fallen)
        self._run(REST_S, fallen)

    def _run(self, time_s: float, fallen: int) -> None:
        """Go on in time. The things from `fallen` on wait far away."""
        waiting = range(fallen, len(self.things))
        for _ in range(round(time_s / STEP_S)):
            for index in waiting:
                self.data.qpos[7 * index : 7 * index + 3] = (0.3 * index, 0, -5)
                self.data.qvel[6 * index : 6 * index + 6] = 0
            self._mujoco.mj_step(self.model, self.data)
        self._mujoco.mj_forward(self.model, self.data)

    def _trace_vertically(self, label: int) -> tuple[Array, Array]:
        """Return the lowest and highest z of a thing on vertical lines through the bin, [a, b]; inf where it is not.

        The lumps of a bag do not count.
        """
        body = self._first + label - 1
        turn = np.array(self.data.xmat[body]).reshape(3, 3)
        thing = self.things[label - 1]
        x, y = np.meshgrid(*_list_lines())
        starts = np.stack([x, y, np.zeros_like(x)], axis=-1) - np.array(self.data.xpos[body])
        return intersect(thing, starts @ turn, turn[2])


def _list_lines() -> list[Array]:
    """Return x and y of the vertical lines through the bin."""
    return [np.arange(-side / 2 - 0.05, side / 2 + 0.05, CELL_M) for side in INSIDE_M[:2]]


def intersect(thing: Thing, starts: Array, way: Array) -> tuple[Array, Array]:
    """Return where lines from `starts` [..., 3] along `way` [3] enter and leave a thing at the origin; inf: nowhere."""
    half = thing.half_m
    with np.errstate(divide="ignore", invalid="ignore"):
        if thing.kind == "bag":
            low, high = _meet_ball(starts / half, way / half)
        else:
            ends = np.stack([(-half - starts) / way, (half - starts) / way])
            near = ends.min(axis=0)
            far = ends.max(axis=0)
            if thing.kind == "can":
                round_near, round_far = _meet_ball(starts[..., :2] / half[:2], way[:2] / half[:2])
                low = np.fmax(near[..., 2], round_near)
                high = np.fmin(far[..., 2], round_far)
            else:
                low = np.nanmax(near, axis=-1)
                high = np.nanmin(far, axis=-1)
    hits = low < high
    return np.where(hits, low, np.inf), np.where(hits, high, np.inf)


def _meet_ball(starts: Array, way: Array) -> tuple[Array, Array]:
    """Return where lines enter and leave the ball of radius 1 about the origin; NaN or infinite: nowhere."""
    a = float(way @ way)
    b = starts @ way
    c = (starts * starts).sum(axis=-1) - 1
    if a < 1e-12:
        # a line along a can lies inside of its round side, or outside
        inside = c < 0
        return np.where(inside, -np.inf, np.inf), np.where(inside, np.inf, -np.inf)
    root = np.sqrt(b * b - a * c)
    return np.where(root >= 0, (-b - root) / a, np.inf), np.where(root >= 0, (-b + root) / a, -np.inf)


def _draw_camera(random: Rng) -> Array:
    """Draw base_from_camera of a camera that looks at the bin from above."""
    azimuth = random.uniform(0, 2 * np.pi)
    tilt = np.radians(random.uniform(0, TILT_DEG))
    away = np.array([np.sin(tilt) * np.cos(azimuth), np.sin(tilt) * np.sin(azimuth), np.cos(tilt)])
    turn = random.uniform(0, 2 * np.pi)
    eye = frames(-away[None], np.array([np.cos(turn), np.sin(turn), 0.0]))[0]
    return rigid(eye, random.uniform(*HEIGHTS_M) * away)
