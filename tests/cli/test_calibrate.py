"""The command `calibrate`: from images, poses and live frames to one file for a camera."""

from __future__ import annotations

import csv
import threading
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.calibration import Calibration, load_calibration
from sam3_node.calibration.boards import Board
from sam3_node.cli.calibration_views import CapturedViews, Picture, collect_live, collect_views
from sam3_node.cli.main import main
from sam3_node.errors import CalibrationError
from sam3_node.geometry import Array, invert, quaternion_from_rotation
from sam3_node.settings import Settings, TransportSettings
from sam3_node.transport import FramePublisher, PosePublisher
from sam3_node.types import Clock, Frame, FramePose, Image, Intrinsics
from sam3_node.wire import encode_image
from tests.support.calibration_scenes import (
    BASE_FROM_BOARD,
    BOARD,
    CENTRE_M,
    GRIPPER_FROM_CAMERA,
    SIZE,
    draw_pose,
    project_board,
    render,
    render_views,
)
from tests.support.refuses import mentions, refuses

PINHOLE = Intrinsics(600.0, 600.0, 320.0, 240.0, "none")


def robot_pose(camera_from_board: Array) -> Array:
    """Return base_from_gripper for a camera on the gripper."""
    return BASE_FROM_BOARD @ invert(camera_from_board) @ invert(GRIPPER_FROM_CAMERA)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with rendered images, their robot poses, and a calibration of the true intrinsics."""
    folder = tmp_path_factory.mktemp("scene")
    (folder / "images").mkdir()
    rows = []
    for number, (pose, image) in enumerate(render_views(BOARD, PINHOLE, 12)):
        name = f"{number:02}.png"
        cv2.imwrite(str(folder / "images" / name), image)
        robot = robot_pose(pose)
        rows.append([name, *robot[:3, 3], *quaternion_from_rotation(robot[:3, :3])])
    with (folder / "poses.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "x", "y", "z", "qx", "qy", "qz", "qw"], *rows])
    (folder / "true.toml").write_text(
        "[intrinsics]\nwidth_px = 640\nheight_px = 480\nfx_px = 600\nfy_px = 600\ncx_px = 320\ncy_px = 240\n"
    )
    return folder


def calibrate(*words: object) -> int:
    return main(["calibrate", *map(str, words)])


def test_a_board_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate("board", BOARD, "-o", tmp_path / "board.pdf") == 0
    assert (tmp_path / "board.pdf").read_bytes().startswith(b"%PDF-1.4")
    assert "a4 landscape" in capsys.readouterr().out


def test_images_and_poses_give_one_file(
    scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wrist.toml"
    assert calibrate("intrinsics", scene / "images", "--board", BOARD, "-o", out, "--shape", "flat") == 0
    words = ("--calibration", out, "--poses", scene / "poses.csv", "--mount", "eye_in_hand", "--board", BOARD)
    assert calibrate("hand-eye", scene / "images", *words) == 0
    printed = capsys.readouterr().out
    assert "robot-world-shah" in printed
    assert mentions(printed, "better with")
    calibration = load_calibration(out)
    lens = calibration.intrinsics
    hand_eye = calibration.hand_eye
    assert (lens.fx_px, lens.fy_px) == pytest.approx((600, 600), rel=0.005)
    assert lens.measured.inputs.keys() == {f"{number:02}.png" for number in range(12)}
    assert hand_eye.measured.inputs.keys() == lens.measured.inputs.keys() | {"poses.csv"}
    miss = invert(hand_eye.parent_from_camera) @ GRIPPER_FROM_CAMERA
    assert np.linalg.norm(miss[:3, 3]) < 3e-3
    assert all(out.with_suffix(suffix).exists() for suffix in (".intrinsics.png", ".hand_eye.png"))
    base_from_camera = calibration.base_from_camera(np.eye(4))
    np.testing.assert_allclose(base_from_camera, hand_eye.parent_from_camera)
    assert "scale of the board by the robot's motion: 1.00" in printed or "motion: 0.99" in printed
    assert hand_eye.measured.scale == pytest.approx(1, abs=0.02)
    assert calibrate("check", out, scene / "images", "--board", BOARD) == 0
    printed = capsys.readouterr().out
    assert mentions(printed, "passed", "median")
    assert mentions(printed, "passed", "leave-one-out")
    assert calibrate("check", out, "--hand-eye-limit", 1e-6) == 1
    assert mentions(capsys.readouterr().out, "FAILED", "leave-one-out")


def test_a_hand_eye_that_is_replaced_is_kept(
    scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wrist.toml"
    out.write_text(
        (scene / "true.toml").read_text()
        + '[hand_eye]\nkind = "eye_in_hand"\ntranslation_m = [0.03, -0.07, 0.15]\n'
        + "rotation_vector_rad = [0.02, -0.03, 1.57]\n"
    )
    before = out.read_bytes()
    words = ("--calibration", out, "--poses", scene / "poses.csv", "--mount", "eye_in_hand", "--board", BOARD)
    assert calibrate("hand-eye", scene / "images", *words) == 0
    printed = capsys.readouterr().out
    assert mentions(printed, "moved")
    assert "wrist.toml.old" in printed
    assert float(printed.split("moved by ")[1].split(" mm")[0]) == pytest.approx(100, abs=3)
    old = tmp_path / "wrist.toml.old"
    assert old.read_bytes() == before
    assert calibrate("hand-eye", scene / "images", *words) == 0  # the same result replaces nothing
    assert sorted(path.name for path in tmp_path.glob("*.old*")) == [old.name]
    assert calibrate("intrinsics", scene / "images", "--board", BOARD, "-o", out, "--shape", "flat") == 0
    assert mentions(capsys.readouterr().out, "hand_eye")
    assert load_calibration(tmp_path / "wrist.toml.old2").hand_eye is not None


def test_a_board_of_another_size_than_described_is_refused(
    scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wrist.toml"
    words = ("--calibration", scene / "true.toml", "-o", out, "--poses", scene / "poses.csv")
    board = "charuco:7x5:35mm:24.5mm:4x4_50"
    assert calibrate("hand-eye", scene / "images", *words, "--mount", "eye_in_hand", "--board", board) == 2
    assert mentions(capsys.readouterr().err, "smaller")
    assert not out.exists()


def test_a_check_fails_for_another_camera(
    scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text((scene / "true.toml").read_text().replace("fx_px = 600", "fx_px = 500"))
    assert calibrate("check", wrong, scene / "images", "--board", BOARD) == 1
    assert "FAILED" in capsys.readouterr().out
    assert calibrate("check", scene / "true.toml") == 0


HAND_EYE = "hand-eye --board BOARD --mount eye_in_hand"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("intrinsics IMAGES --board BOARD", "expected -o FILE.toml"),
        ("intrinsics IMAGES --board chess -o OUT", "expected charuco"),
        ("intrinsics IMAGES --board charuco:7x5:30mm:21mm:5x5_50 -o OUT", "correct the dictionary"),
        ("intrinsics NOWHERE.png --board BOARD -o OUT", "cannot read"),
        ("intrinsics POSES --board BOARD -o OUT", "expected a recording"),
        (f"{HAND_EYE} IMAGES", "--calibration FILE.toml"),
        (f"{HAND_EYE} --calibration TRUE", "expected images, a recording or live"),
        (f"{HAND_EYE} --calibration TRUE IMAGES", "no view of the board has a pose"),
        (f"{HAND_EYE} --calibration TRUE --poses POSES", "no pose of the board"),
        (f"{HAND_EYE} --calibration TRUE IMAGES --board chessboard:6x4:30mm", "half a turn"),
        ("check TRUE IMAGES", "expected --board"),
    ],
)
def test_what_is_missing_is_named(
    words: str, named: str, scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {
        "BOARD": BOARD,
        "IMAGES": scene / "images",
        "TRUE": scene / "true.toml",
        "POSES": scene / "poses.csv",
        "OUT": tmp_path / "out.toml",
        "NOWHERE.png": tmp_path / "nowhere.png",
    }
    assert calibrate(*(paths.get(word, word) for word in words.split())) == 2
    assert named in capsys.readouterr().err


def test_images_of_several_sizes_are_refused(scene: Path, tmp_path: Path) -> None:
    image = cv2.imread(str(scene / "images" / "00.png"))
    cv2.imwrite(str(tmp_path / "half.png"), cv2.resize(image, (320, 240)))
    with refuses(CalibrationError, field=("12", "640x480", "00.png", "1")):
        collect_views([str(scene / "images"), str(tmp_path)], BOARD, "", 1)


def test_two_images_of_one_name_are_refused(scene: Path) -> None:
    with refuses(CalibrationError, field="00.png"):
        collect_views([str(scene / "images"), str(scene / "images" / "00.png")], BOARD, "", 1)


def test_a_recording_gives_views_with_their_times(tmp_path: Path) -> None:
    path = tmp_path / "board.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, SIZE[::-1])
    for _, image in render_views(BOARD, PINHOLE, 3):
        writer.write(image)
        writer.write(image)
    writer.release()
    found = collect_views([str(path)], BOARD, "", 2)
    assert [view.name for view in found.views] == ["board.avi#0", "board.avi#2", "board.avi#4"]
    stamps = [view.stamp_ns for view in found.views if view.stamp_ns is not None]
    assert np.diff(stamps).tolist() == pytest.approx([2e8, 2e8], rel=0.01)
    assert found.inputs.keys() == {"board.avi"}
    assert found.size == SIZE


def make_frame(image: Image, seq: int, capture_ns: int) -> Frame:
    return Frame("cam0", seq, capture_ns, SIZE[1], SIZE[0], "bgr8", encode_image(image, "bgr8"))


class Robot:
    """A camera and a robot that publish the same scene: each pose is held for several frames."""

    def __init__(self, count: int, clock: Clock = "system") -> None:
        self._clock: Clock = clock
        self.frames = FramePublisher("tcp://127.0.0.1:*")
        self.poses = PosePublisher("tcp://127.0.0.1:*")
        self._views = render_views(BOARD, PINHOLE, count)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Robot:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.frames.close()
        self.poses.close()

    def _run(self) -> None:
        seq = 0
        while not self._stop.is_set():
            seq += 1
            board, image = self._views[seq // 6 % len(self._views)]
            robot = robot_pose(board)
            x, y, z, w = map(float, quaternion_from_rotation(robot[:3, :3]))
            position = (float(robot[0, 3]), float(robot[1, 3]), float(robot[2, 3]))
            self.poses.send(FramePose("gripper", "base", 1000 * seq, position, (x, y, z, w), self._clock))
            self.frames.send(make_frame(image, seq, 1000 * seq + 1))
            self.poses.send(FramePose("gripper", "base", 1000 * seq + 2, position, (x, y, z, w), self._clock))
            self._stop.wait(0.02)


def test_live_frames_and_a_stream_of_poses_give_a_hand_eye(
    scene: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sam3_node.processes.signals.stop_on_signals", threading.Event)
    out = tmp_path / "live.toml"
    words = ("live", "--board", BOARD, "--mount", "eye_in_hand", "--calibration", scene / "true.toml")
    with Robot(10) as robot:
        streams = ("--pose-stream", robot.poses.endpoint, "--transport.frames", robot.frames.endpoint)
        assert calibrate("hand-eye", *words, "-o", out, *streams, "--count", 8) == 0
    assert "Next:" in capsys.readouterr().err
    hand_eye = load_calibration(out).hand_eye
    assert hand_eye.measured.views >= 6
    assert np.linalg.norm((invert(hand_eye.parent_from_camera) @ GRIPPER_FROM_CAMERA)[:3, 3]) < 5e-3


def test_poses_of_another_clock_are_refused() -> None:
    with Robot(4, "monotonic") as robot:
        settings = Settings(transport=TransportSettings(frames=(robot.frames.endpoint,)))
        with refuses(CalibrationError, field=("system", "monotonic")):
            collect_live(settings, BOARD, threading.Event(), robot.poses.endpoint, 2)


def test_live_views_need_a_board_at_rest_and_somewhere_new() -> None:
    images = render_views(BOARD, PINHOLE, 2)
    guide = CapturedViews(BOARD)
    pictures = [Picture(str(number), image) for number, (_, image) in enumerate(images)]
    taken = [guide.offer(pictures[index]) for index in (0, 1, 1, 1, 0, 0, 0)]
    assert taken == [False, False, True, False, False, True, False]
    assert not guide.is_enough(0)
    with refuses(CalibrationError, field="size"):
        guide.offer(replace(pictures[0], image=pictures[0].image[:100]))


def test_a_stop_ends_the_collection() -> None:
    stop = threading.Event()
    stop.set()
    with refuses(CalibrationError, field="none"):
        collect_live(Settings(), BOARD, stop, "", 0)


def test_the_helpers_of_these_tests_agree() -> None:
    pose = draw_pose(np.random.default_rng(4), 0.4, 0.41)
    corners = BOARD.detect(render(BOARD, pose, PINHOLE))
    expected = project_board(pose, PINHOLE, BOARD.points)[corners.ids]
    assert np.abs(corners.pixels - expected).max() < 0.3
    assert Board.parse(str(BOARD)).points.mean(axis=0) == pytest.approx(CENTRE_M)
    assert Calibration.model_fields.keys() >= {"version", "camera", "intrinsics", "depth", "hand_eye"}
