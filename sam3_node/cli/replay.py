"""The verb `sam3-node replay`. Heavy imports happen inside it.

`--ray` of the verb `replay`. Heavy imports happen inside it."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from ..errors import ReplayError, require
from ..processes.signals import stop_on_signals
from ..settings import Settings
from .commands import AddCommand as AddVerb

if TYPE_CHECKING:
    from ..replay.job import Job, ObjectOnFrame
    from ..replay.summary import Summary
if TYPE_CHECKING:
    from ..replay.cluster.usage_report import UsageReport
    from ..replay.job import Job


OUTPUTS = ("mcap", "coco", "png", "overlay")
STRATEGIES = ("forward", "bidirectional", "multi-shot")
INTERRUPTED = 130


def add_replay_verb(parsers: Any, add: AddVerb) -> None:
    """Add `replay` to the command line's subparsers."""
    parser = add(parsers, "replay", replay, "recordings through the same pipeline, without sockets")
    parser.add_argument(
        "bags", nargs="+", metavar="BAG", help="a recording: a file or folder of any known format, or its URL"
    )
    parser.add_argument(
        "-o",
        "--out",
        required=True,
        metavar="FOLDER",
        help="where results go, or a URL; a folder in it for each of several bags",
    )
    parser.add_argument(
        "--connect",
        metavar="CONTROL",
        help="push every frame through the running node whose control endpoint this is, without loss; it is started "
        "with --transport.delivery every",
    )
    _add_mode(parser)
    _add_prompts(parser)
    parser.add_argument(
        "--topics",
        type=_names,
        default=(),
        metavar="NAME,…",
        help="cameras or colour topics to take; all if left out",
    )
    parser.add_argument(
        "--outputs",
        type=_names,
        default=("mcap",),
        metavar="KIND,…",
        help=f"what to write, of {', '.join(OUTPUTS)} [mcap]",
    )
    parser.add_argument(
        "--again", action="store_true", help="start over, where results are there; else they are gone on with"
    )
    add_ray_options(parser)


def _add_mode(parser: ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--as-recorded",
        dest="mode",
        action="store_const",
        const="as-recorded",
        help="step what the live node stepped and make its edits where it made them: the same masks, bit for bit",
    )
    mode.add_argument(
        "--every", dest="mode", action="store_const", const="every", help="step all frames [this one]"
    )
    parser.set_defaults(mode="every")
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default=STRATEGIES[0],
        help="every frame: bidirectional tracks objects backward, too, from where they are known; multi-shot tracks "
        "spans of low scores again, backward from the frame after [forward]",
    )
    parser.add_argument(
        "--allow-gaps", action="store_true", help="as recorded: go on where the recording lacks something"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="as recorded: hold the masks against the recorded ones; the exit code is 1 where they differ",
    )


def _add_prompts(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        dest="names",
        metavar="NAME",
        help='look for this, such as "red mug"; again for more',
    )
    parser.add_argument(
        "--objects",
        type=Path,
        metavar="FILE",
        help="objects shown on frames, in .json or .toml, a DAVIS annotation (.png) or its folder",
    )
    parser.add_argument(
        "--box",
        type=_box,
        action="append",
        default=[],
        dest="boxes",
        metavar="X0,Y0,X1,Y1",
        help="an object by the box around it on the first frame; again for more",
    )


def replay(args: Namespace, settings: Settings) -> int:
    """Replay each recording; 0 when all is done, 1 where --compare finds a difference, 130 when interrupted."""
    # before torch: threads that spin for long at barriers take the cores from those that decode
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for module in ("torch", "transformers"):
        require(module, "node")
    require("mcap", "bags")
    from ..replay.completion import StoppedError

    job = _job(args, settings)
    if args.compare and args.mode != "as-recorded":
        raise ReplayError(
            "--compare: expected --as-recorded beside it, found --every; every frame has no counterpart"
        )
    if args.connect and args.ray:
        raise ReplayError("--connect: expected no --ray beside it; a node has one replay at a time")
    stop, code = stop_on_signals(), 0
    if not args.ray and (args.by_camera or args.segment_frames):
        raise ReplayError("--by-camera, --segment-frames: expected --ray beside it, such as --ray local")
    if args.ray:
        code = replay_many(args, job, stop)
        return code or (max(map(_compare, job.each())) if args.compare else 0)
    run = _runner(args, settings, stop)
    for one in job.each():
        try:
            code |= _replay(one, args, run)
        except StoppedError as stopped:
            print(f"{one.bags[0]}: {stopped}")
            return INTERRUPTED
    return code


def _runner(args: Namespace, settings: Settings, stop: Any) -> Callable[..., Summary]:
    """What replays a job, told its `progress`."""
    if not args.connect:
        from ..replay.run import PerceptionCache, run_job

        return partial(run_job, load=PerceptionCache(), stop=stop, again=args.again)
    from ..replay.live.run import Endpoints, run_live

    given = settings.transport.model_fields_set
    endpoints = Endpoints(
        args.connect,
        settings.transport.frames[0] if "frames" in given else None,
        settings.transport.masks if "masks" in given else None,
    )
    return partial(run_live, endpoints=endpoints, stop=stop, again=args.again)


def _replay(job: Job, args: Namespace, run: Callable[..., Summary]) -> int:
    from ..replay.progress import Bar
    from ..replay.run import is_finished

    was_there = not args.again and is_finished(job)
    bar = Bar()
    try:
        summary = run(job, progress=bar)
    finally:
        bar.end()
    print(*summary.lines(), sep="\n")
    if was_there:
        print(f"{job.out}: was finished already, nothing was done; --again starts over")
    return _compare(job) if args.compare else 0


def _compare(job: Job) -> int:
    from ..replay.run import compare_job

    comparison = compare_job(job)
    print(comparison)
    return 0 if comparison.is_identical else 1


def _job(args: Namespace, settings: Settings) -> Job:
    from ..replay.job import Job, chosen_settings

    return Job(
        bags=tuple(args.bags),
        out=args.out,
        mode=args.mode,
        strategy=args.strategy,
        names=tuple(args.names),
        objects=_objects(args),
        topics=args.topics,
        outputs=args.outputs,
        settings=chosen_settings(settings),
        allow_gaps=args.allow_gaps,
    )


def _objects(args: Namespace) -> tuple[ObjectOnFrame, ...]:
    from ..replay.job import ObjectOnFrame
    from ..replay.prompts_file import read_prompts

    boxes = tuple(ObjectOnFrame(box=box) for box in args.boxes)
    return (*boxes, *(read_prompts(args.objects) if args.objects else ()))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _box(text: str) -> tuple[float, ...]:
    numbers = tuple(float(part) for part in text.split(","))
    if len(numbers) != 4:
        raise ValueError
    return numbers


BILL = "bill.json"


def add_ray_options(parser: ArgumentParser) -> None:
    """Where recordings are replayed at once, and how they are divided."""
    group = parser.add_argument_group(
        "many recordings at once", "on a Ray cluster or this machine; needs the extra 'cloud'"
    )
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="local: workers on this machine; auto: those of the Ray cluster that it is in; or a cluster's address",
    )
    group.add_argument(
        "--workers", type=_count, metavar="N", help="at most so many [as many as GPUs; local without them: 2]"
    )
    group.add_argument(
        "--gpus-per-worker",
        type=float,
        metavar="N",
        help="0 for the CPU, a part of 1 to share [1; local without: 0]",
    )
    group.add_argument(
        "--price-per-hour", type=float, metavar="P", help="of one worker: the table tells the cost"
    )
    group.add_argument(
        "--by-camera", action="store_true", help="each camera on its own, with a folder in the recording's"
    )
    group.add_argument(
        "--segment-frames",
        type=_count,
        metavar="N",
        help="cut recordings into segments of N frames; needs --prompt",
    )
    group.add_argument(
        "--overlap",
        type=int,
        default=30,
        metavar="M",
        help="frames that segments share, by which ids are joined [30]",
    )


def replay_many(args: Namespace, job: Job, stop: Event) -> int:
    """Replay the recordings of a job -> the exit code: 0 when all are done, 1 when one failed, 130 when stopped."""
    from ..replay.cluster.job_plan import Split
    from ..replay.cluster.progress import View
    from ..replay.cluster.scheduler import run_many
    from ..replay.url_store import open_store

    view = View()
    try:
        bill = run_many(
            job.each(),
            args.ray,
            args.workers,
            args.gpus_per_worker,
            args.price_per_hour,
            view,
            stop,
            Split(args.by_camera, args.segment_frames, args.overlap),
            args.again,
        )
    finally:
        view.end()
    _say(bill)
    open_store(job.out).write(BILL, bill.to_json().encode())
    if bill.is_complete:
        return 0
    return INTERRUPTED if bill.is_stopped else 1


def _say(bill: UsageReport) -> None:
    for bag in bill.bags:
        print(*bag.notes, sep="\n", end="\n" if bag.notes else "")
    print(*bill.lines(), sep="\n")
    if bill.is_stopped:
        print("stopped; what was done is kept, the same command goes on from there")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number
