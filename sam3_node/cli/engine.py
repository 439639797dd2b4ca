"""The verbs of `sam3-node engine`. Heavy imports happen inside the verb that needs them.

The verbs of `sam3-node calibrate`. Heavy imports happen inside the verb that needs them."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import require
from ..settings import Settings
from .commands import AddCommand as AddVerb

if TYPE_CHECKING:
    from ..engines.store import Built


HEAD = ("ENGINE", "MODEL", "PRECISION", "SIZE", "OBJECTS", "GPU", "LIBRARY", "MB", "BUILT", "GATE")
HAS_ENGINE = "yolo-world"  # of the detectors, by TensorRT
COMPILED = "inductor"


def add_engine_verbs(parsers: Any, add: AddVerb) -> None:
    """Add `engine build|list|check` to the command line's subparsers."""
    text = "engines of the model: by TensorRT, or compiled by torch (--engine.kind inductor)"
    engine = parsers.add_parser("engine", help=text, description=text).add_subparsers(
        metavar="VERB", required=True
    )
    build = add(engine, "build", engine_build, "export the model's stages, build their engines, keep them")
    build.add_argument(
        "--gpu",
        default="this",
        metavar="GENERATION",
        help="such as sm89: build for it, with tensorrt_rtx, wherever this is; else for the GPU of this machine",
    )
    build.add_argument("--scales", type=Path, metavar="FILE.json", help="for fp8: what `calibrate fp8` wrote")
    build.add_argument(
        "--recipe", type=Path, metavar="FILE.toml", help="for fp8: which layers stay as they are"
    )
    add(engine, "list", engine_list, "the engines that are there, as a table")
    check = add(
        engine, "check", engine_check, "compare the engines with torch in float32, and say if they may serve"
    )
    check.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="a recording (.mcap), a video or a folder of images; the bundled recording if left out",
    )


def engine_build(args: Namespace, settings: Settings) -> None:
    """Build the engines of the settings' model, by TensorRT also of its detector by name; print where they are."""
    _require()
    from ..engines.build import build_engines, read_quantisation
    from ..engines.detector import build_detector

    print(build_engines(settings, args.gpu, read_quantisation(args.scales, args.recipe)).folder)
    if _has_detector(settings):
        print(build_detector(settings, args.gpu).folder)


def engine_list(args: Namespace, settings: Settings) -> None:
    """Print a table of the engines in engine.folder, the newest first."""
    _require()
    from ..engines.store import EngineStore

    store = EngineStore(settings.engine.folder)
    rows = [_row(built, settings) for built in store.all()]
    if not rows:
        print(f"no engines in {store.folder}")
        return
    rows.insert(0, HEAD)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def engine_check(args: Namespace, settings: Settings) -> int:
    """Print what the gate finds out about the settings' engines; 0 when they may serve, else 1."""
    _require()
    from ..engines.detector_slot import check_detector
    from ..engines.slot import check

    reports = [check(settings, args.source)]
    print(*reports[0].lines(), sep="\n")
    if _has_detector(settings):
        reports.append(check_detector(settings, args.source))
        print(*reports[1].lines(), sep="\n")
    return 0 if all(report.passed for report in reports) else 1


def _has_detector(settings: Settings) -> bool:
    """Whether the detector has an engine of the kind that the settings ask for."""
    return settings.detector.kind == HAS_ENGINE and settings.engine.kind != COMPILED


def _require() -> None:
    for module in ("torch", "transformers"):
        require(module, "node")


def _row(built: Built, settings: Settings) -> tuple[str, ...]:
    manifest, identity = built.manifest, built.manifest.identity
    return (
        built.folder.name,
        identity.model,
        identity.precision,
        str(identity.image_size),
        str(identity.most_objects),
        identity.gpu_name or identity.gpu,
        f"{identity.library} {identity.version}",
        f"{built.plan_bytes / 1e6:.1f}",
        datetime.fromtimestamp(manifest.built_s).strftime("%Y-%m-%d %H:%M"),
        _verdict(built, settings),
    )


def _verdict(built: Built, settings: Settings) -> str:
    """Of the gate, by the thresholds of the settings."""
    from ..engines.slot import by_thresholds, read_report

    report = read_report(built)
    if report is None:
        return "not yet"
    return "passed" if by_thresholds(report, settings.engine).passed else "refused"


FRAMES = 32

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
    from ..engines.quantize import calibrate
    from ..engines.recipes import load_recipe
    from ..models import load_tracker

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
    from ..bags.image_sampling import sample_images

    for index, source in enumerate(sources):
        share = (index + 1) * count // len(sources) - index * count // len(sources)
        yield from sample_images(source, share)


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
