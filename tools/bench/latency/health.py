"""Ask a node's probes twenty times a second under several loads, and measure how long the answers take.

    python -m tools.bench.latency.health [--seconds 10] [--objects 4] [--loads NAME ...] [--hangs 3]

Camera, node, prober and load are processes on the loopback interface; the node tracks objects in the bundled recording
with the bundled weights. Each probe is a new connection. The loads: nothing else; two busy processes for each core;
slow peers that hold more connections than the endpoint has; scrapes of /metrics without pause, by one peer and by
fifty at once; requests for a mask of everything, which hold the main loop for seconds; and the attacks of
tools.bench.latency.attacks on the node's other sockets. A probe without an answer of status 200 is counted as failed.

Then it stops the node's process (SIGSTOP) under launch/start, with the default settings, and measures the seconds until
its successor starts, and until masks of the successor arrive.
"""

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import psutil

from sam3_node.client import PerceptionClient
from sam3_node.errors import Sam3NodeError
from tools.bench.common import Figures, count_cores, make_parser, percentile
from tools.bench.latency.attacks import ATTACKS, Target, attack
from tools.bench.processes import Processes, add_points, free_endpoints, free_ports, next_masks, spawned

PROBES_HZ = 20
TIMEOUT_S = 10.0
SLOW_PEERS = 64
SCRAPERS = 50
SETTLE_S = 1.0
TARGET = "at most 100 ms"
PROFILE = """
[transport]
frames = ["{frames}"]
masks = "{masks}"
control = "{control}"
[camera]
source = "scene:tabletop"
loop = true
[group]
processes = ["camera", "node"]
restart = "on-failure"
"""


def probe(url: str, seconds: float) -> tuple[list[float], int]:
    """Return the milliseconds that each answer took, and the number of probes that failed."""
    times_ms = []
    failed = 0
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        begin_s = time.monotonic()
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                answer.read()
        except OSError:
            failed += 1
        took_s = time.monotonic() - begin_s
        times_ms.append(took_s * 1e3)
        time.sleep(max(0.0, 1 / PROBES_HZ - took_s))
    return times_ms, failed


def repeat(work: Callable[..., None], *arguments: object) -> None:
    """Repeat some work without end; peers may refuse it."""
    while True:
        with suppress(OSError, Sam3NodeError):
            work(*arguments)


def spin() -> None:
    """Do nothing, without a pause."""


@contextmanager
def busy_processes() -> Iterator[None]:
    """Run two busy processes for each core until the block ends."""
    with ExitStack() as running:
        for _ in range(2 * count_cores()):
            running.enter_context(spawned(repeat, spin))
        yield


def hold_connections(port: int) -> None:
    """Open more connections than the endpoint serves, and send a part of a request on each."""
    with ExitStack() as opened:
        for _ in range(SLOW_PEERS):
            peer = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))
            peer.sendall(b"GET /met")
        time.sleep(0.2)


def scrape(port: int) -> None:
    """Ask for the metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
        answer.read()


def scrape_at_once(port: int) -> None:
    """Ask for the metrics from SCRAPERS threads."""

    def ask(_: int) -> None:
        with suppress(OSError):  # refused: more connections than the endpoint serves
            scrape(port)

    with ThreadPoolExecutor(SCRAPERS) as pool:
        list(pool.map(ask, range(4 * SCRAPERS)))


def ask_for_everything(masks: str, control: str) -> None:
    """Ask for masks of everything, which hold the main loop, ten times."""
    with PerceptionClient(masks, control, timeout_ms=60_000) as client:
        for _ in range(10):
            client.segment_everything(camera="cam0")


def make_loads(port: int, target: Target) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Return the context manager of each load by its name."""
    loads: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "nothing else": nullcontext,
        "busy cores": busy_processes,
        "slow peers": partial(spawned, repeat, hold_connections, port),
        "scrapes": partial(spawned, repeat, scrape, port),
        "scrapes of fifty": partial(spawned, repeat, scrape_at_once, port),
        "masks of everything": partial(spawned, repeat, ask_for_everything, target.masks, target.control),
    }
    return loads | {f"attack: {name}": partial(spawned, attack, name, target) for name in ATTACKS}


def measure_probes(figures: Figures, seconds: float, objects: int, names: list[str]) -> None:
    """Start a camera and a node, and measure the times of both probes under each load."""
    (port,) = free_ports(1)
    (second,) = free_endpoints(1)
    with Processes(SAM3_HEALTH__BIND=f"127.0.0.1:{port}", SAM3_HEALTH__DEADLINE_S="30") as processes:
        processes.start("run", SAM3_TRANSPORT__FRAMES=f"{processes.frames},{second}")
        processes.start_camera("scene:tabletop", 30)
        target = Target(processes.frames, second, processes.masks, processes.control)
        with processes.client() as client:
            add_points(client, objects)
            loads = make_loads(port, target)
            for name in names or loads:
                with loads[name]():
                    time.sleep(SETTLE_S)
                    for page in ("healthz", "readyz"):
                        times, failed = probe(f"http://127.0.0.1:{port}/{page}", seconds)
                        figures.add(f"/{page}, {name}: p50", percentile(times, 0.5), "ms")
                        figures.add(f"/{page}, {name}: longest of {len(times)}", max(times), "ms", TARGET)
                        figures.add(f"/{page}, {name}: failed", failed, "probes", "0")


def measure_replacement(figures: Figures, count: int) -> None:
    """Stop the node of a group `count` times, and measure how soon another one serves."""
    ends = dict(zip(("frames", "masks", "control"), free_endpoints(3), strict=True))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        profile = Path(folder) / "profile.toml"
        profile.write_text(PROFILE.format(**ends))
        command = [sys.executable, "-m", "sam3_node.processes", str(profile)]
        group = opened.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        opened.callback(group.terminate)
        client = opened.enter_context(
            PerceptionClient(ends["masks"], ends["control"], on_restart=lambda restart: None)
        )
        replaced = []
        served = []
        for _ in range(count):
            name = next_masks(client).node
            node = find_node(group)
            assert node is not None
            time.sleep(2 * SETTLE_S)
            begin_s = time.monotonic()
            node.send_signal(signal.SIGSTOP)
            while find_node(group) in (node, None):
                time.sleep(0.05)
            replaced.append(time.monotonic() - begin_s)
            while next_masks(client).node == name:
                pass
            served.append(time.monotonic() - begin_s)
        figures.add("node stopped under launch/start: its successor starts", replaced, "s", "at most 20 s")
        figures.add("node stopped under launch/start: its successor serves", served, "s")


def find_node(group: subprocess.Popen[bytes]) -> psutil.Process | None:
    """Return the node's process of a group; None while it has none."""
    with suppress(psutil.Error):
        children = psutil.Process(group.pid).children()
        return next((child for child in children if "run" in child.cmdline()), None)
    return None


def main() -> None:
    parser = make_parser(__doc__, seconds=10.0, objects=4)
    parser.add_argument("--loads", nargs="*", default=[], metavar="NAME", help="loads to try; all without it")
    parser.add_argument("--hangs", type=int, default=3, help="times that the node is stopped; 0 for none")
    args = parser.parse_args()
    figures = Figures("latency.health")
    measure_probes(figures, args.seconds, args.objects, args.loads)
    if args.hangs:
        measure_replacement(figures, args.hangs)
    figures.write(args.json)


if __name__ == "__main__":
    main()
