"""Measure what a snapshot costs the frames beside it: the copy in the main loop, and the packing in a thread.

    python -m tools.bench.latency.snapshot
    python -m tools.bench.latency.snapshot --model facebook/sam3 --objects 16

Runs of steps with a snapshot begun before each fourth step alternate with runs without. `copy` is the time for which
the loop waits. `step beside` is the step while the thread packs and writes, over the step without, medians of all
runs. The file goes to the temporary folder.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from sam3_node.node.saved_state import Snapshots
from sam3_node.perception.perception import Perception
from sam3_node.settings import DetectorSettings, ModelSettings, Settings, SnapshotSettings, TrackerSettings
from sam3_node.types import Frame
from sam3_node.wire.frame_prompt import FramePrompt
from tools.bench.common import RATIO, Figures, make_parser, objects_text

WIDTH = 640
HEIGHT = 480
WARM_UP = 12
"""Steps until the ring of memories is full."""


def frame(seq: int) -> Frame:
    noise = np.random.default_rng(seq % 8).integers(0, 255, (HEIGHT // 8, WIDTH // 8, 3), np.uint8)
    image = np.kron(noise, np.ones((8, 8, 1), np.uint8))
    return Frame("cam0", seq, time.time_ns(), WIDTH, HEIGHT, "bgr8", image.data)


def open_perception(args: argparse.Namespace) -> Perception:
    """Return a perception whose objects have full banks."""
    settings = Settings(
        model=ModelSettings(name=args.model, device=args.device),
        detector=DetectorSettings(kind="none"),
        tracker=TrackerSettings(max_objects=args.objects),
    )
    perception = Perception.load(settings)
    pipeline = perception.serve("cam0")
    pipeline.step(frame(0))
    for index in range(args.objects):
        x = 40 + 30 * index % (WIDTH - 80)
        y = 40 + 25 * index % (HEIGHT - 80)
        pipeline.add(FramePrompt(box=[x, y, x + 40, y + 40]), "thing", 0)
    for seq in range(1, WARM_UP):
        pipeline.step(frame(seq))
    return perception


def step_ms(perception: Perception, seq: int) -> float:
    image = frame(seq)
    begin_s = time.perf_counter()
    perception.pipelines["cam0"].step(image)
    return (time.perf_counter() - begin_s) * 1000


def main() -> None:
    parser = make_parser(__doc__, model="nano", objects=16, device="auto")
    parser.add_argument("--snapshots", type=int, default=8, help="number of snapshots")
    args = parser.parse_args()
    figures = Figures("latency.snapshot")
    perception = open_perception(args)
    alone = []
    beside = []
    copies = []
    writes = []
    with tempfile.TemporaryDirectory() as folder:
        settings = SnapshotSettings(path=Path(folder) / "node.snapshot", every_s=1e-6)
        output: Any = SimpleNamespace(stats={}, publish_event=lambda op, args: None)
        snapshots = Snapshots(settings, perception, output)
        for index in range(args.snapshots):
            alone += [step_ms(perception, 4 * index + place) for place in range(4)]
            saved = snapshots.describe()["saved"]
            snapshots.tick()
            copies.append(snapshots.describe()["copy_ms"])
            beside.append(step_ms(perception, 4 * index))
            snapshots.finish()
            assert snapshots.describe()["saved"] > saved
            writes.append(snapshots.describe()["write_ms"])
        size = snapshots.describe()["bytes"]
        snapshots.close()
    step = statistics.median(alone)
    what = f"{args.model}, {objects_text(args.objects)}, {size / 1e6:.1f} MB"
    for name, value, unit in (
        ("step beside the writing of a snapshot, over one without", statistics.median(beside) / step, RATIO),
        ("step", step, "ms"),
        ("copy for a snapshot in the main loop, p50", statistics.median(copies), "ms"),
        ("copy for a snapshot in the main loop, longest", max(copies), "ms"),
        ("writing a snapshot in a thread, p50", statistics.median(writes), "ms"),
    ):
        figures.add(f"{name}: {what}", value, unit, "under 50 ms" if "copy" in name else "")
    figures.write(args.json)


if __name__ == "__main__":
    main()
