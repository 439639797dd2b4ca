"""A browser for all tests, and one camera, node and console for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.console_rig import ConsoleRig, Page, open_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def rig(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleRig]:
    """The bundled recording, a node with the bundled weights, and a console; `rig.url` is its page."""
    found = ConsoleRig(tmp_path_factory.mktemp("console"))
    try:
        _, found.url = found.console()
        found.tabletop()
        found.node()
        yield found
    finally:
        found.close()


@pytest.fixture
def page(browser: Any, rig: ConsoleRig) -> Iterator[Page]:
    """A fresh page that shows masks of a node without objects and names."""
    with rig.client() as client:
        client.wait_for_camera()
        client.set_prompts([])
        client.reset()
    opened = Page(browser, rig.url)
    try:
        opened.wait('body[data-connected="yes"]')
        opened.wait('.tile[data-masks="0"]')
        yield opened
        assert not opened.complaints
    finally:
        opened.close()
