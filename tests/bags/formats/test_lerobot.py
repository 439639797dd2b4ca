"""LeRobot datasets that lerobot's own tools wrote (tools/lerobot_roundtrip): 0.3.3 wrote 2.1, 0.4.4 and 0.6.1 3.0."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sam3_node.bags import open_bag
from sam3_node.bags.formats.lerobot import POSE
from sam3_node.bags.pairing import TimeSpan
from sam3_node.errors import BagError, MissingExtraError
from sam3_node.types import NANOSECONDS, JointState
from sam3_node.wire import decode_depth, decode_image
from tests.support.paths import ROOT
from tests.support.recordings import read_bag
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row
from tools.lerobot_roundtrip.__main__ import EPISODES, MAX_DEPTH_ERROR_MM, save_frames

DATA = ROOT / "tests" / "data" / "lerobot"
VERSIONS = ("v2.1", "v3.0")
STARTS = (0, 4, 9)
PICTURE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


@pytest.fixture(params=VERSIONS)
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / request.param, tmp_path / "dataset"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("frames") / "frames.npz"
    save_frames(path)
    return np.load(path)


def copy_v2(folder: Path) -> Path:
    return Path(shutil.copytree(DATA / "v2.1", folder / "dataset"))


def features_of(dataset: Path) -> dict[str, Any]:
    return json.loads((dataset / "meta/info.json").read_text())["features"]


def change_column(path: Path, name: str, values: list[Any], kind: Any = None) -> pyarrow.Table:
    """Return a table of a dataset with other values in one column."""
    table = pyarrow.parquet.read_table(path)
    at = table.schema.get_field_index(name)
    return table.set_column(at, name, pyarrow.array(values * (table.num_rows // len(values)), kind))


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def change_info(dataset: Path, **values: Any) -> None:
    path = dataset / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


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
    frames, _ = read_bag(Path(f"{dataset}#episode=1-2"), topics=["wrist"])
    assert [frame.seq for frame in frames] == list(range(4, 15))
    frames, _ = read_bag(Path(f"{dataset}#episode=1"))
    assert [frame.seq for frame in frames] == [row for row in range(4, 9) for _ in range(2)]
    with refuses(BagError, field=("episodes", "0", "2")):
        open_bag(Path(f"{dataset}#episode=3"))
    with refuses(BagError, field=("recording", "file")):
        open_bag(Path(f"{dataset}-absent#episode=3"))


def test_a_span_of_time_crosses_episodes(dataset: Path) -> None:
    frames, _ = read_bag(dataset, topics=["front"], span=TimeSpan(NANOSECONDS // 4, 3 * NANOSECONDS // 4))
    assert [frame.seq for frame in frames] == [3, 4, 5, 6, 7]


def test_what_is_absent_is_left_out_and_told(dataset: Path) -> None:
    table = next(iter(sorted((dataset / "data").rglob("*.parquet"))))
    next(iter(sorted((dataset / "videos").rglob("*.mp4")))).write_bytes(b"no video")
    frames, lost = read_bag(dataset)
    assert {frame.camera for frame in frames} >= {"wrist"}
    assert mentions(str(lost), "/front/image")
    table.write_bytes(table.read_bytes()[:-5])
    frames, lost = read_bag(dataset, topics=["wrist"])
    assert len(frames) == (11 if "v2.1" in str((dataset / "meta/info.json").read_text()) else 0)
    assert mentions(str(lost), "1", "episode 0") or not frames


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"codebase_version": "v1.6"}, ("LeRobot", "v2.0", "v2.1", "v3.0")),
        ({"fps": 1e999}, ("fps", "inf")),
        ({"fps": 0}, ("1000", "0")),
        ({"features": []}, ("map", "features")),
        ({"features": {"action": {"dtype": "float32"}}}, ("image", "video")),
        ({"data_path": "../data"}, ("inside", "dataset")),
        ({"data_path": "/etc/passwd"}, ("inside", "dataset")),
        ({"data_path": "{frame:03d}"}, "{frame:03d}"),
        ({"codebase_version": "\x1b[31m"}, r"\x1b[31m"),
        ({"fps": 10**10}, ("fps", "1000")),
        ({"splits": nested(700)}, "levels"),
    ],
)
def test_wrong_descriptions_are_refused(
    dataset: Path, values: dict[str, Any], message: str | tuple[str, ...]
) -> None:
    change_info(dataset, **values)
    with refuses(BagError, field=message):
        open_bag(dataset)


def test_depth_in_a_video_is_left_out(dataset: Path) -> None:
    features = features_of(dataset)
    features["observation.images.front"]["info"]["video.is_depth_map"] = True
    change_info(dataset, features=features)
    frames, lost = read_bag(dataset)
    assert {frame.camera for frame in frames} == {"wrist"}
    assert mentions(str(lost), "observation.images.front", "depth")


@pytest.mark.parametrize("names", [[*POSE, "ee.gripper_pos"], {"motors": ["ee.gripper_pos", *POSE]}])
def test_a_state_that_is_named_as_one_is_the_gripper_s_pose(dataset: Path, names: Any) -> None:
    features = features_of(dataset)
    with open_bag(dataset) as bag:
        assert all(isinstance(message, JointState) for message in bag.robot())
        assert not list(bag.robot(joints=False))
    features["observation.state"] |= {"names": names, "shape": [7]}
    change_info(dataset, features=features)
    turned = [0.1, 0.2, 0.3, 0.0, 0.0, np.pi / 2]
    state = [[*turned, 9.0] if isinstance(names, list) else [9.0, *turned]]
    for path in (dataset / "data").rglob("*.parquet"):
        pyarrow.parquet.write_table(change_column(path, "observation.state", state), path)
    with open_bag(dataset) as bag:
        poses = list(bag.robot())
        assert list(bag.robot(joints=False)) == poses
        stamps = [frame.capture_ns for frame in bag if frame.camera == "wrist"]
    assert [pose.stamp_ns for pose in poses] == stamps
    assert {(pose.frame, pose.parent, pose.clock, pose.position_m) for pose in poses} == {
        ("gripper", "base", "device", (0.1, 0.2, 0.3))
    }
    np.testing.assert_allclose(poses[0].quaternion_xyzw, [0, 0, np.sqrt(0.5), np.sqrt(0.5)], atol=1e-6)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # type: ignore[arg-type]
    for version in VERSIONS:
        with refuses(MissingExtraError, field=("installed", "lerobot-datasets")):
            read_bag(DATA / version, topics=["wrist"])


def test_a_compressed_cell_of_much_memory_is_refused(tmp_path: Path) -> None:
    dataset = copy_v2(tmp_path)
    path = dataset / "data/chunk-000/episode_000000.parquet"
    images = [{"bytes": bytes(192 << 20), "path": None}] + [None] * 3
    table = change_column(path, "observation.images.wrist", images, PICTURE)
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    assert path.stat().st_size < 64 << 10
    frames, lost = read_bag(dataset, topics=["wrist"])
    assert [frame.seq for frame in frames] == list(range(4, 15))
    assert mentions(str(lost), "1", "episode 0")


def test_endless_rows_without_pictures_end(tmp_path: Path) -> None:
    dataset = copy_v2(tmp_path)
    rows = 1_000_000
    path = dataset / "data/chunk-000/episode_000000.parquet"
    none = pyarrow.nulls(rows, PICTURE)
    zeros = pyarrow.array(np.zeros(rows, np.int64))
    times = pyarrow.array(np.arange(rows) / 10)
    columns = {"episode_index": zeros, "timestamp": times, "observation.images.wrist": none}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    lines = (dataset / "meta/episodes.jsonl").read_text().splitlines()
    lines[0] = json.dumps({"episode_index": 0, "length": rows, "tasks": []})
    (dataset / "meta/episodes.jsonl").write_text("\n".join(lines))
    frames, lost = read_bag(dataset, topics=["wrist"])
    assert len(frames) == sum(count for _, count in EPISODES[1:])
    assert mentions(str(lost), "2000")


def test_a_pipe_in_the_place_of_a_table_is_told(dataset: Path) -> None:
    for path in [*(dataset / "data").rglob("*.parquet")][:1]:
        path.unlink()
        os.mkfifo(path)
    _, lost = read_bag(dataset)
    assert mentions(str(lost), "regular file", "pipe") or mentions(str(lost), "no file")


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize("stand_in", [None, LFS, "", "link"])
def test_absent_videos_cost_only_their_own_frames(dataset: Path, stand_in: str | None) -> None:
    videos = sorted((dataset / "videos").rglob("*.mp4"))
    whole, _ = read_bag(dataset)
    for path in videos[:1]:
        path.unlink()
        if stand_in == "link":
            path.symlink_to("../../blobs/0")
        elif stand_in is not None:
            path.write_text(stand_in)
    frames, lost = read_bag(dataset)
    lacking = len(whole) - len(frames)
    assert [frame.seq for frame in frames if frame.camera == "wrist"] == list(range(15))
    assert lacking == (15 if len(videos) == 1 else STARTS[1])
    assert str(videos[0]) in str(lost)
    assert stand_in != LFS or mentions(str(lost), "git lfs pull")
    frames, lost = read_bag(dataset, topics=["front"])
    assert len(frames) == 15 - lacking
    assert str(videos[0]) in str(lost)
    shutil.rmtree(dataset / "videos")
    frames, lost = read_bag(dataset)
    assert {frame.camera for frame in frames} == {"wrist"}
    assert all(str(path) in str(lost) for path in videos)


def test_many_episodes_without_a_video_do_not_hide_the_last_one(tmp_path: Path) -> None:
    dataset = copy_v2(tmp_path)
    (video,) = dataset.rglob("*.front/episode_000000.mp4")
    table = dataset / "data/chunk-000/episode_000000.parquet"
    lines = [{"episode_index": number, "length": 4, "tasks": []} for number in range(300)]
    (dataset / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    change_info(dataset, chunks_size=1000)
    kind = pyarrow.parquet.read_table(table).schema.field("episode_index").type
    shutil.copy(video, video.with_name("episode_000299.mp4"))
    renumbered = change_column(table, "episode_index", [299] * 4, kind)
    pyarrow.parquet.write_table(renumbered, table.with_name("episode_000299.parquet"))
    for path in [*dataset.rglob("*.front/episode_00000?.mp4")]:
        path.unlink()
    frames, lost = read_bag(dataset, topics=["front"])
    assert [frame.seq for frame in frames] == list(range(299 * 4, 300 * 4))
    assert "more losses" in str(lost)


@pytest.mark.parametrize("content", [None, LFS])
def test_an_absent_table_or_description_is_named(dataset: Path, content: str | None) -> None:
    table = next(iter(sorted((dataset / "data").rglob("*.parquet"))))
    for path in (table, dataset / "meta/info.json"):
        path.unlink()
        if content is not None:
            path.write_text(content)
        try:
            _, text = read_bag(dataset)
        except BagError as error:
            text = str(error)
        assert path.name in str(text)
        assert content is None or mentions(str(text), "git lfs pull")
        if path == table:
            assert str(table) in str(text)


INFO = {"video.depth_min": 0.2, "video.depth_max": 4.0, "video.shift": 3.5, "video.use_log": True}


def write_depth(path: Path, codes: np.ndarray, count: int, pixels: str = "gray12le") -> None:
    """Write a video whose frames have these codes [height, width] as their brightness."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libx265", rate=10, options={"x265-params": "lossless=1:log-level=none"}
        )
        stream.height, stream.width = codes.shape
        stream.pix_fmt = pixels
        for index in range(count):
            frame = av.VideoFrame(stream.width, stream.height, pixels)
            for plane, value in zip(frame.planes, (codes, None, None), strict=False):
                rows = np.full((plane.height, plane.line_size // 2), 2048, np.uint16)
                if value is not None:
                    rows[:, : value.shape[1]] = value
                plane.update(rows.tobytes())
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def add_depth(
    dataset: Path, info: dict[str, Any], pixels: str = "gray12le", name: str = "front_depth"
) -> np.ndarray:
    """Add a depth video to version 2.1, with every code in each frame; return the codes."""
    key = f"observation.images.{name}"
    features = features_of(dataset)
    features[key] = {"dtype": "video", "shape": [64, 64, 1], "info": info}
    change_info(dataset, features=features)
    codes = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    folder = dataset / "videos/chunk-000" / key
    folder.mkdir()
    for number, (_, length) in enumerate(EPISODES):
        write_depth(folder / f"episode_{number:06}.mp4", codes, length, pixels)
    return codes


@pytest.mark.verifies(
    "recording",
    "LeRobot depth: 12-bit video, PNG and TIFF",
    "own package",
    "lerobot 0.6.1, by `python -m tools.lerobot_roundtrip`",
    "PNG and TIFF of lerobot itself",
)
def test_the_depth_of_lerobot_itself_is_metres(written: Any) -> None:
    frames, lost = read_bag(DATA / "v3.0-depth", topics=["front"])
    assert (len(frames), lost) == (15, None)
    for frame in frames:
        episode = sum(start <= frame.seq for start in STARTS) - 1
        expected = written[f"{episode}-depth"][frame.seq - STARTS[episode], ..., 0].astype(float)
        found = decode_depth(frame.depth) * frame.depth.scale_m * 1000
        assert np.abs(found - expected)[found > 0].max() < MAX_DEPTH_ERROR_MM
        assert (found > 0).mean() > 0.9


@each_row("flag", ["is_depth_map", "video.is_depth_map"])
@each_row("pixels", ["gray12le", "yuv420p12le"])
@each_row("use_log", [True, False])
def test_depth_in_a_video_is_metres(tmp_path: Path, flag: str, pixels: str, use_log: bool) -> None:
    dataset = copy_v2(tmp_path)
    codes = add_depth(dataset, INFO | {flag: True, "video.use_log": use_log}, pixels)
    frames, lost = read_bag(dataset, topics=["front"])
    assert lost is None
    assert len(frames) == 15
    share = codes / 4095
    metres = np.exp(np.log(3.7) + share * np.log(7.5 / 3.7)) - 3.5 if use_log else 0.2 + 3.8 * share
    metres[(codes == 0) | (codes == 4095)] = 0  # nearer or farther: unknown
    for frame in frames:
        assert not frame.depth.aligned
        found = decode_depth(frame.depth) * frame.depth.scale_m
        np.testing.assert_allclose(found, metres, atol=4.0 / 65535)


def test_depth_goes_to_the_camera_of_its_name(tmp_path: Path) -> None:
    dataset = copy_v2(tmp_path)
    add_depth(dataset, INFO | {"is_depth_map": True}, name="wrist_depth")
    frames, _ = read_bag(dataset)
    assert {(frame.camera, frame.depth is None) for frame in frames} == {("front", True), ("wrist", False)}


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({}, "found {'depth_min': None, 'depth_max': None, 'shift': None, 'use_log': None}"),
        ({**INFO, "video.shift": None}, "'shift': None, 'use_log'"),
        ({**INFO, "video.depth_max": 0.1}, "0 <= depth_min < depth_max"),
        ({**INFO, "video.shift": -0.3}, "depth_min + shift above 0"),
        ({**INFO, "video.use_log": 1}, "a use_log of true or false"),
    ],
)
def test_depth_without_its_metres_is_left_out_and_told(
    tmp_path: Path, info: dict[str, Any], expected: str
) -> None:
    dataset = copy_v2(tmp_path)
    add_depth(dataset, {**info, "is_depth_map": True})
    frames, lost = read_bag(dataset)
    assert {(frame.camera, frame.depth) for frame in frames} == {("front", None), ("wrist", None)}
    assert mentions(str(lost), "observation.images.front_depth", "video")
    assert expected in str(lost)


def test_depth_of_eight_bits_is_told_and_a_false_flag_means_colour(tmp_path: Path) -> None:
    dataset = copy_v2(tmp_path)
    features = features_of(dataset)
    front = features["observation.images.front"]
    front["info"] |= INFO | {"is_depth_map": False, "video.is_depth_map": False}
    change_info(dataset, features=features)
    frames, lost = read_bag(dataset)
    assert (len(frames), lost) == (30, None)
    front["info"]["is_depth_map"] = True
    change_info(dataset, features=features)
    frames, lost = read_bag(dataset)
    assert {(frame.camera, frame.depth) for frame in frames} == {("wrist", None)}
    assert mentions(str(lost), "12", "yuv420p")


@pytest.mark.parametrize(
    ("kind", "unit"), [("png", None), ("png", "mm"), ("tiff", "mm"), ("float", None), ("float", "m")]
)
def test_depth_in_images_is_metres(tmp_path: Path, kind: str, unit: str | None) -> None:
    dataset = copy_v2(tmp_path)
    features = features_of(dataset)
    features["observation.images.wrist"]["info"] = {"is_depth_map": True, "depth_unit": unit}
    change_info(dataset, features=features)
    millimetres = np.random.default_rng(0).integers(1, 9000, (24, 32)).astype(np.uint16)
    if kind == "float":  # without compression, as pillow writes it
        options = [cv2.IMWRITE_TIFF_COMPRESSION, 1]
        data = cv2.imencode(".tiff", (millimetres / 1000).astype(np.float32), options)[1].tobytes()
    else:
        data = cv2.imencode(f".{kind}", millimetres)[1].tobytes()
    for path in (dataset / "data").rglob("*.parquet"):
        cells = [{"bytes": data, "path": None}]
        pyarrow.parquet.write_table(change_column(path, "observation.images.wrist", cells, PICTURE), path)
    frames, lost = read_bag(dataset)
    assert lost is None
    assert {frame.camera for frame in frames} == {"front"}
    for frame in frames:
        np.testing.assert_allclose(
            decode_depth(frame.depth) * frame.depth.scale_m, millimetres / 1000, atol=1e-6
        )
