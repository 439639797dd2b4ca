"""Kill camera, node and watcher in turn with SIGKILL, and measure how soon the other processes are served again.

    python -m tools.bench.latency.reconnect              five kills of each, over tcp, tiny random weights

The time starts at the ready line of the restarted process. For a camera it ends when a subscriber that was not
restarted holds masks of a frame captured after that line; for a node, masks published after it; for a watcher, when
the watcher prints its first row.

Then it kills (SIGKILL) and stops (SIGSTOP) camera and node, and measures how soon a subscriber of each notices.
"""

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sam3_node.client import PerceptionClient
from sam3_node.transport import FrameSubscriber
from sam3_node.types import MaskFrame
from tools.bench.common import Figures, make_parser
from tools.bench.processes import Processes, next_masks
from tools.bench.tiny_weights import save_tiny_checkpoint

COMMANDS = {"camera": ("camera", "scene:shapes"), "node": ("run",), "watcher": ("watch",)}
STAMPS: dict[str, Callable[[MaskFrame], int]] = {
    "camera": lambda masks: masks.capture_ns,
    "node": lambda masks: masks.published_ns,
}


def back_after_s(name: str, restarted: subprocess.Popen[str], client: PerceptionClient) -> float:
    """Return the seconds from now, when the restarted process is ready, until its output arrives again."""
    ready_ns = time.time_ns()
    if name == "watcher":
        assert restarted.stdout is not None
        restarted.stdout.readline()
    else:
        while STAMPS[name](next_masks(client)) < ready_ns:
            pass
    return (time.time_ns() - ready_ns) / 1e9


def noticed_after_s(process: subprocess.Popen[str], number: int, connected: Callable[[], object]) -> float:
    """Return the seconds from a signal to a process until a subscriber sees it as gone."""
    while not connected():
        time.sleep(0.01)
    time.sleep(1)  # beats have come
    process.send_signal(number)
    start_s = time.monotonic()
    while connected():
        time.sleep(0.001)
    return time.monotonic() - start_s


def measure_notice(processes: Processes, client: PerceptionClient, count: int, figures: Figures) -> None:
    """Kill and stop camera and node, and print how soon each is noticed."""
    with FrameSubscriber([processes.frames]) as frames:
        watched = {"camera": lambda: frames.connected, "node": lambda: client.connected}
        running = {name: processes.start(*COMMANDS[name]) for name in watched}
        for word, number in (("hung", signal.SIGSTOP), ("killed", signal.SIGKILL)):
            for name, connected in watched.items():
                times = []
                for _ in range(count):
                    times.append(noticed_after_s(running[name], number, connected))
                    if number == signal.SIGSTOP:
                        running[name].send_signal(signal.SIGCONT)
                    else:
                        running[name].wait()
                        running[name] = processes.start(*COMMANDS[name])
                figures.add(f"{name} {word}: noticed by its subscriber", times, "s")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=5, help="kills of each process")
    args = parser.parse_args()
    figures = Figures("latency.reconnect")
    with tempfile.TemporaryDirectory() as folder:
        model = {"SAM3_MODEL__NAME": str(save_tiny_checkpoint(Path(folder))), "SAM3_MODEL__THREADS": "1"}
        with Processes(**model) as processes, processes.client() as client:
            running = {name: processes.start(*command) for name, command in COMMANDS.items()}
            next_masks(client)
            for name, command in COMMANDS.items():
                times = []
                for _ in range(args.kills):
                    running[name].kill()
                    running[name].wait()
                    running[name] = processes.start(*command)
                    times.append(back_after_s(name, running[name], client))
                figures.add(f"{name} killed and restarted: served again after its ready line", times, "s")
        with Processes(**model) as processes, processes.client() as client:
            measure_notice(processes, client, args.kills, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
