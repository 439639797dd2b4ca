"""Kill workers of a local Ray during replays, and compare the results with uninterrupted replays.

    python -m tools.bench.replay.cluster_kills              20 kills with SIGKILL, nano on the CPU, two workers
    python -m tools.bench.replay.cluster_kills --kills 5

Runs of four recordings (frames of the bundled one) follow each other until --kills workers were killed, each at a
random moment after it was ready. The exit code is 1 if a result differs in a byte, lacks a frame or repeats one.
"""

from __future__ import annotations

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
from sam3_node.bags.native.reader import TABLETOP, LabelledClip
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.replay.cluster.scheduler import connect_ray, run_many
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.run import PerceptionCache, run_job
from sam3_node.replay.shards import ShardLimits
from tools.bench.common import Figures, make_parser

BAGS, FRAMES = 4, 150
LIMITS = ShardLimits(frames=10)
MAX_PAUSE_S = 8.0  # between two kills


def write_bags(folder: Path) -> tuple[str, ...]:
    """Write recordings of FRAMES frames, each from a different first frame."""
    paths = [folder / f"bag{number}.mcap" for number in range(BAGS)]
    frames = LabelledClip.load(TABLETOP).frames
    for number, path in enumerate(paths):
        with RecordingWriter(path) as writer:
            for seq, frame in enumerate(islice(frames, 10 * number, 10 * number + FRAMES)):
                writer.write_frame(replace(frame, seq=seq, depth=None), seq + 1)
    return tuple(map(str, paths))


class Killer:
    """A thread that kills workers of this process's Ray, one at a time."""

    def __init__(self, seed: int) -> None:
        self.killed: set[int] = set()
        self._random = random.Random(seed)

    @contextmanager
    def running(self, max_kills: int) -> Iterator[None]:
        """Kill at random moments during the `with` block, until `max_kills` workers were killed in all."""
        ended = threading.Event()
        thread = threading.Thread(target=self._kill, args=(max_kills, ended))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _kill(self, max_kills: int, ended: threading.Event) -> None:
        while len(self.killed) < max_kills and not ended.wait(self._random.uniform(0.1, MAX_PAUSE_S)):
            workers = [worker for worker in self._workers() if worker.pid not in self.killed]
            if workers:
                pid = self._random.choice(workers).pid
                os.kill(pid, signal.SIGKILL)
                self.killed.add(pid)

    def _workers(self) -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [child for child in children if child.name().startswith("ray::Worker")]


def differences(out: Path, expected: Path) -> Iterator[str]:
    """Yield a message for each recording whose results differ from the expected ones."""
    for folder in sorted(expected.iterdir()):
        path = out / folder.name / "masks.mcap"
        seqs = [masks.seq for masks in read_masks(path)]
        if seqs != list(range(FRAMES)):
            yield f"{path}: expected the frames 0 to {FRAMES - 1}, found {len(seqs)}, {len(set(seqs))} different"
        elif path.read_bytes() != (folder / "masks.mcap").read_bytes():
            yield f"{path}: differs"


def run(kills: int, seed: int, folder: Path, figures: Figures) -> int:
    """Replay until `kills` workers were killed; return the exit code."""
    prompt = ObjectOnFrame(box=(200, 150, 420, 330))
    job = Job(
        write_bags(folder), str(folder / "expected"), objects=(prompt,), settings={"model": {"threads": 1}}
    )
    load = PerceptionCache()
    for single in job.split_by_recording():
        run_job(single, load)
    killer, runs, lost, wrong = Killer(seed), 0, 0, []
    begin_s = time.monotonic()
    with connect_ray("local", 2):
        while len(killer.killed) < kills:
            out = folder / f"out{runs}"
            with killer.running(kills):
                report = run_many(
                    replace(job, out=str(out)).split_by_recording(), "local", retries=100, limits=LIMITS
                )
            runs, lost = runs + 1, lost + sum(bag.losses for bag in report.bags)
            wrong += [bag.error or bag.state for bag in report.bags if bag.state != "done"]
            wrong += differences(out, folder / "expected")
    print(
        f"{len(killer.killed)} workers killed in {runs} runs of {BAGS} recordings of {FRAMES} frames, {lost} of them "
        f"during a replay; {len(wrong)} differences; {time.monotonic() - begin_s:.0f} s"
    )
    print(*wrong, sep="\n")
    what = f"{len(killer.killed)} Ray workers killed with SIGKILL, {runs * BAGS} replays of {FRAMES} frames"
    figures.add(f"{what}: results that differ from an uninterrupted run", len(wrong), "results", target="0")
    figures.add(f"{what}: kills during a replay", lost, "kills")
    return 1 if wrong else 0


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="workers to kill in all")
    parser.add_argument("--seed", type=int, default=0, help="seed of moments and choice of workers")
    args, figures = parser.parse_args(), Figures("replay.cluster_kills", show=False)
    with tempfile.TemporaryDirectory() as folder:
        code = run(args.kills, args.seed, Path(folder), figures)
    figures.write(args.json)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
