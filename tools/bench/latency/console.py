"""Measure the console's page: its age, and its share of the processor.

    python -m tools.bench.latency.console [--seconds 30] [--fps 30]

A process publishes raw 1280x720 at --fps, and masks of five objects for each frame at once, in the place of a camera
and a node. The console and a headless chromium are processes of their own.

    page     one page on this machine: pictures a second, and their age when they are drawn, from the capture
    console  processor time of the console's process, and of the browser with all of its processes
    link     a second page behind a link that carries three pictures a second: the age of what it draws
    node     with a real camera and node: time from a click to the object in the table, and from the node's death to
             the line that says so

Needs the extras console and dev, and chromium.
"""

import shutil
import socket
import threading
import time
from contextlib import closing, suppress
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import psutil

from sam3_node.cameras.scene import Scene
from sam3_node.transport import FramePublisher, MaskPublisher
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from tools.bench.common import Figures, make_parser, percentile
from tools.bench.processes import Processes, free_ports, spawned

WIDTH = 1280
HEIGHT = 720
OBJECTS = 5
SETTLE_S = 5.0
SAMPLE_S = 0.1
LINK_HZ = 3
LINK_STEP = 4096
MAX_HOST_CORES = 1.5
MAX_AGE_MS = 500
MAX_CLICK_S = 1.0
MAX_TOLD_S = 2.0


class Usage(NamedTuple):
    """Processor seconds of the console and of the browser."""

    console: float
    browser: float


def publish(frames: str, masks: str, fps: float) -> None:
    """Publish frames and their masks without end."""
    scene = Scene.from_uri(f"scene:shapes?width={WIDTH}&height={HEIGHT}")
    images = [scene.render(number)[0] for number in range(16)]
    disc = np.hypot(*np.mgrid[-90:90, -90:90]) < 90
    with FramePublisher(frames) as camera, MaskPublisher(masks) as node:
        due_s = time.monotonic()
        for seq in count():
            due_s += 1 / fps
            time.sleep(max(0.0, due_s - time.monotonic()))
            now_ns = time.time_ns()
            pixels = images[seq % len(images)].data.cast("B")
            camera.send(Frame("cam0", seq, now_ns, WIDTH, HEIGHT, "bgr8", pixels))
            x = 100 + seq % 200
            instances = tuple(
                Instance(i + 1, "disc", 0.9, "tracked", seq, 0, Mask((HEIGHT, WIDTH), _box(x, i), disc))
                for i in range(OBJECTS)
            )
            node.send(MaskFrame("cam0", seq, now_ns, WIDTH, HEIGHT, received_ns=now_ns, instances=instances))


def _box(x: int, index: int) -> tuple[int, int, int, int]:
    left = x + 150 * index
    top = 60 + 90 * index
    return left, top, left + 180, top + 180


def read_ages(page: Any, seconds: float) -> list[float]:
    """Return the age of each picture when it was drawn; sampled often."""
    ages: dict[int, float] = {}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        data = page.evaluate("() => ({...document.querySelector('#main-tile .tile')?.dataset})")
        if data.get("drawnAge"):
            ages.setdefault(int(data["seq"]), float(data["drawnAge"]))
        time.sleep(SAMPLE_S / 5)
    return list(ages.values())


def read_usage(console: psutil.Process, browser: psutil.Process) -> Usage:
    """Return the processor seconds so far."""

    def total(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    children = browser.children(recursive=True)
    chromium = [child for child in children if "chrom" in child.name()]
    return Usage(total(console), sum(map(total, chromium)))


class SlowLink:
    """A TCP relay to `port` that passes at most `bytes_per_s` from there, with small buffers on both sides."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._target = port
        self._rate = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.socket()
            for side in (near, far):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LINK_STEP)
                side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINK_STEP)
            far.connect(("127.0.0.1", self._target))
            threading.Thread(target=self._relay, args=(near, far, 0.0), daemon=True).start()
            threading.Thread(target=self._relay, args=(far, near, 1 / self._rate), daemon=True).start()

    @staticmethod
    def _relay(source: socket.socket, target: socket.socket, s_per_byte: float) -> None:
        with closing(target), suppress(OSError):  # the other direction has closed it
            while data := source.recv(LINK_STEP):
                time.sleep(len(data) * s_per_byte)
                target.sendall(data)


def measure_page(browser: Any, url: str, seconds: float, console: psutil.Process, figures: Figures) -> Any:
    """Print and keep the figures of one page on this machine. Return the page."""
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.goto(url)
    time.sleep(SETTLE_S)
    before = read_usage(console, psutil.Process())
    begin_s = time.monotonic()
    ages = read_ages(page, seconds)
    passed_s = time.monotonic() - begin_s
    after = read_usage(console, psutil.Process())
    cores = Usage(*((later - earlier) / passed_s for earlier, later in zip(before, after, strict=True)))
    print(f"browser: {cores.browser:.2f} cores")
    figures.add("processor time of the console", cores.console, "cores", f"under {MAX_HOST_CORES}")
    figures.add("pictures drawn", len(ages) / passed_s, "pictures/s")
    figures.add("age of a picture when it is drawn, p50", percentile(ages, 0.5), "ms")
    figures.add("age of a picture when it is drawn, p99", percentile(ages, 0.99), "ms")
    return page


def measure_link(browser: Any, url: str, seconds: float, figures: Figures) -> None:
    """Print and keep the age of what a page draws behind a link of LINK_HZ pictures a second."""
    script = "async () => (await (await fetch('static/main.js')).blob()).size"
    port = int(url.rstrip("/").rpartition(":")[2])
    page = browser.new_page()
    sizes: list[int] = []
    note = lambda data: sizes.append(len(data)) if isinstance(data, bytes) else None  # noqa: E731
    page.on("websocket", lambda found: found.on("framereceived", note))
    page.goto(url)
    page.evaluate(script)
    page.wait_for_timeout(2000)
    page.close()
    rate = LINK_HZ * float(np.median(sizes))
    link = SlowLink(port, rate)
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.goto(f"http://127.0.0.1:{link.port}/")
    page.wait_for_selector("#main-tile .tile[data-drawn-age]")
    page.wait_for_timeout(3000)
    ages = read_ages(page, seconds)
    page.close()
    shown = f"{len(ages) / seconds:.1f} pictures/s, the oldest {max(ages):.0f} ms"
    print(f"link of {rate / 1e3:.0f} kB/s: {shown}")
    what = f"age behind a link of {LINK_HZ} pictures/s, p99"
    target = f"under {MAX_AGE_MS}"
    figures.add(what, percentile(ages, 0.99), "ms", target)


def measure_node(browser: Any, figures: Figures) -> None:
    """Print and keep how soon a click gives an object, and how soon the page says that the node has died."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with Processes(SAM3_CONSOLE__BIND=address) as processes:
        processes.start("console")
        processes.start_camera("scene:tabletop", 10, SAM3_CAMERA__ENCODING="jpeg")
        node = processes.start("run")
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(120_000)
        page.goto(f"http://{address}/")
        page.wait_for_selector("body[data-connected=yes]")
        page.wait_for_selector('#main-tile .tile[data-masks="0"]')
        begin_s = time.monotonic()
        page.locator("#main-tile .overlay").click()
        page.wait_for_selector("#tracks tbody tr")
        clicked_s = time.monotonic() - begin_s
        node.kill()
        begin_s = time.monotonic()
        page.wait_for_selector("body[data-connected=no]")
        told_s = time.monotonic() - begin_s
        page.close()
    figures.add("time from a click to the object", clicked_s, "s", f"under {MAX_CLICK_S:g}")
    figures.add("time from the node's death to the line that says so", told_s, "s", f"under {MAX_TOLD_S:g}")


def main() -> None:
    parser = make_parser(__doc__, seconds=30.0, fps=30.0)
    args = parser.parse_args()
    figures = Figures("latency.console")
    from playwright.sync_api import sync_playwright

    address = f"127.0.0.1:{free_ports(1)[0]}"
    url = f"http://{address}/"
    chromium = shutil.which("chromium")
    with (
        Processes(SAM3_CONSOLE__BIND=address) as processes,
        spawned(publish, processes.frames, processes.masks, args.fps),
        sync_playwright() as playwright,
    ):
        console = psutil.Process(processes.start("console").pid)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = measure_page(browser, url, args.seconds, console, figures)
        page.close()
        measure_link(browser, url, args.seconds, figures)
        measure_node(browser, figures)
        browser.close()
    figures.write(args.json)


if __name__ == "__main__":
    main()
