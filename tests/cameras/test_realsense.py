"""RealSense cameras without hardware: a recording played as the device, and software devices as live cameras."""

import itertools
import logging
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sam3_node.cameras.live_source import DeviceSource
from sam3_node.cameras.publish import run_camera
from sam3_node.cameras.realsense_device import FramePairer, Pair, RealSenseDevice, StampedFrame
from sam3_node.cameras.realsense_sdk import explain, find_device
from sam3_node.cameras.sources import open_camera
from sam3_node.errors import CameraError
from sam3_node.settings import CameraSettings, load_settings
from sam3_node.transport.channels import FrameSubscriber
from sam3_node.types import Intrinsics
from sam3_node.wire import decode_depth
from tests.support.node_rig import until
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.realsense_rig import FPS, SIZE, START_MS, SoftCamera, load_rs, record
from tests.support.refuses import mentions, refuses

FRAMES = 30
LOST = (11, 12)
MS = 1_000_000


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("realsense") / "take.db3", FRAMES, LOST)


@pytest.fixture
def cameras() -> Iterator[Callable[..., SoftCamera]]:
    made = []

    def make(**options: object) -> SoftCamera:
        made.append(SoftCamera(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for camera in made:
        camera.close()


def open_soft(camera: SoftCamera, settings: CameraSettings | None = None) -> RealSenseDevice:
    return RealSenseDevice(camera.rs, camera.device, settings or CameraSettings(), "realsense")


@pytest.mark.verifies(
    "stream", "RealSense", "own package", "pyrealsense2 plays a recorded software device", "a real camera"
)
def test_a_recording_gives_each_image_once_with_its_aligned_depth(recording: Path) -> None:
    source = open_camera(f"realsense:{recording}", CameraSettings(fps=500))
    assert source.is_finite
    images = list(source)
    source.close()
    expected = [index for index in range(FRAMES) if index not in LOST]
    assert [int(image.image[0, 0, 0]) for image in images] == expected
    assert source.lost == len(LOST)
    for image, index in zip(images, expected, strict=True):
        assert tuple(image.image[0, 0]) == (index, index, 200)
        assert image.intrinsics == Intrinsics(60.0, 61.0, 31.5, 23.5)
        assert image.depth.aligned
        pixels = decode_depth(image.depth)
        assert pixels.shape == SIZE
        assert set(np.unique(pixels)) <= {0, 1000 + index}
        assert image.depth.scale_m == pytest.approx(0.001)
        # 60 mm beside the colour sensor, a surface at 1 m lies 3.6 pixels further right
        assert (pixels[:, :3] == 0).all()
        assert (pixels[:, 5:] == 1000 + index).mean() > 0.9  # rounding may leave a line without depth
        stamp_ns = round((START_MS + index * 1000 / FPS) * MS)
        for clock in ("hardware_clock_ns", "depth_hardware_clock_ns"):
            assert image.times[clock] == pytest.approx(stamp_ns, abs=1000)
        assert image.times["sensor_timestamp_ns"] == pytest.approx(stamp_ns - 500_000, abs=2000)


def test_a_recording_that_loops_starts_again(recording: Path) -> None:
    source = open_camera(f"realsense:{recording}", CameraSettings(fps=500, loop=True))
    found = [int(image.image[0, 0, 0]) for image in itertools.islice(source, FRAMES + 2)]
    source.close()
    assert found[-4:] == [0, 1, 2, 3]
    assert list(source) == []


def test_depth_that_cannot_be_aligned_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = record(tmp_path / "apart.db3", 4, extrinsics=False)
    images = list(open_camera(f"realsense:{path}", CameraSettings(fps=500)))
    assert not images[0].depth.aligned
    assert (decode_depth(images[0].depth) == 1000).all()
    assert mentions(caplog.text, "depth", "aligned")


def test_depth_can_be_left_out(recording: Path) -> None:
    images = list(open_camera(f"realsense:{recording}", CameraSettings(fps=500, depth=False)))
    assert len(images) == FRAMES - len(LOST)
    assert all(image.depth is None for image in images)


@pytest.mark.parametrize("content", [None, b"", b"not a database"])
def test_a_recording_that_cannot_be_played_is_a_camera_error(tmp_path: Path, content: bytes | None) -> None:
    load_rs()
    path = tmp_path / "bad.db3"
    if content is not None:
        path.write_bytes(content)
    with refuses(CameraError, field=("RealSense", "SDK")):
        open_camera(f"realsense:{path}", CameraSettings())


def test_live_stamps_are_mapped_to_the_clock_of_the_host(cameras: Callable[..., SoftCamera]) -> None:
    camera = cameras()
    source = DeviceSource("realsense", lambda: open_soft(camera), 0, threading.Event())
    begin_ns = time.time_ns()
    camera.stream()
    images = list(itertools.islice(source, 20))
    source.close()
    for image in images:
        assert begin_ns <= image.capture_ns <= image.times["arrival_ns"] <= time.time_ns()
        assert image.depth.aligned
    captures = [image.capture_ns for image in images]
    assert captures == sorted(captures)


def test_a_camera_that_is_unplugged_mid_stream_is_opened_again(
    cameras: Callable[..., SoftCamera], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that its silence is noticed, that it is awaited, and that the stream then goes on."""
    monkeypatch.setattr("sam3_node.cameras.realsense_device.SILENT_S", 0.3)
    first = cameras()
    second = cameras()
    plugged = [first]

    def open_device() -> RealSenseDevice:
        rs = load_rs()
        device = find_device(rs, [camera.device for camera in plugged], "123456")
        camera = next(camera for camera in plugged if camera.device is device)
        return open_soft(camera)

    source = DeviceSource("realsense:123456", open_device, 0, threading.Event())
    images = iter(source)
    first.stream()
    for _ in range(3):
        next(images)
    first.close()
    plugged.clear()
    until(lambda: mentions(caplog.text, "RealSense", "123456"), "the search")
    plugged.append(second)
    second.stream(start=3000)
    awaited = time.monotonic() + PATIENCE_S
    while next(images).times["hardware_clock_ns"] < (START_MS + 60_000) * MS:
        assert time.monotonic() < awaited
    source.close()
    assert mentions(caplog.text, "realsense:123456", "0.3 s")


def test_frames_of_a_camera_that_is_plugged_in_again_are_counted_on(
    cameras: Callable[..., SoftCamera], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sam3_node.cameras.realsense_device.SILENT_S", 0.3)
    plugged = [cameras(), cameras()]
    for camera, start in zip(plugged, (0, 3000), strict=True):
        camera.stream(start)
    waiting = list(plugged)
    stop = threading.Event()

    def open_source(*_: object) -> DeviceSource:
        return DeviceSource("realsense", lambda: open_soft(waiting.pop(0)), 0, stop)

    monkeypatch.setattr("sam3_node.cameras.publish.open_camera", open_source)
    endpoint = f"ipc://@sam3-node-test-{uuid.uuid4().hex}"
    settings = load_settings(overrides={"transport.frames": endpoint, "camera.encoding": "jpeg"})
    with FrameSubscriber([endpoint]) as subscriber:
        process = threading.Thread(target=run_camera, args=(settings, stop))
        process.start()
        try:
            received = [subscriber.take(timeout_ms=PATIENCE_MS)]
            plugged[0].close()
            end = time.monotonic() + PATIENCE_S
            while received[-1] is None or received[-1].frame.times["hardware_clock_ns"] < 100_000 * MS:
                received.append(subscriber.take(timeout_ms=1000))
                assert time.monotonic() < end
        finally:
            stop.set()
            process.join()
    frames = [item.frame for item in received if item is not None]
    seqs = [frame.seq for frame in frames]
    assert seqs == sorted(set(seqs))
    assert frames[0].times["hardware_clock_ns"] < 100_000 * MS
    depth = frames[0].depth
    assert (depth.encoding, depth.aligned) == ("z16+zstd", True)
    assert frames[0].encoding == "jpeg"


def test_several_cameras_stream_at_once(cameras: Callable[..., SoftCamera]) -> None:
    made = [cameras(serial=serial) for serial in ("111", "222")]
    devices = [camera.device for camera in made]
    for camera in made:
        found = find_device(camera.rs, devices, camera.device.get_info(camera.rs.camera_info.serial_number))
        assert found is camera.device
    opens = (partial(open_soft, camera) for camera in made)
    sources = [DeviceSource("realsense", open_one, 0, threading.Event()) for open_one in opens]
    for camera in made:
        camera.stream()
    for source in sources:
        assert len(list(itertools.islice(source, 5))) == 5
        source.close()


def test_absent_and_wrong_cameras_are_named() -> None:
    camera = SoftCamera("1234567")
    other = SoftCamera("999")
    rs = camera.rs
    devices = [camera.device, other.device]
    assert find_device(rs, devices[:1], "") is camera.device
    with refuses(CameraError, field="RealSense"):
        find_device(rs, [], "")
    with refuses(CameraError, field=("1234568", "1234567", "D435", "999")):
        find_device(rs, devices, "1234568")
    with refuses(CameraError, field=("RealSense", "1234567", "realsense:SERIAL")):
        find_device(rs, devices, "")


def test_a_camera_that_is_absent_is_a_camera_error() -> None:
    load_rs()
    with refuses(CameraError, field=("RealSense", "000000")):
        open_camera("realsense:000000", CameraSettings())


def test_a_camera_that_another_program_uses_says_so(cameras: Callable[..., SoftCamera]) -> None:
    camera = cameras()
    device = open_soft(camera)
    with refuses(CameraError, field=("camera", "end")):
        open_soft(camera)
    device.close()
    open_soft(camera).close()


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("xioctl(VIDIOC_S_FMT) failed, errno=16 Last Error: Device or resource busy", "another program"),
        ("failed to open usb interface: 0, error: RS2_USB_STATUS_ACCESS, Permission denied", "udev rules"),
        ("hwmon command 0x10 failed. Error type: timeout", "plug it in again"),
    ],
)
def test_errors_of_the_sdk_say_what_to_do(text: str, advice: str) -> None:
    assert advice in str(explain("realsense", RuntimeError(text)))


def test_settings_of_the_sensors(cameras: Callable[..., SoftCamera]) -> None:
    camera = cameras()
    settings = CameraSettings(depth_exposure_ms=12.5, emitter="off", preset="high_accuracy")
    open_soft(camera, settings).close()
    wanted = {"exposure": 12_500, "enable_auto_exposure": 0, "emitter_enabled": 0, "visual_preset": 3}
    for name, value in wanted.items():
        assert camera.depth_sensor.get_option(getattr(camera.rs.option, name)) == value


def test_settings_that_the_camera_cannot_take(
    cameras: Callable[..., SoftCamera], caplog: pytest.LogCaptureFixture
) -> None:
    camera = cameras()
    with refuses(CameraError, field=("camera.depth_exposure_ms", "0.001", "165", "500")):
        open_soft(camera, CameraSettings(depth_exposure_ms=500))
    open_soft(camera, CameraSettings(exposure_ms=5, width=1280)).close()
    assert mentions(caplog.text, "camera.exposure_ms")
    assert mentions(caplog.text, "1280x480", "64x48")


def test_usb_2_is_a_warning(cameras: Callable[..., SoftCamera], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_soft(cameras(usb="2.1")).close()
        assert mentions(caplog.text, "USB 3", "USB 2.1")
        assert mentions(caplog.text, "64x48", "30 fps", "rgb8")
        caplog.clear()
        open_soft(cameras(usb="3.2"), CameraSettings(width=64, height=48)).close()
        assert not caplog.text


def test_a_missing_libusb_and_a_missing_sdk_say_what_to_install(tmp_path: Path) -> None:
    broken = tmp_path / "pyrealsense2"
    broken.mkdir()
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from sam3_node.cli.main import main\n"
        "sys.exit(main(['camera', 'realsense']))"
    )
    for source, advice in (
        ("raise ImportError('libusb-1.0.so.0: cannot open shared object file')", "apt install libusb-1.0-0"),
        ("raise ModuleNotFoundError('', name='pyrealsense2')", "extra 'realsense'"),
    ):
        (broken / "__init__.py").write_text(source)
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 2
        assert advice in done.stderr
        assert "Traceback" not in done.stderr


def stamped(
    kind: str, stamp_ms: float, domain: str = "hardware_clock", arrival_ms: float = 0.0
) -> StampedFrame:
    return StampedFrame(kind, round(stamp_ms * MS), domain, round(arrival_ms * MS), 0)


def run(*frames: StampedFrame, patience: int = 1, flush: bool = False) -> list[tuple[float, float | None]]:
    pairer = FramePairer(16 * MS, patience)
    found: list[Pair] = []
    for frame in frames:
        found += pairer.add_colour(frame) if frame.frame == "c" else pairer.add_depth(frame)
    if flush:
        found += pairer.flush()
    return [(colour.stamp_ns / MS, None if depth is None else depth.stamp_ns / MS) for colour, depth in found]


def test_either_may_come_first() -> None:
    frames = [stamped("c", 0), stamped("d", 5), stamped("d", 38), stamped("c", 33)]
    assert run(*frames) == [(0, 5), (33, 38)]


def test_colour_without_depth_comes_alone() -> None:
    assert run(stamped("c", 0), stamped("c", 33), stamped("c", 66)) == [(0, None), (33, None)]
    assert run(stamped("c", 0), stamped("d", 33), stamped("c", 33)) == [(0, None), (33, 33)]
    assert run(stamped("d", 66), stamped("c", 33), stamped("c", 66)) == [(33, None), (66, 66)]


def test_a_stream_that_lags_is_awaited() -> None:
    colours = [stamped("c", 33 * index) for index in range(6)]
    depths = [stamped("d", 33 * index + 1) for index in range(6)]
    expected = [(33.0 * index, 33.0 * index + 1) for index in range(6)]
    assert run(*colours, *depths, patience=8) == expected
    assert run(*depths, *colours, patience=8) == expected


def test_what_waits_at_the_end_is_given() -> None:
    assert run(stamped("c", 0), stamped("d", 0), stamped("c", 33), flush=True) == [(0, 0), (33, None)]


def test_depth_that_is_too_old_is_left_out() -> None:
    assert run(stamped("d", 0), stamped("c", 33), stamped("d", 30)) == [(33, 30)]
    assert run(stamped("c", 66), stamped("d", 33), stamped("d", 66)) == [(66, 66)]


def test_stamps_of_two_clocks_are_not_compared() -> None:
    frames = [stamped("c", 9e6, "global_time", 1), stamped("d", 5, arrival_ms=3)]
    assert run(*frames) == [(9e6, 5)]


@pytest.mark.parametrize("seed", range(20))
def test_every_colour_image_comes_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    draw = lambda: [33.3 * index + rng.uniform(-3, 3) for index in range(60) if rng.random() < 0.8]  # noqa: E731
    queues = {kind: draw() for kind in "cd"}
    frames = []
    waiting = {kind: list(stamps) for kind, stamps in queues.items()}
    while any(waiting.values()):
        kind = rng.choice([kind for kind in waiting if waiting[kind]])
        ahead = min(stamps[0] for stamps in waiting.values() if stamps)
        if waiting[kind][0] - ahead < 40:
            frames.append(stamped(kind, waiting[kind].pop(0)))
    found = run(*frames)
    colours = [round(stamp, 6) for stamp, _ in found]
    assert colours == [round(stamp, 6) for stamp in queues["c"]][: len(colours)]
    assert len(colours) >= len(queues["c"]) - 1
    assert all(depth is None or abs(colour - depth) <= 16 for colour, depth in found)
