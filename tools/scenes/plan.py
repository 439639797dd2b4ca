"""Plans: everything about a clip that its seed decides."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.scenes import nameless
from tools.scenes.arm import Limb, draw_look, gripper, reach
from tools.scenes.camera import Camera, Effects, Viewpoint, draw_effects, draw_view, film
from tools.scenes.layout import Room, arrange, draw_models, draw_room, draw_similar, on_table
from tools.scenes.objects import SPLITS, Split
from tools.scenes.scenarios import SCENARIOS, ClipScript
from tools.scenes.stage import Actor, Array, Hand, Rng, frames

SCRIPT_S = 4.0  # a shorter clip shows a part of a script of this length
MIN_ACTORS = {"free": 2, "occlusion": 2, "leave": 2, "lookalike": 1, "similar": 3}
TRIES = 50
WRIST_CAMERAS = 0.35  # of the clips without an arm
# half views from the centre
SIDES = {"far": (0.0, 1.7), "left": (-1.8, 0.0), "right": (1.8, 0.0), "near": (0.3, -2.0)}


@dataclass(frozen=True)
class ClipSettings:
    """Split, frames per clip, size in pixels, frames per second and the scenarios' weights.

    nameless: also solids without a name among the training objects. camera: the style of all cameras (`camera.film`);
    each clip draws its own if empty.
    """

    split: Split
    frames: int
    width: int
    height: int
    fps: float
    weights: dict[str, float]
    depth: bool = False
    nameless: bool = False
    camera: str = ""


@dataclass(frozen=True)
class Plan:
    """All details of a clip. Arrays over time have `effects.samples` entries for each frame."""

    settings: ClipSettings
    scenario: str
    target: int  # label of what the scenario is about, or 0
    actors: list[Actor]
    limbs: list[Limb]
    camera: Camera
    room: Room
    effects: Effects


def make_plan(rng: Rng, settings: ClipSettings, scenario: str) -> Plan:
    """Draw a clip of a scenario at random."""
    effects = draw_effects(rng)
    script = _set_up(rng, settings, scenario, effects)
    target = SCENARIOS[scenario](script)
    limbs = _limbs(script)
    room = draw_room(rng, script.view, settings.split, _standing(script))
    return Plan(settings, scenario, target, script.actors, limbs, script.camera, room, effects)


def draw_scenario(rng: Rng, settings: ClipSettings) -> str:
    """Draw a scenario by the settings' weights."""
    names = list(settings.weights)
    weights = np.array([settings.weights[name] for name in names])
    return str(rng.choice(names, p=weights / weights.sum()))


def seeded(seed: int, settings: ClipSettings, index: int, attempt: int) -> Rng:
    """Return the generator of one attempt at one clip."""
    return np.random.default_rng([seed, SPLITS.index(settings.split), index, attempt])


def sample_times(start: float, settings: ClipSettings, effects: Effects) -> Array:
    """Return the times of the pictures: `samples` around each frame, within the shutter's time."""
    frames = start + np.arange(settings.frames) / settings.fps
    within = (np.arange(effects.samples) - effects.samples // 2) / effects.samples
    return (frames[:, None] + within * effects.shutter / settings.fps).ravel()


def frame_samples(effects: Effects, settings: ClipSettings) -> npt.NDArray[np.intp]:
    """Return the index of the picture in the middle of each frame."""
    return np.arange(settings.frames) * effects.samples + effects.samples // 2


def _set_up(rng: Rng, settings: ClipSettings, scenario: str, effects: Effects) -> ClipScript:
    duration = settings.frames / settings.fps
    seconds = max(SCRIPT_S, duration)
    start = rng.uniform(0, seconds - duration) if scenario in ("free", "similar") else 0.0
    times = sample_times(start, settings, effects)
    more = nameless.MAKERS if settings.nameless else {}
    for _ in range(TRIES):
        draw = draw_similar if scenario == "similar" else draw_models
        models, width = draw(rng, settings.split, more)
        view = draw_view(rng, width)
        actors = arrange(rng, view, models, len(times))
        if len(actors) >= MIN_ACTORS[scenario]:
            break
    calm = 0.6 if scenario == "occlusion" else 1.0
    camera = film(rng, view, times, (settings.width, settings.height), settings.camera, calm)
    look = draw_look(rng, float(np.clip(width / 0.6, 0.7, 1.3)))
    return ClipScript(rng, settings.split, view, camera, times, seconds, actors, draw_hand(rng, view), look)


def draw_hand(rng: Rng, view: Viewpoint) -> Hand:
    """Draw a hand whose arm stands somewhere around the table."""
    side = rng.choice(list(SIDES), p=[0.4, 0.25, 0.25, 0.1])
    base = on_table(view, *(np.array(SIDES[side]) + rng.normal(0, 0.25, 2)))
    return Hand(base, rng.uniform(0.0, 0.5), rng.uniform(0.13, 0.19), rng.uniform(0, np.pi))


def _limbs(script: ClipScript) -> list[Limb]:
    """Return the arm if the hand has work to do; else sometimes a gripper on which the camera is mounted."""
    hand = script.hand
    camera = script.camera
    if hand.keys:
        _park(script)
        return reach(script.rng, script.times, hand, script.look)
    if script.rng.random() > WRIST_CAMERAS:
        return []
    right, up, back = (camera.rotations[:, :, axis] for axis in range(3))
    tip = camera.positions - 0.2 * back - 0.07 * up
    opening = hand.opening(script.times)
    return gripper(script.rng, tip, frames(-back, right), opening, draw_look(script.rng, 1.0, person=False))


def _park(script: ClipScript) -> None:
    """Keep the hand near its base before and after its work."""
    hand = script.hand
    rng = script.rng
    if not np.isfinite(hand.busy_until):
        return
    first = min(hand.keys, key=lambda key: key[0])
    last = max(hand.keys, key=lambda key: key[0])
    before = first[0] - rng.uniform(0.7, 1.5)
    after = last[0] + rng.uniform(0.7, 1.5)
    for time, key in ((before, first[1]), (after, last[1])):
        rest = key + rng.uniform(0.5, 0.9) * (hand.base - key)
        rest[2] = rng.uniform(0.15, 0.35)
        hand.keys.append((time, rest))


def _standing(script: ClipScript) -> Array:
    """Return the points [n, 2] that the table must support."""
    view = script.view
    path = np.concatenate([actor.positions[actor.positions[:, 2] < 0.02, :2] for actor in script.actors])
    near = path[np.linalg.norm(path - view.centre[:2], axis=-1) < 1.2 * view.width]
    corners = [on_table(view, x, y)[:2] for x, y in ((-1, 0), (1, 0), (0, -0.8), (0, 0.8))]
    return np.concatenate([near, corners])
