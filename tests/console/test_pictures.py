"""Pictures of the console for the documentation: `DOCS_IMAGES=1 pytest tests/console/test_pictures.py` writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sam3_node.cli.main import main
from tests.support.console_rig import CLIP_FRAMES, ConsoleRig, Page
from tests.support.paths import ROOT
from tests.support.tabletop import TABLETOP

pytestmark = pytest.mark.skipif("DOCS_IMAGES" not in os.environ, reason="DOCS_IMAGES is not set")

IMAGES = ROOT / "docs/images"
MAX_BYTES = 300_000
IS_GOOD = """() => {
    const states = [...document.querySelectorAll("#tracks td[data-state]")].map((cell) => cell.dataset.state);
    const age = document.querySelector("#age");
    return states.length >= 4 && states.every((state) => state === "sure") && age.innerText.includes("ms old")
        && parseFloat(age.innerText) < 250;
}"""
NAMES = ("red mug", "green bottle", "yellow box", "blue can")


def save(page: Page, name: str) -> None:
    path = IMAGES / name
    page.page.screenshot(path=path, type="jpeg", quality=82)
    assert path.stat().st_size < MAX_BYTES


def save_live(page: Page, name: str) -> None:
    """Save a moment at which all objects are sure, and whose age is small before and after the picture was taken."""
    while True:
        page.page.wait_for_function(IS_GOOD, timeout=600_000)
        save(page, name)
        if page.read(IS_GOOD):
            return


@pytest.mark.timeout(1200)
def test_the_live_page(rig: ConsoleRig, page: Page) -> None:
    """Needs a machine that is not busy: the pictures show how old they are."""
    with rig.client() as client:
        client.set_prompts(NAMES, most=dict.fromkeys(NAMES, 1))
    page.wait('#main-tile .tile[data-masks="4"]')
    page.press("1")
    save_live(page, "console-dark.jpg")
    page.press("t")
    page.page.set_viewport_size({"width": 820, "height": 1100})
    page.page.wait_for_timeout(600)
    save_live(page, "console-tablet.jpg")


@pytest.mark.timeout(1200)
def test_the_player(browser: Any, tmp_path: Path) -> None:
    rig = ConsoleRig(tmp_path)
    out = tmp_path / "out"
    names = [word for name in (*NAMES, "orange ball") for word in ("--prompt", name)]
    try:
        assert main(["replay", str(TABLETOP), "-o", str(out), "--frames", "120", *names]) == 0
        _, url = rig.console("--recording", str(TABLETOP), "--against", str(out))
        page = Page(browser, url)
        page.wait(f"#place[max='{CLIP_FRAMES - 1}']")
        page.page.wait_for_timeout(3000)
        page.press("f")
        page.page.wait_for_timeout(500)
        save(page, "console-player.jpg")
    finally:
        rig.close()
