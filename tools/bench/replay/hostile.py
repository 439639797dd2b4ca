"""Open recordings that were made to exhaust a machine, and damaged ones, and measure what each costs.

    python -m tools.bench.replay.hostile [--damaged N] [--only TEXT] [--json FILE]

Each hostile recording has at most 64 KB. Opened, and every frame decoded, in a process of its own, it must not take
more than 15 s of processor time, 300 MB of memory or 100 MB of disk, and no error but one of this package may come out.
The damaged recordings are small good ones of every format with flipped bits, cuts, splices and wrong numbers; the
number is also the seed. Prints the worst of each, and every recording that breaks a rule. Exits with 1 if one does.
"""

import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support import hostile_media  # it adds its cases
from tests.support.confined import MAX_DISK_MB, MAX_MB, MAX_SECONDS, Outcome, read_confined
from tests.support.damaged_recordings import write_damaged
from tests.support.hostile_recordings import CASES
from tools.bench.common import Figures, make_parser

TOGETHER = 50
_ALL = hostile_media.KINDS


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--damaged", type=int, default=330, metavar="N", help="damaged recordings [330]")
    parser.add_argument("--only", default="", metavar="TEXT", help="only those whose names have this text")
    args = parser.parse_args()
    figures = Figures("replay.hostile", show=False)
    with tempfile.TemporaryDirectory(prefix="sam3-node-hostile-") as folder:
        hostile = write_hostile(Path(folder), args.only)
        damaged = {path: name for name, path in write_damaged(Path(folder), args.damaged, args.only)}
        runs = {
            "hostile": measure(hostile, read_confined(list(hostile))),
            "damaged": measure(damaged, read_confined(list(damaged), TOGETHER)),
        }
    for kind, outcomes in runs.items():
        if outcomes:
            report(kind, outcomes, figures)
    figures.write(args.json)
    return 1 if any(broken(outcome) for outcomes in runs.values() for _, outcome in outcomes) else 0


def write_hostile(folder: Path, only: str = "") -> dict[Path, str]:
    """Write the hostile recordings whose names contain `only`; return their names by path."""
    names = {}
    for index, (name, write) in enumerate(CASES.items()):
        if only in name:
            place = folder / f"hostile{index}"
            place.mkdir()
            names[write(place)] = name
    return names


def measure(names: dict[Path, str], outcomes: Iterable[Outcome]) -> list[tuple[str, Outcome]]:
    """Print one line for each outcome that breaks a rule; return all with their names."""
    found = []
    for outcome in outcomes:
        found.append((names[outcome.path], outcome))
        if broken(outcome):
            print(f"BROKEN {names[outcome.path]}: {outcome.result[:200]}", flush=True)
    return found


def broken(outcome: Outcome) -> bool:
    """Return True if a recording broke a limit, or its reading failed."""
    return outcome.problem is not None or outcome.seconds > MAX_SECONDS


def report(kind: str, outcomes: Sequence[tuple[str, Outcome]], figures: Figures) -> None:
    """Print and keep the number, and the worst in time, memory and disk."""
    bad = sum(broken(outcome) for _, outcome in outcomes)
    read = sum(not outcome.result.startswith("refused") for _, outcome in outcomes)
    print(f"{kind}: {len(outcomes)} recordings, {bad} broke a rule, {read} opened, the others were refused")
    figures.add(f"{kind} recordings that broke a rule, of {len(outcomes)}", bad, "recordings", "0")
    for what, field, limit, symbol in (
        ("processor time", "seconds", MAX_SECONDS, "s"),
        ("memory", "peak_mb", MAX_MB, "MB"),
        ("disk", "disk_mb", MAX_DISK_MB, "MB"),
    ):
        value, name = max((float(getattr(outcome, field)), name) for name, outcome in outcomes)
        print(f"  most {what}: {value:.2f} {symbol} of {limit} ({name})")
        figures.add(f"{kind} recordings, most {what}", value, symbol, f"at most {limit}")


if __name__ == "__main__":
    sys.exit(main())
