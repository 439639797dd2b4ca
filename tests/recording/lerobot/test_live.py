"""`sam3-node record --lerobot` beside a node, a camera and a robot: episodes that a client marks become a dataset."""

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet
import pytest

from sam3_node.bags.native.reader import RecordingReader
from sam3_node.cli import main
from sam3_node.client import PerceptionClient
from sam3_node.errors import RequestError, SettingsError
from sam3_node.recording.lerobot import live
from sam3_node.recording.lerobot.live import EpisodeRecorder
from sam3_node.recording.recorder import Recorder, Trigger
from sam3_node.recording.series import RecordedSeries
from sam3_node.settings import (
    LeRobotSettings,
    RecordSettings,
    RobotSettings,
    Settings,
    SpatialSettings,
    load_settings,
)
from sam3_node.transport import PosePublisher
from sam3_node.transport.tap import ReceivedMessage
from sam3_node.types import JointState, RobotAction
from sam3_node.wire import Event, pack_event
from tests.support.node_rig import Rig, masks_where
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import mentions, refuses
from tests.support.threads import repeating

FRAMES = 8
"""Masks that come within an episode."""


class Session(NamedTuple):
    folder: Path
    dataset: Path
    output: list[str]
    recordings: list[Path]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("live")
    dataset = folder / "dataset"
    with Rig(folder) as rig:
        robot = rig.enter_context(PosePublisher(f"ipc://{folder}/robot"))
        rig.enter_context(repeating(lambda: move(robot)))
        recorder = rig.start(
            "record",
            str(folder / "pick.mcap"),
            "--lerobot",
            str(dataset),
            SPATIAL__POSES=robot.endpoint,
            LEROBOT__MAX_GAP_S="5",
        )
        rig.node()
        rig.camera()
        with rig.client() as client:
            masks_where(client, lambda found: True, "the first masks")
            client.add_object(box=(100, 100, 200, 200), label="mug")
            with refuses(RequestError, field="begin_episode"):
                client.end_episode()
            begun = client.begin_episode("put the mug away")
            assert client.status()["episode"] == begun
            with refuses(RequestError, field=("episode 0", "end_episode")):
                client.begin_episode()
            wait_for_masks(client)
            ended = client.end_episode()
            assert {**begun, "ended_ns": ended["ended_ns"], "keep": True} == ended
            client.begin_episode()
            wait_for_masks(client)
            assert client.end_episode(keep=False)["keep"] is False
            client.begin_episode()
            wait_for_masks(client)
            client.end_episode()
            assert client.status()["episode"] is None
        assert recorder.terminate() == 0
        yield Session(folder, dataset, recorder.take_lines(), sorted(folder.glob("pick*.mcap")))


def move(robot: PosePublisher) -> None:
    now_ns = time.time_ns()
    robot.send(JointState("arm", now_ns, {"elbow": 0.5, "finger": 0.01}))
    robot.send(RobotAction("arm", now_ns, {"elbow": 0.6}, "policy"))
    time.sleep(0.02)


def wait_for_masks(client: PerceptionClient) -> None:
    for _ in range(FRAMES):
        assert client.latest(timeout_ms=PATIENCE_MS) is not None


def test_kept_episodes_become_a_dataset_when_they_end(session: Session) -> None:
    table = session.dataset / "meta/episodes/chunk-000/file-000.parquet"
    episodes = pyarrow.parquet.read_table(table).to_pylist()
    assert [episode["tasks"] for episode in episodes] == [["put the mug away"], ["mug"]], session.output
    rows = [
        row
        for path in sorted((session.dataset / "data").rglob("*.parquet"))
        for row in pyarrow.parquet.read_table(path).to_pylist()
    ]
    assert len(rows) == sum(episode["length"] for episode in episodes) >= FRAMES
    for row in rows:
        assert row["observation.state"] == pytest.approx([0.5, 0.01])
        assert row["action"] == pytest.approx([0.6])
        assert row["observation.masks.cam0"]["bytes"]


def test_the_recording_has_a_file_for_each_episode_and_all_marks(session: Session) -> None:
    # one before the first mark and one for each episode; a stretch between two marks without a message has none
    assert len(session.recordings) >= 4
    messages = [entry.message for entry in RecordingReader(session.recordings).index()]
    marks = [message for message in messages if isinstance(message, Event) and "episode" in message.op]
    assert [(mark.op, mark.args["episode"], mark.args.get("keep")) for mark in marks] == [
        ("begin_episode", 0, None),
        ("end_episode", 0, True),
        ("begin_episode", 1, None),
        ("end_episode", 1, False),
        ("begin_episode", 2, None),
        ("end_episode", 2, True),
    ]


class Marks(NamedTuple):
    """A recorder's series and what follows the marks in it, without a node; `lines` are what it says."""

    series: RecordedSeries
    episodes: EpisodeRecorder
    lines: list[str]

    def tell(self, op: str, episode: int) -> None:
        begun_ns = 1_000 + episode
        args = {"episode": episode, "task": f"task {episode}", "begun_ns": begun_ns}
        if op == "end_episode":
            args |= {"ended_ns": begun_ns + 1, "keep": True}
        event = Event(self.series.report.events, op, args)
        self.episodes.before(event, self.series)
        parts = [memoryview(part) for part in pack_event(event)]
        self.series.add(ReceivedMessage(parts, begun_ns))
        self.episodes.after(event, self.series)


@pytest.fixture
def marks(tmp_path: Path) -> Iterator[Marks]:
    lines: list[str] = []
    settings = Settings(lerobot=LeRobotSettings(folder=tmp_path / "out"))
    with (
        RecordedSeries(tmp_path / "pick.mcap", RecordSettings(), lambda: 0, lambda: None) as series,
        EpisodeRecorder(settings, tmp_path / "out", lines.append) as episodes,
    ):
        yield Marks(series, episodes, lines)


def test_each_episode_that_was_begun_is_converted_or_named(marks: Marks) -> None:
    marks.tell("begin_episode", 0)
    marks.tell("end_episode", 0)
    # the end of 1, all of 3 and 4, and the beginning of 5 have not arrived; 6 is open at the end
    marks.tell("begin_episode", 1)
    marks.tell("begin_episode", 2)
    marks.tell("end_episode", 5)
    marks.tell("begin_episode", 6)
    marks.episodes.end_recording(marks.series)
    told = "\n".join(marks.lines)
    assert mentions(
        told, "episode 1", "task 1", "episode 2", "episodes 3 to 4", "episode 6", "stop the recorder"
    )
    assert "episode 5" not in told
    marks.lines.clear()
    marks.episodes.close()
    named = [line for line in marks.lines if "not converted" in line]
    assert [Path(line.split()[-3]).name for line in named] == ["pick.mcap", "pick_0002.mcap"]


def test_a_node_that_was_started_again_counts_its_episodes_anew(marks: Marks) -> None:
    for episode in (7, 0, 1):
        marks.tell("begin_episode", episode)
        marks.tell("end_episode", episode)
    marks.episodes.end_recording(marks.series)
    assert marks.lines == []


def test_a_conversion_that_hangs_holds_no_other(marks: Marks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LEAST_S", -1e9)
    for episode in (0, 1):
        marks.tell("begin_episode", episode)
        marks.tell("end_episode", episode)
    while marks.episodes.is_busy:
        marks.episodes.tick()
    assert [("too long" in line, "sam3-node convert" in line) for line in marks.lines] == [
        (True, False),
        (False, True),
    ] * 2


def test_a_conversion_knows_version_and_robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder passes on what its command and profile say, and `convert` reads the same settings from it."""
    lines: list[str] = []
    settings = Settings(
        lerobot=LeRobotSettings(folder=tmp_path / "out", version="2.1"),
        robot=RobotSettings(urdf=tmp_path / "arm.urdf", base="floor"),
        spatial=SpatialSettings(calibration=(tmp_path / "front.toml", tmp_path / "wrist.toml")),
    )
    commands = []
    monkeypatch.setattr(live.subprocess, "Popen", lambda command, **_: commands.append(command))  # no child
    with (
        RecordedSeries(tmp_path / "pick.mcap", RecordSettings(), lambda: 0, lambda: None) as series,
        EpisodeRecorder(settings, tmp_path / "out", lines.append) as episodes,
    ):
        found = Marks(series, episodes, lines)
        found.tell("begin_episode", 0)
        found.tell("end_episode", 0)
        episodes.tick()
    (command,) = commands
    options = vars(main._parser().parse(command[command.index("convert") :]))
    read = load_settings(None, {name: value for name, value in options.items() if "." in name})
    assert (read.lerobot, read.robot, read.spatial) == (settings.lerobot, settings.robot, settings.spatial)


def test_a_ring_has_no_episodes(tmp_path: Path) -> None:
    settings = Settings(
        record=RecordSettings(out=tmp_path, ring_s=5.0), lerobot=LeRobotSettings(folder=tmp_path / "out")
    )
    with refuses(SettingsError, field="lerobot.folder"):
        Recorder(settings, io.StringIO(), Trigger())
