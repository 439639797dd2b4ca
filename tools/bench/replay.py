"""Replay against the bare pipeline, reading alone, and two workers against one, all in one run.

    python tools/bench/replay.py                  nano, 4 objects, under two minutes
    python tools/bench/replay.py --minutes 30     memory, besides, over a recording of so many minutes at 30 Hz
    python tools/bench/replay.py --minutes 30 --hz 10 --tiny    at 10 Hz, by random weights of some ms a frame

The recording is the bundled one's 640x480 JPEG, played in a circle.

    reading    frames out of the file, still encoded; and decoded, in as many threads as replay has for that
    bare       the pipeline's step on the same frames, which are in memory; decoding is a part of the step
    replay     run_job: reading, decoding ahead, the same steps, results put on disk in parts; the rate is that of its
               summary, which leaves out loading and writing outputs. With outputs: the whole call, with masks.mcap
    workers    replay by processes of one thread each, on recordings of their own, one alone and two at once

Bare and replay alternate, so that a noisy machine is noisy for both; ratios are of medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the node does; read when torch is imported

from _common import processor, save_tiny_checkpoint

from sam3_node.bags.bag import open_bag
from sam3_node.bags.native.labelled_clip import TABLETOP, LabelledClip
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.node.stats import rss_bytes
from sam3_node.perception.perception import Perception
from sam3_node.perception.prompts import FramePrompt
from sam3_node.replay.actions import Step
from sam3_node.replay.job import Job, ObjectOnFrame, settings_for
from sam3_node.replay.prefetch import Prefetcher
from sam3_node.replay.run import run_job
from sam3_node.types import NANOSECONDS, Frame, Mask

CAMERA = "bench"
FPS = 30
READ_FRAMES = 3000
WARM = 10
SAMPLE_S = 1.0


def frames_of(count: int, hz: int = FPS) -> Iterator[Frame]:
    """So many frames, without depth."""
    for seq, frame in enumerate(islice(cycle(LabelledClip.load(TABLETOP).frames), count)):
        capture_ns = (seq + 1) * NANOSECONDS // hz
        yield replace(
            frame,
            camera=CAMERA,
            seq=seq,
            capture_ns=capture_ns,
            clock="system",
            sent_ns=0,
            depth=None,
            times={},
        )


def write_bag(path: Path, count: int, hz: int = FPS) -> Path:
    with RecordingWriter(path) as writer:
        for frame in frames_of(count, hz):
            writer.write_frame(frame, frame.capture_ns)
    return path


def boxes(count: int) -> list[tuple[float, float, float, float]]:
    """Those of the first objects in view at the beginning."""
    masks = islice(LabelledClip.load(TABLETOP).truth(0).values(), count)
    return [(float(x0), y0, x1, y1) for x0, y0, x1, y1 in (Mask.from_full(mask).box for mask in masks)]


def job_of(bag: Path, out: Path, objects: int, threads: int) -> Job:
    return Job(
        (str(bag),),
        str(out),
        objects=tuple(ObjectOnFrame(box=box) for box in boxes(objects)),
        settings={"model": {"threads": threads}},
    )


def reading_rates(folder: Path) -> tuple[float, float]:
    """Frames/s read, and read and decoded."""
    bag = open_bag(write_bag(folder / "read.mcap", READ_FRAMES))
    begin = time.perf_counter()
    count = sum(1 for _ in bag)
    read_s = time.perf_counter() - begin
    begin = time.perf_counter()
    with Prefetcher(Step(frame, 0) for frame in bag) as ahead:
        decoded = sum(1 for _ in ahead)
    return count / read_s, decoded / (time.perf_counter() - begin)


def bare_rate(perception: Perception, frames: list[Frame], objects: int) -> float:
    """Frames/s of the pipeline's own step."""
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
    """Frames/s of the steps, and of the whole with its outputs."""
    begin = time.perf_counter()
    summary = run_job(job, lambda settings: perception, again=True)
    return summary.frames_per_s, summary.frames / (time.perf_counter() - begin)


def compare(folder: Path, frames: int, rounds: int, objects: int, threads: int) -> None:
    """Print replay's rate beside the bare pipeline's."""
    job = job_of(write_bag(folder / "bag.mcap", frames), folder / "out", objects, threads)
    perception = Perception.load(settings_for(job, None))
    known = list(frames_of(frames))
    bare_rate(perception, known[:WARM], objects)
    bare, steps, whole = [], [], []
    for _ in range(rounds):
        bare.append(bare_rate(perception, known, objects))
        of_steps, of_all = replay_rates(job, perception)
        steps.append(of_steps)
        whole.append(of_all)
    base = statistics.median(bare)
    print(f"bare pipeline        {base:8.1f} frames/s, {objects} objects, {perception.model.name}")
    for name, rates in (("replay", steps), ("replay with outputs", whole)):
        print(
            f"{name:20s} {statistics.median(rates):8.1f} frames/s {statistics.median(rates) / base:8.3f} of bare"
        )


def work(job: Job, barrier: threading.Barrier) -> float:
    """In a process of its own: the rate of a replay that begins when all others do."""
    perception = Perception.load(settings_for(job, None))
    bare_rate(perception, list(frames_of(WARM)), len(job.objects))
    barrier.wait()
    return run_job(job, lambda settings: perception).frames_per_s


def workers_rate(folder: Path, count: int, frames: int, objects: int) -> float:
    """Frames/s of all workers together."""
    jobs = []
    for number in range(count):
        bag = write_bag(folder / f"bag{count}{number}.mcap", frames)
        jobs.append(job_of(bag, folder / f"out{count}{number}", objects, threads=1))
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(count, context) as pool:
        return sum(pool.map(work, jobs, [manager.Barrier(count)] * count))


class Memory(threading.Thread):
    """Resident bytes each second, with the time since the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self._done = threading.Event()

    def run(self) -> None:
        begin = time.monotonic()
        while not self._done.wait(SAMPLE_S):
            self.samples.append((time.monotonic() - begin, rss_bytes()))

    def stop(self) -> list[tuple[float, int]]:
        self._done.set()
        self.join()
        return self.samples


def soak(folder: Path, minutes: float, hz: int, objects: int, threads: int, tiny: bool) -> None:
    """Print resident memory over the replay of a long recording, all outputs included, and its growth."""
    frames = round(minutes * 60 * hz)
    job = job_of(write_bag(folder / "long.mcap", frames, hz), folder / "long", objects, threads)
    job = replace(job, outputs=("mcap", "coco", "png", "overlay"))
    if tiny:
        model = {**job.settings["model"], "name": str(save_tiny_checkpoint(folder / "tiny"))}
        job = replace(job, settings={**job.settings, "model": model})
    memory = Memory()
    memory.start()
    summary = run_job(job)
    samples = memory.stop()
    base = samples[len(samples) // 10][1]
    print(f"\n{summary.frames} frames, {len(samples)} s, all outputs\n   time s    RSS MB   grown MB")
    for number in range(1, 11):
        at_s, rss = samples[number * (len(samples) - 1) // 10]
        print(f"{at_s:9.0f} {rss / 1e6:9.1f} {(rss - base) / 1e6:10.1f}")
    most = max(rss for _, rss in samples[len(samples) // 10 :])
    print(f"most after the first tenth: {most / 1e6:.1f} MB, {(most - base) / 1e6:+.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--objects", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0 lets torch choose")
    parser.add_argument("--minutes", type=float, default=0.0, help="of a long recording; 0 leaves it out")
    parser.add_argument("--hz", type=int, default=FPS, help="of that recording")
    parser.add_argument("--tiny", action="store_true", help="random weights of some ms a frame for it")
    args = parser.parse_args()
    print(processor())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        read, decoded = reading_rates(folder)
        print(f"reading              {read:8.0f} frames/s of 640x480 JPEG, {decoded:.0f} with decoding")
        compare(folder, args.frames, args.rounds, args.objects, args.threads)
        if len(os.sched_getaffinity(0)) > 1:
            one, two = (workers_rate(folder, count, args.frames, args.objects) for count in (1, 2))
            print(f"two workers          {two:8.1f} frames/s {two / one:8.2f}x of one ({one:.1f})")
        if args.minutes:
            soak(folder, args.minutes, args.hz, args.objects, args.threads, args.tiny)


if __name__ == "__main__":
    main()
