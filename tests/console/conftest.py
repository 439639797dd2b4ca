"""A browser, and one camera, node and console for the tests of a file."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.console_rig import ConsoleRig, Page, open_browser
from tests.support.patience import PATIENCE_MS


# of a file: the browser keeps an event loop in this thread, in which other files' tests could start none of their own
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    return getattr(request.module, "ENVIRONMENT", {})


@pytest.fixture(scope="module")
def rig(
    browser: Any, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ConsoleRig]:
    """The bundled recording, a node with the bundled weights and the file's ENVIRONMENT, and a console at `rig.url`."""
    with ConsoleRig(tmp_path_factory.mktemp("console")) as found:
        found.environment |= environment
        _, found.url = found.console()
        found.tabletop()
        found.node()
        yield found


@pytest.fixture(scope="module")
def opened(browser: Any, rig: ConsoleRig) -> Iterator[Page]:
    """A page that is connected to the node."""
    page = Page(browser, rig.url)
    page.wait('body[data-connected="yes"]')
    yield page
    page.close()


@pytest.fixture
def page(rig: ConsoleRig, opened: Page) -> Iterator[Page]:
    """The page while it shows masks of a node without objects and names, live."""
    with rig.client() as client:
        client.wait_for_camera(PATIENCE_MS)
        client.set_prompts([])
        client.reset()
        before = client.status()["cameras"]["cam0"]["last_seq"]
    opened.read("() => document.activeElement.blur()")
    opened.press("l")
    opened.wait_for_empty_picture(before)
    yield opened
    complaints = [*opened.complaints]
    opened.complaints.clear()
    assert not complaints
