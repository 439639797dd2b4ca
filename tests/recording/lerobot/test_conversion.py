"""Recordings that become LeRobot datasets. `make lerobot-test` opens such datasets with lerobot's own loaders."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pyarrow.parquet
import pytest

from sam3_node.bags import RecordingWriter, open_bag
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.errors import BagError, OutputError
from sam3_node.recording.lerobot import dataset as dataset_module
from sam3_node.recording.lerobot.conversion import Converted, convert_recordings, group_files
from sam3_node.recording.lerobot.dataset import DatasetFolder
from sam3_node.recording.lerobot.groot import group_joints
from sam3_node.recording.lerobot.masks import NAMES
from sam3_node.recording.lerobot.records import RECORDS, EpisodeRecord, count_rows
from sam3_node.recording.lerobot.rows import CameraFrames, NamedSeries, choose_rows, measure_fps
from sam3_node.settings import LeRobotSettings
from sam3_node.types import NANOSECONDS, Frame, JointState, MaskFrame, Shed
from sam3_node.wire import decode_image, pack_masks
from tests.support.paths import ROOT
from tests.support.refuses import mentions, refuses
from tools.lerobot_recorded.recording import (
    BEGIN_NS,
    FPS,
    MARKS,
    SIZES,
    Mark,
    draw,
    joint_positions,
    masks_of,
    time_of,
    write_recording,
)

KEPT = [mark for mark in MARKS if mark.keep]
ROWS = [frame for mark in KEPT for frame in range(mark.first, mark.end)]
STARTS = (0, KEPT[0].end - KEPT[0].first)


def convert(recording: Path, folder: Path, **settings: Any) -> tuple[Converted, list[str]]:
    lines: list[str] = []
    found = convert_recordings([recording], LeRobotSettings(**settings), folder, lines.append)
    return found, lines


def read_rows(dataset: Path) -> list[dict[str, Any]]:
    tables = sorted((dataset / "data").rglob("*.parquet"))
    return [row for table in tables for row in pyarrow.parquet.read_table(table).to_pylist()]


def read_json(dataset: Path, name: str) -> dict[str, Any]:
    return json.loads((dataset / name).read_text())


def decode_picture(cell: dict[str, Any]) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(cell["bytes"], np.uint8), -1)[..., ::-1]


@pytest.mark.verifies(
    "results",
    "LeRobot datasets 3.0 of own recordings",
    "own package",
    "lerobot 0.4.4 and 0.6.1 opened them and trained ACT, by `make lerobot-test`",
)
def test_each_kept_episode_has_its_rows_in_time(lerobot_dataset: Path) -> None:
    rows = read_rows(lerobot_dataset)
    assert [row["index"] for row in rows] == list(range(len(ROWS)))
    assert [row["episode_index"] for row in rows] == [0] * STARTS[1] + [1] * (len(ROWS) - STARTS[1])
    for row in rows:
        assert row["timestamp"] == pytest.approx(row["frame_index"] / FPS)
    info = read_json(lerobot_dataset, "meta/info.json")
    assert (info["codebase_version"], info["fps"], info["total_episodes"]) == ("v3.0", FPS, 2)
    assert info["total_frames"] == len(ROWS)
    # the second task is that of the names that were looked for
    tasks = pyarrow.parquet.read_table(lerobot_dataset / "meta/tasks.parquet").to_pylist()
    assert [task["task"] for task in tasks] == ["put the mug on the tray", "mug, bowl"]


def test_joints_have_the_urdfs_names_and_are_those_of_the_row(lerobot_dataset: Path) -> None:
    features = read_json(lerobot_dataset, "meta/info.json")["features"]
    expected = [joint_positions(time_of(frame)) for frame in ROWS]
    assert features["observation.state"]["names"] == list(expected[0])
    for row, positions in zip(read_rows(lerobot_dataset), expected, strict=True):
        assert row["observation.state"] == pytest.approx(list(positions.values()), abs=1e-5)


def test_actions_of_a_leader_are_those_of_the_row(lerobot_dataset: Path) -> None:
    for row, frame in zip(read_rows(lerobot_dataset), ROWS, strict=True):
        ahead = joint_positions(time_of(frame) + NANOSECONDS // FPS)
        assert row["action"] == pytest.approx(list(ahead.values()), abs=1e-5)


def test_a_command_belongs_to_the_row_that_it_follows() -> None:
    series = NamedSeries("actions of arm")
    for time_ns, value in ((0, 1.0), (110, 2.0), (190, 3.0), (310, 4.0)):
        series.add(time_ns, [("elbow", value)])
    held = series.hold(np.array([0, 100, 200]) + 100, ["elbow"], 200)
    assert held.values.ravel().tolist() == [1.0, 3.0, 3.0]


def test_a_joint_that_wraps_has_no_row_on_the_way_back() -> None:
    series = NamedSeries("joints of arm")
    angles = [2.9, 3.1, -3.0833, -2.8833]
    for index, angle in enumerate(angles):
        series.add(index * 100, [("wrist", angle)])
    times_ns = np.arange(-10, 320, 10)
    values = series.interpolate(times_ns, ["wrist"], 1000).values[:, 0]
    assert np.abs(values).min() > 2.85
    assert (values[0], values[-1]) == pytest.approx((2.9, -2.8833), abs=1e-5)


def test_masks_are_exactly_those_that_were_published(lerobot_dataset: Path) -> None:
    names = read_json(lerobot_dataset, NAMES)
    assert names["labels"] == {"1": "bowl", "2": "mug"}
    numbers = {label: int(number) for number, label in names["labels"].items()}
    for row, frame in zip(read_rows(lerobot_dataset), ROWS, strict=True):
        image = decode_picture(row["observation.masks.front"])
        assert "observation.masks.wrist" not in row
        found = np.array(row["observation.objects.front"]).reshape(8, 4)
        expected = np.zeros_like(image)
        for instance in sorted(masks_of(frame, "front").instances, key=lambda item: item.paint_order):
            # an object has the number of its first appearance: the bowl is painted first
            slot = ["bowl", "mug"].index(instance.label)
            pixel = (numbers[instance.label], slot + 1, round(instance.score * 255))
            instance.mask.paint(expected, pixel)
            values = (numbers[instance.label], instance.score, instance.confidence, float(instance.doubtful))
            assert found[slot] == pytest.approx(values)
        assert (image == expected).all()
        assert not found[2:].any()
    bowl = next(item for item in names["objects"] if (item["episode"], item["label"]) == (1, "bowl"))
    assert bowl["id"] == 9
    assert bowl["doubtful"] == [[row, row] for row in range(14) if (KEPT[1].first + row) % 3 == 0]


def test_frames_are_videos_with_a_frame_for_each_row(lerobot_dataset: Path) -> None:
    for camera, size in SIZES.items():
        files = sorted((lerobot_dataset / f"videos/observation.images.{camera}").rglob("*.mp4"))
        assert len(files) == len(KEPT)
        for path, mark in zip(files, KEPT, strict=True):
            with av.open(str(path)) as container:
                frames = list(container.decode(video=0))
            assert (frames[0].width, frames[0].height) == size
            assert [round(frame.time * FPS) for frame in frames] == list(range(mark.end - mark.first))
            for found, number in zip(frames, range(mark.first, mark.end), strict=True):
                error = np.abs(found.to_ndarray(format="bgr24").astype(int) - draw(number, camera))
                assert error.mean() < 6


def test_our_own_reader_replays_the_dataset(lerobot_dataset: Path) -> None:
    with open_bag(lerobot_dataset) as bag:
        assert (bag.cameras, bag.episode_starts) == (("front", "wrist"), STARTS)
        joints = [message for message in bag.robot() if isinstance(message, JointState)]
        assert len(list(bag)) == 2 * len(ROWS)
        assert bag.lost is None
    assert joints[0].positions == pytest.approx(joint_positions(time_of(ROWS[0])), abs=1e-5)


@pytest.fixture(scope="module")
def groot_dataset(lerobot_recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of version 2.1 that `lerobot_recording` is converted to. Tests only read it."""
    folder = tmp_path_factory.mktemp("groot") / "pick"
    assert convert(lerobot_recording, folder, version="2.1")[0] == Converted(2, 0, 0)
    return folder


def read_lines(dataset: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (dataset / name).read_text().splitlines()]


@pytest.mark.verifies(
    "results",
    "LeRobot datasets 2.1 of own recordings, for GR00T",
    "own package",
    "the loader of GR00T-H (N1.7) and lerobot 0.3.3 read the same values, once, by hand",
)
def test_both_versions_of_a_recording_are_read_equal(lerobot_dataset: Path, groot_dataset: Path) -> None:
    assert read_rows(groot_dataset) == read_rows(lerobot_dataset)
    with open_bag(groot_dataset) as bag, open_bag(lerobot_dataset) as other:
        assert (bag.cameras, bag.episode_starts) == (other.cameras, other.episode_starts)
        assert list(bag.robot()) == list(other.robot())
        for frame, expected in zip(bag, other, strict=True):
            assert (frame.key, frame.encoding) == (expected.key, expected.encoding)
            assert (decode_image(frame) == decode_image(expected)).all()
        assert bag.lost is None


def test_version_2_has_the_layout_that_is_documented(lerobot_dataset: Path, groot_dataset: Path) -> None:
    info = read_json(groot_dataset, "meta/info.json")
    features = read_json(lerobot_dataset, "meta/info.json")["features"]
    assert (info["codebase_version"], info["features"]) == ("v2.1", features)
    assert (info["total_videos"], info["total_chunks"], info["chunks_size"]) == (4, 1, 1000)
    for episode, mark in enumerate(KEPT):
        numbers = {"episode_chunk": 0, "episode_index": episode}
        assert (groot_dataset / info["data_path"].format(**numbers)).is_file()
        for camera in SIZES:
            key = f"observation.images.{camera}"
            assert (groot_dataset / info["video_path"].format(video_key=key, **numbers)).is_file()
        line = read_lines(groot_dataset, "meta/episodes.jsonl")[episode]
        assert line == {
            "episode_index": episode,
            "tasks": [mark.task or "mug, bowl"],
            "length": mark.end - mark.first,
        }
    tasks = read_lines(groot_dataset, "meta/tasks.jsonl")
    assert tasks == [
        {"task_index": 0, "task": "put the mug on the tray"},
        {"task_index": 1, "task": "mug, bowl"},
    ]
    stats = read_lines(groot_dataset, "meta/episodes_stats.jsonl")
    assert [row["stats"]["action"]["count"] for row in stats] == [[12], [14]]
    # each statistic of the whole has a value for each joint, of which GR00T takes a group
    whole = read_json(groot_dataset, "meta/stats.json")["observation.state"]
    assert {len(values) for values in whole.values()} == {3}
    assert {"min", "max", "mean", "std", "q01", "q99"} <= set(whole)
    modality = read_json(groot_dataset, "meta/modality.json")
    groups = {"arm": {"start": 0, "end": 2}, "gripper": {"start": 2, "end": 3}}
    assert (modality["state"], modality["action"]) == (groups, groups)
    assert list(modality["video"]) == ["front", "wrist"]
    assert modality["annotation"] == {"human.task_description": {"original_key": "task_index"}}
    assert modality["mask"] == {"front": {"original_key": "observation.images.front"}}


def test_masks_for_groot_are_a_number_for_each_label(groot_dataset: Path) -> None:
    template = read_json(groot_dataset, "meta/info.json")["mask_path"]
    regions = read_json(groot_dataset, NAMES)["regions"]
    assert regions == {"0": "background", "1": "bowl", "2": "mug", "254": "gripper", "255": "arm"}
    for episode, mark in enumerate(KEPT):
        place = template.format(episode_chunk=0, episode_index=episode, mask_key="observation.images.front")
        with np.load(groot_dataset / place) as found:
            masks = found["arr_0"]
            valid = found["valid"]
        assert valid.tolist() == [True] * (mark.end - mark.first)
        for picture, frame in zip(masks, range(mark.first, mark.end), strict=True):
            expected = np.zeros((120, 160), np.uint8)
            for instance in sorted(masks_of(frame, "front").instances, key=lambda item: item.paint_order):
                instance.mask.paint(expected, {"bowl": 1, "mug": 2}[instance.label])
            assert (picture == expected).all()


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["a1", "a2", "panda_finger_joint1"], {"arm": (0, 2), "gripper": (2, 3)}),
        (["shoulder_pan.pos", "gripper.pos"], {"arm": (0, 1), "gripper": (1, 2)}),
        (
            ["left.a", "left.b", "left.jaw", "right.a", "right.jaw"],
            {"left_arm": (0, 2), "left_gripper": (2, 3), "right_arm": (3, 4), "right_gripper": (4, 5)},
        ),
        (["hand_1", "wrist", "hand_2"], {"gripper": (0, 1), "arm": (1, 2), "gripper_2": (2, 3)}),
    ],
)
def test_joints_are_grouped_by_their_names(names: list[str], groups: dict[str, tuple[int, int]]) -> None:
    expected = {name: {"start": start, "end": end} for name, (start, end) in groups.items()}
    assert group_joints(names) == expected


def test_a_dataset_keeps_its_version(groot_dataset: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(groot_dataset, tmp_path / "pick"))
    recording = write_recording(tmp_path / "next.mcap", marks=[Mark(30, 40)])
    with refuses(OutputError, field=("3.0", "v2.1", "folder")):
        convert(recording, folder, version="3.0")
    assert convert(recording, folder)[0].appended == 1
    assert [line["length"] for line in read_lines(folder, "meta/episodes.jsonl")] == [12, 14, 10]
    assert len(read_rows(folder)) == len(ROWS) + 10


def test_rows_that_were_not_tracked_are_marked_and_counted(tmp_path: Path) -> None:
    """The node skips every third frame, and leaves out an object of another one to keep its budget."""
    with RecordingWriter(tmp_path / "a.mcap") as writer:
        for seq, time_ns in enumerate(stamps(*[NANOSECONDS / 10] * 11)):
            writer.write_frame(Frame("front", seq, time_ns, 16, 12, "mono8", bytes(192)), time_ns)
            if seq % 3 != 1:
                shed = Shed(2, (7,)) if seq == 6 else None
                found = MaskFrame("front", seq, time_ns, 16, 12, shed=shed)
                writer.write_masks(pack_masks(found)[1], found, time_ns)
    convert(tmp_path / "a.mcap", tmp_path / "out", version="2.1")
    valid = [seq % 3 != 1 and seq != 6 for seq in range(12)]
    assert [row["observation.masks_valid.front"] for row in read_rows(tmp_path / "out")] == valid
    with np.load(next((tmp_path / "out/masks").rglob("*.npz"))) as found:
        assert found["valid"].tolist() == valid
    told = count_rows(tmp_path / "out")
    assert told is not None
    assert mentions(told, "12 rows", "5 without masks", "0 with a doubtful", "0 more than half a period")
    # lerobot cannot normalise what is true or false
    assert "observation.masks_valid.front" not in read_json(tmp_path / "out", "meta/stats.json")


def test_pictures_without_loss_are_in_the_tables(lerobot_recording: Path, tmp_path: Path) -> None:
    assert convert(lerobot_recording, tmp_path / "out", pictures="png")[0].appended == 2
    with open_bag(tmp_path / "out") as bag:
        for frame in bag:
            assert (decode_image(frame) == draw(ROWS[frame.seq], frame.camera)).all()
    assert not list((tmp_path / "out").rglob("*.mp4"))


def test_statistics_are_those_of_all_rows(lerobot_dataset: Path) -> None:
    stats = read_json(lerobot_dataset, "meta/stats.json")
    rows = read_rows(lerobot_dataset)
    for key in ("observation.state", "action", "observation.objects.front"):
        values = np.array([row[key] for row in rows])
        assert stats[key]["mean"] == pytest.approx(values.mean(axis=0).tolist(), abs=1e-6)
        assert stats[key]["std"] == pytest.approx(values.std(axis=0).tolist(), abs=1e-6)
        assert stats[key]["min"] == pytest.approx(values.min(axis=0).tolist())
        assert stats[key]["count"] == [len(rows)]
    episodes = pyarrow.parquet.read_table(
        lerobot_dataset / "meta/episodes/chunk-000/file-000.parquet"
    ).to_pylist()
    assert [row["dataset_from_index"] for row in episodes] == list(STARTS)
    assert (
        episodes[1]["stats/observation.images.front/mean"]
        != episodes[0]["stats/observation.images.front/mean"]
    )


def test_a_second_conversion_appends_nothing(lerobot_recording: Path, lerobot_dataset: Path) -> None:
    before = {path: path.read_bytes() for path in lerobot_dataset.rglob("*") if path.is_file()}
    assert convert(lerobot_recording, lerobot_dataset)[0] == Converted(0, 2, 0)
    assert before == {path: path.read_bytes() for path in lerobot_dataset.rglob("*") if path.is_file()}


@pytest.mark.parametrize("version", ["3.0", "2.1"])
def test_a_killed_process_leaves_a_whole_dataset(
    version: str, lerobot_recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    published = dataset_module.EpisodeFiles.publish

    def publish(files: dataset_module.EpisodeFiles) -> None:
        published(files)
        if files.number == 1:
            raise KeyboardInterrupt

    # the files of the second episode are there, its record is not
    monkeypatch.setattr(dataset_module.EpisodeFiles, "publish", publish)
    with pytest.raises(KeyboardInterrupt):
        convert(lerobot_recording, folder, version=version)
    assert read_json(folder, "meta/info.json")["total_episodes"] == 1
    monkeypatch.undo()
    assert convert(lerobot_recording, folder)[0] == Converted(1, 1, 0)
    assert [row["index"] for row in read_rows(folder)] == list(range(len(ROWS)))


def test_a_recording_without_marks_is_one_episode(tmp_path: Path) -> None:
    found, lines = convert(TABLETOP, tmp_path / "out", task="look")
    assert found == Converted(1, 0, 0)
    assert mentions(lines[0], "225 rows", "15 fps", "look", "action")


def test_what_does_not_fit_is_left_out_and_told(tmp_path: Path) -> None:
    # the recorder has lost half a second of a camera within the first episode
    recording = write_recording(tmp_path / "pick.mcap", lost=range(6, 11))
    found, lines = convert(recording, tmp_path / "out")
    assert found == Converted(1, 0, 1)
    assert any(mentions(line, "left out", "front", "max_gap_s") for line in lines)
    found, lines = convert(recording, tmp_path / "whole", max_gap_s=0.5)
    assert found == Converted(2, 0, 0)
    assert any(mentions(line, "5 rows repeat") for line in lines)
    assert len(read_rows(tmp_path / "whole")) == len(ROWS)


def test_an_episode_with_other_features_is_left_out(lerobot_dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    convert(write_recording(tmp_path / "one.mcap"), folder)
    other = write_recording(tmp_path / "two.mcap", marks=[Mark(30, 40)], has_actions=False)
    found, lines = convert(other, folder)
    assert (found.appended, found.left_out) == (0, 1)
    assert any(mentions(line, "action", "another folder") for line in lines)


def test_a_dataset_from_before_the_flags_goes_on_without_them(lerobot_dataset: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(lerobot_dataset, tmp_path / "out"))
    for path in (folder / RECORDS).iterdir():
        record = json.loads(path.read_text())
        del record["features"]["observation.masks_valid.front"]
        del record["source"]["rows"]
        path.write_text(json.dumps(record))
    found, _ = convert(write_recording(tmp_path / "next.mcap", marks=[Mark(30, 40)]), folder)
    assert found == Converted(1, 0, 0)
    assert "observation.masks_valid.front" not in read_json(folder, "meta/info.json")["features"]
    told = count_rows(folder)
    assert told is not None
    assert mentions(told, "36 rows", "4 with a doubtful", "26 rows of an older version")


def test_a_folder_of_somebody_else_is_refused(lerobot_recording: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with refuses(OutputError, field=("new folder", str(tmp_path))):
        convert(lerobot_recording, tmp_path)


@pytest.mark.parametrize("field", ["labels", "features", "objects"])
def test_a_damaged_record_of_an_episode_is_refused(tmp_path: Path, field: str) -> None:
    record = EpisodeRecord(0, 1, "pick", 3, 0, 30, {}, [], [], 0, {})
    folder = tmp_path / RECORDS
    folder.mkdir(parents=True)
    damaged = {"labels": [3], "features": {"action": {"dtype": 3, "shape": [2]}}, "objects": [{"episode": 0}]}
    path = folder / "episode-000000.json"
    path.write_text(json.dumps(asdict(record) | {field: damaged[field]}))
    with refuses(OutputError, field=(path.name, field)):
        DatasetFolder(tmp_path)


def test_the_files_of_a_recording_are_one_group(tmp_path: Path) -> None:
    for name in ("pick.mcap", "pick_0001.mcap", "place.mcap"):
        (tmp_path / name).touch()
    groups = group_files([tmp_path])
    assert [[path.name for path in group] for group in groups] == [
        ["pick.mcap", "pick_0001.mcap"],
        ["place.mcap"],
    ]
    with refuses(BagError, field="NAME.mcap"):
        group_files([tmp_path / "empty"] if (tmp_path / "empty").mkdir() is None else [])


def camera(times_ms: list[float], masked: list[int] | None = None) -> CameraFrames:
    times = np.array([round(time * 1e6) for time in times_ms], np.int64)
    return CameraFrames(times, np.isin(np.arange(len(times)), masked if masked is not None else []))


def test_each_frame_is_in_one_row_in_spite_of_jitter_and_another_clock() -> None:
    jitter = np.random.default_rng(0).normal(0, 3, 600)
    # a camera of 29.97 frames per second in a dataset of 30
    frames = camera([1001 / 30 * number + jitter[number] for number in range(600)])
    assert measure_fps({"front": frames}) == 30
    rows = choose_rows({"front": frames}, 30, NANOSECONDS)
    assert rows.cameras["front"].frames == list(range(600))
    assert rows.cameras["front"].repeated == 0


def test_a_lost_frame_keeps_its_row() -> None:
    times = [100.0 * number for number in range(20) if number != 7]
    rows = choose_rows({"front": camera(times)}, 10, NANOSECONDS)
    assert len(rows.times_ns) == 20
    assert rows.cameras["front"].repeated == 1
    assert rows.cameras["front"].frames[6:9] in ([6, 6, 7], [6, 7, 7])


def test_rows_take_the_frames_that_have_masks() -> None:
    # the node steps every third frame of a camera of 30 frames per second
    stepped = list(range(1, 60, 3))
    frames = camera([100 / 3 * number for number in range(60)], stepped)
    assert measure_fps({"front": frames}) == 30
    rows = choose_rows({"front": frames}, 10, NANOSECONDS)
    assert set(rows.cameras["front"].frames) <= set(stepped)


def test_lerobot_has_opened_such_a_dataset_and_trained_on_it(lerobot_dataset: Path) -> None:
    outcome = json.loads((ROOT / "tests/data/lerobot/recorded.json").read_text())
    features = read_json(lerobot_dataset, "meta/info.json")["features"]
    assert set(outcome) == {"0.4.4", "0.6.1"}
    for release, found in outcome.items():
        assert (found["lerobot"], found["faults"]) == (release, [])
        # the outcome is older than the columns that are true or false
        shapes = {key: feature["shape"] for key, feature in features.items() if feature["dtype"] != "bool"}
        assert shapes == found["features"]
        assert len(found["act"]["losses"]) == 10


def write_clock(path: Path, times_ns: Sequence[int], masked: Sequence[int] = ()) -> Path:
    """Write a recording of one camera without marks, whose frames have these capture times."""
    with RecordingWriter(path) as writer:
        for seq, time_ns in enumerate(times_ns):
            logged_ns = BEGIN_NS + seq * NANOSECONDS // 15
            writer.write_frame(Frame("front", seq, time_ns, 16, 12, "mono8", bytes(192)), logged_ns)
            if seq in masked:
                found = MaskFrame("front", seq, time_ns, 16, 12)
                writer.write_masks(pack_masks(found)[1], found, logged_ns)
    return path


def stamps(*periods_ns: float) -> list[int]:
    """Return times that are these periods apart."""
    return [BEGIN_NS + round(passed) for passed in np.cumsum([0.0, *periods_ns])]


@pytest.mark.parametrize("every", [1, 2, 4])
def test_the_rate_is_the_camera_s_however_busy_the_node_is(tmp_path: Path, every: int) -> None:
    recording = write_clock(tmp_path / "a.mcap", stamps(*[NANOSECONDS / 15] * 40), range(0, 41, every))
    _, lines = convert(recording, tmp_path / "out")
    assert read_json(tmp_path / "out", "meta/info.json")["fps"] == 15
    assert mentions(lines[0], "41 rows" if every < 3 else "rows", "camera front", "15 fps", "0 ms")
    assert ("rows have no masks" in lines[0]) == (every > 1)


@pytest.mark.parametrize(("rate", "chosen"), [(12.5, None), (12.5, 13), (14.5, 15), (30, 20)])
def test_timestamps_stay_true_where_the_rate_is_another(
    tmp_path: Path, rate: float, chosen: int | None
) -> None:
    times = stamps(*[NANOSECONDS / rate] * 400)
    recording = write_clock(tmp_path / "a.mcap", times)
    found, lines = convert(recording, tmp_path / "out", **({} if chosen is None else {"fps": chosen}))
    assert found.appended == 1
    info = read_json(tmp_path / "out", "meta/info.json")
    fps = chosen or 12
    # as many rows as the time has, so that a row is where its timestamp says
    assert info["fps"] == fps
    assert info["total_frames"] == pytest.approx(400 / rate * fps, abs=2)
    (record,) = (tmp_path / "out/meta/sam3_episodes").iterdir()
    off_ms = json.loads(record.read_text())["source"]["max_stamp_ms"]
    assert off_ms <= 1000 / fps
    assert mentions(lines[0], f"timestamps within {off_ms:.0f} ms", f"{rate:g} fps")


@pytest.mark.parametrize("burst_ns", [1_000_000, 20_000, 1_000, 0])
def test_frames_in_bursts_have_no_rate(tmp_path: Path, burst_ns: int) -> None:
    """A driver that stamps at the arrival of a batch gives no rate: 1000 rows per second would be no end of rows."""
    periods = ([burst_ns] * 7 + [0.2 * NANOSECONDS]) * 5
    recording = write_clock(tmp_path / "a.mcap", stamps(*periods))
    found, lines = convert(recording, tmp_path / "out")
    assert (found.appended, found.left_out) == (0, 1)
    assert mentions(
        lines[0], "front", "240", f"{burst_ns / 1e6:g} ms", "2025-10-09T08:53:20.000Z", "lerobot.fps"
    )
    # the user knows the rate
    found, _ = convert(recording, tmp_path / "out", fps=30)
    assert found.appended == 1
    assert read_json(tmp_path / "out", "meta/info.json")["total_frames"] == pytest.approx(30, abs=3)


@pytest.mark.parametrize("jump_s", [366 * 86400.0, 2.0, -366 * 86400.0])
@pytest.mark.parametrize("fps", [0, 15])
def test_a_clock_that_jumps_costs_its_episode_alone(tmp_path: Path, jump_s: float, fps: int) -> None:
    periods = [NANOSECONDS / 15] * 20
    periods[10] += jump_s * NANOSECONDS
    broken = write_clock(tmp_path / "broken.mcap", stamps(*periods))
    found, lines = convert(broken, tmp_path / "out", fps=fps)
    assert (found.appended, found.left_out) == (0, 1)
    assert mentions(lines[0], "front", "clock")
    # the times around the jump, or of the whole episode
    assert re.search(r"from 202\d-1\S+Z to 202\d-1\S+Z", lines[0])
    found, lines = convert(
        write_clock(tmp_path / "next.mcap", stamps(*[NANOSECONDS / 15] * 20)), tmp_path / "out"
    )
    assert (found.appended, read_json(tmp_path / "out", "meta/info.json")["fps"]) == (1, 15)


def test_an_episode_that_began_before_the_recording_is_left_out(tmp_path: Path) -> None:
    recording = write_recording(tmp_path / "pick.mcap", first=6)
    found, lines = convert(recording, tmp_path / "out")
    assert found == Converted(1, 0, 0)
    assert mentions(lines[0], "episode 0", "0.3 s before the recording", "start the recorder")
    assert len(read_rows(tmp_path / "out")) == len(ROWS) - STARTS[1]


def test_an_episode_whose_marks_were_lost_is_whole_or_left_out(tmp_path: Path) -> None:
    # the end names the beginning; the second end is that of another episode than the beginning before it
    recording = write_recording(tmp_path / "pick.mcap", unmarked=(0,))
    assert convert(recording, tmp_path / "out")[0] == Converted(2, 0, 0)
    assert len(read_rows(tmp_path / "out")) == len(ROWS)
    marks = [replace(mark, keep=True) for mark in MARKS]
    recording = write_recording(tmp_path / "place.mcap", marks, unmarked=(1, 2))
    found, lines = convert(recording, tmp_path / "place")
    assert found == Converted(2, 0, 0)
    assert mentions(lines[0], "episode 0", "no end")
    assert len(read_rows(tmp_path / "place")) == sum(mark.end - mark.first for mark in marks[1:])
