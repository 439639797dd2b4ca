"""The camera as a real process with a socket, a subscriber in this process, and the list of cameras."""

import itertools
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from sam3_node.bags.native.reader import TABLETOP
from sam3_node.calibration import load_calibration
from sam3_node.calibration.camera_file import DepthSection
from sam3_node.cameras.camera_source import CapturedImage, Mode
from sam3_node.cameras.publish import frame_from, run_camera
from sam3_node.cameras.scene import Scene
from sam3_node.cameras.sources import describe_modes, list_cameras
from sam3_node.cameras.webcam import V4l2Camera
from sam3_node.cli.main import main
from sam3_node.errors import CameraError, SettingsError, TransportError
from sam3_node.settings import CameraSettings, load_settings
from sam3_node.transport.channels import FrameSubscriber, ReceivedFrame
from sam3_node.types import Intrinsics
from sam3_node.wire import decode_depth, decode_image, encode_depth
from tests.support.paths import ROOT, SHARED
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.processes import Process
from tests.support.recordings import write_film
from tests.support.refuses import mentions, refuses

EXAMPLE = ROOT / "calibration" / "example.toml"
ROBOT_ARM = SHARED / "data" / "video" / "16_robotarm.mp4"
PROGRAM = """
import sys
from sam3_node.cameras.publish import run_camera
from sam3_node.settings import load_settings
from sam3_node.processes.signals import stop_on_signals
run_camera(load_settings(overrides=dict(zip(sys.argv[1::2], sys.argv[2::2]))), stop_on_signals())
"""
SMALL = "scene:shapes?seed=5&width=160&height=120"


@contextmanager
def camera_process(**fields: str) -> Iterator[tuple[Process, str]]:
    """Start a camera process on a free port; give the endpoint of its ready line. Keywords are section__field."""
    options = {"transport.frames": "tcp://127.0.0.1:0"} | {
        key.replace("__", "."): value for key, value in fields.items()
    }
    arguments = [sys.executable, "-c", PROGRAM, *itertools.chain(*options.items())]
    with Process.spawn(arguments, stderr=None) as process:
        ready = process.next_line().split()
        assert ready[:4] == ["camera", "cam0", "publishing", "on"]
        yield process, ready[4]


def take(subscriber: FrameSubscriber, count: int) -> list[ReceivedFrame]:
    taken = [subscriber.take(timeout_ms=PATIENCE_MS) for _ in range(count)]
    return [received for received in taken if received is not None]


def scene_image(index: int) -> CapturedImage:
    return CapturedImage(Scene().render(index)[0], time.time_ns())


def test_frames_of_a_scene_process_match_their_truth_by_seq() -> None:
    fields = {"camera__source": SMALL, "camera__fps": "60"}
    with camera_process(**fields) as (_, endpoint), FrameSubscriber([endpoint]) as subscriber:
        received = take(subscriber, 5)
    scene = Scene.from_uri(SMALL)
    assert len(received) == 5
    for item in received:
        np.testing.assert_array_equal(decode_image(item.frame), scene.render(item.frame.seq)[0])
        assert item.frame.capture_ns <= item.frame.sent_ns <= item.received_ns


def test_lossless_delivery_gives_every_frame_from_zero_then_the_process_ends() -> None:
    options = {"camera__source": SMALL, "camera__fps": "500", "camera__frames": "40"}
    with camera_process(**options, transport__delivery="every") as (process, endpoint):
        with FrameSubscriber([endpoint], delivery="every") as subscriber:
            time.sleep(0.3)  # back-pressure: nothing is lost while nobody takes
            assert [item.frame.seq for item in take(subscriber, 40)] == list(range(40))
        out = process.next_line()
        assert out.startswith("camera cam0 captured 40 frames in ")
        assert out.endswith("0 not sent")
        assert process.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("options", [{}, {"transport__delivery": "every"}, {"camera__fps": "0.05"}])
def test_sigterm_ends_the_process_with_a_summary(options: dict[str, str]) -> None:
    """Stop while it waits for a slow camera, and for a subscriber that never comes."""
    with camera_process(camera__source=SMALL, **options) as (process, _):
        time.sleep(0.3)
        assert process.terminate() == 0
        assert mentions(process.next_line(), "cam0", "captured")


def test_all_that_wait_for_a_camera_get_its_first_frame(tmp_path: Path) -> None:
    """Else the recorder may lack a frame that the node has, and a video shows nothing for its first half second."""

    def start_one() -> bool:
        endpoint = f"ipc://{tmp_path}/{time.time_ns()}"
        with ExitStack() as stack:
            waiting = [stack.enter_context(FrameSubscriber([endpoint])) for _ in range(4)]
            time.sleep(0.3)  # by now they try as rarely as ever
            options = {"camera__source": SMALL, "camera__fps": "1", "transport__frames": endpoint}
            stack.enter_context(camera_process(**options))
            return [take(subscriber, 1)[0].frame.seq for subscriber in waiting] == [0] * 4

    # a busy machine may be late, but not most of the time
    assert sum(start_one() for _ in range(5)) >= 3


def test_a_restarted_camera_is_heard_again() -> None:
    first = camera_process(camera__source=SMALL)
    with first as (process, endpoint), FrameSubscriber([endpoint]) as subscriber:
        assert len(take(subscriber, 3)) == 3
        process.kill()
        killed_ns = time.time_ns()
        with camera_process(camera__source=SMALL, transport__frames=endpoint):
            received = take(subscriber, 3)
    assert received[-1].frame.capture_ns > killed_ns


def test_a_video_file_process(tmp_path: Path) -> None:
    path = write_film(tmp_path / "ramp.mp4", (np.full((120, 160, 3), 30 * i, np.uint8) for i in range(8)))
    options = {"camera__source": f"video:{path}", "camera__encoding": "jpeg", "transport__delivery": "every"}
    with (
        camera_process(**options) as (_, endpoint),
        FrameSubscriber([endpoint], delivery="every") as subscriber,
    ):
        received = take(subscriber, 8)
    levels = [float(decode_image(item.frame).mean()) for item in received]
    np.testing.assert_allclose(levels, [30 * i for i in range(8)], atol=4)


@pytest.mark.skipif(not ROBOT_ARM.is_file(), reason="needs the shared test video")
def test_a_real_recording_is_resized_and_sent_as_jpeg() -> None:
    options = {"camera__source": f"video:{ROBOT_ARM}", "camera__encoding": "jpeg", "camera__width": "640"}
    with camera_process(**options) as (_, endpoint), FrameSubscriber([endpoint]) as subscriber:
        received = take(subscriber, 5)
    assert {decode_image(item.frame).shape for item in received} == {(360, 640, 3)}
    first = received[0].frame
    last = received[-1].frame
    assert last.times["media_ns"] - first.times["media_ns"] == (last.seq - first.seq) * 40_000_000


def test_run_camera_reports_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    free = {"camera.wait": "false", "transport.frames": "tcp://127.0.0.1:0"}
    settings = load_settings(overrides={"camera.source": SMALL + "&frames=4", **free})
    summary = run_camera(settings, threading.Event())
    assert (summary.captured, summary.unsent) == (4, 0)
    assert capsys.readouterr().out.count("\n") == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_goes_to_a_full_disk_does_not_end_a_camera() -> None:
    with open("/dev/full", "w") as full:
        options = ("--camera.wait", "false", "--transport.frames", "tcp://127.0.0.1:0")
        command = (sys.executable, "-m", "sam3_node", "camera", SMALL + "&frames=4", *options)
        assert subprocess.run(command, stdout=full, stderr=full, timeout=PATIENCE_S).returncode == 0


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("camera.source", "video:/nowhere.mp4", CameraError),
        ("camera.source", "scene:nothing", CameraError),
        ("camera.calibration", Path("/nowhere.toml"), SettingsError),
        ("transport.frames", ("tcp://256.0.0.1:1",), TransportError),
    ],
)
def test_run_camera_cannot_start_on_wrong_settings(field: str, value: object, error: type[Exception]) -> None:
    overrides = {"transport.frames": ("tcp://127.0.0.1:0",), field: value}
    with pytest.raises(error):
        run_camera(load_settings(overrides=overrides), threading.Event())


def test_a_calibration_of_another_aspect_ratio_ends_the_camera() -> None:
    overrides = {
        "camera.source": "scene:shapes?width=320&height=180",
        "camera.calibration": EXAMPLE,
        "transport.frames": "tcp://127.0.0.1:0",
    }
    with refuses(SettingsError, field=("aspect", "ratio")):
        run_camera(load_settings(overrides=overrides), threading.Event())


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(0, 0, (640, 480)), (320, 0, (320, 240)), (0, 960, (1280, 960)), (300, 300, (300, 300)), (1, 1, (1, 1))],
)
def test_images_are_resized_as_asked(width: int, height: int, expected: tuple[int, int]) -> None:
    frame = frame_from(scene_image(0), 7, CameraSettings(width=width, height=height))
    assert (frame.width, frame.height, frame.seq, frame.camera) == (*expected, 7, "cam0")
    assert decode_image(frame).shape == (*expected[::-1], 3)


@pytest.mark.parametrize("encoding", ["bgr8", "rgb8", "png", "jpeg"])
def test_colours_survive_their_encoding(encoding: str) -> None:
    captured = scene_image(3)
    frame = frame_from(captured, 0, CameraSettings(encoding=encoding, jpeg_quality=95))  # type: ignore[arg-type]
    difference = np.abs(decode_image(frame).astype(int) - captured.image)
    assert difference.mean() < (4 if encoding == "jpeg" else 1e-9)


def test_calibration_is_scaled_with_the_image_and_outranks_the_device() -> None:
    captured = CapturedImage(np.zeros((480, 640, 3), np.uint8), 1, intrinsics=Intrinsics(1, 1, 1, 1))
    half = frame_from(captured, 0, CameraSettings(width=320), load_calibration(EXAMPLE)).intrinsics
    assert (half.fx, half.model) == (535.92 / 2, "brown_conrady")
    assert half.cx == pytest.approx((342.28 + 0.5) / 2 - 0.5)
    own = frame_from(captured, 0, CameraSettings()).intrinsics
    assert own == Intrinsics(1, 1, 1, 1)


def test_a_calibration_states_that_depth_is_aligned() -> None:
    depth = encode_depth(np.full((480, 640), 500, np.uint16), "z16", 0.0005, False)
    captured = CapturedImage(np.zeros((480, 640, 3), np.uint8), 1, depth=depth)
    example = load_calibration(EXAMPLE)
    stated = example.model_copy(update={"depth": DepthSection(aligned=True)})
    for calibration, expected in ((stated, (True, 0.0005)), (example, (False, 0.001))):
        found = frame_from(captured, 0, CameraSettings(), calibration).depth
        assert (found.aligned, found.scale_m) == expected


def test_depth_is_resized_without_mixing_surfaces() -> None:
    surfaces = np.full((480, 640), 500, np.uint16)
    surfaces[:, 320:] = 2000
    depth = encode_depth(surfaces, "z16+zstd", 0.0005, True)
    captured = CapturedImage(np.zeros((480, 640, 3), np.uint8), 1, depth=depth)
    frame = frame_from(captured, 0, CameraSettings(width=210))
    assert (frame.depth.scale_m, frame.depth.aligned) == (0.0005, True)
    found = decode_depth(frame.depth)
    assert found.shape == (frame.height, frame.width)
    assert set(np.unique(found)) == {500, 2000}
    calibrated = frame_from(captured, 0, CameraSettings(), load_calibration(EXAMPLE)).depth
    assert calibrated.scale_m == 0.001


def test_recordings_come_with_their_cameras_and_damaged_ones_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(TABLETOP, tmp_path / "table.mcap")
    (tmp_path / "torn.mcap").write_bytes(b"torn")
    assert main(["camera", "list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == ["RealSense:", "V4L2:", f"recordings in {tmp_path}:"]
    (table,) = [line for line in lines if "table.mcap" in line]
    assert "640x480" in table
    assert "with depth" in table
    (torn,) = [line for line in lines if "torn.mcap" in line]
    assert mentions(torn, "cannot", "read")


def test_a_folder_that_is_absent_says_so(tmp_path: Path) -> None:
    lines = list(list_cameras(tmp_path / "absent"))
    assert mentions(lines[-1], "cannot", "listed")


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> None:
        raise CameraError("it needs the library libusb: sudo apt install libusb-1.0-0")

    monkeypatch.setattr("sam3_node.cameras.realsense_sdk.load_sdk", refuse)
    title, reason, *_, last = list_cameras(tmp_path)
    assert title == "RealSense:"
    assert reason == "  cannot be listed: it needs the library libusb: sudo apt install libusb-1.0-0"
    assert last == "  none"


def test_cameras_come_with_their_modes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    modes = (Mode(640, 480, 30, "YUYV"), Mode(640, 480, 15, "YUYV"), Mode(1280, 720, 30, "MJPG"))
    described = ["1280x720 MJPG: 30 fps", "640x480 YUYV: 15, 30 fps"]
    assert list(describe_modes(modes)) == described
    camera = V4l2Camera(Path("/dev/video2"), "HD Webcam", modes)
    monkeypatch.setattr("sam3_node.cameras.webcam.list_v4l2", lambda: [camera])
    lines = list(list_cameras(tmp_path))
    begin = lines.index("V4L2:") + 1
    end = lines.index(f"recordings in {tmp_path}:")
    assert lines[begin:end] == ["  v4l2:/dev/video2  HD Webcam", *("    " + mode for mode in described)]


def test_a_folder_is_for_the_list_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["camera", "scene:shapes", "recordings"]) == 2
    assert mentions(capsys.readouterr().err, "'scene:shapes'", "'recordings'")
