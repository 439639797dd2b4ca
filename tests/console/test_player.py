"""Tests of the console that plays a recording and compares two results, with a real browser."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.bags import RecordingWriter
from sam3_node.console.recorded import RecordedViews, compare
from sam3_node.errors import BagError
from sam3_node.types import Mask, MaskFrame, Shed
from tests.support.console_rig import ConsoleRig, Page, find_serious
from tests.support.refuses import refuses
from tests.support.tabletop import cut, truth, write_masks

FRAMES = 24
LABEL = "#tracks tbody tr:first-child td:nth-child(2)"
WRONG = 15
"""Frame of which the second result has masks elsewhere."""
HELD = 2
"""Frame on which the node held its first object."""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first frames of the bundled recording, with their truth as the node's masks; one mask is doubtful."""

    def change(masks: MaskFrame) -> MaskFrame:
        if masks.seq == HELD:
            return held(masks)
        return doubted(masks) if masks.seq == 9 else masks

    return cut(tmp_path_factory.mktemp("recordings") / "first.mcap", 0, FRAMES, change)


@pytest.fixture(scope="module")
def other(recording: Path) -> Path:
    """Another result of it, without pictures: all ids differ, and on one frame no mask is where it was."""
    path = recording.with_name("masks.mcap")
    with RecordingWriter(path) as writer:
        for seq in range(FRAMES):
            write_masks(writer, moved(truth()[seq], seq == WRONG))
    return path


def doubted(masks: MaskFrame) -> MaskFrame:
    return replace(
        masks, instances=tuple(replace(item, doubtful=True, confidence=0.1) for item in masks.instances)
    )


def held(masks: MaskFrame) -> MaskFrame:
    return replace(masks, instances=masks.instances[1:], shed=Shed(2, (masks.instances[0].id,)))


def moved(masks: MaskFrame, away: bool) -> MaskFrame:
    corner = np.zeros((masks.height, masks.width), np.bool_)
    corner[:20, :20] = True
    return replace(
        masks,
        instances=tuple(
            replace(item, id=item.id + 100, mask=Mask.from_full(corner) if away else item.mask)
            for item in masks.instances
        ),
    )


def shown(page: Page, seq: int) -> None:
    page.wait(f".tile[data-seq='{seq}']")


@pytest.fixture(scope="module")
def player(
    browser: Any, recording: Path, other: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    with ConsoleRig(tmp_path_factory.mktemp("player")) as rig:
        _, url = rig.console("--recording", str(recording), "--against", str(other))
        page = Page(browser, url)
        # a key pressed before the page listens is lost, and any of the tests may be the first
        shown(page, 0)
        yield page
        page.close()
        assert not page.complaints


def test_the_player_shows_each_frame_with_its_masks(player: Page) -> None:
    shown(player, 0)
    assert player.rows() == [item.id for item in truth()[0].instances]
    player.press("]")
    shown(player, 1)
    player.press("[")
    shown(player, 0)


def test_load_that_was_shed_is_named(player: Page) -> None:
    ids = [item.id for item in truth()[HELD].instances]
    player.press("]")
    shown(player, 1)
    assert not player.page.locator("td[data-state='held']").count()
    label = player.page.locator(LABEL).inner_text()
    player.press("]")
    shown(player, HELD)
    player.wait(f"tr[data-id='{ids[0]}'] td[data-state='held']")
    player.wait(".tile figcaption:has-text('load shed, level 2')")
    assert player.rows() == ids
    assert player.page.locator(LABEL).inner_text() == label  # of the frames before
    player.press("]")
    shown(player, HELD + 1)
    player.wait_gone("td[data-state='held']")


def test_the_player_jumps_to_doubtful_and_to_different_frames(player: Page) -> None:
    player.wait(f"#place[max='{FRAMES - 1}']")
    player.page.locator("#next-doubtful").click()
    shown(player, 9)
    player.page.locator("#next-different").click()
    shown(player, WRONG)
    assert "IoU 0." in player.page.locator("#time").inner_text()
    ious = [compare(truth()[seq], moved(truth()[seq], seq == WRONG)) for seq in range(FRAMES)]
    ious[HELD] = compare(held(truth()[HELD]), truth()[HELD])
    mean = np.mean([iou for iou in ious if iou is not None])
    player.wait(f"#comparison:has-text('mean IoU of {FRAMES} frames') dd:text-is('{mean:.3f}')")
    assert player.page.locator("#axis span").all_inner_texts()[:2] == ["0 s", "0.5 s"]
    assert player.page.locator("#legend li").count() == 9
    player.picture("console-player.jpg")
    assert not find_serious(player)


def test_the_player_plays_to_the_end(player: Page) -> None:
    player.read("() => document.activeElement.blur()")
    player.press(" ")
    shown(player, FRAMES - 1)
    player.wait("#play[aria-pressed=false]")


def test_compare_pairs_masks_without_their_ids() -> None:
    masks = truth()[0]
    assert compare(masks, moved(masks, False)) == 1.0
    assert compare(masks, replace(masks, instances=masks.instances[1:])) == pytest.approx(
        1 - 1 / sum(item.area > 0 for item in masks.instances), abs=1e-6
    )
    assert compare(masks, None) is None


def test_results_of_another_recording_are_refused(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "masks.mcap"
    with RecordingWriter(path) as writer:
        write_masks(writer, replace(truth()[0], camera="elsewhere"))
    with refuses(BagError, field=("results", "recording")):
        RecordedViews(recording, path, lambda: None)
    with refuses(BagError, field=("recorded", "frames")):
        RecordedViews(path, None, lambda: None)
