"""The command `sam3-node replay`: in this process, or on many workers.

Heavy modules are imported inside the functions that need them, so that other commands start fast.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from ..errors import (
    DeviceError,
    ModelError,
    ReplayError,
    Sam3NodeError,
    SettingsError,
    VocabularyError,
)
from ..processes.signals import print_notice, stop_on_signals
from ..replay.outputs import ALIASES, OUTPUTS, find_output, list_outputs
from ..settings import Settings
from .early_checks import check_job, check_named_files, check_node
from .environment import prepare_torch
from .parser import FAILED, CommandParser, Commands, parse_box, parse_count, parse_named
from .progress import ProgressBar, align_rows, format_duration, printable

if TYPE_CHECKING:
    from ..replay.cluster.bill import UsageReport
    from ..replay.cluster.scheduler import RunProgress
    from ..replay.job import Job, ObjectOnFrame
    from ..replay.store import Summary

STRATEGIES = ("forward", "bidirectional")
DEFAULT_OUTPUTS = ("mcap",)
INTERRUPTED = 130
"""Exit code after a signal, as shells have it. The same command continues."""
OF_ALL_RECORDINGS = (DeviceError, ModelError, VocabularyError, SettingsError)
"""Errors that the next recording would meet, too. They end a replay of several recordings."""


def add_commands(commands: Commands) -> None:
    """Add the command `replay`."""
    parser = commands.add("replay", replay)
    parser.add("bags BAG", "a recording: a file or folder in a supported format, or its URL", nargs="+")
    text = "the folder or URL for results; several recordings get a subfolder each"
    parser.add("-o, --out FOLDER", text, required=True)
    _add_mode(parser)
    _add_prompts(parser)
    _add_part(parser)
    parser.add("--topics NAME,…", "cameras or colour topics to read [all]", _parse_names, ())
    others = ", ".join(f"{alias}: {name}" for alias, name in ALIASES.items())
    text = f"outputs to write: {', '.join(OUTPUTS)} [mcap]; {others}"
    parser.add("--outputs KIND,…", text, _parse_outputs, DEFAULT_OUTPUTS)
    parser.add_flag(
        "--with-images",
        "keep the frames, too: in masks.mcap, and as the files that masks.json and ytvis.json name",
    )
    # what becomes of doubtful objects: their common destination
    doubt = parser.add_mutually_exclusive_group()
    for name, value, text in (
        ("sure-only", "left-out", "leave doubtful objects out of coco and lerobot, too"),
        (
            "with-doubtful",
            "drawn",
            "keep doubtful objects in png, yolo and ytvis, too, whose readers do not see that they are doubtful",
        ),
    ):
        doubt.add_argument(f"--{name}", dest="doubtful", action="store_const", const=value, help=text)
    parser.set_defaults(doubtful="marked")
    parser.add_flag(
        "--redo",
        "of finished results, make again only what marks correct: those of --objects FILE.json, else those beside the "
        "recording, where the console's page keeps them",
    )
    parser.add_flag("--again", "delete existing results and start over; the default continues them")
    parser.add_flag(
        "--dry-run",
        "read the recordings and print what the replay would do: frames, hours, bad files, joints, unknown names, "
        "disk, price; exit code 1 for a bad file, 2 for an unknown name or no object",
    )
    parser.add_flag(
        "--allow-unfound",
        "go on without names that the detector lacks, and with recordings in which no object is followed; the default "
        "ends with exit code 2 before the first frame",
    )
    _add_ray(parser)


def _add_mode(parser: CommandParser) -> None:
    # options that exclude each other; their common destination is the mode
    mode = parser.add_mutually_exclusive_group()
    for name, text in (
        ("as-recorded", "repeat the live node's steps and edits: the same masks, bit for bit"),
        ("every", "step all frames [default]"),
    ):
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name, help=text)
    parser.set_defaults(mode="every")
    parser.add(
        "--strategy",
        "with --every: bidirectional also tracks each object backward from its first frame [forward]",
        default=STRATEGIES[0],
        choices=STRATEGIES,
    )
    parser.add(
        "--stride N",
        "with --every: step each N-th frame of a camera, its first one and those with marks [1]",
        parse_count,
        default=1,
    )
    parser.add_flag("--allow-gaps", "with --as-recorded: go on where the recording lacks data")
    parser.add_flag(
        "--compare",
        "with --as-recorded: compare the masks with the recorded ones; exit code 1 if they differ",
    )


def _add_prompts(parser: CommandParser) -> None:
    parser.add_repeated("--prompt NAME", 'detect and track this object, such as "red mug"', dest="names")
    text = "objects marked on frames: a .json or .toml file, - for JSON on standard input, a DAVIS annotation (.png) "
    text += "or its folder"
    parser.add_path("--objects FILE", text)
    text = "the box around an object on the first frame, in pixels"
    parser.add_repeated("--box X0,Y0,X1,Y1", text, parse_box, dest="boxes")
    # a photo may be named in the place of the first frame
    place = "[FILE:]X0,Y0,X1,Y1"
    like = "detect all that is like this box on the first frame or a photo, and call it NAME"
    for name, text in (("exemplar", like), ("unlike", "but not what is like this box")):
        parser.add_repeated(f"--{name} NAME={place}", text, parse_named(_parse_place, place))
    parser.add_flag(
        "--everything",
        "segment everything on the first frame of each camera, and track it (up to tracker.max_objects)",
    )


def _add_part(parser: CommandParser) -> None:
    parser.add_path(
        "--calibration FILE",
        "calibration file for 3-D fields, instead of the recorded node's; may be repeated, one for each camera",
        action="append",
        default=[],
    )
    parser.add_flag("--depth-aligned", "depth is registered to colour, though the recording does not say so")
    time_help = "seconds from the first frame, a date such as 2026-05-01T12:00:00Z, or Unix time in ns"
    # both ends of the part have the same forms
    for name, text in (("from", "first moment to replay"), ("to", "moment to end before")):
        parser.add(f"--{name} TIME", f"{text}: {time_help}", _parse_time, dest=f"{name}_ns")
    parser.add("--frames N", "end after N frames, of all cameras together", parse_count)


def _add_ray(parser: CommandParser) -> None:
    group = parser.add_argument_group(
        "many recordings at once", "on a Ray cluster or this machine; needs the extra 'cloud'"
    )
    add = partial(parser.add, group=group)
    add(
        "--ray ADDRESS",
        "local: workers on this machine; auto: the Ray cluster of this machine; or a cluster's address",
    )
    add("--workers N", "maximum number of workers [number of GPUs; local without GPUs: 2]", parse_count)
    text = "GPUs of each worker: 0 for the CPU, a fraction of 1 to share one [1; local without GPUs: 0]"
    add("--gpus-per-worker N", text, float)
    add("--price-per-hour P", "price of one worker; adds the cost to the table", _parse_price)
    group.add_argument(
        "--by-camera", action="store_true", help="replay each camera separately, in a subfolder"
    )
    add("--segment-frames N", "cut recordings into segments of N frames; needs --prompt", parse_count)
    add("--overlap M", "frames that consecutive segments share, to match object ids [30]", int, 30)


def replay(args: Namespace, settings: Settings) -> int:
    """Run recordings through the node's pipeline, without sockets.

    Returns 0 if all are done, 1 if --compare finds a difference, no frame was stepped or one of several recordings
    failed, 130 if interrupted.
    """
    check_node(("mcap", "bags"))
    if args.redo:
        return _redo(args, settings)
    # contradictions of the options, and what is not there, are errors before torch is imported, which takes seconds
    job = _make_job(args, settings)
    if args.compare and args.mode != "as-recorded":
        raise ReplayError(
            "--compare: expected --as-recorded with it, found --every, which may step frames without recorded masks"
        )
    if not (args.ray or args.dry_run):
        _check_alone(args)
    check_named_files(settings)
    if not args.dry_run:
        check_job(job, uses_ray=bool(args.ray))
    prepare_torch()
    from ..replay.planning import check_jobs

    if args.dry_run:
        return _plan(args, job)
    stop = stop_on_signals(once=True)
    jobs = job.split_by_recording()
    # of one recording alone, its replay says the same before its first frame
    if args.ray or len(jobs) > 1:
        check_jobs(jobs, args.again)
    if args.ray:
        code = _replay_many(args, job, stop)
        if args.compare and not code:
            code = max(map(_compare, jobs))
    else:
        code = _replay_in_turn(jobs, args, stop)
    if code != INTERRUPTED and len(jobs) > 1:
        _join(job, jobs)
    return code


def _redo(args: Namespace, settings: Settings) -> int:
    """Carry out marks in the finished results of one recording, with the job that made them."""
    from ..bags.marks import name_marks, read_marks
    from ..replay.store import local_path

    others = ("again", "dry_run", "compare", "names", "boxes", "exemplar", "unlike", "everything")
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(args, name)]
    given += ["--ray"] if args.ray else []
    path = local_path(args.bags[0])
    if given or len(args.bags) > 1 or (path is None and args.objects is None):
        raise ReplayError(
            f"--redo: expected one recording with its folder of results, found {', '.join(given) or args.bags}; the "
            "job is the one that made the results, and marks of a recording at a URL are named by --objects"
        )
    file = args.objects or name_marks(local_path(args.bags[0].rstrip("/")) or Path(args.bags[0]))
    marks = read_marks(file)
    if not marks:
        raise ReplayError(
            f"--redo: expected marks in {file}, found none; make them with sam3-node console --recording, or name "
            "their file with --objects"
        )
    prepare_torch()
    from ..replay.completion import StoppedError
    from ..replay.job import chosen_settings
    from ..replay.run import redo_job

    stop = stop_on_signals(once=True)
    outputs = args.outputs if args.outputs != DEFAULT_OUTPUTS else ()
    try:
        with closing(ProgressBar()) as bar:
            done = redo_job(
                args.bags[0],
                args.out,
                marks,
                progress=bar,
                stop=stop,
                outputs=outputs,
                settings=chosen_settings(settings),
            )
    except StoppedError as stopped:
        _print(f"{args.bags[0]}: {stopped}")
        return INTERRUPTED
    _print(done.line, *done.summary.lines())
    return 0


def _replay_in_turn(jobs: Sequence[Job], args: Namespace, stop: Event) -> int:
    """Replay one recording after the other, so that each has the whole machine. Return the exit code of `replay`."""
    from ..replay.completion import StoppedError
    from ..replay.planning import EmptyPartError
    from ..replay.run import PerceptionCache, run_job

    run = partial(run_job, load=PerceptionCache(), stop=stop, again=args.again)
    code = 0
    for single in jobs:
        try:
            code |= _replay(single, args, run)
        except StoppedError as stopped:
            _print(f"{single.bags[0]}: {stopped}")
            return INTERRUPTED
        except EmptyPartError as error:
            code = 1
            _print(f"{single.bags[0]}: {error}")
        except Exception as error:
            # one bad file must not stop the others, but what is wrong with all of them must
            if len(jobs) == 1 or isinstance(error, OF_ALL_RECORDINGS):
                raise
            code = 1
            print_notice(
                f"sam3-node: error: {printable(f'{single.bags[0]}: {_describe(error)}', line_feeds=True)}"
            )
    return code


def _join(job: Job, jobs: Sequence[Job]) -> None:
    """Write the datasets that finished recordings have in common."""
    from ..replay.outputs.write import join_outputs
    from ..replay.run import read_finished_summary
    from ..replay.store import local_path

    out = local_path(job.out)
    joined = [kind for kind in job.outputs if find_output(kind).is_joined]
    if out is None or not joined:
        return
    finished = [single for single in jobs if read_finished_summary(single) is not None]
    parts = [path for path in (local_path(single.out) for single in finished) if path is not None]
    for kind in joined if parts else ():
        _print(f"{job.out}/{join_outputs(out, kind, parts)}")


def _describe(error: Exception) -> str:
    # an error that is not of the family has no sentence that says what it is
    if isinstance(error, Sam3NodeError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _plan(args: Namespace, job: Job) -> int:
    """Print what a replay would do. Return 2 if it would be refused, 1 if a recording is bad, else 0."""
    from ..replay.planning import plan_jobs

    with closing(ProgressBar()) as bar:
        plan = plan_jobs(job.split_by_recording(), args.price_per_hour, progress=bar)
    _print(*plan.lines())
    if plan.refused:
        return FAILED
    return 1 if plan.bad else 0


def _check_alone(args: Namespace) -> None:
    """Raise ReplayError for an option that a replay without Ray would ignore."""
    options = ("by_camera", "segment_frames", "workers", "gpus_per_worker", "price_per_hour")
    # a value of 0 is given, too, and equals False
    values = {name: getattr(args, name) for name in options}
    given = [name for name, value in values.items() if value is not None and value is not False]
    if given:
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ReplayError(
            f"{shown}: expected --ray with it, such as --ray local; this replay has no workers that take and cost time"
        )


def _replay(job: Job, args: Namespace, run: Callable[..., Summary]) -> int:
    from ..replay.run import read_finished_summary

    # asked before the run, which would make it true
    was_finished = not args.again and read_finished_summary(job) is not None
    with closing(ProgressBar()) as bar:
        summary = run(job, progress=bar)
    _print(*summary.lines())
    if "report" in job.outputs:
        _print(f"{job.out}/report.html: open it in a browser")
    if was_finished:
        _print(f"{job.out}: was finished already, nothing was done; --again starts over")
    if summary.failed == summary.frames:
        _print(f"{job.bags[0]}: no frame was replayed: expected frames, found none ({summary.failed} failed)")
        return 1
    if args.compare:
        return _compare(job)
    return 0


def _compare(job: Job) -> int:
    from ..replay.run import compare_job

    comparison = compare_job(job)
    _print(str(comparison))
    if comparison.is_identical:
        return 0
    return 1


def _make_job(args: Namespace, settings: Settings) -> Job:
    from ..calibration import load_calibration
    from ..replay.job import Job, chosen_settings

    # files named here replace the calibration that the recording carries
    files = args.calibration or settings.spatial.calibration
    outputs = args.outputs
    _check_doubtful(args.doubtful, outputs)
    if args.with_images:
        outputs = _add_images(outputs)
    return Job(
        bags=tuple(args.bags),
        out=args.out,
        mode=args.mode,
        strategy=args.strategy,
        names=tuple(args.names),
        objects=_read_objects(args),
        topics=args.topics,
        outputs=outputs,
        settings=chosen_settings(settings),
        allow_gaps=args.allow_gaps,
        stop=args.frames,
        begin_ns=args.from_ns,
        end_ns=args.to_ns,
        everything=args.everything,
        requires_objects=not args.allow_unfound,
        depth_aligned=args.depth_aligned,
        doubtful=args.doubtful,
        stride=args.stride,
        calibrations=tuple(load_calibration(path).model_dump_json() for path in files),
    )


def _read_objects(args: Namespace) -> tuple[ObjectOnFrame, ...]:
    from ..replay.job import ObjectOnFrame, read_prompts

    boxes = [ObjectOnFrame(box=box) for box in args.boxes]
    # what is meant, then what is not
    for like, shown in ((1, args.exemplar), (0, args.unlike)):
        for name, (photo, box) in shown:
            boxes.append(ObjectOnFrame(label=name, photo=photo, box=box, like=like))
    marked: Sequence[ObjectOnFrame] = ()
    if args.objects:
        marked = read_prompts(args.objects)
    return (*boxes, *marked)


def _check_doubtful(doubtful: str, outputs: Sequence[str]) -> None:
    """Raise ReplayError for an option of doubtful objects that none of the outputs follows."""
    options = {
        "left-out": ("--sure-only", list_outputs(lambda output: output.is_label)),
        "drawn": ("--with-doubtful", list_outputs(lambda output: output.hides_doubt)),
    }
    if doubtful not in options:
        return
    option, wanted = options[doubtful]
    if not set(wanted) & set(outputs):
        raise ReplayError(
            f"{option}: expected --outputs with {' or '.join(wanted)}, found {', '.join(outputs)}; mcap, overlay and "
            "report always have doubtful objects, and mark them"
        )


def _add_images(outputs: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the outputs with the frames beside masks: in the recording, and as files that others name."""
    named = ["mcap-images" if kind == "mcap" else kind for kind in outputs]
    if any(find_output(kind).names_images for kind in named) and "images" not in named:
        named.append("images")
    return tuple(named)


def _parse_place(text: str) -> tuple[str | None, tuple[float, ...]]:
    # a path may contain : itself, a box does not
    photo, _, box = text.rpartition(":")
    return photo or None, parse_box(box)


def _parse_time(text: str) -> int:
    from ..bags.pairing import parse_time

    return parse_time(text)


def _parse_price(text: str) -> float:
    price = float(text)
    if not 0 <= price < math.inf:
        raise ValueError(f"expected a price of 0 or more, found {text!r}")
    return price


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError(f"expected at least one name, found {text!r}")
    return names


def _parse_outputs(text: str) -> tuple[str, ...]:
    return tuple(ALIASES.get(name, name) for name in _parse_names(text))


def _replay_many(args: Namespace, job: Job, stop: Event) -> int:
    """Replay the recordings of a job on workers. Returns 0 if all are done, 1 if one failed, 130 if stopped."""
    from ..replay.cluster.bill import read_bill, save_bill, write_bill
    from ..replay.cluster.scheduler import run_many
    from ..replay.cluster.tasks import Split
    from ..replay.store import open_store

    # what earlier runs took is paid, too, unless their results are deleted
    store = open_store(job.out)
    earlier = None
    if not args.again:
        earlier = read_bill(store)
    with closing(ProgressBar("recordings")) as bar:
        report = run_many(
            job.split_by_recording(),
            args.ray,
            args.workers,
            args.gpus_per_worker,
            args.price_per_hour,
            lambda run: bar("replaying", run.done, run.total, describe_progress(run)),
            stop,
            Split(args.by_camera, args.segment_frames, args.overlap),
            args.again,
            earlier=earlier,
            save=partial(save_bill, store),
        )
    # the table for people, the file for programs
    _print_report(report)
    write_bill(store, report)
    if report.is_complete:
        return 0
    return INTERRUPTED if report.is_stopped else 1


def describe_progress(run: RunProgress) -> str:
    """Describe workers, frames, rate and time left of a run over many recordings."""
    text = f"{run.workers} workers, {run.frames} frames, {run.frames_per_s:.1f} frames/s"
    if run.left_s is not None and run.done < run.total:
        text += f", {format_duration(run.left_s)} left"
    return text


def _print_report(report: UsageReport) -> None:
    # what was wrong with each recording, then the table of all
    for bag in report.bags:
        if bag.notes:
            _print(*bag.notes)
    _print(*align_rows(report.rows()))
    if report.is_stopped:
        _print("stopped; results so far are kept, the same command continues")


def _print(*texts: str) -> None:
    # names of recordings, and results that others may have written, could rewrite what the terminal shows
    print(*(printable(text, line_feeds=True) for text in texts), sep="\n")
