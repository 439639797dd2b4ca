"""Kill -9 of camera, node and watcher in turn: how soon the others have it back after it says it is ready.

    python tools/bench/reconnect.py              five kills of each, over tcp, tiny random weights

Camera and node count until a reader that lived through it holds masks of a frame captured, or published, after the
ready line; the watcher counts from its own ready line to its first row.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _common import Processes, next_masks, save_tiny_checkpoint

from sam3_node.client import PerceptionClient
from sam3_node.types import MaskFrame

COMMANDS = {"camera": ("camera", "scene:shapes"), "node": ("run",), "watcher": ("watch",)}
STAMPS: dict[str, Callable[[MaskFrame], int]] = {
    "camera": lambda masks: masks.capture_ns,
    "node": lambda masks: masks.published_ns,
}


def back_after_s(name: str, restarted: subprocess.Popen[str], client: PerceptionClient) -> float:
    """Seconds from now, when the process is ready, until it is heard again."""
    ready_ns = time.time_ns()
    if name == "watcher":
        assert restarted.stdout is not None
        restarted.stdout.readline()
    else:
        while STAMPS[name](next_masks(client)) < ready_ns:
            pass
    return (time.time_ns() - ready_ns) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = {"SAM3_MODEL__NAME": str(save_tiny_checkpoint(Path(folder))), "SAM3_MODEL__THREADS": "1"}
        with Processes(**model) as processes, processes.client() as client:
            running = {name: processes.start(*command) for name, command in COMMANDS.items()}
            next_masks(client)
            print("killed     back after s: median     worst")
            for name, command in COMMANDS.items():
                times = []
                for _ in range(args.kills):
                    running[name].kill()
                    running[name].wait()
                    running[name] = processes.start(*command)
                    times.append(back_after_s(name, running[name], client))
                print(f"{name:8s} {statistics.median(times):20.2f} {max(times):12.2f}", flush=True)


if __name__ == "__main__":
    main()
