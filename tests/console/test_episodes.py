"""Tests of the page that edits the episodes of a dataset: its requests, and the page in a real browser."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra console is not installed")
pytest.importorskip("uvicorn", reason="the extra console is not installed")

from sam3_node.bags import open_bag
from sam3_node.cli import main
from sam3_node.recording.lerobot.conversion import Converted, convert_recordings
from sam3_node.recording.lerobot.pending import name_edits
from sam3_node.settings import LeRobotSettings
from tests.recording.lerobot.test_editing import list_files
from tests.support.console_rig import UPGRADE, ConsoleRig, Page, ask, find_serious
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions
from tools.lerobot_recorded.recording import Mark, write_recording

TASK = "put the mug on the tray"
NEW = "wipe the table"
MARKS = (Mark(2, 12, TASK), Mark(13, 23, "wave"), Mark(24, 34, TASK), Mark(35, 43, TASK))
"""Episodes of 1.0, 1.0, 1.0 and 0.8 s."""
EDITS = (
    {"episode": 1, "dropped": True},
    {"episode": 2, "begin_s": 0.2, "end_s": 0.8},
    {"episode": 3, "task": NEW},
)
OPTIONS = ("--drop", "1", "--trim", "2=0.2:0.8", "--relabel", f"3={NEW}")
"""What EDITS are for the command `episodes`."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleRig]:
    with ConsoleRig(tmp_path_factory.mktemp("episodes")) as found:
        yield found


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    recording = write_recording(folder / "pick.mcap", MARKS)
    done = convert_recordings([recording], LeRobotSettings(), folder / "pick", lambda _: None)
    assert done == Converted(4, 0, 0)
    return folder / "pick"


@pytest.fixture
def dataset(converted: Path, tmp_path: Path) -> Path:
    """A dataset in a folder of its own, in which edits and copies are, too."""
    return Path(shutil.copytree(converted, tmp_path / "pick"))


def post(url: str, op: str, **args: object) -> Any:
    """Send a request of the page. Return what the page shows then."""
    status, _, body = ask(url, f"/api/{op}", "POST", args)
    assert status == 200, body
    return json.loads(body)


def show(url: str) -> Any:
    status, _, body = ask(url, "/api/episodes")
    assert status == 200, body
    return json.loads(body)


def assert_written_as_by_the_command(dataset: Path, written: Path) -> None:
    expected = dataset.with_name("by the command")
    assert main.main(["episodes", str(dataset), *OPTIONS, "--write", str(expected)]) == 0
    assert list_files(written) == list_files(expected)
    with open_bag(written) as found, open_bag(expected) as wanted:
        assert found.episode_starts == wanted.episode_starts == (0, 10, 16)
        frames = [(frame.camera, frame.seq, bytes(frame.colour)) for frame in found]
        assert frames == [(frame.camera, frame.seq, bytes(frame.colour)) for frame in wanted]
    assert len(frames) == 2 * (10 + 6 + 8)


def test_edits_outlive_the_console_and_are_written_as_by_the_command(rig: ConsoleRig, dataset: Path) -> None:
    before = list_files(dataset)
    process, url = rig.console("--dataset", str(dataset))
    first, *_, fourth = show(url)["episodes"]
    assert (first["task"], first["rows"], first["seconds"]) == (TASK, 10, 1.0)
    assert first["rates"] == pytest.approx({"front": 10, "wrist": 10})
    assert (first["without_masks"], first["off_in_time"]) == (0, 0)
    assert first["doubtful"] == sum(frame % 3 == 0 for frame in range(2, 12))
    assert [episode["pieces"] for episode in (first, fourth)] == [[[0, 1.0]], [[0, 0.8]]]
    for edit in EDITS:
        shown = post(url, "edit_episode", **edit)
    assert (shown["edits"], shown["changed"], shown["new_name"]) == (3, 3, "pick-2")
    assert [episode["pieces"] for episode in shown["episodes"]] == [[[0, 1]], [], [[0.2, 0.8]], [[0, 0.8]]]
    assert shown["episodes"][3]["new_task"] == NEW
    process.kill()
    assert list_files(dataset) == before

    # another console, another person
    _, url = rig.console("--dataset", str(dataset))
    assert show(url)["edits"] == 3
    post(url, "edit_episode", episode=0, split_s=0.5)
    assert post(url, "undo_edit", edits=4)["episodes"] == shown["episodes"]
    written = post(url, "write_episodes", name="pick-2", edits=3)
    assert written["written"]["folder"] == str(dataset.with_name("pick-2"))
    assert mentions(written["written"]["rows"], "24 rows in 3 episodes")
    assert (written["edits"], written["new_name"]) == (0, "pick-3")
    assert list_files(dataset) == before
    assert_written_as_by_the_command(dataset, dataset.with_name("pick-2"))


def test_each_episode_has_a_strip_of_pictures(rig: ConsoleRig, dataset: Path) -> None:
    _, url = rig.console("--dataset", str(dataset))
    status, headers, body = ask(url, "/api/strips/3")
    assert (status, headers["content-type"]) == (200, "image/jpeg")
    image = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    assert image.shape == (120, 8 * 160, 3)
    for number in ("4", "-1", "x", "9" * 5000, "%C2%B2", "../episodes"):
        assert ask(url, f"/api/strips/{number}")[0] in (400, 404)
    next(dataset.glob("videos/observation.images.front/**/file-001.mp4")).write_bytes(b"junk")
    status, _, body = ask(url, "/api/strips/1")
    assert (status, mentions(json.loads(body)["error"]["message"], "episode 1")) == (400, True)


def test_strangers_neither_see_nor_change_a_dataset(rig: ConsoleRig, dataset: Path) -> None:
    _, printed = rig.console("--dataset", str(dataset), CONSOLE__TOKEN="true")
    url, _, token = printed.partition("#token=")
    paths = ("/api/episodes", "/api/strips/0")
    assert [ask(url, path)[0] for path in paths] == [401, 401]
    assert ask(url, "/api/edit_episode", "POST", EDITS[0])[0] == 401
    cookie = ask(url, "/login", "POST", {"token": token})[1]["set-cookie"].partition(";")[0]
    assert [ask(url, path, Cookie=cookie)[0] for path in paths] == [200, 200]
    assert [ask(url, path, Cookie=cookie, Host="evil.example")[0] for path in paths] == [403, 403]
    for origin in ("http://evil.example", ""):
        assert ask(url, "/api/edit_episode", "POST", EDITS[0], Cookie=cookie, Origin=origin)[0] == 403
    assert not name_edits(dataset).exists()
    assert ask(url, "/api/edit_episode", "POST", EDITS[0], Cookie=cookie)[0] == 200


def test_read_only_shows_and_changes_nothing(rig: ConsoleRig, dataset: Path) -> None:
    _, url = rig.console("--dataset", str(dataset), CONSOLE__READ_ONLY="true")
    assert show(url)["read_only"]
    assert ask(url, "/api/strips/0")[0] == 200
    for op in ("edit_episode", "undo_edit", "write_episodes"):
        status, _, body = ask(url, f"/api/{op}", "POST", {})
        assert (status, json.loads(body)["error"]["code"]) == (403, "read_only")
    assert not name_edits(dataset).exists()


WRONG: tuple[tuple[str, object], ...] = (
    ("edit_episode", {}),
    ("edit_episode", {"episode": 0}),
    ("edit_episode", {"episode": 4, "dropped": True}),
    ("edit_episode", {"episode": -1, "dropped": True}),
    ("edit_episode", {"episode": 10**30, "dropped": True}),
    ("edit_episode", {"episode": 0, "dropped": 1}),
    ("edit_episode", {"episode": 0, "dropped": True, "path": "/etc"}),
    ("edit_episode", {"episode": 0, "begin_s": float("nan")}),
    ("edit_episode", {"episode": 0, "begin_s": 1e300}),
    ("edit_episode", {"episode": 0, "end_s": 5.0}),
    ("edit_episode", {"episode": 0, "split_s": [0.5]}),
    ("edit_episode", {"episode": 0, "task": ""}),
    ("edit_episode", {"episode": 0, "task": "x" * 201}),
    ("edit_episode", {"episode": 0, "task": "\x1b[2J"}),
    ("edit_episode", {"episode": 0, "task": "x" * 70_000}),
    ("edit_episode", [1]),
    ("undo_edit", {"edits": 2}),
    ("undo_edit", {}),
    ("write_episodes", {"edits": 1}),
    ("write_episodes", {"edits": 0, "name": "pick-2"}),
    *(
        ("write_episodes", {"edits": 1, "name": name})
        for name in ("", ".", "..", "../x", "/tmp/x", "a/b", "a\0", "x" * 65, "pick")
    ),
    ("set_prompts", {"prompts": ["mug"]}),
    ("record", {"on": True}),
)


def test_wrong_requests_change_nothing(rig: ConsoleRig, dataset: Path) -> None:
    _, url = rig.console("--dataset", str(dataset))
    post(url, "edit_episode", **EDITS[0])
    before = list_files(dataset.parent)
    for op, body in WRONG:
        status, _, answer = ask(url, f"/api/{op}", "POST", body)
        assert (status, len(answer) < 2000) == (400, True), (op, body)
    assert list_files(dataset.parent) == before
    assert ask(url, "/views", **UPGRADE)[0] in (403, 404)


def test_a_damaged_dataset_is_one_line(rig: ConsoleRig, dataset: Path) -> None:
    _, url = rig.console("--dataset", str(dataset))
    (dataset / "meta/sam3_episodes/episode-000001.json").unlink()
    status, _, body = ask(url, "/api/episodes")
    assert (status, mentions(json.loads(body)["error"]["message"], "episode 1")) == (400, True)
    for arguments in ((str(dataset),), (str(dataset.parent),), (str(dataset), "--recording", "pick.mcap")):
        process = rig.launch("console", "--dataset", *arguments)
        assert process.process.wait(timeout=PATIENCE_S) != 0
        assert process.log is not None
        error = process.log.read_text()
        assert error.count("\n") == 1, error
        assert mentions(error, "expected", "found")


def card(number: int) -> str:
    return f".episode:nth-child({number + 1})"


def answer(page: Page, *values: str) -> None:
    """Fill the fields of the dialog, and agree."""
    for at, value in enumerate(values):
        page.page.locator("#edit-fields input").nth(at).fill(value)
    page.page.locator("#edit-yes").click()


def test_a_person_drops_trims_renames_and_writes(browser: Any, rig: ConsoleRig, dataset: Path) -> None:
    before = list_files(dataset)
    _, url = rig.console("--dataset", str(dataset))
    page = Page(browser, url)
    page.wait("#dataset:has-text('pick: 4 episodes')")
    assert page.page.locator(".episode").count() == 4
    page.page.wait_for_function("() => document.querySelector('.episode img').naturalWidth === 1280")
    for theme in ("Light", "Dark"):
        assert not find_serious(page), theme
        page.page.locator("#theme").click()

    # by the keyboard alone
    page.page.locator(f"{card(1)} >> text=Drop").focus()
    page.press("Enter")
    page.wait(f"{card(1)}[data-state=dropped]")
    page.wait("#pending:has-text('1 edit')")
    assert page.read("() => document.activeElement.textContent") == "Restore"
    page.press("Enter")
    page.wait(f"{card(1)}[data-state=same]")
    page.page.locator("#undo").click()
    page.wait(f"{card(1)}[data-state=dropped]")

    page.page.locator(f"{card(2)} >> text=Trim").click()
    assert not find_serious(page)
    answer(page, "0.2", "0.8")
    page.wait(f"{card(2)} .outcome:has-text('keeps 0.20 to 0.80 s')")
    page.page.locator(f"{card(0)} >> text=Split").click()
    page.press("Escape")
    page.page.locator(f"{card(0)} >> text=Split").click()
    answer(page, "0.5")
    page.wait(f"{card(0)} .outcome:has-text('becomes 2 episodes')")
    assert page.page.locator(f"{card(0)} .kept i").count() == 2
    page.page.locator(f"{card(0)} >> text=Restore").click()
    page.wait(f"{card(0)}[data-state=same]")
    page.page.locator(f"{card(3)} >> text=Rename").click()
    answer(page, NEW)
    page.wait(f"{card(3)} .outcome:has-text('{NEW}')")

    # what does not fit is told, and changes nothing
    page.page.locator(f"{card(2)} >> text=Split").click()
    answer(page, "0.1")
    page.wait("#toast.shown:has-text('expected times')")
    page.page.reload()
    page.wait("#pending:has-text('3 episodes changed')")
    assert not find_serious(page)

    page.page.locator("#write").click()
    assert page.page.locator("#edit-fields input").input_value() == "pick-2"
    answer(page, "pick-mended")
    written = dataset.with_name("pick-mended")
    page.wait(f"#written:has-text('{written}')")
    page.wait("#pending:has-text('no edits')")
    assert not find_serious(page)
    page.close()
    # the browser itself complains about the request that was refused
    assert all("400 (Bad Request)" in complaint for complaint in page.complaints)
    assert list_files(dataset) == before
    assert_written_as_by_the_command(dataset, written)


def test_a_page_on_a_phone_fits_and_says_why_pictures_lack(
    browser: Any, rig: ConsoleRig, dataset: Path
) -> None:
    next(dataset.glob("videos/observation.images.front/**/file-001.mp4")).write_bytes(b"junk")
    _, url = rig.console("--dataset", str(dataset), CONSOLE__READ_ONLY="true")
    page = Page(browser, url, viewport={"width": 390, "height": 844})
    page.wait(f"{card(1)} .broken:has-text('episode 1')")
    page.wait(f"{card(0)} img")
    assert not page.page.locator(".change:visible").count()
    assert page.read("() => document.documentElement.scrollWidth") <= 390
    assert not find_serious(page)
    page.close()
