"""`--ray` of the verb `replay`. Heavy imports happen inside it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from threading import Event
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..replay.job import Job
    from .bill import Bill

BILL = "bill.json"
INTERRUPTED = 130


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
    from ..replay.url_store import open_store
    from .many import run_many
    from .progress import View
    from .tasks import Split

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


def _say(bill: Bill) -> None:
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
