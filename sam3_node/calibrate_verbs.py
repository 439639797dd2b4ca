"""The verbs of `sam3-node calibrate`. Heavy imports happen inside the verb that needs them."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import require
from .settings import Settings

FRAMES = 32

AddVerb = Callable[..., ArgumentParser]
"""Adds a verb: (subparsers, name, what it runs, its help)."""


def add_calibrate_verbs(parsers: Any, add: AddVerb) -> None:
    """Add `calibrate fp8` to the command line's subparsers."""
    text = "scales for engines"
    calibrate = parsers.add_parser("calibrate", help=text, description=text).add_subparsers(
        metavar="VERB", required=True
    )
    fp8 = add(calibrate, "fp8", calibrate_fp8, "how large the encoder's numbers become, for FP8 engines")
    fp8.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="a recording (.mcap), a video or a folder of images"
    )
    fp8.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.json", help="where the scales go")
    fp8.add_argument("--recipe", type=Path, metavar="FILE.toml", help="which kinds of layers are quantised")
    fp8.add_argument(
        "--frames", type=_count, default=FRAMES, metavar="N", help=f"look at so many in all [{FRAMES}]"
    )


def calibrate_fp8(args: Namespace, settings: Settings) -> None:
    """Run frames of the sources through the model that the settings name; write the scales, tell of them."""
    for module in ("torch", "transformers"):
        require(module, "node")
    from .engines.quantize import calibrate
    from .engines.recipes import load_recipe
    from .models import load_tracker

    chosen = settings.model
    recipe = load_recipe(args.recipe) if args.recipe else None
    dtype = "float32" if chosen.dtype == "auto" else chosen.dtype
    model = load_tracker(chosen.name, device=chosen.device, dtype=dtype, image_size=chosen.image_size)
    images = _images(args.sources, args.frames)
    scales = calibrate(model, images, recipe, lambda done: _tell(done, args.frames))
    if sys.stderr.isatty():
        print(file=sys.stderr)
    scales.save(args.out)
    print(f"{args.out}: FP8 scales of {len(scales.amax)} layers of {model.name}, from {scales.frames} frames")


def _images(sources: list[str], count: int) -> Iterator[npt.NDArray[np.uint8]]:
    """About as many of each source, `count` in all."""
    from .engines.frames import frames_of

    for index, source in enumerate(sources):
        share = (index + 1) * count // len(sources) - index * count // len(sources)
        yield from frames_of(source, share)


def _tell(done: int, count: int) -> None:
    """Progress on stderr: one line that is written over on a terminal, else a line at every eighth part."""
    if sys.stderr.isatty():
        print(f"\rcalibrating: {done}/{count} frames ", end="", file=sys.stderr)
    elif done % max(1, count // 8) == 0:
        print(f"calibrating: {done}/{count} frames", file=sys.stderr)


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError
    return count
