"""Measure what prompts on past frames cost the live stream, and the memory of the frames that are kept for them.

    python -m tools.bench.latency.past [--seconds 120] [--rate 15] [--delay 1.5] [--model nano]

One node serves one camera and tracks one object. Prompts for a second object are made in turn on the newest frame and
on a frame that is `--delay` seconds old, so that the node has to catch up; after some seconds the second object is
removed. The age of the masks runs from capture to publication. Both kinds alternate on the same machine, so their ratio
says more than either age.
"""

import statistics
import time
from collections import defaultdict, deque
from typing import Any, NamedTuple

from sam3_node.client import PerceptionClient
from sam3_node.types import NANOSECONDS, MaskFrame
from tools.bench.common import Figures, make_parser, percentile
from tools.bench.processes import next_masks, run_node

SETTLE_S = 3.0
CYCLE_S = 4.0
"""Time between two prompts; the masks of this time are measured."""
KEPT_DELAYS = 2
"""The node keeps frames for this many delays, because a request on a busy machine takes some time itself."""
TARGET = "under 1.2 x"


class Cycle(NamedTuple):
    """Measurements after one prompt."""

    ages_ms: list[float]
    join_s: float
    """from the request to the first masks with the object"""
    objects: float
    """mean number of objects"""


class Seqs:
    """The recent frames, to find the one that is some seconds old."""

    def __init__(self, delay_s: float) -> None:
        self._delay_ns = int(delay_s * NANOSECONDS)
        self._recent: deque[tuple[int, int]] = deque()

    def take(self, masks: MaskFrame) -> int:
        """Return the seq of the newest frame that is at least the delay older than these masks."""
        self._recent.append((masks.capture_ns, masks.seq))
        while len(self._recent) > 1 and self._recent[1][0] <= masks.capture_ns - self._delay_ns:
            self._recent.popleft()
        return self._recent[0][1]


def run_cycle(client: PerceptionClient, seqs: Seqs, is_past: bool) -> Cycle:
    """Add an object by a click, measure the masks for CYCLE_S, and remove it."""
    masks = next_masks(client)
    old = seqs.take(masks)
    begin_s = time.monotonic()
    middle = (masks.width / 2, masks.height / 2)
    added = client.add_object(points=[middle], seq=old if is_past else masks.seq)
    ages_ms = []
    counts = []
    join_s = CYCLE_S
    while time.monotonic() < begin_s + CYCLE_S:
        masks = next_masks(client)
        seqs.take(masks)
        ages_ms.append((masks.published_ns - masks.capture_ns) / 1e6)
        counts.append(len(masks.instances))
        if any(instance.id == added.id for instance in masks.instances):
            join_s = min(join_s, time.monotonic() - begin_s)
    client.remove_object(added.id)
    return Cycle(ages_ms, join_s, statistics.mean(counts))


def settle(client: PerceptionClient, seqs: Seqs) -> None:
    """Read masks until frames of the delay's age are known."""
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s:
        seqs.take(next_masks(client))


def main() -> None:
    parser = make_parser(__doc__, seconds=120.0, model="nano", threads="0")
    parser.add_argument("--rate", type=float, default=15.0, help="frames per second of the camera")
    parser.add_argument("--delay", type=float, default=1.5, help="age in seconds of the frame to prompt on")
    args = parser.parse_args()
    figures = Figures("latency.past")
    cycles: defaultdict[bool, list[Cycle]] = defaultdict(list)
    settings = {"SAM3_MODEL__NAME": args.model, "SAM3_MODEL__THREADS": args.threads}
    settings["SAM3_TRACKER__FEATURE_CACHE_S"] = str(KEPT_DELAYS * args.delay)
    with run_node("scene:shapes", args.rate, 1, **settings) as client:
        seqs = Seqs(args.delay)
        settle(client, seqs)
        first = client.status()
        for number in range(max(2, round(args.seconds / CYCLE_S))):
            cycles[number % 2 == 1].append(run_cycle(client, seqs, number % 2 == 1))
        last = client.status()
    report(cycles, first, last, f"{args.model}, camera at {args.rate:g} Hz", args.delay, figures)
    figures.write(args.json)


Status = dict[str, Any]


def report(
    cycles: dict[bool, list[Cycle]], first: Status, last: Status, what: str, delay_s: float, figures: Figures
) -> None:
    """Keep the figures."""
    ages = {kind: [age for cycle in found for age in cycle.ages_ms] for kind, found in cycles.items()}
    p50, p99 = ({kind: percentile(found, share) for kind, found in ages.items()} for share in (0.5, 0.99))
    (camera,) = last["cameras"].values()
    joins = [cycle.join_s for cycle in cycles[True]]
    grown = (last["rss_bytes"] - first["rss_bytes"]) / 1e6
    prompts = f"prompts {delay_s:g} s old every {2 * CYCLE_S:g} s, {what}"
    compared = f"age of masks, {prompts}, to prompts on the newest frame"
    figures.add(f"p99 {compared}", p99[True] / p99[False], "x", TARGET)
    figures.add(f"p99 age of masks, {prompts}", p99[True], "ms")
    figures.add(f"p50 {compared}", p50[True] / p50[False], "x")
    figures.add(f"time from the request until the object has caught up, {prompts}", joins, "s")
    figures.add(f"memory of the kept frames, {what}", camera["cached_bytes"] / 1e6, "MB")
    figures.add(f"growth of the node's resident memory meanwhile, {prompts}", grown, "MB")


if __name__ == "__main__":
    main()
