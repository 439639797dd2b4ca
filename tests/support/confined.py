"""Recordings that are opened and read in a process of their own, with its time, memory and disk measured."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.processes import forks
from tests.support.resources import clear_peak_memory, peak_memory

MAX_SECONDS = 15
"""Limit of a recording of 64 KB: seconds of processor time."""
MAX_MB = 300
"""The same: MB of memory."""
MAX_DISK_MB = 100
"""The same: MB of disk."""

_HANG_S = 180


@dataclass(frozen=True)
class Outcome:
    """Reading of one recording: `result` tells how it ended; `problem` is None unless it broke a rule."""

    path: Path
    result: str
    seconds: float
    peak_mb: float
    disk_mb: float
    problem: str | None


def read_confined(paths: Sequence[Path], together: int = 1) -> Iterator[Outcome]:
    """Yield the outcome of each recording, `together` in a process; memory is exact if each has its own.

    One that crashes or hangs costs its process, and the next gets a new one.
    """
    waiting = list(paths)
    while waiting:
        for outcome in _read_in_one_process(waiting[:together]):
            waiting.pop(0)
            yield outcome


def _read_in_one_process(paths: Sequence[Path]) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory(prefix="sam3-node-confined-") as folder:
        results, sender = forks.Pipe(duplex=False)
        process = forks.Process(target=_serve, args=([str(path) for path in paths], folder, sender))
        process.start()
        sender.close()
        try:
            for path in paths:
                disk_mb, answer = _wait(results, Path(folder))
                if answer is None:
                    process.kill()
                    process.join()
                    ended = "hangs" if process.exitcode == -9 else f"ends its process ({process.exitcode})"
                    yield Outcome(path, ended, _HANG_S, 0, disk_mb, ended)
                    return
                yield _judge(path, disk_mb, *answer)
        finally:
            process.kill()
            process.join()


def _wait(results: Connection, folder: Path) -> tuple[float, tuple[str, bool, float, float] | None]:
    """Return the most MB that the folder held, and the answer; None if the process ended or hangs."""
    most = 0.0
    end = time.monotonic() + _HANG_S
    while time.monotonic() < end:
        ready = results.poll(0.02)
        most = max(most, _size_mb(folder))
        if ready:
            try:
                return most, results.recv()
            except EOFError:
                break
    return most, None


def _size_mb(folder: Path) -> float:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # it is being removed
            continue
    return total / 1e6


def _judge(
    path: Path, disk_mb: float, result: str, is_error: bool, seconds: float, peak_mb: float
) -> Outcome:
    problems = [
        *([result] if is_error else []),
        *([f"{peak_mb:.0f} MB"] if peak_mb > MAX_MB else []),
        *([f"{disk_mb:.0f} MB of disk"] if disk_mb > MAX_DISK_MB else []),
    ]
    return Outcome(path, result, seconds, peak_mb, disk_mb, ", ".join(problems) or None)


def _serve(paths: Sequence[str], folder: str, results: Connection) -> None:
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    for path in paths:
        before_mb = clear_peak_memory()
        begin = time.process_time()
        try:
            result = read_whole(Path(path))
            is_error = False
        except Exception as error:  # whatever a reader raises besides its own errors is a fault of the reader
            result = f"raises {type(error).__name__}: {error}"[:300]
            is_error = True
        results.send((result, is_error, time.process_time() - begin, peak_memory() - before_mb))


def read_whole(path: Path) -> str:
    """Open a recording as a replay does, decode every frame, and tell the outcome."""
    from sam3_node.bags.bag import open_bag
    from sam3_node.errors import BagError, WireError
    from sam3_node.wire import decode_depth, decode_image

    frames = damaged = 0
    try:
        with open_bag(path) as bag:
            for frame in bag:
                try:
                    frames += 1
                    decode_image(frame)
                    if frame.depth is not None:
                        decode_depth(frame.depth)
                except WireError:
                    damaged += 1
            return f"{frames} frames, {damaged} damaged; lost: {bag.lost or 'nothing'}"
    except BagError as error:
        return f"refused: {error}"
