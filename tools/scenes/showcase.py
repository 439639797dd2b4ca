"""The bundled recording: five test objects, and an arm that hides one and takes another away."""

import math
from dataclasses import replace

import numpy as np

from sam3_node.errors import OutputError
from tools.scenes.arm import LIVERIES, Look, reach
from tools.scenes.camera import Effects, Viewpoint, film
from tools.scenes.clips import Labels
from tools.scenes.generate import HIDDEN_FRAMES, Rendered, max_run_length, shoot
from tools.scenes.layout import Light, Room, on_table
from tools.scenes.objects import make_object, surface_rng
from tools.scenes.plan import ClipSettings, Plan, sample_times
from tools.scenes.render import MujocoScene, Renderer
from tools.scenes.robot import describe_arm
from tools.scenes.scenarios import ClipScript, Passing, pass_arm, take_away
from tools.scenes.stage import Actor, Hand, roll, slide
from tools.scenes.textures import surface

NAME = "tabletop"
SETTINGS = ClipSettings("test", 225, 640, 480, 15.0, {}, depth=True)
EFFECTS = Effects(brightness=120.0, supersample=2, jpeg=95)
SEED = 4
CAST = (  # identity, kind, place in half views to the right and forward, turn
    (1159, "mug", -0.12, -0.35, 2.4),
    (329, "bottle", -0.5, 0.15, 0.0),
    (539, "box", 0.52, 0.25, 0.5),
    (29, "can", 0.04, 0.3, 0.0),
    (979, "ball", 0.45, -0.45, 0.0),
)
SURFACES = ((19, "wood"), (29, "speckle"), (329, "plain"))  # of table, floor and walls
# places in the cast
HIDDEN = 3
TAKEN = 1
ROLLED = 4
TURNED = 0


def record(renderer: Renderer) -> Rendered:
    """Render the clip; raise OutputError if it does not show what it must."""
    rng = np.random.default_rng(SEED)
    plan = make_showcase(rng)
    film_of_it = renderer.open(MujocoScene(plan))
    try:
        labels = [film_of_it.labels(frame) for frame in range(SETTINGS.frames)]
        check(labels)
        rendered = shoot(film_of_it, plan, labels, rng, NAME, SEED)
    finally:
        film_of_it.close()
    urdf, joints = describe_arm(plan)
    return replace(
        rendered, clip=replace(rendered.clip, meta={**rendered.clip.meta, "urdf": urdf, "joints": joints})
    )


def check(labels: list[Labels]) -> None:
    """Raise OutputError unless one object is hidden and one away for long enough, and all are in view at the end."""
    for place in (HIDDEN, TAKEN):
        gone = max_run_length(np.array([not (each == place + 1).any() for each in labels]))
        if gone < HIDDEN_FRAMES:
            wanted = f"the {CAST[place][1]} out of sight for {HIDDEN_FRAMES} frames"
            raise OutputError(f"recording: expected {wanted}, found {gone}")
    for each in (labels[0], labels[-1]):
        if set(seen := np.unique(each)) != set(range(len(CAST) + 1)):
            raise OutputError(f"recording: expected {len(CAST)} objects in view, found labels {seen}")


def make_showcase(rng: np.random.Generator) -> Plan:
    """Return the plan of the bundled recording."""
    times = sample_times(0.0, SETTINGS, EFFECTS)
    view = Viewpoint(np.array([0.0, 0.0, 0.1]), 0.74, 0.6, math.radians(29), math.radians(58))
    actors = [
        Actor.stand(make_object(identity, (kind,)), label, on_table(view, right, forward), yaw, len(times))
        for label, (identity, kind, right, forward, yaw) in enumerate(CAST, start=1)
    ]
    camera = film(rng, view, times, (SETTINGS.width, SETTINGS.height), "handheld", calm=0.7)
    hand = Hand(on_table(view, 0.55, 1.7), 0.25, 0.15, view.azimuth)
    look = Look(False, 0.034, 0.0, *LIVERIES[3])
    script = ClipScript(rng, "test", view, camera, times, SETTINGS.frames / SETTINGS.fps, actors, hand, look)
    perform(script)
    room = furnish(view)
    limbs = reach(rng, times, hand, script.look)
    return Plan(SETTINGS, "recording", HIDDEN + 1, actors, limbs, camera, room, EFFECTS)


def furnish(view: Viewpoint) -> Room:
    """Return a wooden table in a plain room."""
    table, floor, walls = (surface(surface_rng(number), kind) for number, kind in SURFACES)
    centre = on_table(view, 0.0, 0.6)
    lights = (
        Light((0.6, -0.7, 1.3), (0.5, 0.48, 0.44), True),
        Light((-0.2, 0.9, 1.6), (0.25, 0.26, 0.3), False),
    )
    yaw = view.azimuth + math.pi / 2
    return Room(
        (0.75, 0.55), yaw, (centre[0], centre[1]), table, floor, walls, 1.6, lights, 0.3, 0.0, (0.7, 0.8, 0.9)
    )


def perform(script: ClipScript) -> None:
    """Script the recording."""
    hand = script.hand
    view = script.view
    times = script.times
    rest = on_table(view, 0.8, 1.4) + np.array([0.0, 0.0, 0.3])
    hand.keys += [(0.0, rest), (1.2, rest), (14.2, rest)]
    pass_arm(script, script.actors[HIDDEN], Passing(2.2, 3.2, 4.6, 5.4))
    taken = script.actors[TAKEN]
    away = taken.place - 1.25 * view.width * view.right
    take_away(script, taken, (6.8, 8.8, 10.4, 12.4), away, taken.place.copy())
    ball = script.actors[ROLLED]
    roll(ball, times, 8.6, 11.0, ball.place - 0.42 * view.width * view.right)
    slide(script.actors[TURNED], times, 5.2, 6.8, script.actors[TURNED].place, spin=-1.4)
