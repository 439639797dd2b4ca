"""bag:, video:, images: and scene: give each frame once, in order, at its pace, up to any damage."""

import itertools
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.bags import RecordingWriter
from sam3_node.cameras import playback
from sam3_node.cameras.camera_source import CameraSource, CapturedImage
from sam3_node.cameras.publish import frame_from, run_camera
from sam3_node.cameras.scene import Scene
from sam3_node.cameras.sources import open_camera
from sam3_node.errors import BagError, CameraError
from sam3_node.settings import CameraSettings, load_settings
from sam3_node.types import Frame, FramePose, JointState
from sam3_node.wire import decode_depth, decode_image, encode_depth, pack_pose
from tests.support.paths import SHARED
from tests.support.patience import PATIENCE_S
from tests.support.recordings import INTRINSICS, MS, frame_at, write_film, write_recording
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row

FAST = CameraSettings(fps=1000)
JPEG = CameraSettings(fps=1000, encoding="jpeg")
Z16 = encode_depth(np.full((48, 64), 500, np.uint16), "z16", 0.001, aligned=True)  # of frame 0


def play(folder: Path, frames: int | list[Frame], settings: CameraSettings = FAST) -> CameraSource:
    """Write a recording of these frames, and open it."""
    return open_camera(f"bag:{write_recording(folder / 'table.mcap', frames)}", settings)


def seqs(source: Iterable[CapturedImage]) -> list[int]:
    """Return the seqs of the recorded frames."""
    return [captured.image.seq for captured in source if isinstance(captured.image, Frame)]


def test_images_are_captured_anew_with_what_was_recorded(tmp_path: Path) -> None:
    captured = list(play(tmp_path, 3))
    stamps = [item.capture_ns for item in captured]
    assert stamps == sorted(stamps)
    assert stamps[0] > frame_at(2).capture_ns + 10**17  # Unix time
    assert [item.times for item in captured] == [
        {"sensor_ns": seq, "media_ns": 40 * MS * seq} for seq in range(3)
    ]
    assert captured[2].intrinsics == INTRINSICS
    assert captured[2].size == (48, 64)
    assert captured[2].pixels().mean() == pytest.approx(20, abs=2)
    assert set(np.unique(decode_depth(captured[2].depth))) == {502}


def test_a_recorded_robot_moves_beside_its_images(tmp_path: Path) -> None:
    path = tmp_path / "arm.mcap"
    frames = [frame_at(seq) for seq in range(6)]
    first_ns = frames[0].capture_ns
    poses = [JointState("arm", first_ns + step * 30 * MS, {"j1": float(step)}) for step in range(-1, 9)]
    gripper = FramePose("gripper", "base", first_ns + 35 * MS, (0.0, 0.0, 0.5), (0.0, 0.0, 0.0, 1.0))
    with RecordingWriter(path) as writer:
        for joints in poses:
            writer.write_robot(pack_pose(joints)[1], "joints/arm", joints.stamp_ns)
        writer.write_robot(pack_pose(gripper)[1], "poses/gripper", gripper.stamp_ns)
        for frame in frames:
            writer.write_frame(frame, frame.capture_ns)
    played = list(open_camera(f"bag:{path}", CameraSettings(fps=1000, robot="tcp://127.0.0.1:*")))
    moves = [
        (move, captured.capture_ns - frame.capture_ns)
        for captured, frame in zip(played, frames, strict=True)
        for move in captured.robot
    ]
    assert {move.clock for move, _ in moves} == {"system"}
    joints = [(move.stamp_ns - late, move.positions) for move, late in moves if isinstance(move, JointState)]
    assert joints == [(state.stamp_ns, state.positions) for state in poses]
    assert [move.stamp_ns - late for move, late in moves if isinstance(move, FramePose)] == [gripper.stamp_ns]
    for captured in played:  # each image has what it needs, before and after it
        so_far = [move.stamp_ns for move in captured.robot]
        assert captured is not played[0] or min(so_far) < captured.capture_ns < max(so_far)
    assert not any(captured.robot for captured in open_camera(f"bag:{path}", FAST))


def test_its_own_pace_is_kept_unless_settings_say_otherwise(tmp_path: Path) -> None:
    frames = [frame_at(seq, stamp_ns=at * MS) for seq, at in enumerate((0, 10, 150, 160))]
    captured = list(play(tmp_path, frames, CameraSettings()))
    assert captured[2].capture_ns - captured[1].capture_ns >= 100 * MS
    assert captured[-1].capture_ns - captured[0].capture_ns >= 140 * MS


def test_jpeg_and_depth_are_passed_on_as_they_were_recorded(tmp_path: Path) -> None:
    (captured,) = play(tmp_path, 1, JPEG)
    recorded = frame_at(0)
    frame = frame_from(captured, 7, JPEG)
    assert (frame.camera, frame.seq, frame.clock) == ("cam0", 7, "system")
    assert frame.colour == recorded.colour
    assert frame.depth == Z16


def test_another_encoding_or_size_is_made_when_asked_for(tmp_path: Path) -> None:
    (captured,) = play(tmp_path, [frame_at(9)])
    raw = frame_from(captured, 0, FAST)
    assert (raw.encoding, len(raw.colour)) == ("bgr8", 48 * 64 * 3)
    half = frame_from(captured, 0, CameraSettings(encoding="jpeg", width=32))
    assert decode_image(half).shape == (24, 32, 3)
    assert half.depth.scale_m == 0.001
    assert decode_depth(half.depth).shape == (24, 32)
    assert half.intrinsics.fx == 30.0


def test_depth_of_another_camera_is_not_resized(tmp_path: Path) -> None:
    recorded = frame_at(0)
    recorded = replace(recorded, depth=replace(recorded.depth, aligned=False))
    (captured,) = play(tmp_path, [recorded])
    assert frame_from(captured, 0, CameraSettings(width=32)).depth == replace(Z16, aligned=False)


def test_looping_starts_again_at_the_same_pace(tmp_path: Path) -> None:
    source = play(tmp_path, 3, CameraSettings(loop=True))
    captured = list(itertools.islice(source, 7))
    assert seqs(captured) == [0, 1, 2, 0, 1, 2, 0]
    assert captured[6].capture_ns - captured[0].capture_ns >= 6 * 39 * MS
    source.close()
    assert not list(source)


def test_an_image_that_cannot_be_decoded_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames = [frame_at(0), replace(frame_at(1), colour=b"not a JPEG"), frame_at(2)]
    path = write_recording(tmp_path / "table.mcap", frames)
    free = {"camera.wait": "false", "transport.frames": "tcp://127.0.0.1:0"}
    settings = load_settings(overrides={"camera.source": f"bag:{path}", **free})
    summary = run_camera(settings, threading.Event())
    assert (summary.captured, summary.unsent) == (3, 1)
    assert mentions(caplog.text, "image 1", "cam0", "JPEG")


def test_a_file_that_is_gone_when_it_loops_ends_the_camera(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", 2)
    source = iter(open_camera(f"bag:{path}", CameraSettings(fps=1000, loop=True)))
    next(source)
    path.unlink()
    with pytest.raises(BagError, match="cannot read"):
        list(source)


def test_the_tabletop_says_when_it_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playback, "TABLETOP", tmp_path / "tabletop.mcap")
    with refuses(BagError, field=str(tmp_path)):
        open_camera("scene:tabletop", FAST)
    write_recording(tmp_path / "tabletop.mcap", 2)
    source = open_camera("scene:tabletop", FAST)
    assert (source.name, seqs(source)) == ("scene:tabletop", [0, 1])


ROBOT_ARM = SHARED / "data" / "video" / "16_robotarm.mp4"


def write_video(path: Path) -> Path:
    """Write a video whose frame i is a flat grey of 20 * i."""
    return write_film(path, (np.full((120, 160, 3), 20 * i, np.uint8) for i in range(12)))


@pytest.fixture
def video(tmp_path: Path) -> Path:
    return write_video(tmp_path / "grey.mp4")


def greys(source: object) -> list[int]:
    return [round(float(captured.pixels().mean()) / 20) for captured in source]  # type: ignore[attr-defined]


@pytest.fixture(params=["bag", "video", "scene:shapes?width=160&height=120"])
def played(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URI of each kind of source: a recording of 6 frames, a video of 12 and a scene."""
    if request.param == "bag":
        return f"bag:{write_recording(tmp_path / 'table.mcap', 6)}"
    return f"video:{write_video(tmp_path / 'grey.mp4')}" if request.param == "video" else request.param


def test_every_frame_of_a_file_comes_once(tmp_path: Path, video: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", 6)
    for uri, read, count in ((f"bag:{path}", seqs, 6), (f"video:{video}", greys, 12)):
        source = open_camera(uri, FAST)
        assert (source.name, read(source)) == (uri, list(range(count)))
        source.close()


def test_stop_ends_the_wait_for_the_next_frame(played: str) -> None:
    stop = threading.Event()
    source = iter(open_camera(played, CameraSettings(fps=0.01, loop=True), stop))
    next(source)
    threading.Timer(0.05, stop.set).start()
    assert next(source, None) is None


def test_images_carry_capture_and_media_time(video: Path) -> None:
    captured = list(open_camera(f"video:{video}", FAST))
    assert captured[0].pixels().shape == (120, 160, 3)
    stamps = [item.capture_ns for item in captured]
    assert stamps == sorted(stamps)
    assert [item.times["media_ns"] for item in captured[:3]] == [0, 40_000_000, 80_000_000]


def test_its_own_rate_is_kept_unless_settings_say_otherwise(video: Path) -> None:
    captured = list(open_camera(f"video:{video}", CameraSettings()))
    assert captured[-1].capture_ns - captured[0].capture_ns >= 0.43e9  # 11 intervals of 40 ms


def test_looping_starts_again(video: Path) -> None:
    source = open_camera(f"video:{video}", CameraSettings(fps=1000, loop=True))
    assert greys(itertools.islice(source, 26)) == [*range(12), *range(12), 0, 1]
    source.close()
    assert greys(source) == []


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 4096, b"not a video", b"\x00\x00\x00\x20ftypisom" + b"\xff" * 999, None]
)
def test_damaged_and_missing_files_are_camera_errors(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.mp4"
    if content is not None:
        path.write_bytes(content)
    with refuses(CameraError, field=str(path) if content is None else ("readable", "video")):
        open_camera(f"video:{path}", FAST)
    with refuses(CameraError, field=str(tmp_path)):
        open_camera(f"video:{tmp_path}", FAST)


def test_a_file_cut_short_is_refused_or_ends_cleanly(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "whole.avi")
    cut = tmp_path / "cut.avi"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    try:
        found = greys(open_camera(f"video:{cut}", FAST))
    except CameraError:
        return
    assert found == list(range(len(found)))


@pytest.mark.parametrize("uri", ["", "video", "bag", "/dev/video0", "Scene:shapes"])
def test_unknown_schemes_name_the_known_ones(uri: str) -> None:
    with refuses(CameraError, field=("scene", "video:FILE", "webcam:INDEX")):
        open_camera(uri, FAST)


@pytest.mark.skipif(not ROBOT_ARM.is_file(), reason="needs the shared test video")
def test_a_real_recording() -> None:
    captured = list(itertools.islice(open_camera(f"video:{ROBOT_ARM}", CameraSettings(fps=200)), 20))
    assert {item.pixels().shape for item in captured} == {(720, 1280, 3)}
    assert captured[19].times["media_ns"] == 19 * 40_000_000


@each_row(
    ("source", "nearest"),
    [
        ("clip.MP4", ("video", "video:clip.MP4")),
        ("webcm:0", "webcam:0"),
        ("vidoe:clip.mp4", ("video", "video:clip.mp4")),
        ("0", "webcam:0"),
        ("/dev/video2", "webcam:2"),
        ("tabletop", "scene"),
        ("scene:tabeltop", "scene"),
    ],
)
def test_a_source_without_its_kind_or_misspelt_is_answered_with_the_nearest(
    source: str, nearest: str | tuple[str, ...]
) -> None:
    with refuses(CameraError, field=nearest):
        open_camera(source, FAST)


def test_a_bare_path_of_a_recording_is_answered_with_its_kind(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    with pytest.raises(CameraError, match=r"found '[^']*'$"):
        open_camera(str(images), FAST)
    cv2.imwrite(str(images / "0.png"), np.zeros((48, 64, 3), np.uint8))
    with refuses(CameraError, field=str(images)):
        open_camera(str(images), FAST)


def test_images_come_in_the_natural_order_of_their_names(tmp_path: Path) -> None:
    for index in (2, 10, 1):
        cv2.imwrite(str(tmp_path / f"{index}.png"), np.full((48, 64, 3), index, np.uint8))
    source = open_camera(f"images:{tmp_path}", CameraSettings(fps=1000))
    assert [int(image.pixels()[0, 0, 0]) for image in source] == [1, 2, 10]
    assert source.is_finite
    assert source.lost == 0


def test_a_folder_without_images_and_a_file_are_camera_errors(tmp_path: Path) -> None:
    with pytest.raises(CameraError, match="images:"):
        open_camera(f"images:{tmp_path}", CameraSettings())
    with refuses(CameraError, field=("folder", "images")):
        open_camera(f"images:{tmp_path / 'absent'}", CameraSettings())


PERIOD = range(0, 240, 8)  # frames of one round of every path, at 30 fps


def areas(scene: Scene, index: int) -> np.ndarray:
    return np.bincount(scene.render(index)[1].ravel(), minlength=len(scene.names) + 1)[1:]


def test_default_scene_is_vga_with_named_objects() -> None:
    scene = Scene()
    image, ids = scene.render(0)
    assert (image.shape, image.dtype) == ((480, 640, 3), np.uint8)
    assert (ids.shape, ids.dtype) == ((480, 640), np.uint8)
    assert len(set(scene.names)) == 5
    assert set(np.unique(ids)) == set(range(6))


def test_rendering_is_a_pure_function_of_seed_and_index() -> None:
    first = Scene(seed=3)
    second = Scene(seed=3)
    for index in (7, 0, 120):
        for ours, theirs in zip(first.render(index), second.render(index), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(first.render(0)[0], Scene(seed=4).render(0)[0])
    assert not np.array_equal(first.render(0)[1], first.render(5)[1])


def test_another_process_computes_the_same_truth() -> None:
    program = (
        "import zlib; from sam3_node.cameras.scene import Scene; "
        "print(*(zlib.crc32(a) for a in Scene.from_uri('scene:shapes?seed=3').render(42)))"
    )
    ours = " ".join(str(zlib.crc32(array)) for array in Scene(seed=3).render(42))
    theirs = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert theirs.stdout.split() == ours.split()


@pytest.mark.parametrize("seed", range(6))
def test_every_object_is_in_view_at_first(seed: int) -> None:
    scene = Scene(seed=seed, objects=6)
    assert (areas(scene, 0) > 2000).all()


@pytest.mark.parametrize("seed", range(6))
def test_one_object_is_hidden_and_one_leaves_and_returns(seed: int) -> None:
    scene = Scene(seed=seed)
    seen = np.array([areas(scene, index) for index in PERIOD])
    hidden = seen[:, 0]
    hiding = seen[:, 1]
    leaving = seen[:, 2]
    assert hidden.min() < 0.6 * hidden.max()
    assert hiding.min() > 0.95 * hiding.max()
    assert leaving[0] > 0
    assert leaving.min() == 0
    assert leaving[-1] > 0.9 * leaving.max()


def test_motion_is_smooth() -> None:
    scene = Scene(seed=1)
    for index in range(0, 240, 20):
        before = scene.render(index)[1]
        after = scene.render(index + 1)[1]
        assert np.mean(before != after) < 0.02


def test_from_uri_reads_every_parameter() -> None:
    scene = Scene.from_uri("scene:shapes?seed=3&objects=4&frames=300&width=320&height=240&fps=15")
    assert (len(scene.names), scene.frames, scene.width, scene.height, scene.fps) == (4, 300, 320, 240, 15)
    assert scene.render(0)[0].shape == (240, 320, 3)


@each_row(
    ("uri", "named"),
    [
        ("scene:cubes", ("scene:shapes", "scene:tabletop")),
        ("scene:", "scene:shapes"),
        ("scene:shapes?speed=3", "speed"),
        ("scene:shapes?objects=7", ("objects", "6", "7")),
        ("scene:shapes?seed=-1", "found '-1'"),
        ("scene:shapes?seed=1e3", "seed"),
        ("scene:shapes?seed=", "seed"),
        ("scene:shapes?width=" + "9" * 5000, "width"),
        ("scene:shapes?fps=0", "fps"),
    ],
)
def test_wrong_uris_are_camera_errors(uri: str, named: str | tuple[str, ...]) -> None:
    with refuses(CameraError, field=named):
        open_camera(uri, CameraSettings())


def test_source_gives_the_frames_in_order_and_ends() -> None:
    uri = "scene:shapes?seed=2&frames=3&width=160&height=120"
    images = [captured.image for captured in open_camera(uri, CameraSettings(fps=500))]
    scene = Scene.from_uri(uri)
    assert len(images) == 3
    for index, image in enumerate(images):
        np.testing.assert_array_equal(image, scene.render(index)[0])


def test_source_loops_when_asked() -> None:
    source = open_camera("scene:shapes?frames=2&width=160&height=120", CameraSettings(fps=500, loop=True))
    images = [captured.image for captured in itertools.islice(source, 3)]
    np.testing.assert_array_equal(images[2], images[0])
