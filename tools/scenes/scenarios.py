"""Scenarios of clips: free movement, similar things, an occlusion, an object that leaves, lookalikes that cross."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tools.scenes.camera import UP, pan
from tools.scenes.layout import clear, free_place, tinted
from tools.scenes.motion import Array, eased, minimum_jerk
from tools.scenes.occlusion import occlusion
from tools.scenes.script import SHORT_S, ClipScript, clearance, move, move_others, sweep
from tools.scenes.stage import Actor, grasp, slide

LOOKS_AWAY = 0.15  # of the clips in which something leaves: the camera turns instead


def free(script: ClipScript) -> int:
    """Move some of the objects in random ways; return 0, since there is no target."""
    rng = script.rng
    count = max(1, round(rng.uniform(0.6, 3.2) * script.seconds / 4))
    for index in rng.permutation(len(script.actors))[:count]:
        move(script, script.actors[index])
    if not script.hand.holds and rng.random() < 0.7:
        sweep(script)
    return 0


def leave(script: ClipScript) -> int:
    """Move an object out of view and back, or turn the camera away from it; return its label."""
    rng = script.rng
    target = script.actors[rng.integers(len(script.actors))]
    spare = max(0.0, script.duration - 4.5)  # seconds
    out = script.at(rng.uniform(0.1, 0.2)) + rng.uniform(0, 0.5) * spare
    back = script.at(rng.uniform(0.8, 0.92)) - rng.uniform(0, 0.5) * spare
    side = rng.choice([-1.0, 1.0])
    if rng.random() < LOOKS_AWAY:
        script.camera = pan(
            script.camera, script.view, script.times, out, back, side * 1.5 * script.view.width
        )
        return target.label
    away = target.place + side * script.view.right * (1.1 * script.view.width + target.model.extent)
    home = target.place.copy()
    place = free_place(rng, script.view, target.model.radius, script.actors, 0.7)
    if place is not None and rng.random() < 0.3:
        home = place
    pace = 0.4 * (back - out)
    if rng.random() < 0.4:
        slide(target, script.times, out, out + pace, away)
        slide(target, script.times, back - pace, back, home)
    else:
        take_away(script, target, (out, out + pace, back - pace, back), away, home)
    move_others(script, target)
    return target.label


def take_away(
    script: ClipScript, target: Actor, when: tuple[float, float, float, float], away: Array, home: Array
) -> None:
    """Let the hand carry an object away between the first two times, and back between the last two."""
    hand, times = script.hand, script.times
    lift = max(script.rng.uniform(0.05, 0.15), clearance(target, away, script.actors))
    span = 0.35 * (when[1] - when[0])
    offset, half = grasp(hand, target)
    hand.hold(target, when[0], when[3], offset, UP * 0.1)
    raised = eased(times, when[0], when[0] + span) - eased(times, when[3] - span, when[3])
    target.positions[:, 2] += lift * raised
    target.shift(eased(times, when[0] + 0.3 * span, when[1]), away)
    target.shift(eased(times, when[2], when[3] - 0.3 * span), home)
    hand.release(target, when[3], offset)
    hand.grip(when[0], when[3], half)


def lookalike(script: ClipScript) -> int:
    """Let two or three objects of one shape change places, so that one passes in front of another; return its label."""
    rng = script.rng
    target = script.actors[0]
    for _ in range(rng.integers(1, 3)):
        place = free_place(rng, script.view, target.model.radius, script.actors, 0.7)
        if place is not None:
            tint = rng.uniform(0.75, 1.25, 3) if rng.random() < 0.5 else np.ones(3)
            script.enter(tinted(target.model, tint), place, rng.uniform(0, 6), True)
    lookalikes = [actor for actor in script.actors if actor.model.identity == target.model.identity]
    swaps = max(1, round(script.duration / SHORT_S)) if len(lookalikes) > 1 else 0
    for count in range(swaps):
        first, second = rng.permutation(len(lookalikes))[:2]
        start, end = count + rng.uniform(0, 0.15), count + rng.uniform(0.85, 1)
        _swap(script, lookalikes[first], lookalikes[second], script.at(start / swaps), script.at(end / swaps))
    if rng.random() < 0.5:
        sweep(script)
    return target.label


def _swap(script: ClipScript, first: Actor, second: Actor, start: float, end: float) -> None:
    """Turn two objects half around their middle, on a path that touches no other object."""
    middle = (first.place + second.place) / 2
    arm = first.place - middle
    half = float(np.linalg.norm(arm))
    min_width = max(
        min(1.0, 1.3 * first.model.radius / max(half, 1e-6)), 0.35
    )  # wide enough to pass each other
    others = [actor for actor in script.actors if actor is not first and actor is not second]
    rings = [np.cross(UP, arm) * width for width in (min_width, 0.5 * (min_width + 1), 1.0, 1.3)]
    free = [ring for ring in rings if _clear_ring(middle, arm, ring, first.model.radius, others)]
    across = (free or rings)[0]
    angle = np.pi * minimum_jerk((script.times - start) / (end - start))[:, None]
    way = (np.cos(angle) - 1) * arm + np.sin(angle) * across
    first.positions += way
    second.positions -= way
    first.place, second.place = second.place, first.place


def _clear_ring(middle: Array, arm: Array, across: Array, radius: float, others: list[Actor]) -> bool:
    angles = np.linspace(0, 2 * np.pi, 24)
    return all(clear(middle + np.cos(a) * arm + np.sin(a) * across, radius, others) for a in angles)


SCENARIOS: dict[str, Callable[[ClipScript], int]] = {
    "free": free,
    "occlusion": occlusion,
    "leave": leave,
    "lookalike": lookalike,
    "similar": free,
}
