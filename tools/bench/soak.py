"""Run a node with cameras and clients for long, and check that memory, descriptors, ages and ids keep their bounds.

    python -m tools.bench.soak --minutes 60 --chaos     something breaks every minute, then an overload and a quiet end
    python -m tools.bench.soak --minutes 10             the overload and the quiet end alone
    python -m tools.bench.soak --summarise FOLDER       the summary of such a run again, also of one that was cut

Weights are tiny and random: the memory bank, the bookkeeping and the messages are as with large weights. A client adds
and removes objects all the time. tests/test_flat_memory.py does the same for the tracker alone.

A run writes FOLDER/log.jsonl, and at its end summary.json and plot.png. It shows that no state is stuck, that ids keep
their meaning, and that memory, descriptors and ages keep their bounds (`soak_summary`); what it breaks is in
`soak_chaos`. It exits with 1 if a check has failed.
"""

import argparse
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from tools.bench.common import Figures, make_parser
from tools.bench.soak_chaos import Plan, Soak
from tools.bench.soak_summary import Row, describe, write_results
from tools.bench.tiny_weights import save_tiny_checkpoint


def make_plan(args: argparse.Namespace, weights: Path) -> Plan:
    """Return the plan: mostly chaos if it was asked for, then the overload, then a quiet quarter of an hour or more."""
    seconds = 60 * args.minutes
    overload_s = min(60 * args.overload_minutes, seconds / 3)
    quiet_s = min(900.0, seconds / 4) if args.chaos else seconds - overload_s
    settings = {
        "SAM3_MODEL__NAME": args.model or str(weights),
        "SAM3_MODEL__THREADS": str(args.threads),
        "SAM3_MODEL__DEVICE": args.device,
        "SAM3_DETECTOR__KIND": "none",  # `soak_surfaces` has a detector of its own
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
        surfaces=args.surfaces,
        episodes=args.episodes,
    )


def run(plan: Plan, folder: Path) -> Row:
    """Run a plan, also one that Ctrl-C ends, and return the summary."""
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run."""
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the run")
    parser.add_argument("--chaos", action="store_true", help="break things")
    text = "joints, exemplars, clicks on past frames, and spans to a collector, too (`soak_surfaces`)"
    parser.add_argument("--surfaces", action="store_true", help=text)
    text = "a recorder of episodes to a LeRobot dataset (`soak_episodes`)"
    parser.add_argument("--episodes", action="store_true", help=text)
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


def add_figures(summary: Row, run: str, figures: Figures) -> None:
    """Keep the checks that were measured, and the node's memory over the run."""
    for check in summary["checks"]:
        if check["value"] is not None:
            target = f"at most {check['bound']:.1f}"
            figures.add(f"{run}: {check['name']}", check["value"], check["unit"] or "count", target)
    for minute, rss_mb in summary.get("rss_mb", {}).items():
        figures.add(f"{run}: the node's memory after {minute} minutes", rss_mb, "MB")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = make_parser(__doc__, device=device, threads=1)
    add_options(parser)
    args = parser.parse_args()
    figures = Figures("soak", group="latency", show=False)
    if args.summarise is not None:
        raise SystemExit(not report(args.summarise)["passed"])
    with tempfile.TemporaryDirectory() as folder:
        weights = save_tiny_checkpoint(Path(folder) / "tiny")
        summary = run(make_plan(args, weights), args.out)
    add_figures(summary, f"{'chaos' if args.chaos else 'soak'} of {args.minutes:g} minutes", figures)
    figures.write(args.json)
    raise SystemExit(not summary["passed"])


if __name__ == "__main__":
    main()
