"""Generate one clip: draw plans until one shows what its scenario promises, then render it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.scenes.camera import intrinsics
from tools.scenes.clips import Clip, Labels
from tools.scenes.objects import ObjectModel
from tools.scenes.plan import ClipSettings, Plan, draw_scenario, frame_samples, make_plan, seeded
from tools.scenes.render import Film, Renderer
from tools.scenes.scene import MujocoScene

ATTEMPTS = 40
HIDDEN_FRAMES = 10  # in a row, of what is occluded or away; a third of a shorter clip
VISIBLE = 0.001  # of the image's pixels
USEFUL_SIDE = 0.08  # of the image's width, for an object to count


class UnfitPlanError(Exception):
    """No plan of a clip showed what its scenario promises."""


@dataclass(frozen=True)
class Rendered:
    """A clip in memory and the quality of its JPEG files."""

    clip: Clip
    jpeg: int


def clip_name(settings: ClipSettings, seed: int, index: int) -> str:
    """Return the clip's name, which is the same for the same seed and index."""
    return f"{settings.split}-{seed}-{index:05d}"


def generate(renderer: Renderer, settings: ClipSettings, seed: int, index: int) -> Rendered:
    """Generate the clip of this seed and index; raise UnfitPlanError after too many attempts."""
    scenario = draw_scenario(seeded(seed, settings, index, 0), settings)
    for attempt in range(1, ATTEMPTS + 1):
        rng = seeded(seed, settings, index, attempt)
        plan = make_plan(rng, settings, scenario)
        film = renderer.open(MujocoScene(plan))
        try:
            labels = [film.labels(frame) for frame in range(settings.frames)]
            if fits(plan, labels):
                return shoot(film, plan, labels, rng, clip_name(settings, seed, index), seed)
        finally:
            film.close()
    raise UnfitPlanError(
        f"{ATTEMPTS} plans of scenario {scenario} for clip {index} did not show what the scenario promises"
    )


def fits(plan: Plan, labels: Sequence[Labels]) -> bool:
    """Return True if objects are well visible at first, and the target is hidden or away and then returns."""
    min_visible = 2 if len(plan.actors) > 1 else 1
    if sum(_side(labels[0], actor.label) > USEFUL_SIDE for actor in plan.actors if actor.label) < min_visible:
        return False
    if plan.scenario in ("free", "similar"):
        return True
    areas = np.array([(each == plan.target).mean() for each in labels])
    seen = areas > VISIBLE
    if plan.scenario == "lookalike":
        return bool(seen[0] and seen[-1]) and _pair_visible(plan, labels[0])
    return bool(seen[0] and seen[-2:].all()) and max_run_length(areas == 0) >= min(
        HIDDEN_FRAMES, len(labels) // 3
    )


def _side(labels: Labels, label: int) -> float:
    """Return the larger side of an object's box, in widths of the image."""
    rows, columns = np.nonzero(labels == label)
    return max(float(np.ptp(rows)), float(np.ptp(columns))) / labels.shape[1] if len(rows) else 0.0


def _pair_visible(plan: Plan, labels: Labels) -> bool:
    identity = next(actor.model.identity for actor in plan.actors if actor.label == plan.target)
    same = [actor.label for actor in plan.actors if actor.model.identity == identity]
    return sum(float((labels == label).mean()) > VISIBLE for label in same) > 1


def shoot(
    film: Film, plan: Plan, labels: Sequence[Labels], rng: np.random.Generator, name: str, seed: int
) -> Rendered:
    """Render a plan whose labels are known; leave out objects that are never visible and number the others."""
    settings, frames = plan.settings, range(plan.settings.frames)
    film.expose()
    images = [film.image(rng, frame) for frame in frames]
    depths = [film.depth(frame) for frame in frames] if settings.depth else []
    shown = [
        actor for actor in plan.actors if actor.label and any((each == actor.label).any() for each in labels)
    ]
    order = np.zeros(256, np.uint8)
    order[[actor.label for actor in shown]] = np.arange(1, len(shown) + 1)
    meta = {
        "fps": settings.fps,
        "width": settings.width,
        "height": settings.height,
        "split": settings.split,
        "seed": seed,
        "scenario": plan.scenario,
        "target": int(order[plan.target]),
        "intrinsics": intrinsics(plan.camera.fov_y, settings.width, settings.height),
        "objects": [describe(actor.model, index) for index, actor in enumerate(shown, start=1)],
        "camera_poses": np.round(plan.camera.poses()[frame_samples(plan.effects, settings)], 6).tolist(),
    }
    return Rendered(Clip(name, images, [order[each] for each in labels], depths, meta), plan.effects.jpeg)


def describe(model: ObjectModel, label: int) -> dict[str, Any]:
    """Return an object's entry of `Clip.meta`."""
    return {
        "id": label,
        "name": model.name,
        "color": model.color,
        "kind": model.kind,
        "identity": model.identity,
    }


def max_run_length(flags: npt.NDArray[np.bool_]) -> int:
    """Return the length of the longest run of true values."""
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest
