"""LeRobot datasets that lerobot's own tools wrote (tools/lerobot_roundtrip): 0.3.3 version 2.1, 0.4.4 version 3.0."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("av")

import pyarrow
import pyarrow.parquet

from sam3_node.bags import open_bag
from sam3_node.bags.formats.lerobot import POSE
from sam3_node.bags.time_span import TimeSpan
from sam3_node.errors import BagError, MissingExtraError
from sam3_node.types import NANOSECONDS
from sam3_node.wire import decode_image
from tests.support.paths import ROOT
from tools.lerobot_roundtrip.__main__ import EPISODES, save_frames

DATA = ROOT / "tests" / "data" / "lerobot"
VERSIONS = ("v2.1", "v3.0")
STARTS = (0, 4, 9)


@pytest.fixture(params=VERSIONS)
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / request.param, tmp_path / "dataset"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("frames") / "frames.npz"
    save_frames(path)
    return np.load(path)


def change_info(dataset: Path, **values: Any) -> None:
    path = dataset / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def read(path: Path, **options: Any) -> tuple[list[Any], str | None]:
    with open_bag(path, **options) as bag:
        return list(bag), bag.lost


@pytest.mark.verifies(
    "recording",
    "LeRobot datasets 2.1 and 3.0",
    "own package",
    "lerobot 0.3.3 and 0.4.4 wrote the datasets, by `python -m tools.lerobot_roundtrip`",
    "version 2.0, whose layout is that of 2.1",
)
def test_all_cameras_of_all_episodes_come_as_they_were_written(dataset: Path, written: Any) -> None:
    with open_bag(dataset) as bag:
        assert (bag.cameras, bag.episode_starts, bag.lost) == (("front", "wrist"), STARTS, None)
        frames = list(bag)
        assert bag.lost is None
    assert [(frame.seq, frame.camera) for frame in frames] == [
        (row, camera) for row in range(15) for camera in ("front", "wrist")
    ]
    for frame in frames:
        episode = sum(start <= frame.seq for start in STARTS) - 1
        expected = written[f"{episode}-{frame.camera}"][frame.seq - STARTS[episode]].astype(int)
        error = np.abs(decode_image(frame)[..., ::-1] - expected).mean()
        assert error == 0 if frame.camera == "wrist" else error < 8
        assert abs(frame.capture_ns - frame.seq * NANOSECONDS // 10) < 100


def test_episodes_are_chosen_behind_the_path(dataset: Path) -> None:
    frames, _ = read(Path(f"{dataset}#episode=1-2"), topics=["wrist"])
    assert [frame.seq for frame in frames] == list(range(4, 15))
    frames, _ = read(Path(f"{dataset}#episode=1"))
    assert [frame.seq for frame in frames] == [row for row in range(4, 9) for _ in range(2)]
    with pytest.raises(BagError, match="expected episodes 0 to 2, found none of them"):
        open_bag(Path(f"{dataset}#episode=3"))
    with pytest.raises(BagError, match="expected a recording, found no file"):
        open_bag(Path(f"{dataset}-absent#episode=3"))


def test_a_span_of_time_crosses_episodes(dataset: Path) -> None:
    frames, _ = read(dataset, topics=["front"], span=TimeSpan(NANOSECONDS // 4, 3 * NANOSECONDS // 4))
    assert [frame.seq for frame in frames] == [3, 4, 5, 6, 7]


def test_what_is_absent_is_left_out_and_told(dataset: Path) -> None:
    table = next(iter(sorted((dataset / "data").rglob("*.parquet"))))
    next(iter(sorted((dataset / "videos").rglob("*.mp4")))).write_bytes(b"no video")
    frames, lost = read(dataset)
    assert {frame.camera for frame in frames} >= {"wrist"}
    assert "/front/image passed over, the first because: " in str(lost)
    table.write_bytes(table.read_bytes()[:-5])
    frames, lost = read(dataset, topics=["wrist"])
    assert len(frames) == (11 if "v2.1" in str((dataset / "meta/info.json").read_text()) else 0)
    assert "1 of episodes passed over, the first because: episode 0:" in str(lost) or not frames


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"codebase_version": "v1.6"}, "expected a LeRobot dataset of version v2.0, v2.1, v3.0, found v1.6"),
        ({"fps": 1e999}, "expected a number as fps, found inf"),
        ({"fps": 0}, "expected fps up to 1000, found 0"),
        ({"features": []}, "expected a map of features"),
        ({"features": {"action": {"dtype": "float32"}}}, "expected a feature of the type image or video"),
        ({"data_path": "../data"}, "expected paths inside the dataset"),
        ({"data_path": "/etc/passwd"}, "expected paths inside the dataset"),
        ({"data_path": "{frame:03d}"}, "in a path, found '{frame:03d}'"),
    ],
)
def test_wrong_descriptions_are_refused(dataset: Path, values: dict[str, Any], message: str) -> None:
    change_info(dataset, **values)
    with pytest.raises(BagError, match=message):
        open_bag(dataset)


def test_depth_in_a_video_is_left_out(dataset: Path) -> None:
    info = json.loads((dataset / "meta/info.json").read_text())
    info["features"]["observation.images.front"]["info"]["video.is_depth_map"] = True
    change_info(dataset, features=info["features"])
    frames, lost = read(dataset)
    assert {frame.camera for frame in frames} == {"wrist"}
    assert "observation.images.front is left out: depth" in str(lost)


@pytest.mark.parametrize("names", [[*POSE, "ee.gripper_pos"], {"motors": ["ee.gripper_pos", *POSE]}])
def test_a_state_that_is_named_as_one_is_the_gripper_s_pose(dataset: Path, names: Any) -> None:
    info = json.loads((dataset / "meta/info.json").read_text())
    with open_bag(dataset) as bag:
        assert not list(bag.robot_poses())  # of joints
    info["features"]["observation.state"] |= {"names": names, "shape": [7]}
    change_info(dataset, features=info["features"])
    turned = [0.1, 0.2, 0.3, 0.0, 0.0, np.pi / 2]
    state = [[*turned, 9.0] if isinstance(names, list) else [9.0, *turned]]
    for path in (dataset / "data").rglob("*.parquet"):
        table = pyarrow.parquet.read_table(path)
        at = table.schema.get_field_index("observation.state")
        pyarrow.parquet.write_table(
            table.set_column(at, "observation.state", pyarrow.array(state * table.num_rows)), path
        )
    with open_bag(dataset) as bag:
        poses, stamps = (
            list(bag.robot_poses()),
            [frame.capture_ns for frame in bag if frame.camera == "wrist"],
        )
    assert [pose.stamp_ns for pose in poses] == stamps
    assert {(pose.frame, pose.parent, pose.clock, pose.position_m) for pose in poses} == {
        ("gripper", "base", "device", (0.1, 0.2, 0.3))
    }
    np.testing.assert_allclose(poses[0].quaternion_xyzw, [0, 0, np.sqrt(0.5), np.sqrt(0.5)], atol=1e-6)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyarrow").mkdir()
    (tmp_path / "pyarrow" / "__init__.py").write_text("raise ModuleNotFoundError(name='pyarrow')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    for version in VERSIONS:
        with pytest.raises(
            MissingExtraError, match=r"pyarrow is not installed; .*sam3-node\[lerobot-datasets\]"
        ):
            read(DATA / version, topics=["wrist"])


def test_a_compressed_cell_of_much_memory_is_refused(tmp_path: Path) -> None:
    dataset = Path(shutil.copytree(DATA / "v2.1", tmp_path / "dataset"))
    path = dataset / "data/chunk-000/episode_000000.parquet"
    table = pyarrow.parquet.read_table(path)
    images = [{"bytes": bytes(192 << 20), "path": None}] + [None] * 3
    column = pyarrow.array(images, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    at = table.schema.get_field_index("observation.images.wrist")
    table = table.set_column(at, "observation.images.wrist", column)
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    assert path.stat().st_size < 64 << 10
    frames, lost = read(dataset, topics=["wrist"])
    assert [frame.seq for frame in frames] == list(range(4, 15))
    assert "1 of episodes passed over, the first because: episode 0:" in str(lost)


def test_endless_rows_without_pictures_end(tmp_path: Path) -> None:
    dataset = Path(shutil.copytree(DATA / "v2.1", tmp_path / "dataset"))
    rows = 1_000_000
    path = dataset / "data/chunk-000/episode_000000.parquet"
    none = pyarrow.nulls(rows, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    zeros = pyarrow.array(np.zeros(rows, np.int64))
    columns = {"episode_index": zeros, "timestamp": zeros.cast("float32"), "observation.images.wrist": none}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    lines = (dataset / "meta/episodes.jsonl").read_text().splitlines()
    lines[0] = json.dumps({"episode_index": 0, "length": rows, "tasks": []})
    (dataset / "meta/episodes.jsonl").write_text("\n".join(lines))
    frames, lost = read(dataset, topics=["wrist"])
    assert len(frames) == sum(count for _, count in EPISODES[1:])
    assert "expected pictures in its rows, found none before the row 2000" in str(lost)
