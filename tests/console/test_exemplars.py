"""A drag with Alt on the picture: all like this."""

import pytest

from tests.support.console_rig import ConsoleRig, Page
from tests.support.tiny_detectors import write_tiny_sam3


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """SAM 3's detector with random weights."""
    folder = tmp_path_factory.mktemp("detector")
    write_tiny_sam3(folder)
    return {"SAM3_DETECTOR__KIND": "sam3-concept", "SAM3_DETECTOR__NAME": str(folder)}


def test_drags_with_alt_show_what_to_look_for_and_what_not(rig: ConsoleRig, page: Page) -> None:
    page.freeze()
    page.drag((100, 100, 200, 180), "Alt")
    page.wait("#toast.shown:has-text('Type a name first')")
    page.page.locator("#name").fill("washer")
    page.drag((100, 100, 200, 180), "Alt")
    page.wait("#toast.shown:has-text('Looks for washer: all that is like this box.')")
    page.page.locator("#name").fill("")
    page.drag((300, 200, 420, 300), "Alt", "Shift")
    page.wait("#toast.shown:has-text('all that is not like this box.')")
    with rig.client() as client:
        status = client.status()
    assert status["prompts"] == ["washer"]
    assert status["exemplars"] == {"washer": [1, 0]}
    assert page.rows() == []
    page.wait("#events li:has-text('Looks for all that is like a box.')")
