"""Measure the steps of nano beside busy processes: with fixed numbers of CPU threads, and with the node's own choice.

    python -m tools.bench.latency.neighbours [--seconds 20] [--runs 1] [--busy 0 1 2 4]

One object of the drawn scene is tracked at 15 Hz. The numbers take turns for --seconds each, all beside the same busy
processes, each of which keeps one processor busy. "auto" is the choice of the node from its first frame on; its p50 is
compared with that of the best fixed number.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack

import numpy as np

from sam3_node.cli.environment import prepare_torch
from tools.bench.common import RATIO, Figures, count_cores, make_parser, percentile

FPS = 15
BUSY = "while True: pass"
FIRST = 15
"""Steps that do not count: the first ones compile operations."""
P50_TARGET = "at most 1.2"
P99_TARGET = "at most 2"


def step_for(seconds: float, threads: int) -> list[float]:
    """Step frames at FPS with this number of threads, 0 for the node's choice; return the times in ms."""
    import torch

    from sam3_node.cameras.scene import Scene
    from sam3_node.models import load_tracker
    from sam3_node.perception.pipeline import Pipeline
    from sam3_node.perception.step import StepFrame
    from sam3_node.perception.thread_choice import ThreadChooser
    from sam3_node.settings import Settings
    from sam3_node.types import Frame
    from sam3_node.wire.frame_prompt import FramePrompt

    chooser = ThreadChooser(threads or count_cores(), fixed=threads > 0)
    torch.set_num_threads(chooser.chosen)
    scene = Scene.from_uri("scene:shapes?width=640&height=480")
    pipeline = Pipeline(load_tracker("nano"), Settings().tracker, "cam0")
    times_ms: list[float] = []
    begin_s = time.monotonic()
    for seq in range(FIRST + round(seconds * FPS)):
        image, ids = scene.render(seq)
        frame = Frame("cam0", seq, 1 + round(1e9 * seq / FPS), 640, 480, "bgr8", image.tobytes())
        if seq == 1:
            rows, columns = np.nonzero(ids == 1)
            pipeline.add(
                FramePrompt(
                    points=((float(columns.mean()), float(rows.mean())),),
                )
            )
        time.sleep(max(0.0, begin_s + seq / FPS - time.monotonic()))
        count = chooser.next()
        torch.set_num_threads(count)
        step_begin_s = time.perf_counter()
        pipeline.step(StepFrame(frame))
        step_s = time.perf_counter() - step_begin_s
        chooser.note(count, step_s)
        times_ms.append(1e3 * step_s)
    return times_ms[FIRST:]


def measure(seconds: float, threads: int) -> list[float]:
    """Run `step_for` in a process of its own."""
    code = f"from tools.bench.latency.neighbours import main_step; main_step({seconds}, {threads})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [float(value) for value in done.stdout.split()]


def main_step(seconds: float, threads: int) -> None:
    """Print the times of steps in ms."""
    prepare_torch()
    print(*step_for(seconds, threads))


def main() -> None:
    parser = make_parser(__doc__, runs=1, seconds=20.0)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 4], help="numbers of busy processes")
    args = parser.parse_args()
    figures = Figures("latency.neighbours")
    fixed = sorted({1, count_cores()})
    for busy in args.busy:
        p50s: dict[int, list[float]] = {}
        p99s: dict[int, list[float]] = {}
        with ExitStack() as stack:
            for _ in range(busy):
                process = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
                stack.callback(process.kill)
            for _ in range(args.runs):
                for threads in (0, *fixed):
                    times_ms = measure(args.seconds, threads)
                    p50s.setdefault(threads, []).append(percentile(times_ms, 0.5))
                    p99s.setdefault(threads, []).append(percentile(times_ms, 0.99))
        where = f"{busy} busy processes on {count_cores()} processors"
        for threads in (0, *fixed):
            name = f"{threads} threads" if threads else "auto"
            figures.add(f"{where}: step with {name}, p50", p50s[threads], "ms")
            figures.add(f"{where}: step with {name}, p99", p99s[threads], "ms")
        best = [min(p50s[threads][run] for threads in fixed) for run in range(args.runs)]
        ratios = [auto / other for auto, other in zip(p50s[0], best, strict=True)]
        figures.add(f"{where}: auto / the best fixed number, p50", ratios, RATIO, P50_TARGET)
        spreads = [p99 / p50 for p99, p50 in zip(p99s[0], p50s[0], strict=True)]
        figures.add(f"{where}: auto, p99 / p50", spreads, RATIO, P99_TARGET)
    figures.write(args.json)


if __name__ == "__main__":
    main()
