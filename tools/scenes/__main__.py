"""Render labelled clips of a table, objects and a robot arm into a folder of `clips`' layout.

    python -m tools.scenes --split train --clips 500 --frames 16 --size 320x240 --fps 12 -o out/scenes/train
    python -m tools.scenes --recording -o out/scenes/recording

Needs the extra `scenes` and, without a GPU, the system library OSMesa (apt-get install libosmesa6). A clip follows from
its split, seed and index alone; a run that is started again leaves finished clips as they are. Objects and surfaces of
one split are never seen in another: see tools/scenes/identity.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sam3_node.errors import Sam3NodeError
from tools.scenes import photos, robosuite, showcase
from tools.scenes.clips import is_written, write_clip
from tools.scenes.generate import clip_name, generate
from tools.scenes.identity import SPLITS
from tools.scenes.plan import Settings
from tools.scenes.render import Renderer, load_mujoco
from tools.scenes.scenarios import SCENARIOS

WEIGHTS = "free=5,occlusion=2,leave=1.5,lookalike=1.5"
MAX_SCALE = 2


@dataclass(frozen=True)
class Job:
    """Clips that one process renders."""

    settings: Settings
    seed: int
    root: Path


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    options = parse(arguments)
    try:
        load_mujoco()
        if options.recording:
            return render_recording(options.output)
        return render(Job(settings_of(options), options.seed, options.output), options.clips, options.workers)
    except Sam3NodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.scenes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--clips", type=positive, default=100)
    parser.add_argument("--frames", type=positive, default=16, help="per clip")
    parser.add_argument("--size", type=size, default=(320, 240), metavar="WxH")
    parser.add_argument("--fps", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=positive, default=1)
    parser.add_argument(
        "--scenario", type=weights, default=weights(WEIGHTS), help=f"weights, such as {WEIGHTS}"
    )
    parser.add_argument("--depth", action="store_true", help="write depth too")
    parser.add_argument("--robosuite", action="store_true", help="its meshes too, where it is installed")
    parser.add_argument("--photos", type=Path, metavar="DIR", help="pictures for some of the surfaces")
    parser.add_argument(
        "--recording", action="store_true", help="the one clip that the demo plays, with depth"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def size(text: str) -> tuple[int, int]:
    """(width, height) of '320x240'."""
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"expected WIDTHxHEIGHT in pixels, found {text!r}")
    return int(width), int(height)


def weights(text: str) -> dict[str, float]:
    """Scenarios' weights of 'free=2,leave' (1 where none is given)."""
    pairs = [item.partition("=") for item in text.split(",")]
    try:
        found = {name: float(weight or 1) for name, _, weight in pairs}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected weights such as {WEIGHTS}, found {text!r}") from error
    if not set(found) <= set(SCENARIOS) or min(found.values()) < 0 or not sum(found.values()):
        raise argparse.ArgumentTypeError(f"expected weights of {', '.join(SCENARIOS)}, found {text!r}")
    return found


def settings_of(options: argparse.Namespace) -> Settings:
    width, height = options.size
    if options.robosuite:
        robosuite.makers()
    if options.photos:
        photos.pictures(options.photos)
    return Settings(
        options.split,
        options.frames,
        width,
        height,
        options.fps,
        options.scenario,
        options.depth,
        options.robosuite,
        options.photos,
    )


def render_recording(root: Path) -> int:
    """Render the showcase."""
    settings = showcase.SETTINGS
    rendered = showcase.record(_renderer(settings.width, settings.height))
    write_clip(root, showcase.NAME, rendered.clip, rendered.jpeg)
    print(f"{showcase.NAME}: {len(rendered.clip)} frames in {root}")
    return 0


def render(job: Job, clips: int, workers: int) -> int:
    """Render what is not there yet; 0 if all clips are there in the end."""
    waiting = [i for i in range(clips) if not is_written(job.root, clip_name(job.settings, job.seed, i))]
    print(
        f"{clips - len(waiting)} of {clips} clips are there, rendering {len(waiting)} into {job.root}",
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


def _work(job: Job, indices: list[int], workers: int) -> Iterator[str | None]:
    """What went wrong with each clip, or None, as they are done."""
    jobs = [(job, index) for index in indices]
    if workers <= 1:
        yield from (_one(each) for each in jobs)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(_one, jobs)


@cache
def _renderer(width: int, height: int) -> Renderer:
    """This process's renderer for pictures of a size."""
    return Renderer(MAX_SCALE * width, MAX_SCALE * height)


def _one(task: tuple[Job, int]) -> str | None:
    job, index = task
    settings = job.settings
    name = clip_name(settings, job.seed, index)
    try:
        rendered = generate(_renderer(settings.width, settings.height), settings, job.seed, index)
        write_clip(job.root, name, rendered.clip, rendered.jpeg)
    except Exception as error:  # one clip's failure must not end hours of others
        return f"{name}: {type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    sys.exit(main())
