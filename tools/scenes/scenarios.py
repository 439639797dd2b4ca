"""What happens in a clip: free movement, an occlusion, an object that leaves, lookalikes that cross."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tools.scenes.camera import UP, Camera, View, pan
from tools.scenes.identity import Split, draw_identity
from tools.scenes.layout import destination, free_place, on_table, tinted
from tools.scenes.motion import Array, Rng, eased, frames, minimum_jerk, quaternions, turn, unit
from tools.scenes.objects import ObjectModel
from tools.scenes.occluders import board_model, cover_model, screen_model
from tools.scenes.stage import Actor, Hand, carry, grasp_height, push, roll, slide

LABELLED_OCCLUDERS = 0.4


@dataclass
class Stage:
    """A clip in the making. times [n] in seconds; the clip is filmed from times[0] to times[-1] of a longer script."""

    rng: Rng
    split: Split
    view: View
    camera: Camera
    times: Array
    seconds: float  # of the script
    actors: list[Actor]
    hand: Hand = field(default_factory=Hand)

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


def free(stage: Stage) -> int:
    """Some objects are carried, pushed, slid, rolled, turned or come in."""
    rng = stage.rng
    movers = rng.permutation(len(stage.actors))[: rng.integers(1, 4)]
    for index in movers:
        _move(stage, stage.actors[index])
    if not stage.hand.holds and rng.random() < 0.7:
        sweep(stage)
    return 0


def _move(stage: Stage, actor: Actor) -> None:
    rng = stage.rng
    start = rng.uniform(0, 0.5) * stage.seconds
    end = start + rng.uniform(1.2, 3.0)
    verb = "roll" if actor.model.roll and rng.random() < 0.6 else rng.choice(VERBS)
    on_arm = verb in ("carry", "push")
    if on_arm:
        start, end = (time + max(0.0, stage.hand.busy_until + 0.8 - start) for time in (start, end))
    if verb == "spin":
        slide(actor, stage.times, start, end, actor.place, spin=rng.uniform(-4, 4))
        return
    place = destination(rng, stage.view, actor, stage.actors, way=verb != "carry")
    if place is None:
        return
    if verb == "roll":
        _face(actor, place)
        roll(actor, stage.times, start, end, place)
    elif verb == "carry":
        carry(stage.hand, actor, stage.times, start, end, place, rng.uniform(0.06, 0.2))
    elif verb == "push":
        push(stage.hand, actor, stage.times, start, end, place)
    elif verb == "enter":
        _come_in(stage, actor, start, end)
    else:
        slide(actor, stage.times, start, end, place, spin=rng.normal(0, 0.8))


VERBS = ("carry", "carry", "carry", "push", "push", "slide", "slide", "spin", "enter")


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


def sweep(stage: Stage) -> None:
    """The arm passes over and between the objects."""
    rng = stage.rng
    time = -rng.uniform(0, 1)
    while time < stage.seconds + 1:
        point = on_table(stage.view, *rng.uniform(-1, 1, 2))
        stage.hand.keys.append((time, point + UP * rng.uniform(0.02, 0.25)))
        time += rng.uniform(0.6, 1.6)
    stage.hand.grips.append((0.0, rng.uniform(0.01, 0.05)))


def occlusion(stage: Stage) -> int:
    """A board, a cover or a screen hides an object completely for a while."""
    target = _smallest(stage)
    way = stage.rng.choice(("board", "board", "cover", "screen"))
    if way == "screen" and stage.view.elevation < math.radians(42):
        _pass_screen(stage, target)
    elif way == "cover":
        _lower_cover(stage, target)
    else:
        _pass_board(stage, target)
    _others_move(stage, target)
    return target.label


def _smallest(stage: Stage) -> Actor:
    """One of the smaller objects, near the middle."""
    centre = stage.view.centre[:2]
    order = sorted(
        stage.actors, key=lambda a: a.model.extent + 0.4 * float(np.linalg.norm(a.place[:2] - centre))
    )
    return order[stage.rng.integers(min(3, len(order)))]


def _hidden_times(stage: Stage) -> tuple[float, float, float, float]:
    """When the occluder comes, is there, starts to go, is gone."""
    come = stage.rng.uniform(0.08, 0.2)
    gone = stage.rng.uniform(0.82, 0.94)
    pace = min(0.18, 0.9 / max(stage.duration, 1e-6))
    return stage.at(come), stage.at(come + pace), stage.at(gone - pace), stage.at(gone)


def _pass_board(stage: Stage, target: Actor) -> None:
    rng, camera, view = stage.rng, stage.camera, stage.view
    _nudge(stage, target)
    middle = target.positions + UP * target.model.height / 2
    part = rng.uniform(0.5, 0.72)
    centre = camera.positions + part * (middle - camera.positions)
    size = part * (target.model.extent * 1.25 + 0.02)
    board = board_model(
        rng, draw_identity(rng, stage.split), (size * rng.uniform(1.0, 1.5), size * rng.uniform(1.0, 1.4))
    )
    actor = stage.enter(board, np.zeros(3), 0.0, rng.random() < LABELLED_OCCLUDERS)
    come, there, go, gone = _hidden_times(stage)
    away = 1 - eased(stage.times, come, there) + rng.choice([-1, 1]) * eased(stage.times, go, gone)
    side = rng.choice([-1, 1]) * (camera.rotations[:, :, 0] + 0.3 * rng.normal() * camera.rotations[:, :, 1])
    shift = part * view.width * 0.85 + size
    centre = centre + shift * away[:, None] * unit(side)
    normal = unit(camera.positions - middle)
    matrices = frames(unit(normal + 0.25 * rng.normal(size=3)), camera.rotations[:, :, 0])
    actor.quats = quaternions(matrices)
    actor.positions = centre - board.height / 2 * matrices[:, :, 2]
    grip = matrices[:, :, 1] * board_reach(board) + board.height / 2 * matrices[:, :, 2]
    stage.hand.keys.append((0.0, centre[0]))
    stage.hand.holds.append((-np.inf, np.inf, actor, grip))
    stage.hand.grips.append((0.0, 0.006))


def board_reach(board: ObjectModel) -> float:
    """From a board's middle to its upper edge."""
    return float(np.ptp(board.parts[0].mesh.vertices[:, 1])) / 2


def _nudge(stage: Stage, target: Actor) -> None:
    """Sometimes the hidden object moves a little meanwhile."""
    if stage.rng.random() < 0.5:
        place = target.place + stage.rng.normal(0, 0.06, 3) * stage.view.width * (1, 1, 0)
        if all(
            np.linalg.norm((place - o.place)[:2]) > target.model.radius + o.model.radius
            for o in stage.actors
            if o is not target
        ):
            slide(target, stage.times, stage.at(0.35), stage.at(0.65), place)


def _lower_cover(stage: Stage, target: Actor) -> None:
    rng = stage.rng
    cover = cover_model(rng, draw_identity(rng, stage.split), target.model)
    start = target.place + stage.view.right * rng.choice([-1, 1]) * 0.8 * stage.view.width
    actor = stage.enter(cover, start, rng.uniform(0, 6), rng.random() < LABELLED_OCCLUDERS)
    come, there, go, gone = _hidden_times(stage)
    height = target.model.height + cover.height * 0.4 + 0.03
    up = 1 - eased(stage.times, come, there) + eased(stage.times, go, gone)
    actor.positions[:, 2] += height * np.clip(up * 1.6, 0, 1)
    early, late = come + 0.5 * (there - come), gone - 0.5 * (gone - go)
    slide(actor, stage.times, come - 0.6, early, target.place)
    if rng.random() < 0.5:
        moved = target.place + rng.normal(0, 0.06, 3) * stage.view.width * (1, 1, 0)
        for each in (actor, target):
            slide(each, stage.times, there + 0.05, go - 0.05, moved)
    slide(actor, stage.times, late, gone + 0.8, start)
    offset = np.array([0.0, 0.0, cover.height - 0.01])
    stage.hand.keys.append((0.0, actor.positions[0] + offset))
    stage.hand.holds.append((-np.inf, np.inf, actor, offset))
    stage.hand.grips.append((0.0, 0.02))


def _pass_screen(stage: Stage, target: Actor) -> None:
    rng, view = stage.rng, stage.view
    slope = math.tan(view.elevation)
    gap = target.model.radius + 0.03
    height = 1.15 * (target.model.height + (gap + target.model.radius) * slope) + 0.02
    wide = 2 * target.model.radius * rng.uniform(1.3, 1.8) + 0.03
    screen = screen_model(rng, draw_identity(rng, stage.split), (wide, 0.03, height))
    spot = target.place - view.forward * (gap + 0.02)
    side = rng.choice([-1, 1]) * view.right * (0.7 * view.width + wide)
    yaw = math.atan2(view.right[1], view.right[0])
    actor = stage.enter(screen, spot + side, yaw, rng.random() < LABELLED_OCCLUDERS)
    come, there, go, gone = _hidden_times(stage)
    slide(actor, stage.times, come, there, spot)
    slide(actor, stage.times, go, gone, spot + rng.choice([-1, 1]) * side)
    if rng.random() < 0.5:
        sweep(stage)


def _others_move(stage: Stage, target: Actor) -> None:
    for actor in stage.actors:
        still = actor.label and actor is not target and np.ptp(actor.positions, axis=0).max() < 1e-6
        if still and stage.rng.random() < 0.3:
            place = destination(stage.rng, stage.view, actor, stage.actors, way=True)
            if place is not None:
                slide(actor, stage.times, stage.at(0), stage.at(stage.rng.uniform(0.6, 1.2)), place)


def leave(stage: Stage) -> int:
    """An object leaves the view and returns, or the camera looks away from it."""
    rng = stage.rng
    target = stage.actors[rng.integers(len(stage.actors))]
    out, back = stage.at(rng.uniform(0.1, 0.2)), stage.at(rng.uniform(0.8, 0.92))
    side = rng.choice([-1.0, 1.0])
    if rng.random() < 0.25:
        stage.camera = pan(stage.camera, stage.view, stage.times, out, back, side * 1.6 * stage.view.width)
        return target.label
    away = target.place + side * stage.view.right * (1.1 * stage.view.width + target.model.extent)
    home = target.place.copy()
    if rng.random() < 0.3:
        place = free_place(rng, stage.view, target.model.radius, stage.actors, 0.7)
        home = home if place is None else place
    pace = 0.4 * (back - out)
    if rng.random() < 0.5:
        for start, end, place in ((out, out + pace, away), (back - pace, back, home)):
            slide(target, stage.times, start, end, place)
    else:
        _take_away(stage, target, (out, out + pace, back - pace, back), away, home)
    _others_move(stage, target)
    return target.label


def _take_away(
    stage: Stage, target: Actor, when: tuple[float, float, float, float], away: Array, home: Array
) -> None:
    lift = stage.rng.uniform(0.05, 0.15)
    raised = eased(stage.times, when[0], when[0] + 0.1 * stage.duration) - eased(
        stage.times, when[3] - 0.1 * stage.duration, when[3]
    )
    target.positions[:, 2] += lift * raised
    offset = np.array([0.0, 0.0, grasp_height(target.model)])
    stage.hand.hold(target, when[0] - 0.05, when[3], offset, UP * 0.1)
    target.shift(eased(stage.times, when[0], when[1]), away)
    target.shift(eased(stage.times, when[2], when[3]), home)
    stage.hand.release(target, when[3], offset)
    stage.hand.grips += [
        (when[0] - 0.3, target.model.grasp + 0.02),
        (when[0], target.model.grasp),
        (when[3] + 0.2, target.model.grasp + 0.02),
    ]


def lookalike(stage: Stage) -> int:
    """Two or three objects of one shape change places, so that one passes in front of another."""
    rng = stage.rng
    target = stage.actors[0]
    for _ in range(rng.integers(1, 3)):
        place = free_place(rng, stage.view, target.model.radius, stage.actors, 0.7)
        if place is not None:
            tint = rng.uniform(0.75, 1.25, 3) if rng.random() < 0.5 else np.ones(3)
            stage.enter(tinted(target.model, tint), place, rng.uniform(0, 6), True)
    twins = [actor for actor in stage.actors if actor.model.identity == target.model.identity]
    swaps = max(1, round(stage.duration / 2.5))
    for count in range(swaps if len(twins) > 1 else 0):
        first, second = rng.permutation(len(twins))[:2]
        span = (
            stage.at((count + rng.uniform(0, 0.15)) / swaps),
            stage.at((count + rng.uniform(0.85, 1)) / swaps),
        )
        _swap(stage, twins[first], twins[second], span)
    if rng.random() < 0.5:
        sweep(stage)
    return target.label


def _swap(stage: Stage, first: Actor, second: Actor, span: tuple[float, float]) -> None:
    """Half a turn of two objects about their middle, squeezed so that neither goes far."""
    middle = (first.place + second.place) / 2
    arm = first.place - middle
    half = float(np.linalg.norm(arm))
    across = np.cross(UP, arm) * max(min(1.0, 1.3 * first.model.radius / max(half, 1e-6)), 0.35)
    angle = np.pi * minimum_jerk((stage.times - span[0]) / (span[1] - span[0]))[:, None]
    way = (np.cos(angle) - 1) * arm + np.sin(angle) * across
    first.positions += way
    second.positions -= way
    first.place, second.place = second.place, first.place


SCENARIOS: dict[str, Callable[[Stage], int]] = {
    "free": free,
    "occlusion": occlusion,
    "leave": leave,
    "lookalike": lookalike,
}
