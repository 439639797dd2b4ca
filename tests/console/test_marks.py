"""Tests of marks on a recording, with a real browser: they are in the file, survive a reload, and can be taken back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sam3_node.bags.marks import name_marks, read_marks
from sam3_node.types import MaskFrame
from tests.support.console_rig import ConsoleRig, Page, find_serious
from tests.support.tabletop import cut

FRAMES = 8
DOUBTED = 5
"""Frame on which two masks are doubtful."""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first frames of the bundled recording, with their truth as a node's masks."""

    def change(masks: MaskFrame) -> MaskFrame:
        if masks.seq != DOUBTED:
            return masks
        two = tuple(replace(item, doubtful=True) for item in masks.instances[:2])
        return replace(masks, instances=(*two, *masks.instances[2:]))

    return cut(tmp_path_factory.mktemp("recordings") / "pick.mcap", 0, FRAMES, change)


def test_a_click_marks_a_frame_and_survives_reload_and_undo(
    browser: Any, recording: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with ConsoleRig(tmp_path_factory.mktemp("marks")) as rig:
        _, url = rig.console("--recording", str(recording))
        page = Page(browser, url)
        page.wait(".tile[data-seq='0']")
        page.wait("#review dd:text-is('2')")  # the queue
        page.press("d")
        page.wait(f".tile[data-seq='{DOUBTED}']")
        first = int(page.wait("#tracks tr[aria-selected=true]").get_attribute("data-id"))

        # the mark belongs to the object in question, also where its mask is not
        page.click(20, 30)
        page.wait(".tile[data-marks='1']")
        (mark,) = read_marks(name_marks(recording))
        assert (mark.camera, mark.seq, mark.id, mark.labels) == ("tabletop", DOUBTED, first, (1,))
        assert mark.points is not None
        assert mark.points[0] == pytest.approx((20, 30), abs=2)

        # another person goes on with the rest of the queue
        page.page.reload()
        page.wait(".tile[data-seq='0']")
        page.wait("#review dd:text-is('1')")
        page.press("d")
        page.wait(f".tile[data-seq='{DOUBTED}'][data-marks='1']")
        page.wait(f"#tracks tr[aria-selected=true]:not([data-id='{first}'])")
        page.press("a")
        page.wait("#review dd:has-text('checked')")
        assert read_marks(name_marks(recording))[1].state == "checked"
        assert not find_serious(page)

        page.press("z")
        page.wait_gone("#review dd:has-text('checked')")
        page.press("z")
        page.wait(".tile[data-marks='0']")
        assert not read_marks(name_marks(recording))
        page.close()
        assert not page.complaints
