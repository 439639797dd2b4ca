"""Scenarios: scripts of what happens on the table. Each returns the label of the object that it is about, or 0."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tools.scenes.arm import Look
from tools.scenes.camera import UP, Camera, Viewpoint, pan
from tools.scenes.layout import clear, clear_way, destination, free_place, on_table, tinted
from tools.scenes.objects import ObjectModel, Split, board_model, cover_model, draw_identity, screen_model
from tools.scenes.stage import (
    Actor,
    Array,
    Hand,
    Rng,
    carry,
    eased,
    frames,
    grasp,
    minimum_jerk,
    push,
    quaternions,
    roll,
    slide,
    turn,
    unit,
)
from tools.scenes.textures import NAMED, shade

VERBS = ("carry", "carry", "carry", "push", "push", "slide", "slide", "spin", "enter")
SHORT_S = 2.5  # a clip up to this long has one event, which fills it
LABELLED = 0.4  # of the occluders
STEEP = math.radians(42)  # seen from higher up, a screen would have to be too tall
ALIKE = 0.6  # share of arms, in training clips, that are named by the colour of what they hide
# of the way from the camera to what the arm hides
NEAREST = 0.35
FARTHEST = 0.85
LOOKS_AWAY = 0.15  # of the clips in which something leaves: the camera turns instead


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
                end = start + script.rng.uniform(0.3, 0.8)
                slide(actor, script.times, script.at(start), script.at(end), place)


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


class Passing(NamedTuple):
    """Times of an occluder in seconds: it arrives, hides, starts to leave, has left."""

    come: float
    there: float
    go: float
    gone: float


def occlusion(script: ClipScript) -> int:
    """Hide an object completely for a while; return its label."""
    target = _choose_small(script)
    way = script.rng.choice(("board", "board", "cover", "screen", "arm", "arm"))
    if way == "screen" and script.view.elevation < STEEP:
        pass_screen(script, target, passing(script))
    elif way == "cover":
        lower_cover(script, target, passing(script))
    elif way != "arm" or not pass_arm(script, target, passing(script)):
        pass_board(script, target, passing(script))
    move_others(script, target)
    return target.label


def passing(script: ClipScript) -> Passing:
    """Draw times that leave the object visible before and after."""
    rng = script.rng
    duration = script.duration
    pace = min(0.17 * duration, rng.uniform(0.5, 1.0))
    short = duration < SHORT_S
    stay = rng.uniform(0.42, 0.48) * duration if short else rng.uniform(1.0, min(3.0, 0.45 * duration))
    free = duration - 2 * pace - stay
    come = float(script.times[0]) + rng.uniform(0.3, 0.6) * free
    return Passing(come, come + pace, come + pace + stay, come + 2 * pace + stay)


def pass_board(script: ClipScript, target: Actor, when: Passing) -> None:
    """Let the hand hold a board between the camera and the object."""
    rng = script.rng
    camera = script.camera
    view = script.view
    _nudge(script, target, when)
    middle = target.positions + UP * target.model.height / 2
    part = rng.uniform(0.5, 0.72)
    size = part * (target.model.extent * 1.25 + 0.02)
    wide = size * rng.uniform(1.0, 1.5)
    high = size * rng.uniform(1.0, 1.4)
    board = board_model(rng, draw_identity(rng, script.split), (wide, high))
    actor = script.enter(board, np.zeros(3), 0.0, rng.random() < LABELLED)
    side = camera.rotations[:, :, 0] + 0.3 * rng.normal() * camera.rotations[:, :, 1]
    shift = (part * view.width * 0.85 + size) * _displacement(script, when)[:, None] * unit(side)
    centre = camera.positions + part * (middle - camera.positions) + shift
    normal = unit(camera.positions - middle)
    matrices = frames(unit(normal + 0.25 * rng.normal(size=3)), camera.rotations[:, :, 0])
    actor.quats = quaternions(matrices)
    actor.positions = centre - board.height / 2 * matrices[:, :, 2]
    edge = high / 2 * matrices[:, :, 1] + board.height / 2 * matrices[:, :, 2]
    _hold_throughout(script, actor, edge, 0.006)


def pass_arm(script: ClipScript, target: Actor, when: Passing) -> bool:
    """Move the arm's wrist between the camera and the object; return False if the object is too large for that."""
    rng = script.rng
    camera = script.camera
    scale = float(np.clip(script.view.width / 0.6, 0.8, 1.3))
    housing = rng.uniform(0.05, 0.07) * scale
    radius = math.hypot(target.model.radius, target.model.height / 2)
    part = min(FARTHEST, housing / (1.25 * radius))
    if part < NEAREST:
        return False
    script.look = replace(script.look, person=False, housing=housing)
    if script.split == "train" and target.model.color in NAMED and rng.random() < ALIKE:
        script.look = replace(script.look, main=shade(rng, target.model.color))
    middle = target.positions + UP * target.model.height / 2
    wrist = camera.positions + part * (middle - camera.positions)
    hand = script.hand
    tip = wrist + hand.tool * hand.approach(wrist)
    hand.holds.append((when.there, when.go, target, tip - target.positions))
    side = script.view.right * rng.choice([-1, 1]) * 0.9 * script.view.width
    for time, shift in ((when.come, side), (when.there, 0 * side), (when.go, 0 * side), (when.gone, -side)):
        point = tip[np.searchsorted(script.times, time).clip(0, len(tip) - 1)]
        hand.keys.append((time, point + shift))
    hand.grips.append((0.0, rng.uniform(0.01, 0.04)))
    return True


def lower_cover(script: ClipScript, target: Actor, when: Passing) -> None:
    """Let the hand put a cover over the object, sometimes move both, and remove the cover again."""
    rng = script.rng
    cover = cover_model(rng, draw_identity(rng, script.split), target.model)
    start = target.place + script.view.right * rng.choice([-1, 1]) * 0.8 * script.view.width
    actor = script.enter(cover, start, rng.uniform(0, 6), rng.random() < LABELLED)
    up = 1 - eased(script.times, when.come, when.there) + eased(script.times, when.go, when.gone)
    actor.positions[:, 2] += (target.model.height + cover.height * 0.4 + 0.03) * np.clip(up * 1.6, 0, 1)
    slide(actor, script.times, when.come - 0.6, (when.come + when.there) / 2, target.place)
    if rng.random() < 0.5:
        moved = target.place + rng.normal(0, 0.06, 3) * script.view.width * (1, 1, 0)
        others = [other for other in script.actors if other not in (actor, target)]
        if clear(moved, target.model.radius, others):
            for each in (actor, target):
                slide(each, script.times, when.there + 0.05, when.go - 0.05, moved)
    slide(actor, script.times, (when.go + when.gone) / 2, when.gone + 0.8, start)
    _hold_throughout(script, actor, np.array([0.0, 0.0, cover.height - 0.01]), 0.02)


def pass_screen(script: ClipScript, target: Actor, when: Passing) -> None:
    """Slide a tall box along the table between the camera and the object."""
    rng = script.rng
    view = script.view
    gap = target.model.radius + 0.03
    high = 1.15 * (target.model.height + (gap + target.model.radius) * math.tan(view.elevation)) + 0.02
    wide = 2 * target.model.radius * rng.uniform(1.3, 1.8) + 0.03
    screen = screen_model(rng, draw_identity(rng, script.split), (wide, 0.03, high))
    spot = target.place - view.forward * (gap + 0.02)
    side = rng.choice([-1, 1]) * view.right * (0.7 * view.width + wide)
    yaw = math.atan2(view.right[1], view.right[0])
    actor = script.enter(screen, spot + side, yaw, rng.random() < LABELLED)
    slide(actor, script.times, when.come, when.there, spot)
    slide(actor, script.times, when.go, when.gone, spot + rng.choice([-1, 1]) * side)
    if rng.random() < 0.5:
        sweep(script)


def _choose_small(script: ClipScript) -> Actor:
    """Choose one of the smaller objects near the middle."""
    centre = script.view.centre[:2]
    order = sorted(
        script.actors, key=lambda a: a.model.extent + 0.4 * float(np.linalg.norm(a.place[:2] - centre))
    )
    return order[script.rng.integers(min(3, len(order)))]


def _displacement(script: ClipScript, when: Passing) -> Array:
    """Return the occluder's displacement [n]: 1 before it arrives, 0 while it hides, 1 or -1 after it has left."""
    gone = script.rng.choice([-1, 1]) * eased(script.times, when.go, when.gone)
    return script.rng.choice([-1, 1]) * (1 - eased(script.times, when.come, when.there) + gone)


def _nudge(script: ClipScript, target: Actor, when: Passing) -> None:
    """Sometimes move the hidden object a little."""
    others = [other for other in script.actors if other is not target]
    place = target.place + script.rng.normal(0, 0.06, 3) * script.view.width * (1, 1, 0)
    if script.rng.random() < 0.5 and clear(place, target.model.radius, others):
        slide(target, script.times, when.there, when.go, place)


def _hold_throughout(script: ClipScript, actor: Actor, offset: Array, half: float) -> None:
    script.hand.keys.append((0.0, (actor.positions + offset)[0]))
    script.hand.holds.append((-np.inf, np.inf, actor, offset))
    script.hand.grips.append((0.0, half))


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
        shift = side * 1.5 * script.view.width
        script.camera = pan(script.camera, script.view, script.times, out, back, shift)
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
    hand = script.hand
    times = script.times
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
        start = count + rng.uniform(0, 0.15)
        end = count + rng.uniform(0.85, 1)
        _swap(script, lookalikes[first], lookalikes[second], script.at(start / swaps), script.at(end / swaps))
    if rng.random() < 0.5:
        sweep(script)
    return target.label


def _swap(script: ClipScript, first: Actor, second: Actor, start: float, end: float) -> None:
    """Turn two objects half around their middle, on a path that touches no other object."""
    middle = (first.place + second.place) / 2
    arm = first.place - middle
    half = float(np.linalg.norm(arm))
    # wide enough to pass each other
    min_width = max(min(1.0, 1.3 * first.model.radius / max(half, 1e-6)), 0.35)
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
