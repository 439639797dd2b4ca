"""A camera, a node and a console as processes, and a browser that opens the console's page."""

import http.client
import json
import os
import shutil
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from sam3_node.types import Mask
from tests.support.node_rig import Process, Rig, ids, masks_where
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_MS
from tests.support.tabletop import iou, true_instance, truth

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VIEWPORT = {"width": 1280, "height": 720}
CLIP_FRAMES = 225
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}
"""Headers by which a request asks for a WebSocket."""
PAINTED = """() => {
    const overlay = document.querySelector("#main-tile .overlay");
    const context = new OffscreenCanvas(160, 120).getContext("2d");
    context.drawImage(overlay, 0, 0, 160, 120);
    return Array.from(context.getImageData(0, 0, 160, 120).data).filter((_, i) => i % 4 === 3).map(Number);
}"""
PREVIEW = f"""() => {{
    const alpha = ({PAINTED})();
    const {{ preview }} = document.querySelector("#main-tile .tile").dataset;
    // without a seq, what is painted is the mask of a reply, which also fades away
    return preview && alpha.some((each) => each) && {{ seq: Number(preview), alpha }};
}}"""
LOOK_MS = 1000
"""How long one place of the pointer is given to show a preview. Previews rest for seconds after a slow answer."""
NEAR_FRAMES = 8
"""Frames by which the picture may move on until the pointer has arrived. The place may lie on another thing then."""


class ConsoleRig(Rig):
    """The processes, with the bundled recording and weights, on ipc endpoints and a free port."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment |= {
            "SAM3_MODEL__NAME": "nano",
            "SAM3_DETECTOR__KIND": "yolo-world",
            "SAM3_CAMERA__FPS": "5",
            "SAM3_CAMERA__ENCODING": "jpeg",
            "SAM3_CAMERA__LOOP": "true",
            "SAM3_TRACKER__FEATURE_CACHE": "32",
            "SAM3_CONSOLE__BIND": "127.0.0.1:0",
            "SAM3_RECORD__OUT": str(folder / "recordings"),
        }

    def tabletop(self) -> Process:
        """Start the camera, which plays the bundled recording again and again; its seq go on."""
        return self.start("camera", "scene:tabletop")

    def console(self, *arguments: str, **settings: str) -> tuple[Process, str]:
        """Start the console and return its process and the page's URL."""
        process = self.launch("console", *arguments, **settings)
        line = process.next_line()
        assert line.startswith("console at "), line
        return process, line.removeprefix("console at ")


def ask(
    url: str, path: str, method: str = "GET", body: object = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send one request, as the page itself would unless `headers` say something else."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc)
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(parts.netloc, context=ssl._create_unverified_context())
    sent = {"Origin": f"{parts.scheme}://{parts.netloc}", **headers}
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {name: value for name, value in sent.items() if value})
    answer = connection.getresponse()
    received = b"" if answer.status == 101 else answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, received


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yield a browser; skip the test if there is none."""
    pytest.importorskip("starlette", reason="the extra console is not installed")
    pytest.importorskip("uvicorn", reason="the extra console is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    with playwright.sync_playwright() as running:
        arguments = ["--no-sandbox", "--disable-background-networking", "--enable-precise-memory-info"]
        browser = running.chromium.launch(executable_path=path, args=arguments, timeout=PATIENCE_MS)
        yield browser
        browser.close()


class Page:
    """The console's page in a browser, and everything that it has asked for or complained about."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        options = {"viewport": VIEWPORT, "color_scheme": "dark"} | options
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.set_default_timeout(PATIENCE_MS)
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", lambda socket: self.requests.append(socket.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)
        self.page.goto(url)

    def close(self) -> None:
        self.context.close()

    def wait(self, selector: str, **options: Any) -> Any:
        """Wait for an element and return its locator."""
        self.page.wait_for_selector(selector, **options)
        return self.page.locator(selector)

    def wait_gone(self, selector: str) -> None:
        """Wait until no such element exists."""
        self.page.wait_for_selector(selector, state="detached")

    def wait_for_empty_picture(self, seq: int) -> None:
        """Wait for a picture after `seq` without masks: those before may still show what has been removed."""
        self.page.wait_for_function(
            """seq => [...document.querySelectorAll('.tile')].some(
                ({dataset}) => Number(dataset.seq) > seq && dataset.masks === '0')""",
            arg=seq,
        )

    def read(self, script: str, argument: Any = None) -> Any:
        """Return the value of a function of JavaScript."""
        return self.page.evaluate(script, argument)

    def data(self, name: str) -> str:
        """Return a data attribute of the large picture's tile."""
        return str(self.page.locator("#main-tile .tile").get_attribute(f"data-{name}"))

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)

    def freeze(self) -> int:
        """Freeze the picture and return its seq."""
        self.page.locator("#freeze[aria-pressed=false]").click()
        self.wait("#freeze[aria-pressed=true]")
        self.wait("#main-tile .tile[data-frozen=true]")  # pictures that were on their way have come
        return int(self.data("seq"))

    def live(self) -> None:
        self.page.locator("#freeze[aria-pressed=true]").click()
        self.wait("#freeze[aria-pressed=false]")

    def to_page(self, x: float, y: float, size: tuple[int, int] = (480, 640)) -> tuple[float, float]:
        """Return the place in the page of a pixel of the frame."""
        box = self.page.locator("#main-tile .overlay").bounding_box()
        return box["x"] + x / size[1] * box["width"], box["y"] + y / size[0] * box["height"]

    def click(self, x: float, y: float, shift: bool = False, size: tuple[int, int] = (480, 640)) -> None:
        """Click a pixel of the frame."""
        if shift:
            self.page.keyboard.down("Shift")
        self.page.mouse.click(*self.to_page(x, y, size))
        if shift:
            self.page.keyboard.up("Shift")

    def drag(self, box: tuple[float, float, float, float], *keys: str) -> None:
        """Drag a box, in pixels of the frame, while these keys are held."""
        for key in keys:
            self.page.keyboard.down(key)
        self.page.mouse.move(*self.to_page(*box[:2]))
        self.page.mouse.down()
        self.page.mouse.move(*self.to_page(*box[2:]), steps=4)
        self.page.mouse.up()
        for key in keys:
            self.page.keyboard.up(key)

    def rows(self) -> list[int]:
        """Return the ids in the table of objects."""
        return [int(row.get_attribute("data-id")) for row in self.page.locator("#tracks tbody tr").all()]

    def picture(self, name: str) -> None:
        """Write a picture of the page for the documentation if DOCS_IMAGES is set."""
        if "DOCS_IMAGES" in os.environ:
            self.page.screenshot(path=ROOT / "docs/images" / name, type="jpeg", quality=82)

    def _note(self, message: Any) -> None:
        # a node on a busy machine may take longer than the console waits, which is no fault of the page
        if message.type in ("error", "warning") and "504 (Gateway Timeout)" not in message.text:
            self.complaints.append(message.text)


def find_serious(page: Page) -> list[Any]:
    """Return what axe-core finds on the page that is serious or critical."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")
    results: dict[str, Any] = axe.Axe().run(page.page).response
    return [
        (item["id"], [node["target"] for node in item["nodes"]])
        for item in results["violations"]
        if item["impact"] in ("serious", "critical")
    ]


def preview_of(page: Page, label: str) -> tuple[int, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Point at an object on the live picture until there is a preview of a frame that the place was chosen on or near.

    Return the seq of the frame that the preview is of, and its pixels at a quarter of the frame's size.
    """
    from playwright.sync_api import TimeoutError as NotInTimeError

    for attempt in range(100):
        pointed = int(page.data("seq"))
        x, y = inner_point(true_mask(pointed, label))
        page.page.mouse.move(*page.to_page(x + 0.1 * (attempt % 2), y))  # another place each time
        try:
            found = page.page.wait_for_function(PREVIEW, timeout=LOOK_MS).json_value()
        except NotInTimeError:
            continue
        # on a loaded machine the picture may be another one by then, with the arm where the object was
        if abs(found["seq"] - pointed) > NEAR_FRAMES or not is_in_view(found["seq"], label):
            continue
        return found["seq"], np.array(found["alpha"]).reshape(120, 160) > 0
    raise TimeoutError(f"expected a preview of {label}, found none at 100 places")


def true_mask(seq: int, label: str) -> Mask:
    """Return the true mask of an object on a frame of the looping clip."""
    return true_instance(seq % CLIP_FRAMES, label).mask


def is_in_view(seq: int, label: str) -> bool:
    """Return True if at least half of what is ever seen of an object is in view: the arm hides some for seconds."""
    areas = [item.mask.area for masks in truth().values() for item in masks.instances if item.label == label]
    return 2 * true_mask(seq, label).area >= max(areas)


def inner_point(mask: Mask) -> tuple[float, float]:
    """Return a pixel well inside a mask, (x, y): the one of the middle run of its middle row."""
    rows, columns = np.nonzero(mask.crop)
    row = int(np.median(rows))
    inside = columns[rows == row]
    return mask.box[0] + float(np.median(inside)) + 0.5, mask.box[1] + row + 0.5


def best_iou(rig: ConsoleRig, object_id: int, label: str, messages: int = 3) -> float:
    """Return the best IoU with the truth that an object's mask has in the next messages."""
    found: list[float] = []
    with rig.client() as client:
        while len(found) < messages:
            masks = masks_where(
                client,
                lambda masks: object_id in ids(masks) and is_in_view(masks.seq, label),
                f"object {object_id}",
            )
            mask = next(instance.mask for instance in masks.instances if instance.id == object_id)
            found.append(iou(mask.full(), true_mask(masks.seq, label).full()))
    return max(found)
