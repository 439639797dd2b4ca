"""A clip before it is rendered: everything that a seed decides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tools.scenes import robosuite
from tools.scenes.arm import Limb, draw_look, gripper, reach
from tools.scenes.camera import Camera, View, draw_view, film
from tools.scenes.effects import Effects, draw_effects
from tools.scenes.identity import SPLITS, Split
from tools.scenes.layout import arrange, draw_models, on_table
from tools.scenes.motion import Array, Rng, frames
from tools.scenes.room import Room, draw_room
from tools.scenes.scenarios import SCENARIOS
from tools.scenes.script import Stage
from tools.scenes.stage import Actor, Hand

SCRIPT_S = 4.0  # a shorter clip shows a part of a script of this length
FEWEST = {"free": 2, "occlusion": 2, "leave": 2, "lookalike": 1}
TRIES = 50
WRIST_CAMERAS = 0.35  # of the clips without an arm
SIDES = {
    "far": (0.0, 1.7),
    "left": (-1.8, 0.0),
    "right": (1.8, 0.0),
    "near": (0.3, -2.0),
}  # half views from the centre


@dataclass(frozen=True)
class Settings:
    """What is asked for: split, frames per clip, size in pixels, frames per second and the scenarios' weights.

    robosuite: its meshes among the training objects. photos: a folder of pictures for some of the surfaces.
    """

    split: Split
    frames: int
    width: int
    height: int
    fps: float
    weights: dict[str, float]
    depth: bool = False
    robosuite: bool = False
    photos: Path | None = None


@dataclass(frozen=True)
class Plan:
    """A clip in every detail. Arrays over time have `effects.samples` entries for each frame."""

    settings: Settings
    scenario: str
    target: int  # label of what the scenario is about, or 0
    actors: list[Actor]
    limbs: list[Limb]
    camera: Camera
    room: Room
    effects: Effects


def make_plan(rng: Rng, settings: Settings, scenario: str) -> Plan:
    """A clip of a scenario, drawn at random."""
    effects = draw_effects(rng)
    stage = _set_up(rng, settings, scenario, effects)
    target = SCENARIOS[scenario](stage)
    limbs = _limbs(stage)
    room = draw_room(rng, stage.view, settings.split, _standing(stage), settings.photos)
    return Plan(settings, scenario, target, stage.actors, limbs, stage.camera, room, effects)


def draw_scenario(rng: Rng, settings: Settings) -> str:
    """A scenario by the settings' weights."""
    names = list(settings.weights)
    weights = np.array([settings.weights[name] for name in names])
    return str(rng.choice(names, p=weights / weights.sum()))


def seeded(seed: int, settings: Settings, index: int, attempt: int) -> Rng:
    """The generator of one clip's one attempt."""
    return np.random.default_rng([seed, SPLITS.index(settings.split), index, attempt])


def sample_times(start: float, settings: Settings, effects: Effects) -> Array:
    """When pictures are taken: `samples` around each frame, within the shutter's time."""
    frames = start + np.arange(settings.frames) / settings.fps
    within = (np.arange(effects.samples) - effects.samples // 2) / effects.samples
    return (frames[:, None] + within * effects.shutter / settings.fps).ravel()


def frame_samples(effects: Effects, settings: Settings) -> npt.NDArray[np.intp]:
    """Of all the pictures taken, the one in the middle of each frame."""
    return np.arange(settings.frames) * effects.samples + effects.samples // 2


def _set_up(rng: Rng, settings: Settings, scenario: str, effects: Effects) -> Stage:
    duration = settings.frames / settings.fps
    seconds = max(SCRIPT_S, duration)
    start = rng.uniform(0, seconds - duration) if scenario == "free" else 0.0
    times = sample_times(start, settings, effects)
    more = robosuite.makers() if settings.robosuite else {}
    for _ in range(TRIES):
        models, width = draw_models(rng, settings.split, more)
        view = draw_view(rng, width)
        actors = arrange(rng, view, models, len(times))
        if len(actors) >= FEWEST[scenario]:
            break
    calm = 0.6 if scenario == "occlusion" else 1.0
    camera = film(rng, view, times, (settings.width, settings.height), calm=calm)
    look = draw_look(rng, float(np.clip(width / 0.6, 0.7, 1.3)))
    return Stage(rng, settings.split, view, camera, times, seconds, actors, draw_hand(rng, view), look)


def draw_hand(rng: Rng, view: View) -> Hand:
    """A hand whose arm stands somewhere around the table."""
    side = rng.choice(list(SIDES), p=[0.4, 0.25, 0.25, 0.1])
    base = on_table(view, *(np.array(SIDES[side]) + rng.normal(0, 0.25, 2)))
    return Hand(base, rng.uniform(0.0, 0.5), rng.uniform(0.13, 0.19), rng.uniform(0, np.pi))


def _limbs(stage: Stage) -> list[Limb]:
    """The arm, where the hand has anything to do; else sometimes a gripper that the camera is mounted on."""
    hand, camera = stage.hand, stage.camera
    if hand.keys:
        _park(stage)
        return reach(stage.rng, stage.times, hand, stage.look)
    if stage.rng.random() > WRIST_CAMERAS:
        return []
    right, up, back = (camera.rotations[:, :, axis] for axis in range(3))
    tip = camera.positions - 0.2 * back - 0.07 * up
    opening = hand.opening(stage.times)
    return gripper(stage.rng, tip, frames(-back, right), opening, draw_look(stage.rng, 1.0, person=False))


def _park(stage: Stage) -> None:
    """Before and after its work the hand is near its base."""
    hand, rng = stage.hand, stage.rng
    if not np.isfinite(hand.busy_until):
        return
    first, last = min(hand.keys, key=lambda key: key[0]), max(hand.keys, key=lambda key: key[0])
    for time, key in (
        (first[0] - rng.uniform(0.7, 1.5), first[1]),
        (last[0] + rng.uniform(0.7, 1.5), last[1]),
    ):
        rest = key + rng.uniform(0.5, 0.9) * (hand.base - key)
        rest[2] = rng.uniform(0.15, 0.35)
        hand.keys.append((time, rest))


def _standing(stage: Stage) -> Array:
    """Points [n, 2] that the table must be under."""
    paths = [actor.positions[actor.positions[:, 2] < 0.02, :2] for actor in stage.actors]
    near = [
        path[np.linalg.norm(path - stage.view.centre[:2], axis=-1) < 1.2 * stage.view.width] for path in paths
    ]
    corners = np.array([on_table(stage.view, x, y)[:2] for x, y in ((-1, 0), (1, 0), (0, -0.8), (0, 0.8))])
    return np.concatenate([*near, corners])
