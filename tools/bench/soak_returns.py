"""Let objects come and go for an hour of a camera's time, and watch memory.

    python -m tools.bench.soak_returns [--minutes 60] [--fps 5] [--json FILE]

Blocks of three colours appear and vanish on a grey table. A detector that knows their colours finds them; nano tracks
them. Frames go through the pipeline one after another. The bench also measures the stage that remembers, with 16
objects in view. Memory is read each tenth of the time.
"""

import gc
import random
import statistics
import sys
from dataclasses import replace

import torch

from sam3_node.detection.detectors import prepare_prompts
from sam3_node.models import load_tracker
from sam3_node.perception.checkpoint import pack_state
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.step import StepFrame
from sam3_node.settings import DetectorSettings, TrackerSettings
from sam3_node.types import NANOSECONDS
from sam3_node.wire import RECALLED
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.coloured_blocks import COLOURS, ColourDetector, frame
from tools.bench.common import Figures, make_parser

READINGS = 10
"""Times at which memory is read. The first is left out: it includes what is allocated once."""
COST_FRAMES = 60
"""Frames on which the cost of remembering is measured."""
SPOTS = [(x, y) for x in (10, 90, 170, 250) for y in (10, 70, 130, 185)]
SIDE = 45
"""Of a block, in pixels."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="of the camera's time")
    parser.add_argument("--fps", type=float, default=5, help="frames a second of the camera")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = Figures("soak_returns", group="latency")
    measure_cost(figures)
    measure_memory(figures, args.minutes, args.fps)
    figures.write(args.json)


def measure_cost(figures: Figures) -> None:
    """Measure the stage that remembers, with 16 objects in view."""
    pipeline = Pipeline(load_tracker("nano"), TrackerSettings(), "cam0")
    placed = {spot: random.Random(place).choice(list(COLOURS)) for place, spot in enumerate(SPOTS)}
    pipeline.step(frame(0, placed, SIDE))
    for x, y in SPOTS:
        pipeline.add(FramePrompt(box=(x, y, x + SIDE, y + SIDE)), "block", seq=0)
    steps = [pipeline.step(frame(seq, placed, SIDE)) for seq in range(1, COST_FRAMES)]
    spent_us = [masks.stages_us["remember"] for masks in steps]
    figures.add("remembering, 16 objects in view, median", statistics.median(spent_us) / 1000, "ms", "1")


def measure_memory(figures: Figures, minutes: float, fps: float) -> None:
    """Let objects come and go, and read memory."""
    detector = ColourDetector()
    settings = DetectorSettings(kind="yolo-world", every=3, max_lost_s=2)
    pipeline = Pipeline(load_tracker("nano"), TrackerSettings(), "cam0", detector, settings)
    pipeline.set_prompts(prepare_prompts(detector, ("red", "green", "blue"), 0.5))
    rng = random.Random(1)
    placed: dict[tuple[int, int], str] = {}
    recalls = 0
    resident_mb: list[float] = []
    state_kb: list[float] = []
    count = round(60 * minutes * fps)
    for seq in range(count):
        # every few seconds, something comes or goes
        if rng.random() < 0.4 / fps:
            spot = rng.choice(SPOTS)
            if spot in placed:
                del placed[spot]
            elif len(placed) < 3:
                placed[spot] = rng.choice(("red", "green", "blue"))
        step = StepFrame(replace(frame(seq, placed, SIDE), capture_ns=round(seq * NANOSECONDS / fps)))
        pipeline.step(step)
        recalls += sum(event.op == RECALLED for event in step.events)
        if (seq + 1) % max(1, count // READINGS) == 0:
            gc.collect()
            resident_mb.append(read_resident_mb())
            state_kb.append(len(pack_state(pipeline.memory.state())) / 1000)
            print(
                f"{100 * (seq + 1) / count:.0f} %: {resident_mb[-1]:.1f} MB, lost objects {len(pipeline.memory.lost)}, "
                f"{state_kb[-1]:.0f} kB, ids {pipeline.registry.last_id}, recalls {recalls}",
                file=sys.stderr,
                flush=True,
            )
    growth_mb = resident_mb[-1] - resident_mb[0]
    figures.add(f"resident memory over {minutes:g} minutes: growth after the first tenth", growth_mb, "MB")
    figures.add("what is remembered of lost objects at the end", state_kb[-1], "kB")
    figures.add("what is remembered of lost objects at most", max(state_kb), "kB")
    figures.add("objects that came back under their ids", recalls, "")
    figures.add("ids given", pipeline.registry.last_id, "")


def read_resident_mb() -> float:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * 4096 / 1e6


if __name__ == "__main__":
    main()
