"""Measure the growth of resident memory and of live tensors over a long run; after the first steps there must be none.

    python -m tools.bench.soak                          the tracker alone: 5,000 steps with 4 objects
    python -m tools.bench.soak --minutes 10             also a camera and a node as processes, with 4 objects
    python -m tools.bench.soak --minutes 60 --chaos     a node in which something breaks every minute, then an overload
    python -m tools.bench.soak --summarise FOLDER       the summary of such a run again, also of one that was cut

Weights are tiny and random: the memory bank, the bookkeeping and the messages are as with large weights. The first
200 steps fill the bank and warm up the allocators. On a CPU, tensor memory is counted over the garbage collector's live
tensors, each storage counted once; on a GPU it is the memory that torch has allocated there.

The chaos writes FOLDER/log.jsonl while it runs, and at its end summary.json and plot.png. It shows that no state is
stuck, that ids keep their meaning, and that memory, descriptors and ages keep their bounds (`soak_summary`); what it
breaks is in `soak_chaos`. It exits with 1 if a check has failed.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from sam3_node.client import PerceptionClient
from sam3_node.models import load_tracker
from sam3_node.tracking import ObjectPrompt, Tracker
from sam3_node.transport.limits import rss_bytes
from tools.bench.common import Figures, make_parser
from tools.bench.processes import next_masks, run_node
from tools.bench.soak_chaos import Plan, Soak
from tools.bench.soak_summary import Row, describe, write_results
from tools.bench.tiny_weights import save_tiny_checkpoint

WARM_STEPS = 200
OBJECTS = 4
FPS = 60
CLIP = 16  # frames, played in a loop


def tensor_bytes(device: torch.device) -> int:
    """Return the bytes of all live tensors on the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    tensors = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def run_tracker(weights: Path, device: str, steps: int) -> Iterator[tuple[int, int, int]]:
    """Yield step number, resident bytes and tensor bytes at the end of the warm-up and ten times after it."""
    model = load_tracker(weights, device=device)
    tracker = Tracker(model, max_objects=OBJECTS)
    size = model.image_size
    clip = torch.randn(CLIP, 1, 3, size, size, generator=torch.Generator().manual_seed(0)).to(model.device)
    prompts = [ObjectPrompt(i, points=[[size * (i + 1) / (OBJECTS + 1), size / 2]]) for i in range(OBJECTS)]
    for step in range(1, steps + 1):
        tracker.step(clip[step % CLIP], prompts if step == 1 else ())
        if step == WARM_STEPS or (step > WARM_STEPS and step % max(1, steps // 10) == 0):
            yield step, rss_bytes(), tensor_bytes(model.device)


def soak_node(weights: Path, minutes: float) -> Iterator[tuple[int, int, int]]:
    """Yield frames stepped, resident bytes and frames skipped, after the warm-up and ten times after it.

    One of the objects is replaced every second, which must cost no memory.
    """
    model = {"SAM3_MODEL__NAME": str(weights), "SAM3_MODEL__THREADS": "1"}
    with run_node("scene:shapes", FPS, OBJECTS, **model) as client:
        while _read_status(client)[0] < WARM_STEPS:
            replace_oldest(client)
        yield _read_status(client)
        for _ in range(10):
            end_s = time.monotonic() + 6 * minutes
            while time.monotonic() < end_s:
                replace_oldest(client)
            yield _read_status(client)


def _read_status(client: PerceptionClient) -> tuple[int, int, int]:
    status = client.status()
    camera = status["cameras"]["cam0"]
    return camera["stepped"], status["rss_bytes"], camera["skipped"]


def replace_oldest(client: PerceptionClient) -> None:
    """Remove an object and add another, then wait a second."""
    client.remove_object(client.list_objects()[0].id)
    masks = next_masks(client)
    client.add_object(points=[(masks.width / 2, masks.height / 2)])
    time.sleep(1)


def print_growth(rows: Iterator[tuple[int, int, int]], last: str) -> tuple[float, int]:
    """Print rows of (step, resident bytes, `last`); return the growth in MB and of `last` since the first row."""
    print(f"   step    RSS MB   grown MB   {last}")
    first, growth = (0, 0), (0.0, 0)
    for step, rss, other in rows:
        first = first if any(first) else (rss, other)
        growth = (rss - first[0]) / 1e6, other - first[1]
        print(f"{step:7d} {rss / 1e6:9.1f} {growth[0]:10.2f}   {other}", flush=True)
    return growth


def plan_chaos(args: argparse.Namespace, weights: Path) -> Plan:
    """Return the plan of a chaos run: mostly chaos, then the overload, then a quiet quarter of an hour."""
    seconds = 60 * args.minutes
    overload_s = min(60 * args.overload_minutes, seconds / 3)
    quiet_s = min(900.0, seconds / 4)
    settings = {
        "SAM3_MODEL__NAME": args.model or str(weights),
        "SAM3_MODEL__THREADS": str(args.threads),
        "SAM3_MODEL__DEVICE": args.device,
        "SAM3_DETECTOR__KIND": "none",
        "SAM3_DEADLINE__BUDGET_MS": str(args.budget_ms),
    }
    given = (word.partition("=") for word in args.set)
    settings |= {f"SAM3_{name.upper().replace('.', '__')}": value for name, _, value in given}
    return Plan(
        seconds - overload_s - quiet_s,
        overload_s,
        quiet_s,
        args.fault_every,
        min(5.0, seconds / 10),
        args.watchdog,
        load_factor=args.load_factor,
        seed=args.seed,
        keeps_epochs=args.keeps_epochs,
        settings=settings,
    )


def run_chaos(plan: Plan, folder: Path) -> Row:
    """Run a chaos, also one that Ctrl-C ends, and return its summary."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    with suppress(KeyboardInterrupt):
        Soak(plan, log).run()
    return report(folder)


def report(folder: Path) -> Row:
    """Write the results beside a log, print the checks, and return the summary."""
    summary = write_results(folder / "log.jsonl")
    print(*describe(summary), sep="\n", flush=True)
    return summary


def add_chaos_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the chaos."""
    parser.add_argument("--chaos", action="store_true", help="break things; needs --minutes")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="folder of log and results")
    parser.add_argument("--summarise", type=Path, metavar="FOLDER", help="only write a log's results again")
    parser.add_argument("--model", default="", help="weights of the node; default: tiny random ones")
    parser.add_argument("--budget-ms", type=float, default=0.0, help="latency budget of the node; 0: none")
    parser.add_argument("--fault-every", type=float, default=60.0, metavar="S", help="seconds between faults")
    parser.add_argument("--watchdog", type=float, default=10.0, metavar="S", help="group.watchdog_s")
    parser.add_argument("--overload-minutes", type=float, default=5.0, help="at most a third of the run")
    parser.add_argument("--load-factor", type=float, default=4.0, help="rate of the overload in node rates")
    parser.add_argument("--seed", type=int, default=0, help="order of the faults")
    parser.add_argument("--keeps-epochs", action="store_true", help="check that ids survive restarts")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="node setting")


def add_figures(summary: Row, minutes: float, figures: Figures) -> None:
    """Keep the checks that were measured, and the node's memory over the run."""
    for check in summary["checks"]:
        if check["value"] is not None:
            target = f"at most {check['bound']:.1f}"
            what = f"chaos of {minutes:g} minutes: {check['name']}"
            figures.add(what, check["value"], check["unit"] or "count", target)
    for minute, rss_mb in summary.get("rss_mb", {}).items():
        figures.add(f"chaos of {minutes:g} minutes: the node's memory after {minute} minutes", rss_mb, "MB")


def main() -> None:
    parser = make_parser(__doc__, threads=1, device="cuda" if torch.cuda.is_available() else "cpu")
    add_chaos_options(parser)
    parser.add_argument("--steps", type=int, default=5000, help="steps of the tracker alone")
    parser.add_argument("--minutes", type=float, default=0.0, help="minutes of the whole node; 0: none")
    args, figures = parser.parse_args(), Figures("soak", group="latency", show=False)
    if args.summarise is not None:
        raise SystemExit(not report(args.summarise)["passed"])
    if args.chaos and not args.minutes:
        parser.error("--chaos: expected --minutes N beside it, found none")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        weights = save_tiny_checkpoint(Path(folder) / "tiny")
        if args.chaos:
            summary = run_chaos(plan_chaos(args, weights), args.out)
            add_figures(summary, args.minutes, figures)
            figures.write(args.json)
            raise SystemExit(not summary["passed"])
        print(f"tracker alone on {args.device}, {OBJECTS} objects")
        megabytes, tensors = print_growth(run_tracker(weights, args.device, args.steps), "bytes in tensors")
        what = f"tracker alone, {args.steps} steps with {OBJECTS} objects, after the first {WARM_STEPS}"
        figures.add(f"{what}: growth of resident memory", megabytes, "MB")
        figures.add(f"{what}: growth of the bytes in tensors", tensors, "bytes", target="0")
        if args.minutes:
            print(f"\ncamera at {FPS} Hz and node, {OBJECTS} objects, one of them replaced every second")
            megabytes, _ = print_growth(soak_node(weights, args.minutes), "frames skipped")
            figures.add(f"node, {args.minutes:g} minutes: growth of resident memory", megabytes, "MB")
    figures.write(args.json)


if __name__ == "__main__":
    main()
