"""Compare replay with the bare pipeline and two workers with one; measure reading and memory.

    python -m tools.bench.replay.replay                  nano, 4 objects
    python -m tools.bench.replay.replay --minutes 30     also memory, over a recording of 30 minutes at 30 Hz

The recording has the 640x480 JPEG frames of the bundled one, repeated in a loop.

    reading    reading frames from the file, still encoded; then with decoding, in the threads that replay uses for it
    bare       the pipeline's step on the same frames in memory; decoding is a part of the step
    replay     run_job: reading, decoding ahead, the same steps, and writing results to shards. Its rate is its
               summary's, without loading and writing outputs. "With outputs" is the whole call, with masks.mcap
    workers    replays by processes of one thread each, on recordings of their own: one alone, then two at once

Bare and replay alternate, and so do one and two workers, so that other load on the machine slows both.
"""

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from sam3_node.bags.bag import open_bag
from sam3_node.bags.native.reader import TABLETOP, LabelledClip
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.perception.perception import Perception
from sam3_node.replay.event_log import Step
from sam3_node.replay.job import Job, ObjectOnFrame, settings_for
from sam3_node.replay.run import Prefetcher, run_job
from sam3_node.transport.limits import rss_bytes
from sam3_node.types import NANOSECONDS, Frame, Mask
from sam3_node.wire.frame_prompt import FramePrompt
from tools.bench.common import RUNS, Figures, count_cores, make_parser, objects_text

CAMERA = "bench"
FPS = 30
READ_FRAMES = 3000
WARM = 10
SAMPLE_S = 1.0


def read_frames(count: int) -> Iterator[Frame]:
    """Yield `count` frames of the bundled recording, in a loop and without depth."""
    for seq, frame in enumerate(islice(cycle(LabelledClip.load(TABLETOP).frames), count)):
        capture_ns = (seq + 1) * NANOSECONDS // FPS
        plain = replace(frame, clock="system", sent_ns=0, depth=None, times={})
        yield replace(plain, camera=CAMERA, seq=seq, capture_ns=capture_ns)


def write_bag(path: Path, count: int) -> Path:
    """Write a recording of `count` frames; return its path."""
    with RecordingWriter(path) as writer:
        for frame in read_frames(count):
            writer.write_frame(frame, frame.capture_ns)
    return path


def boxes(count: int) -> list[tuple[float, float, float, float]]:
    """Return the boxes of the first `count` objects in view on the first frame."""
    masks = islice(LabelledClip.load(TABLETOP).truth(0).values(), count)
    return [(float(x0), y0, x1, y1) for x0, y0, x1, y1 in (Mask.from_full(mask).box for mask in masks)]


def make_job(bag: Path, out: Path, objects: int, threads: int) -> Job:
    """Return a replay of a recording with its first objects."""
    found = tuple(ObjectOnFrame(box=box) for box in boxes(objects))
    return Job((str(bag),), str(out), objects=found, settings={"model": {"threads": threads}})


def reading_rates(folder: Path) -> tuple[float, float]:
    """Return the frames/s of reading, and of reading with decoding."""
    bag = open_bag(write_bag(folder / "read.mcap", READ_FRAMES))
    begin = time.perf_counter()
    count = sum(1 for _ in bag)
    read_s = time.perf_counter() - begin
    begin = time.perf_counter()
    with Prefetcher(Step(frame, 0) for frame in bag) as steps:
        decoded = sum(1 for _ in steps)
    return count / read_s, decoded / (time.perf_counter() - begin)


def bare_rate(perception: Perception, frames: list[Frame], objects: int) -> float:
    """Return the frames/s of the pipeline's own step."""
    perception.drop(CAMERA)
    pipeline = perception.serve(CAMERA)
    begin = time.perf_counter()
    for frame in frames:
        pipeline.step(frame)
        if frame is frames[0]:
            for box in boxes(objects):
                pipeline.add(FramePrompt(box=box), seq=frame.seq)
    return len(frames) / (time.perf_counter() - begin)


def replay_rates(job: Job, perception: Perception) -> tuple[float, float]:
    """Return the frames/s of a replay's steps, and of the whole replay with its outputs."""
    begin = time.perf_counter()
    summary = run_job(job, lambda settings: perception, again=True)
    return summary.frames_per_s, summary.frames / (time.perf_counter() - begin)


def compare(folder: Path, frames: int, runs: int, objects: int, threads: int, figures: Figures) -> None:
    """Compare replay's rate with the bare pipeline's, in turns."""
    job = make_job(write_bag(folder / "bag.mcap", frames), folder / "out", objects, threads)
    perception = Perception.load(settings_for(job, None))
    in_memory = list(read_frames(frames))
    bare_rate(perception, in_memory[:WARM], objects)
    bare: list[float] = []
    replays: dict[str, list[float]] = {"replay": [], "replay with outputs": []}
    for _ in range(runs):
        bare.append(bare_rate(perception, in_memory, objects))
        for rates, rate in zip(replays.values(), replay_rates(job, perception), strict=True):
            rates.append(rate)
    what = f"{objects_text(objects)}, {perception.model.name}"
    figures.add(f"bare pipeline, {what}", bare, "frames/s")
    for name, rates in replays.items():
        ratios = [rate / bare_run for rate, bare_run in zip(rates, bare, strict=True)]
        figures.add(f"{name} / bare pipeline, {what}", ratios, "x", target="at least 0.95")
        figures.add(f"{name}, {what}", rates, "frames/s")


def work(job: Job, barrier: threading.Barrier) -> float:
    """Return the frames/s of a replay that begins together with all workers; runs in a worker's process."""
    perception = Perception.load(settings_for(job, None))
    bare_rate(perception, list(read_frames(WARM)), len(job.objects))
    barrier.wait()
    return run_job(job, lambda settings: perception).frames_per_s


def compare_workers(folder: Path, frames: int, objects: int, runs: int, figures: Figures) -> None:
    """Compare the rate of two workers together with the rate of one, in turns."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for run in range(runs):
        for count in rates:
            rates[count].append(workers_rate(folder / f"workers{run}{count}", count, frames, objects))
    ratios = [two_rate / one_rate for one_rate, two_rate in zip(rates[1], rates[2], strict=True)]
    figures.add("two workers / one worker", ratios, "x", target="at least 1.7")
    figures.add("two workers, one thread each", rates[2], "frames/s")


def workers_rate(folder: Path, count: int, frames: int, objects: int) -> float:
    """Return the frames/s of all workers together."""
    folder.mkdir()
    jobs = []
    for number in range(count):
        bag = write_bag(folder / f"bag{number}.mcap", frames)
        jobs.append(make_job(bag, folder / f"out{number}", objects, threads=1))
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(count, context) as pool:
        return sum(pool.map(work, jobs, [manager.Barrier(count)] * count))


class MemorySampler(threading.Thread):
    """A thread that samples the resident bytes each second, with the time since its start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self._done = threading.Event()

    def run(self) -> None:
        begin = time.monotonic()
        while not self._done.wait(SAMPLE_S):
            self.samples.append((time.monotonic() - begin, rss_bytes()))

    def stop(self) -> list[tuple[float, int]]:
        """Stop, and return the samples (seconds, bytes)."""
        self._done.set()
        self.join()
        return self.samples


def soak(folder: Path, args: argparse.Namespace, figures: Figures) -> None:
    """Measure the growth of resident memory over the replay of a long recording with all outputs."""
    frames = round(args.minutes * 60 * FPS)
    bag = write_bag(folder / "long.mcap", frames)
    job = make_job(bag, folder / "long", args.objects, args.threads)
    job = replace(job, outputs=("mcap", "coco", "png", "overlay"))
    memory = MemorySampler()
    memory.start()
    summary = run_job(job)
    samples = memory.stop()
    base = samples[len(samples) // 10][1]
    print(f"\n{summary.frames} frames, {len(samples)} s, all outputs\n   time s    RSS MB   grown MB")
    for number in range(1, 11):
        at_s, rss = samples[number * (len(samples) - 1) // 10]
        print(f"{at_s:9.0f} {rss / 1e6:9.1f} {(rss - base) / 1e6:10.1f}")
    peak = max(rss for _, rss in samples[len(samples) // 10 :])
    what = f"replay of {frames} frames with all outputs"
    figures.add(f"{what}: growth of resident memory after the first tenth", (peak - base) / 1e6, "MB")


def main() -> None:
    parser = make_parser(__doc__, RUNS, objects=4, threads=0)
    parser.add_argument("--frames", type=int, default=150, help="frames of each recording")
    parser.add_argument("--minutes", type=float, default=0.0, help="minutes of the long recording; 0: none")
    args = parser.parse_args()
    figures = Figures("replay.replay")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        read, decoded = reading_rates(folder)
        figures.add("reading 640x480 JPEG from a recording", read, "frames/s", target="at least 500")
        figures.add("reading 640x480 JPEG from a recording, with decoding", decoded, "frames/s")
        compare(folder, args.frames, args.runs, args.objects, args.threads, figures)
        if count_cores() > 1:
            compare_workers(folder, args.frames, args.objects, args.runs, figures)
        if args.minutes:
            soak(folder, args, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
