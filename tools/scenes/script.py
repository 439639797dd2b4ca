"""The script of a clip, and the events of any scenario: objects that move, an arm that passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.scenes.arm import Look
from tools.scenes.camera import UP, Camera, Viewpoint
from tools.scenes.identity import Split
from tools.scenes.layout import clear_way, destination, on_table
from tools.scenes.motion import Array, Rng, turn
from tools.scenes.objects import ObjectModel
from tools.scenes.stage import Actor, Hand, carry, push, roll, slide

VERBS = ("carry", "carry", "carry", "push", "push", "slide", "slide", "spin", "enter")
SHORT_S = 2.5  # a clip up to this long has one event, which fills it


@dataclass
class ClipScript:
    """The actors of a clip. times [n] in seconds: the filmed times of a script from 0 to `seconds`."""

    rng: Rng
    split: Split
    view: Viewpoint
    camera: Camera
    times: Array
    seconds: float
    actors: list[Actor]
    hand: Hand
    look: Look

    @property
    def duration(self) -> float:
        """Length of the film in seconds."""
        return float(self.times[-1] - self.times[0])

    def at(self, fraction: float) -> float:
        """Return the time at a fraction of the film."""
        return float(self.times[0]) + fraction * self.duration

    def enter(self, model: ObjectModel, place: Array, yaw: float, labelled: bool) -> Actor:
        """Add another object to the stage; return it."""
        label = 1 + max((actor.label for actor in self.actors), default=0) if labelled else 0
        actor = Actor.stand(model, label, place, yaw, len(self.times))
        self.actors.append(actor)
        return actor


def move(script: ClipScript, actor: Actor) -> None:
    """Let something happen to an object: it is carried, pushed, slid, rolled, turned or enters."""
    rng = script.rng
    start = rng.uniform(0, max(0.5 * script.seconds, script.seconds - 3))
    span = rng.uniform(1.2, 3.0)
    verb = "roll" if actor.model.roll and rng.random() < 0.6 else rng.choice(VERBS)
    if verb in ("carry", "push"):
        start = max(start, script.hand.busy_until + 0.8)
    if verb == "spin":
        slide(actor, script.times, start, start + span, actor.place, spin=rng.uniform(-4, 4))
    elif verb == "enter":
        _come_in(script, actor, start, start + span)
    else:
        place = destination(rng, script.view, actor, script.actors, way=verb != "carry")
        if place is not None:
            _move_to(script, actor, verb, start, start + span, place)


def move_others(script: ClipScript, target: Actor, share: float = 0.3) -> None:
    """Slide some of the objects that stand still elsewhere."""
    for actor in script.actors:
        still = actor.label and actor is not target and np.ptp(actor.positions, axis=0).max() < 1e-6
        if still and script.rng.random() < share:
            place = destination(script.rng, script.view, actor, script.actors, way=True)
            if place is not None:
                start = script.rng.uniform(0, 0.5)
                slide(
                    actor,
                    script.times,
                    script.at(start),
                    script.at(start + script.rng.uniform(0.3, 0.8)),
                    place,
                )


def sweep(script: ClipScript) -> None:
    """Move the arm over and between the objects."""
    rng = script.rng
    time = -rng.uniform(0, 1)
    while time < script.seconds + 1:
        point = on_table(script.view, *rng.uniform(-1, 1, 2))
        script.hand.keys.append((time, point + UP * rng.uniform(0.02, 0.25)))
        time += rng.uniform(0.7, 1.8)
    script.hand.grips.append((0.0, rng.uniform(0.01, 0.05)))


def clearance(actor: Actor, place: Array, actors: Sequence[Actor]) -> float:
    """Return the height to lift an object so that it touches no other on its way."""
    others = [other for other in actors if other is not actor]
    if clear_way(actor.place, place, actor.model.radius, others):
        return 0.0
    return max(other.model.height for other in others) + 0.02


def _move_to(script: ClipScript, actor: Actor, verb: str, start: float, end: float, place: Array) -> None:
    if verb == "roll":
        _face(actor, place)
        roll(actor, script.times, start, end, place)
    elif verb == "carry":
        lift = max(script.rng.uniform(0.05, 0.16), clearance(actor, place, script.actors))
        carry(script.hand, actor, script.times, start, end, place, lift)
    elif verb == "push":
        push(script.hand, actor, script.times, start, end, place)
    else:
        slide(actor, script.times, start, end, place, spin=script.rng.normal(0, 0.8))


def _face(actor: Actor, place: Array) -> None:
    """Turn an object that rolls about one axis across its way."""
    if not actor.model.ball:
        way = place - actor.place
        actor.quats = turn((0, 0, 1), np.full(len(actor.quats), math.atan2(way[1], way[0])))


def _come_in(script: ClipScript, actor: Actor, start: float, end: float) -> None:
    side = script.rng.choice([-1.0, 1.0])
    home = actor.place.copy()
    away = home + side * 1.1 * (script.view.width + actor.model.extent) * script.view.right
    actor.positions += away - home
    actor.place = away
    slide(actor, script.times, start, end, home, spin=script.rng.normal(0, 0.5))
