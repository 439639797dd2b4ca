"""The page for whoever comes with a guide of SAM 3: its calls and commands run, or are read by the real parser."""

import asyncio
import base64
import importlib.util
import itertools
import json
import re
import shlex
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
import torch
import yaml

from sam3_node.cli.main import main
from sam3_node.client import AsyncPerceptionClient, PerceptionClient
from sam3_node.node.node import Node
from sam3_node.settings import DetectorSettings, Settings, TrackerSettings, load_settings
from sam3_node.transport.control_server import ControlServer
from sam3_node.types import Frame
from sam3_node.wire import Reply, decode_image
from tests.support.command_line import command_parser
from tests.support.near_node import HealthyNode, ask
from tests.support.node_rig import ids, masks_where
from tests.support.pages import block_with, shown
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.repeats import if_pages_changed
from tests.support.tables import each_row
from tests.support.threads import in_thread
from tests.support.tiny import Oracle, random_source
from tests.support.transport_peer import NOBODY, TCP
from tests.test_docs import check_module, check_targets

pytest.importorskip("mcap", reason="the extra bags is not installed")

PAGE = ROOT / "docs" / "coming-with-a-guide.md"
MIN_ROWS = 40
MAX_WORDS = 2500
FRAMES = 6
"""Frames of the recordings that the page's commands replay."""
PERIOD_S = 0.15
"""Time between two frames of the camera."""
MUG = (211, 285, 346, 427)
"""Box of the red mug on the first frame of the bundled recording."""
KEY = "key-of-this-test"


typed = if_pages_changed()


class Step(NamedTuple):
    """A call or command of a row, which is run unless the page says that it is parsed."""

    guide: str
    code: str
    is_parsed: bool

    @property
    def is_call(self) -> bool:
        """True for Python."""
        return bool(re.match(r"(node|masks|tracker|next|load_tracker|Tracker)\b", self.code))

    @property
    def is_replay(self) -> bool:
        """True for a replay that is run."""
        return self.code.startswith("sam3-node replay ") and not self.is_parsed

    @property
    def is_start(self) -> bool:
        """True for a node that is started."""
        return self.code.startswith("sam3-node run ") and not self.is_parsed

    def __str__(self) -> str:
        return self.code[:70]


def rows() -> list[list[str]]:
    """Return the cells of each row of the page's tables."""
    lines = [line for line in shown(PAGE).splitlines() if line.startswith("| ")]
    return [
        cells for line in lines if (cells := [cell.strip() for cell in line.split("|")[1:-1]])[1] != "here"
    ]


def steps() -> list[Step]:
    return [
        Step(cells[0], code, bool(parsed))
        for cells in rows()
        for code, parsed in re.findall(r"`([^`]+)`( \(parsed\))?", cells[1])
    ]


STEPS = steps()


class Cell:
    """A node on the bundled weights with a camera that plays the bundled recording, and a folder with files of it."""

    def __init__(self, near: HealthyNode, folder: Path, image: np.ndarray) -> None:
        self.near = near
        self.folder = folder
        self.image = image

    @property
    def environment(self) -> dict[str, str]:
        """The settings with which commands reach the node."""
        endpoints = {"MASKS": self.near.masks_at, "CONTROL": self.near.control, "FRAMES": self.near.frames}
        found = {f"SAM3_TRANSPORT__{name}": value for name, value in endpoints.items()}
        return found | {"SAM3_MODEL__DEVICE": "cpu", "SAM3_MODEL__THREADS": "1", "SEGMENT_KEY": KEY}

    def client(self) -> PerceptionClient:
        return PerceptionClient(self.near.masks_at, self.near.control, timeout_ms=PATIENCE_MS)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Frame]]:
    """A folder with the files that the page's commands name, and the frames that they are of."""
    from sam3_node.bags import RecordingReader, RecordingWriter
    from sam3_node.bags.native.reader import TABLETOP

    folder = tmp_path_factory.mktemp("g")
    reader = RecordingReader([TABLETOP])
    frames = [frame for _, frame in zip(range(FRAMES), reader.frames(), strict=False)]
    with RecordingWriter(folder / "clip.mcap") as writer:
        for frame in frames:
            writer.write_frame(frame, frame.capture_ns)
    video = cv2.VideoWriter(str(folder / "video.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 15, (640, 480))
    for frame in frames:
        video.write(decode_image(frame))
    video.release()
    picture = bytes(frames[0].colour)
    (folder / "picture.jpg").write_bytes(picture)
    click = {"image_b64": base64.b64encode(picture).decode(), "points": [[260, 350]], "labels": [1]}
    (folder / "click.json").write_text(json.dumps(click))
    return folder, frames


@pytest.fixture(scope="module")
def cell(work: tuple[Path, list[Frame]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    folder, frames = work
    sections = {
        "detector": DetectorSettings(),
        "tracker": TrackerSettings(feature_cache=16, feature_cache_s=60, max_age_ms=60_000),
    }
    with HealthyNode(tmp_path_factory.mktemp("n"), PATIENCE_S, weights=Path("nano"), **sections) as near:

        def play(stop: threading.Event) -> None:
            seq = 0
            while not stop.wait(PERIOD_S):
                frame = frames[seq % len(frames)]
                near.camera.send(replace(frame, camera="cam1", seq=seq, capture_ns=time.time_ns()))
                seq += 1

        with in_thread(play):
            found = Cell(near, folder, decode_image(frames[0]))
            with found.client() as node:
                node.wait_for_camera(PATIENCE_MS)
            yield found


@pytest.fixture
def here(work: tuple[Path, list[Frame]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in the folder with the page's files, on the CPU."""
    monkeypatch.chdir(work[0])
    monkeypatch.setenv("SAM3_MODEL__DEVICE", "cpu")
    monkeypatch.setenv("SAM3_MODEL__THREADS", "1")
    return work[0]


def test_the_page_is_one_page() -> None:
    assert len(rows()) >= MIN_ROWS
    assert len(PAGE.read_text(encoding="utf-8").split()) <= MAX_WORDS
    assert not [cells[0] for cells in rows() if "`" not in cells[1]], "each row has a call or a command"


@each_row("step", [step for step in STEPS if not step.is_call], ids=str)
def test_a_command_is_understood_and_its_files_are_there(step: Step) -> None:
    words = shlex.split(step.code)
    checks = {
        "sam3-node": check_command,
        "docker": check_compose,
        "kubectl": check_manifests,
        "ros2": check_service,
        "python": check_program,
        "make": check_targets,
        "curl": lambda words: None,  # asked below
    }
    checks[words[0]](words[1:])


def check_command(words: list[str], **more: str) -> Settings:
    """Parse a command, and return the settings with which it would run."""
    args = command_parser().parse_args(words)
    assert args.run
    return load_settings(
        args.profile, {name: value for name, value in vars(args).items() if "." in name} | more
    )


def check_compose(words: list[str]) -> None:
    assert (words[0], words[-1]) == ("compose", "up")
    for name in words[2:-1:2]:
        assert yaml.safe_load((ROOT / name).read_text())["services"]


def check_manifests(words: list[str]) -> None:
    assert words[:2] == ["apply", "-k"]
    folder = ROOT / words[2]
    for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
        assert list(yaml.safe_load_all((folder / name).read_text()))


def check_service(words: list[str]) -> None:
    assert words[:2] == ["service", "call"]
    package, kind, name = words[3].split("/")
    request = (ROOT / "launch/ros2" / package / kind / f"{name}.srv").read_text().partition("---")[0]
    fields = set(re.findall(r"^\w\S* (\w+)", request, flags=re.MULTILINE))
    assert set(yaml.safe_load(words[4])) <= fields


def check_program(words: list[str]) -> None:
    if words[0] == "-m":
        check_module(words)
    else:
        compile((ROOT / words[0]).read_text(), words[0], "exec")


def test_every_call_runs_on_a_node(cell: Cell) -> None:
    from sam3_node.models import load_tracker
    from sam3_node.tracking import ObjectPrompt, Tracker

    model = load_tracker("nano", device="cpu")
    space: dict[str, Any] = {
        "load_tracker": load_tracker,
        "Tracker": Tracker,
        "ObjectPrompt": ObjectPrompt,
        "model": model,
        "tracker": Tracker(model, max_objects=4, bank_size=7),
        "image": cell.image,
        "photo": (cell.folder / "picture.jpg").read_bytes(),
    }
    results = {}
    for step in STEPS:
        if step.is_call:
            results[step.code] = call(step.code, cell, space)
    assert results["node.segment(points=[(260, 350)]).mask.area"] > 1000
    assert results['node.segment_photo(photo, names=["red mug"])'][0].label == "red mug"
    assert 0 < len(results["node.points(mug.id, count=100)"].points_m) <= 100


def call(code: str, cell: Cell, space: dict[str, Any]) -> Any:
    """Run a call of the page with a client of its own, while the mug is tracked."""
    with cell.client() as node:
        node.set_prompts([])  # the row before may have asked for names, which would be found once more
        node.reset()
        mug = node.add_object(box=MUG, label="red mug")
        masks = masks_where(node, lambda masks: ids(masks) == [mug.id], "the mug is tracked")
        return eval(code, space | {"node": node, "mug": mug, "masks": masks})


def test_every_call_that_is_named_beside_exists() -> None:
    named = {name for cells in rows() for name in re.findall(r"`node\.(\w+)\(", cells[2])}
    assert named
    assert not [name for name in named if not hasattr(PerceptionClient, name)]


@typed
def test_every_command_to_a_node_runs(
    cell: Cell, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in cell.environment.items():
        monkeypatch.setenv(name, value)
    commands = [step for step in STEPS if step.code.startswith("sam3-node ") and not step.is_parsed]
    asked = [step for step in commands if not step.is_replay and not step.is_start]
    assert asked
    for step in asked:
        code = main(shlex.split(step.code)[1:])
        assert code == 0, (step.code, capsys.readouterr().err)


def test_the_probes_answer(cell: Cell) -> None:
    pages = [
        step.code.rpartition("/")[2]
        for step in STEPS
        if step.code.startswith("curl ") and "/segment" not in step.code
    ]
    assert {"readyz", "healthz", "metrics"} <= set(pages)
    assert {ask(cell.near.url, f"/{page}")[0] for page in pages} == {200}


@typed
@pytest.mark.usefixtures("here")
def test_every_node_starts(tmp_path: Path) -> None:
    endpoints = {
        f"transport.{name}": f"ipc://{tmp_path}/{name[0]}" for name in ("frames", "masks", "control")
    }
    starts = [step for step in STEPS if step.is_start]
    assert starts
    for step in starts:
        settings = check_command(shlex.split(step.code)[1:], **endpoints)
        with Node(settings):  # it has loaded the weights and bound the sockets, or raised
            pass


REPLAYS = [step for step in STEPS if step.is_replay]


@typed
@pytest.mark.parametrize("number", range(len(REPLAYS)), ids=lambda number: str(REPLAYS[number]))
def test_every_replay_runs(number: int, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(REPLAYS[number].code)[1:]
    out = words.index("-o") + 1
    # a folder of its own, as tests may run in any order
    folder = words[out] = f"{words[out]}{number}"
    assert main([*words, "--frames", "3"]) == 0, capsys.readouterr().err
    assert list(Path(folder).iterdir())


def test_the_request_over_http_gets_a_mask(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette", reason="the extra console is not installed")
    pytest.importorskip("uvicorn")
    pytest.importorskip("pycocotools")
    from tests import test_segment_http as http

    (line,) = [step.code for step in STEPS if step.code.startswith("curl ") and "/segment" in step.code]
    words = shlex.split(line.replace("$SEGMENT_KEY", KEY))
    headers = dict(text.lower().split(": ") for flag, text in itertools.pairwise(words) if flag == "-H")
    body = Path(words[words.index("-d") + 1].removeprefix("@")).read_bytes()
    monkeypatch.setenv("SEGMENT_KEY", KEY)
    spec = importlib.util.spec_from_file_location("segment_by_guide", ROOT / "examples/segment_http.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    status, (mask,) = http.answer(example, body, headers=headers)
    assert status == 200
    assert http.decode(mask).sum() > 1000
    assert http.answer(example, body, headers=headers | {"x-api-key": "other"})[0] == 401


def test_a_session_of_transformers_keeps_every_frame() -> None:
    """The page says so. When transformers drops old frames, the page must change."""
    source = random_source("sam3")
    oracle = Oracle(source)
    size = source.prompt_encoder.input_image_size
    click = {"points": torch.tensor([[size / 2, size / 2]]), "labels": torch.ones(1)}
    kept = []
    with torch.no_grad():
        for number in range(3 * FRAMES):
            oracle.step(torch.zeros(1, 3, size, size), {1: click} if number == 0 else {})
            (outputs,) = oracle.sessions[1].output_dict_per_obj.values()
            kept.append(sum(len(frames) for frames in outputs.values()))
    assert kept == list(range(1, 3 * FRAMES + 1))


def follow_clicks() -> Any:
    """Return the function of the page."""
    space: dict[str, Any] = {}
    exec(block_with("docs/python-api.md", "def follow_clicks"), space)
    return space["follow_clicks"]


def run(work: Any) -> Any:
    """Run a coroutine in a thread, because a browser of other tests may keep a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, asyncio.wait_for(work, PATIENCE_S)).result()


def test_only_the_newest_click_is_sent() -> None:
    sent: list[tuple[int, int]] = []
    shown_masks: list[str] = []

    class Slow:
        """A node that answers when the test says so."""

        def __init__(self) -> None:
            self.answers: asyncio.Queue[str] = asyncio.Queue()

        async def segment(self, points: list[tuple[int, int]]) -> str:
            sent.extend(points)
            return await self.answers.get()

    async def click() -> None:
        node = Slow()
        clicks: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        task = asyncio.create_task(follow_clicks()(node, clicks, shown_masks.append))
        for x in range(5):
            clicks.put_nowait((x, 0))
            await asyncio.sleep(0)
        for answer in ("first", "newest"):
            node.answers.put_nowait(answer)
            while answer not in shown_masks:
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run(click())
    assert sent == [(0, 0), (4, 0)]
    assert shown_masks == ["first", "newest"]


def test_clicks_on_a_node_get_their_masks(cell: Cell) -> None:
    found: list[Any] = []

    async def click() -> None:
        near = cell.near
        clicks: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        async with AsyncPerceptionClient(near.masks_at, near.control, timeout_ms=PATIENCE_MS) as node:
            task = asyncio.create_task(follow_clicks()(node, clicks, found.append))
            clicks.put_nowait((260, 350))
            while not found and not task.done():
                await asyncio.sleep(0.01)
            task.cancel()

    run(click())
    assert found[0].mask.area > 1000


def test_a_request_whose_task_is_cancelled_is_still_carried_out() -> None:
    """So tasks that are cancelled alone do not make the newest click come first."""
    asked: list[Any] = []
    with ControlServer(TCP) as control:

        def answer(stop: threading.Event) -> None:
            while not stop.is_set():
                received = control.receive(50)
                if received is not None:
                    asked.append(received[1])
                    control.reply(received[0], Reply(received[1].id, {}))

        async def click() -> None:
            async with AsyncPerceptionClient(NOBODY, control.endpoint, timeout_ms=PATIENCE_MS) as node:
                tasks = [asyncio.create_task(node.status()) for _ in range(3)]
                await asyncio.sleep(0)  # they begin
                for task in tasks[:2]:
                    task.cancel()
                assert await tasks[2] == {}
                while len(asked) < len(tasks):
                    await asyncio.sleep(0.01)

        with in_thread(answer):
            run(click())
    assert len(asked) == 3
