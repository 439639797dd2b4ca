"""Kills workers of a local Ray in the middle of replays, and holds the results against those of undisturbed replays.

    python tools/bench/cloud_kills.py              20 kills with SIGKILL, nano on the CPU, two workers
    python tools/bench/cloud_kills.py --kills 5

Runs of four recordings (frames of the bundled one) follow each other until so many workers were killed, each at a
random moment after it was ready. Ends with 1 where one result differs in a byte, lacks a frame or has one twice.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import psutil

from sam3_node.bags import read_masks
from sam3_node.bags.native.labelled_clip import TABLETOP, LabelledClip
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.replay.cluster.pool import connect_ray
from sam3_node.replay.cluster.scheduler import run_many
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.run import PerceptionCache, run_job
from sam3_node.replay.shards import ShardLimits

BAGS, FRAMES = 4, 150
LIMITS = ShardLimits(frames=10)
SECONDS = 8.0
"""The longest pause between two kills."""


def write_bags(folder: Path) -> tuple[str, ...]:
    """LabelledClips of FRAMES frames, each from another one on."""
    paths = [folder / f"bag{number}.mcap" for number in range(BAGS)]
    frames = LabelledClip.load(TABLETOP).frames
    for number, path in enumerate(paths):
        with RecordingWriter(path) as writer:
            for seq, frame in enumerate(islice(frames, 10 * number, 10 * number + FRAMES)):
                writer.write_frame(replace(frame, seq=seq, depth=None), seq + 1)
    return tuple(map(str, paths))


class Killer:
    """Kills workers of this process's Ray, one at a time."""

    def __init__(self, seed: int) -> None:
        self.killed: set[int] = set()
        self._random = random.Random(seed)

    @contextmanager
    def at_work(self, most: int) -> Iterator[None]:
        """Meanwhile, until there were `most` kills."""
        over = threading.Event()
        thread = threading.Thread(target=self._work, args=(most, over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _work(self, most: int, over: threading.Event) -> None:
        while len(self.killed) < most and not over.wait(self._random.uniform(0.1, SECONDS)):
            workers = [one for one in self._workers() if one.pid not in self.killed]
            if workers:
                pid = self._random.choice(workers).pid
                os.kill(pid, signal.SIGKILL)
                self.killed.add(pid)

    def _workers(self) -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [child for child in children if child.name().startswith("ray::Worker")]


def differences(out: Path, expected: Path) -> Iterator[str]:
    """What is wrong with the results of all recordings."""
    for folder in sorted(expected.iterdir()):
        found = out / folder.name / "masks.mcap"
        seqs = [masks.seq for masks in read_masks(found)]
        if seqs != list(range(FRAMES)):
            yield f"{found}: expected the frames 0 to {FRAMES - 1}, found {len(seqs)}, {len(set(seqs))} different"
        elif found.read_bytes() != (folder / "masks.mcap").read_bytes():
            yield f"{found}: differs"


def run(kills: int, seed: int, folder: Path) -> int:
    """All runs -> the exit code."""
    shown = ObjectOnFrame(box=(200, 150, 420, 330))
    job = Job(
        write_bags(folder), str(folder / "expected"), objects=(shown,), settings={"model": {"threads": 1}}
    )
    load = PerceptionCache()
    for one in job.split_by_recording():
        run_job(one, load)
    killer, runs, lost, wrong = Killer(seed), 0, 0, []
    begin_s = time.monotonic()
    with connect_ray("local", 2):
        while len(killer.killed) < kills:
            out = folder / f"out{runs}"
            with killer.at_work(kills):
                bill = run_many(
                    replace(job, out=str(out)).split_by_recording(), "local", retries=100, limits=LIMITS
                )
            runs, lost = runs + 1, lost + sum(bag.losses for bag in bill.bags)
            wrong += [bag.error or bag.state for bag in bill.bags if bag.state != "done"]
            wrong += differences(out, folder / "expected")
    print(
        f"{len(killer.killed)} workers killed in {runs} runs of {BAGS} recordings of {FRAMES} frames, {lost} of them "
        f"at work on one; {len(wrong)} differences; {time.monotonic() - begin_s:.0f} s"
    )
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return run(args.kills, args.seed, Path(folder))


if __name__ == "__main__":
    raise SystemExit(main())
