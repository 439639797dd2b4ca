"""The commands `sam3-node engine`, `sam3-node tune` and `sam3-node calibrate fp8`.

Heavy packages are imported inside the command that needs them.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import prepare_output
from ..settings import Settings
from .early_checks import (
    EXPORT_PACKAGES,
    FP8_PACKAGES,
    INDUCTOR,
    check_engine_build,
    check_node,
    check_source,
)
from .parser import Commands, parse_count
from .progress import ProgressBar, align_rows

if TYPE_CHECKING:
    from ..engines.engine_store import StoredEngine
    from ..types import Image

COLUMNS = ("ENGINE", "MODEL", "PRECISION", "SIZE", "OBJECTS", "GPU", "LIBRARY", "MB", "BUILT", "GATE")
DETECTOR_WITH_ENGINE = "yolo-world"
"""Detector that has a TensorRT engine of its own."""
CALIBRATION_FRAMES = 32
"""Frames from which the range of the encoder's numbers is measured."""
TUNED_OBJECTS = (1, 4, 16)
"""Numbers of objects that `tune` times by default."""
SOURCE_HELP = "a recording (.mcap), a video or a folder of images"


def add_commands(commands: Commands) -> None:
    """Add the commands `engine …` and `tune`."""
    tuned = commands.add("tune", tune)
    text = f"numbers of objects to time [{','.join(map(str, TUNED_OBJECTS))}]"
    tuned.add("--objects N,N", text, parse_counts, TUNED_OBJECTS)
    group = commands.add_group(
        "engine",
        "build, list and check engines of the model: TensorRT, or compiled by torch (--engine.kind inductor)",
    )
    build = group.add("build", engine_build)
    text = "GPU generation to build for, such as sm89 (needs tensorrt_rtx) [the GPU of this machine]"
    build.add("--gpu GENERATION", text, default="this")
    build.add_path("--scales FILE.json", "for fp8: output of `calibrate fp8`")
    build.add_path("--recipe FILE.toml", "for fp8: which layers are not quantised")
    group.add("list", engine_list)
    check = group.add("check", engine_check)
    check.add("source SOURCE", f"{SOURCE_HELP} [the bundled recording]", nargs="?")
    triton = group.add("export-triton", engine_export_triton)
    triton.add_path("-o, --out FOLDER", "model repository, new or existing", required=True)
    triton.add_flag("--plans", "copy the TensorRT plans of `engine build` [export ONNX files]")
    triton.add("--name NAME", "how names of models begin [name of the weights]", default="")
    text = "what the detector looks for, such as 'mug,red box' [vectors in each request]"
    triton.add("--names NAME,NAME", text, parse_names, ())
    triton.add("--batch N", "most images in a call [8]", parse_count, 8)
    triton.add("--instances N", "copies of each model of images [1]", parse_count, 1)
    text = "microseconds that a request may wait for others to join it [0]"
    triton.add("--delay-us N", text, parse_count, 0)
    triton.add("--preferred N,N", "numbers of images to wait for, such as 1,4,8 [--batch]", parse_counts, ())


def add_fp8_command(group: Commands) -> None:
    """Add the command `calibrate fp8`."""
    fp8 = group.add("fp8", calibrate_fp8)
    fp8.add("sources SOURCE", SOURCE_HELP, nargs="+")
    fp8.add_path("-o, --out FILE.json", "file to write the scales to", required=True)
    fp8.add_path("--recipe FILE.toml", "which kinds of layers will be quantised")
    text = f"number of frames to use, over all sources [{CALIBRATION_FRAMES}]"
    fp8.add("--frames N", text, parse_count, CALIBRATION_FRAMES)


def parse_names(text: str) -> tuple[str, ...]:
    """Parse "mug,red box": names without the spaces around them, at least one."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"expected names such as mug,red box, found {text!r}")
    return names


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse "1,4,16": numbers of 1 or greater, each once, in rising order."""
    return tuple(sorted({parse_count(part) for part in text.split(",")}))


def tune(args: Namespace, settings: Settings) -> None:
    """Time the options of torch on this machine, and keep the fastest for the next starts.

    Each combination of the options that are auto is timed with each number of objects: dtype, kernels of the memory
    read, compilation and CUDA graphs, and FP8 if there are scales. Compilation takes minutes. A tuning that was stopped
    goes on where it was.
    """
    check_node()
    from ..engines.tune import list_rows
    from ..engines.tune import tune as time_options
    from ..perception.loading import load_to_serve

    with closing(ProgressBar("trials")) as bar:

        def report(what: str, done: int, total: int) -> None:
            bar("tune", done, total, what)

        tuning = time_options(settings, load_to_serve, args.objects, report)
    print(*align_rows(list_rows(tuning)), sep="\n")


def engine_build(args: Namespace, settings: Settings) -> None:
    """Export the model's stages, build their engines, store them."""
    check_engine_build(settings, args.scales)
    from ..engines.build import build_engines, read_quantisation
    from ..engines.detector import build_detector

    # scales and recipe are read first: a mistake there must not cost the minutes of a build
    quantisation = read_quantisation(args.scales, args.recipe)
    with closing(ProgressBar("%")) as bars:
        print(build_engines(settings, args.gpu, quantisation, bars.report).folder)
        if _has_detector_engine(settings):
            print(build_detector(settings, args.gpu, bars.report).folder)


def engine_list(args: Namespace, settings: Settings) -> None:
    """Print a table of the stored engines."""
    check_node()
    from ..engines.engine_store import EngineStore

    store = EngineStore(settings.engine.folder)
    # read from each engine's manifest: nothing is loaded
    rows = [_make_row(stored, settings) for stored in store.all()]
    if not rows:
        print(f"no engines in {store.folder}")
        return
    print(*align_rows([COLUMNS, *rows]), sep="\n")


def engine_check(args: Namespace, settings: Settings) -> int:
    """Compare the engines with torch in float32: may they serve?

    Run the gate on the settings' engines and print its reports; return 0 if they may serve, else 1.
    """
    check_node()
    if args.source is not None:
        _check_images(Path(args.source).expanduser())
    from ..engines.detector import check_detector
    from ..engines.slot import check_tracker

    # the tracker's gate first, then the detector's, which may refuse while the tracker passes
    reports = [check_tracker(settings, args.source)]
    print(*reports[0].lines(), sep="\n")
    if _has_detector_engine(settings):
        reports.append(check_detector(settings, args.source))
        print(*reports[1].lines(), sep="\n")
    passed = all(report.passed for report in reports)
    return 0 if passed else 1


def engine_export_triton(args: Namespace, settings: Settings) -> None:
    """Write a model repository for Triton Inference Server."""
    # plans alone need no ONNX; the models beside them do, unless they are in bfloat16, which is checked later
    check_node(*(() if args.plans else EXPORT_PACKAGES))
    from ..engines.triton_server import Serving, export_repository

    # how large a call may be, and how many of them run at once
    serving = Serving(args.batch, args.instances, args.delay_us, args.preferred)
    with closing(ProgressBar("%")) as bars:
        written = export_repository(
            settings,
            args.out,
            plans=args.plans,
            name=args.name,
            names=args.names,
            serving=serving,
            progress=bars.report,
        )
    print(*written, sep="\n")
    for command in list_next_commands(args.out, written):
        print(command, file=sys.stderr)


def list_next_commands(repository: Path, written: Sequence[Path]) -> list[str]:
    """Return the commands that serve a repository, and that segment by it."""
    family = written[0].name.rpartition("_")[0]
    folder = repository.resolve()
    return [
        f"serve it:    TRITON_MODELS={folder} docker compose -f launch/container/compose.triton.yaml up",
        f"is it ready: curl -f http://127.0.0.1:8000/v2/models/{family}_encode/ready",
        f"segment:     python examples/triton_client.py picture.jpg {family} 320,240",
    ]


def _has_detector_engine(settings: Settings) -> bool:
    """Return True if the detector has an engine of the kind that the settings ask for."""
    return settings.detector.kind == DETECTOR_WITH_ENGINE and settings.engine.kind != INDUCTOR


def _make_row(stored: StoredEngine, settings: Settings) -> tuple[str, ...]:
    manifest = stored.manifest
    key = manifest.key
    return (
        stored.folder.name,
        key.model,
        key.precision,
        str(key.image_size),
        str(key.max_objects),
        key.gpu_name or key.gpu,
        f"{key.library} {key.version}",
        f"{stored.plan_bytes / 1e6:.1f}",
        datetime.fromtimestamp(manifest.built_s).strftime("%Y-%m-%d %H:%M"),
        _read_verdict(stored, settings),
    )


def _read_verdict(stored: StoredEngine, settings: Settings) -> str:
    """Return the gate's verdict by the thresholds of the settings."""
    from ..engines.slot import apply_thresholds, read_report

    # the report is kept with the engine; the thresholds are those of today's settings
    report = read_report(stored)
    if report is None:
        return "not yet"
    if apply_thresholds(report, settings.engine).passed:
        return "passed"
    return "refused"


def calibrate_fp8(args: Namespace, settings: Settings) -> None:
    """Measure the range of the encoder's numbers, for FP8 engines."""
    # before the model, which takes long to load
    prepare_output(args.out)
    check_node(*FP8_PACKAGES)
    for source in args.sources:
        _check_images(Path(source).expanduser())
    from ..engines.quantize import calibrate, load_recipe
    from ..models import load_tracker

    weights = settings.model
    recipe = load_recipe(args.recipe)
    # ranges are measured in the reference precision, unless the settings name another
    dtype = weights.dtype
    if dtype == "auto":
        dtype = "float32"
    model = load_tracker(weights.name, device=weights.device, dtype=dtype, image_size=weights.image_size)
    images = _read_images(args.sources, args.frames)
    with closing(ProgressBar()) as bar:
        scales = calibrate(model, images, recipe, lambda done: bar("calibrating", done, args.frames))
    scales.save(args.out)
    print(f"{args.out}: FP8 scales of {len(scales.amax)} layers of {model.name}, from {scales.frames} frames")


def _check_images(source: Path) -> None:
    """Raise BagError for a source that is none, MissingExtraError if its format's library is missing."""
    from ..bags.bag import IMAGE_SUFFIXES

    if source.is_dir() and any(file.suffix.lower() in IMAGE_SUFFIXES for file in source.iterdir()):
        return
    check_source(source)


def _read_images(sources: list[str], count: int) -> Iterator[Image]:
    """Yield `count` images, about the same number from each source."""
    from ..bags.bag import sample_images

    for index, source in enumerate(sources):
        # whole shares whose sum is exactly `count`
        share = (index + 1) * count // len(sources) - index * count // len(sources)
        yield from sample_images(source, share)
