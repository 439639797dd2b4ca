"""A clip in the making, and what may happen in any of them: objects that move by themselves, an arm that passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.scenes.arm import Look
from tools.scenes.camera import UP, Camera, View
from tools.scenes.identity import Split
from tools.scenes.layout import clear_way, destination, on_table
from tools.scenes.motion import Array, Rng, turn
from tools.scenes.objects import ObjectModel
from tools.scenes.stage import Actor, Hand, carry, push, roll, slide

VERBS = ("carry", "carry", "carry", "push", "push", "slide", "slide", "spin", "enter")
SHORT_S = 2.5  # a clip up to this long has one event, which fills it


@dataclass
class Stage:
    """Who is there. times [n] in seconds: what is filmed of a script that lasts from 0 to `seconds`."""

    rng: Rng
    split: Split
    view: View
    camera: Camera
    times: Array
    seconds: float
    actors: list[Actor]
    hand: Hand
    look: Look

    @property
    def duration(self) -> float:
        """Seconds that are filmed."""
        return float(self.times[-1] - self.times[0])

    def at(self, fraction: float) -> float:
        """The time at a fraction of what is filmed."""
        return float(self.times[0]) + fraction * self.duration

    def enter(self, model: ObjectModel, place: Array, yaw: float, labelled: bool) -> Actor:
        """Put another object on stage."""
        label = 1 + max((actor.label for actor in self.actors), default=0) if labelled else 0
        actor = Actor.stand(model, label, place, yaw, len(self.times))
        self.actors.append(actor)
        return actor


def move(stage: Stage, actor: Actor) -> None:
    """Something happens to an object: it is carried, pushed, slid, rolled, turned or comes in."""
    rng = stage.rng
    start = rng.uniform(0, max(0.5 * stage.seconds, stage.seconds - 3))
    span = rng.uniform(1.2, 3.0)
    verb = "roll" if actor.model.roll and rng.random() < 0.6 else rng.choice(VERBS)
    if verb in ("carry", "push"):
        start = max(start, stage.hand.busy_until + 0.8)
    if verb == "spin":
        slide(actor, stage.times, start, start + span, actor.place, spin=rng.uniform(-4, 4))
    elif verb == "enter":
        _come_in(stage, actor, start, start + span)
    else:
        place = destination(rng, stage.view, actor, stage.actors, way=verb != "carry")
        if place is not None:
            _move_to(stage, actor, verb, start, start + span, place)


def move_others(stage: Stage, target: Actor, share: float = 0.3) -> None:
    """Some of the objects that stand still slide elsewhere."""
    for actor in stage.actors:
        still = actor.label and actor is not target and np.ptp(actor.positions, axis=0).max() < 1e-6
        if still and stage.rng.random() < share:
            place = destination(stage.rng, stage.view, actor, stage.actors, way=True)
            if place is not None:
                start = stage.rng.uniform(0, 0.5)
                slide(
                    actor, stage.times, stage.at(start), stage.at(start + stage.rng.uniform(0.3, 0.8)), place
                )


def sweep(stage: Stage) -> None:
    """The arm passes over and between the objects."""
    rng = stage.rng
    time = -rng.uniform(0, 1)
    while time < stage.seconds + 1:
        point = on_table(stage.view, *rng.uniform(-1, 1, 2))
        stage.hand.keys.append((time, point + UP * rng.uniform(0.02, 0.25)))
        time += rng.uniform(0.7, 1.8)
    stage.hand.grips.append((0.0, rng.uniform(0.01, 0.05)))


def clearance(actor: Actor, place: Array, actors: Sequence[Actor]) -> float:
    """How far to lift an object so that it meets no other on its way."""
    others = [other for other in actors if other is not actor]
    if clear_way(actor.place, place, actor.model.radius, others):
        return 0.0
    return max(other.model.height for other in others) + 0.02


def _move_to(stage: Stage, actor: Actor, verb: str, start: float, end: float, place: Array) -> None:
    if verb == "roll":
        _face(actor, place)
        roll(actor, stage.times, start, end, place)
    elif verb == "carry":
        lift = max(stage.rng.uniform(0.05, 0.16), clearance(actor, place, stage.actors))
        carry(stage.hand, actor, stage.times, start, end, place, lift)
    elif verb == "push":
        push(stage.hand, actor, stage.times, start, end, place)
    else:
        slide(actor, stage.times, start, end, place, spin=stage.rng.normal(0, 0.8))


def _face(actor: Actor, place: Array) -> None:
    """Lay what rolls about one axis across its way."""
    if not actor.model.ball:
        way = place - actor.place
        actor.quats = turn((0, 0, 1), np.full(len(actor.quats), math.atan2(way[1], way[0])))


def _come_in(stage: Stage, actor: Actor, start: float, end: float) -> None:
    side = stage.rng.choice([-1.0, 1.0])
    home = actor.place.copy()
    away = home + side * 1.1 * (stage.view.width + actor.model.extent) * stage.view.right
    actor.positions += away - home
    actor.place = away
    slide(actor, stage.times, start, end, home, spin=stage.rng.normal(0, 0.5))
