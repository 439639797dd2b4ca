"""Ways to hide an object completely: a board in front of it, a cover, a screen, the arm itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tools.scenes.camera import UP
from tools.scenes.colors import NAMED, shade
from tools.scenes.identity import draw_identity
from tools.scenes.layout import clear
from tools.scenes.motion import Array, eased, frames, quaternions, unit
from tools.scenes.occluders import board_model, cover_model, screen_model
from tools.scenes.script import SHORT_S, ClipScript, move_others, sweep
from tools.scenes.stage import Actor, slide

LABELLED = 0.4  # of the occluders
STEEP = math.radians(42)  # seen from higher up, a screen would have to be too tall
ALIKE = 0.6  # share of arms, in training clips, whose colour has the name of that of what they hide
NEAREST, FARTHEST = 0.35, 0.85  # of the way from the camera to what the arm hides


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
    rng, duration = script.rng, script.duration
    pace = min(0.17 * duration, rng.uniform(0.5, 1.0))
    stay = (
        rng.uniform(0.42, 0.48) * duration
        if duration < SHORT_S
        else rng.uniform(1.0, min(3.0, 0.45 * duration))
    )
    free = duration - 2 * pace - stay
    come = float(script.times[0]) + rng.uniform(0.3, 0.6) * free
    return Passing(come, come + pace, come + pace + stay, come + 2 * pace + stay)


def pass_board(script: ClipScript, target: Actor, when: Passing) -> None:
    """Let the hand hold a board between the camera and the object."""
    rng, camera, view = script.rng, script.camera, script.view
    _nudge(script, target, when)
    middle = target.positions + UP * target.model.height / 2
    part = rng.uniform(0.5, 0.72)
    size = part * (target.model.extent * 1.25 + 0.02)
    wide, high = size * rng.uniform(1.0, 1.5), size * rng.uniform(1.0, 1.4)
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
    rng, camera = script.rng, script.camera
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
    rng, view = script.rng, script.view
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
    displacement: Array = script.rng.choice([-1, 1]) * (1 - eased(script.times, when.come, when.there) + gone)
    return displacement


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
