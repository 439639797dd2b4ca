"""Clips that several processes render beside each other, each with a renderer of its own."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.scenes.clips import is_written, write_clip
from tools.scenes.generate import clip_name, generate
from tools.scenes.plan import ClipSettings
from tools.scenes.render import Renderer

MAX_SCALE = 2


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
    print(
        f"{clips - len(waiting)} of {clips} clips exist, rendering {len(waiting)} into {job.root}",
        flush=True,
    )
    start, failed = time.monotonic(), 0
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
