"""The first days of a new user, across all faces: an agent looks, things are measured, and a dataset is recorded.

One node with one camera, one recorder and a robot serve all three. Each block of a path has its own tests elsewhere;
here one face goes on with what another one has left.
"""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("mcap")
pytest.importorskip("mcp")
pytest.importorskip("pyarrow")

import pyarrow.parquet

from sam3_node.bags.native.reader import TABLETOP, RecordingReader
from sam3_node.cli.main import main
from sam3_node.errors import Sam3NodeError
from sam3_node.mcp.tools import AgentTools
from sam3_node.settings import load_settings
from sam3_node.transport import FramePublisher, PosePublisher
from sam3_node.types import Instance, JointState
from tests.support.node_rig import Process, Rig, until
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.refuses import mentions
from tests.support.threads import repeating

NAMES = ("green bottle", "red mug")
"""What the node looks for, and what replays number from 1 in this order."""
MASKS = 5
"""Masks that come within an episode."""


class Desk(NamedTuple):
    """A node that looks for NAMES, its camera, and a recorder that makes a dataset, with the first episode begun."""

    rig: Rig
    recorder: Process
    dataset: Path


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("days")
    dataset = folder / "datasets" / "pick"
    with Rig(folder) as rig:
        robot = rig.enter_context(PosePublisher(f"ipc://{folder}/robot"))
        rig.enter_context(repeating(lambda: move(robot)))
        options = {"SPATIAL__POSES": robot.endpoint, "LEROBOT__MAX_GAP_S": "60"}
        lens = (ROOT / "examples/table.toml").read_text()
        calibrations = [folder / "cam0.toml", folder / "side.toml"]
        for path in calibrations:
            path.write_text(f'camera = "{path.stem}"\n{lens}')
        recorder = rig.start("record", str(folder / "pick.mcap"), "--lerobot", str(dataset), **options)
        rig.launch(
            "run",
            MODEL__NAME="nano",
            DETECTOR__KIND="yolo-world",
            DETECTOR__PROMPTS=",".join(NAMES),
            SPATIAL__CALIBRATION=",".join(map(str, calibrations)),
            SPATIAL__TABLE="true",
        )
        # typed at once: the node still loads its weights
        assert main(["episode", "begin", "put the mug away", "--transport.control", rig.control]) == 0
        played = {"CAMERA__LOOP": "true", "CAMERA__FPS": "6", "TRANSPORT__FRAMES": rig.frames[0]}
        rig.start("camera", "scene:tabletop", **played)
        yield Desk(rig, recorder, dataset)


def move(robot: PosePublisher) -> None:
    robot.send(JointState("arm", time.time_ns(), {"elbow": 0.5, "finger": 0.01}))
    time.sleep(0.02)


def see_mug(rig: Rig) -> Instance:
    """Wait for a sure mug with an upright box in the base."""
    with rig.client() as client:

        def find() -> Instance | None:
            masks = client.latest(timeout_ms=200)
            found = masks.instances if masks is not None else ()
            mugs = (one for one in found if one.label == "red mug" and one.is_sure)
            return next((mug for mug in mugs if mug.upright_size_m is not None), None)

        return until(find, "the mug with its upright box")


def test_an_agent_finds_looks_adds_and_measures(desk: Desk) -> None:
    mug = see_mug(desk.rig)
    endpoints = {"transport.masks": desk.rig.masks, "transport.control": desk.rig.control}
    settings = load_settings(overrides={**endpoints, "transport.frames": desk.rig.frames[0]})
    with AgentTools(settings, allow_edits=True, timeout_ms=PATIENCE_MS) as agent:

        def ask(tool: str, **given: Any) -> dict[str, Any]:
            return agent.call(tool, given).facts

        assert mug.id in [one["id"] for one in ask("find", name="red mug", max_age_ms=60_000)["objects"]]

        # the box is one of the picture, so it goes back with the picture's scale and frame
        def mark_again() -> bool:
            seen = ask("look", max_side="320", keep_s="60")
            box = next((one["box"] for one in seen.get("objects", ()) if one["id"] == mug.id), None)
            if box is None:
                return False
            assert max(box) <= 320
            given = {"seq": str(seen["seq"]), "scale": str(seen["scale"]), "camera": "cam0"}
            added = ask("add", box=[str(side) for side in box], label="cup", **given)
            assert ask("remove", id=str(added["id"])) == {"removed": added["id"], "camera": "cam0"}
            notes = " ".join(added["notes"])
            return mentions(notes, f"this is object {mug.id}", "red mug", f"remove object {added['id']}")

        until(mark_again, "a picture with the mug, of which a second mark is told")

        def measure(count: int | str) -> int:
            # on some frames the mug is hidden or doubtful
            with suppress(Sam3NodeError):
                return len(ask("points", id=str(mug.id), count=count)["points_m"])
            return 0

        for count in ("1", 4):
            assert until(partial(measure, count), "points of the mug") <= int(count)


def test_the_mug_has_a_grasp_and_a_table_and_a_wrong_unit_is_told(desk: Desk) -> None:
    mug = see_mug(desk.rig)
    assert mug.frame == "base"
    assert mug.upright_size_m is not None
    assert all(0.04 < side < 0.2 for side in mug.upright_size_m)
    assert mug.heights_m is not None
    # it stands on the table
    assert mug.heights_m[0] < 0.03 < mug.heights_m[1]
    frame = next(RecordingReader([TABLETOP]).frames())
    assert frame.depth is not None
    in_metres = replace(frame, camera="side", depth=replace(frame.depth, scale_m=1.0))
    with desk.rig.client() as client, FramePublisher(desk.rig.frames[1]) as side:

        def find() -> str | None:
            side.send(
                replace(in_metres, capture_ns=time.time_ns(), clock="system", seq=time.time_ns() // 10**6)
            )
            problem: str | None = client.status()["cameras"].get("side", {}).get("spatial_problem")
            return problem

        assert mentions(until(find, "what is wrong with the depth"), "scale_m", "0.001")


def test_what_was_recorded_is_a_dataset_and_its_replays_agree(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"MODEL__DEVICE": "cpu", "MODEL__THREADS": "1"}.items():
        monkeypatch.setenv(f"SAM3_{name}", value)
    rig = desk.rig
    see_mug(rig)
    with rig.client() as client:
        client.end_episode()
        client.begin_episode("never ended")
        for _ in range(MASKS):
            assert client.latest(timeout_ms=PATIENCE_MS) is not None
    desk.recorder.process.send_signal(signal.SIGINT)
    assert desk.recorder.process.wait(PATIENCE_S) == 0
    told = "\n".join(desk.recorder.seen)
    assert mentions(told, "episode 1", "never ended", "not in the dataset", "end or discard")

    # the recording, converted by hand, has what the recorder made of it
    files = sorted(rig.folder.glob("pick*.mcap"))
    by_hand = tmp_path / "by-hand"
    convert = ["convert", *map(str, files), "--lerobot", str(by_hand)]
    assert main([*convert, "--lerobot.max_gap_s", "60"]) == 0
    assert mentions(capsys.readouterr().out, "1 episodes", "episode 1", "no end")
    for dataset in (desk.dataset, by_hand):
        assert read_tasks(dataset) == ["put the mug away"], told

    # its replay goes into a copy of it, with the numbers of the command, as that of the recording has
    numbers = []
    for source, outputs in ((desk.dataset, "coco,lerobot"), (files[-1], "coco")):
        out = tmp_path / f"out-{source.stem}"
        prompts = [word for name in NAMES for word in ("--prompt", name)]
        every = [
            "replay",
            str(source),
            "-o",
            str(out),
            "--every",
            *prompts,
            "--outputs",
            outputs,
            "--frames",
            "2",
        ]
        assert main(every) == 0, capsys.readouterr().err
        (found,) = out.rglob("masks.json")
        numbers.append([(one["id"], one["name"]) for one in json.loads(found.read_text())["categories"]])
    assert numbers[0] == numbers[1] == list(enumerate(NAMES, 1))
    (copy,) = (tmp_path / "out-pick").rglob("lerobot")
    assert read_tasks(copy) == ["put the mug away"]


def read_tasks(dataset: Path) -> list[str]:
    """Return the task of each episode of a dataset."""
    tables = sorted((dataset / "meta/episodes").rglob("*.parquet"))
    return [
        task
        for path in tables
        for row in pyarrow.parquet.read_table(path).to_pylist()
        for task in row["tasks"]
    ]


def test_two_days_in_one_folder_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("monday", "tuesday"):
        shutil.copy(TABLETOP, tmp_path / f"{name}.mcap")
    folder = str(tmp_path)
    for command in (
        ["replay", folder, "-o", f"{folder}/out", "--prompt", "red mug"],
        ["camera", f"bag:{folder}"],
    ):
        assert main(command) != 0
        assert mentions(
            "".join(capsys.readouterr()), "2 recordings", "monday.mcap", "tuesday.mcap", "one of them"
        )
