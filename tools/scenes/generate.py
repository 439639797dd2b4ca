"""Generate clips, each by plans that are drawn until one shows what its scenario promises.

Several processes may render, each with a renderer of its own.
"""

import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.scenes.camera import intrinsics
from tools.scenes.clips import Clip, Labels, is_written, write_clip
from tools.scenes.objects import ObjectModel
from tools.scenes.plan import ClipSettings, Plan, draw_scenario, frame_samples, make_plan, seeded
from tools.scenes.render import Film, MujocoScene, Renderer

ATTEMPTS = 40
HIDDEN_FRAMES = 10  # in a row, of what is occluded or away; a third of a shorter clip
VISIBLE = 0.001  # of the image's pixels
USEFUL_SIDE = 0.08  # of the image's width, for an object to count
MAX_SCALE = 2


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
    what = f"{ATTEMPTS} plans of scenario {scenario} for clip {index}"
    raise UnfitPlanError(f"{what} did not show what the scenario promises")


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
    hidden = max_run_length(areas == 0) >= min(HIDDEN_FRAMES, len(labels) // 3)
    return bool(seen[0] and seen[-2:].all()) and hidden


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
    settings = plan.settings
    frames = range(plan.settings.frames)
    film.expose()
    images = [film.image(rng, frame) for frame in frames]
    depths = [film.depth(frame) for frame in frames] if settings.depth else []
    visible = {int(label) for each in labels for label in np.unique(each)} - {0}
    shown = [actor for actor in plan.actors if actor.label in visible]
    order = np.zeros(256, np.uint8)
    order[[actor.label for actor in shown]] = np.arange(1, len(shown) + 1)
    meta = {
        **{name: getattr(settings, name) for name in ("fps", "width", "height", "split")},
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
    return {"id": label, **{name: getattr(model, name) for name in ("name", "color", "kind", "identity")}}


def max_run_length(flags: npt.NDArray[np.bool_]) -> int:
    """Return the length of the longest run of true values."""
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest


@dataclass(frozen=True)
class RenderJob:
    """Clips of these settings and seed, in the folder `root`."""

    settings: ClipSettings
    seed: int
    root: Path


@cache
def open_renderer(width: int, height: int) -> Renderer:
    """Return this process's renderer for pictures of a size."""
    return Renderer(MAX_SCALE * width, MAX_SCALE * height)


def render(job: RenderJob, clips: int, workers: int) -> int:
    """Render the clips that are missing; return 0 if all clips exist at the end."""
    waiting = [i for i in range(clips) if not is_written(job.root, clip_name(job.settings, job.seed, i))]
    exist = f"{clips - len(waiting)} of {clips} clips exist"
    print(f"{exist}, rendering {len(waiting)} into {job.root}", flush=True)
    start = time.monotonic()
    failed = 0
    for done, problem in enumerate(_work(job, waiting, workers), start=1):
        failed += problem is not None
        if problem:
            print(problem, file=sys.stderr, flush=True)
        spent = time.monotonic() - start
        rate = done * job.settings.frames / spent
        left = spent / done * (len(waiting) - done)
        print(f"{done}/{len(waiting)} clips, {rate:.1f} frames/s, {left / 60:.1f} min left", flush=True)
    return 1 if failed else 0


def _work(job: RenderJob, indices: list[int], workers: int) -> Iterator[str | None]:
    """Yield the error of each clip, or None, as the clips are finished."""
    tasks = [(job, index) for index in indices]
    if workers <= 1:
        yield from (_render_clip(task) for task in tasks)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(_render_clip, tasks)


def _render_clip(task: tuple[RenderJob, int]) -> str | None:
    job, index = task
    settings = job.settings
    name = clip_name(settings, job.seed, index)
    try:
        rendered = generate(open_renderer(settings.width, settings.height), settings, job.seed, index)
        write_clip(job.root, name, rendered.clip, rendered.jpeg)
    except Exception as error:  # one clip's failure must not end hours of others
        return f"{name}: {type(error).__name__}: {error}"
    return None
