import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.bags.formats.realsense import RealSenseBag, make_intrinsics
from sam3_node.bags.messages.ros_images import MessageError
from sam3_node.errors import BagError
from sam3_node.types import Depth, Intrinsics
from tests.support import ros_recordings as ros
from tests.support.hostile_recordings import execute
from tests.support.realsense_bags import (
    COEFFS,
    COLOUR,
    DEPTH,
    FRAMES,
    INFRA,
    LENS,
    PERIOD_MS,
    RGB,
    START_MS,
    UNITS,
    Y8,
    Z16,
    Stream,
    pixels,
    stamp_ns,
    write_bag,
)
from tests.support.realsense_rig import add_stream, load_rs, make_frame, record_device
from tests.support.refuses import refuses


def record(path: Path, streams: Sequence[Stream], frames: int = FRAMES) -> Path:
    """Record a software camera with the SDK's own recorder."""
    rs = load_rs()
    device = rs.software_device()
    device.register_info(rs.camera_info.name, "software")
    sensors = [device.add_sensor(f"sensor {stream.kind}") for stream in streams]
    pairs = zip(sensors, streams, strict=True)
    profiles = [add_stream(rs, *pair, uid, COEFFS) for uid, pair in enumerate(pairs)]

    def push(index: int) -> None:
        for sensor, profile, stream in zip(sensors, profiles, streams, strict=True):
            stamp_ms = START_MS + index * PERIOD_MS
            frame = make_frame(rs, stream, profile, pixels(stream, index), index, stamp_ms, UNITS)
            frame.domain = rs.timestamp_domain.system_time
            sensor.on_video_frame(frame)

    return record_device(path, rs, device, push, range(frames))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("realsense") / "take.db3", (RGB, Z16, Y8))


def read(path: Path) -> tuple[dict[str, list[ros.Shot]], str | None]:
    """Return the content of each topic, in its order."""
    with RealSenseBag(path) as bag:
        found: dict[str, list[ros.Shot]] = {topic.name: [] for topic in bag.topics}
        for item in bag.samples(set(found)):
            if isinstance(item.payload, Depth):
                assert item.payload.scale_m == pytest.approx(UNITS)
            found[item.topic].append(ros.decode_samples(iter([item]))[0])
        return found, bag.lost


def check(shots: Sequence[ros.Shot], expected: Sequence[np.ndarray]) -> None:
    assert len(shots) == len(expected)
    for index, (shot, image) in enumerate(zip(shots, expected, strict=True)):
        assert abs(shot.stamp_ns - stamp_ns(index)) < 1000
        assert np.array_equal(shot.payload, image)


def bgr(index: int) -> np.ndarray:
    return pixels(RGB, index)[:, :, ::-1]


def grey(index: int) -> np.ndarray:
    return np.repeat(pixels(Y8, index), 3, axis=2)


def depth(index: int) -> np.ndarray:
    return pixels(Z16, index)


@pytest.mark.verifies(
    "recording",
    "RealSense `.db3`",
    "own package",
    "pyrealsense2 records a software device",
    "a file of a real camera",
)
def test_a_database_is_read_to_the_last_pixel(recording: Path) -> None:
    assert RealSenseBag.recognises(recording)
    found, lost = read(recording)
    for topic, image in ((COLOUR, bgr), (DEPTH, depth), (INFRA, grey)):
        check(found[topic], [image(index) for index in range(FRAMES)])
        (lens,) = (shot.payload for shot in found[topic.replace("image_raw", "camera_info")])
        assert (lens.model, lens.fx, lens.cy) == ("brown_conrady", 60.0, 23.5)
        assert lens.coeffs == pytest.approx(COEFFS)
    assert lost is None


def test_topics_are_named_as_its_ros_driver_names_them(recording: Path) -> None:
    with RealSenseBag(recording) as bag:
        assert {topic.name: topic.kind for topic in bag.topics} == {
            COLOUR: "colour",
            DEPTH: "depth",
            INFRA: "colour",
            "/device_0/color/camera_info": "intrinsics",
            "/device_0/depth/camera_info": "intrinsics",
            "/device_0/infra1/camera_info": "intrinsics",
        }


def test_images_that_png_cannot_hold(tmp_path: Path) -> None:
    yuyv = Stream("color", 0, "yuyv", 2)
    found, lost = read(record(tmp_path / "take.db3", [yuyv], 2))
    expected = [cv2.cvtColor(pixels(yuyv, index), cv2.COLOR_YUV2BGR_YUY2) for index in range(2)]
    check(found[COLOUR], expected)
    assert lost is None


def test_images_whose_metadata_is_lost_still_come(tmp_path: Path, recording: Path) -> None:
    path = Path(shutil.copy(recording, tmp_path))
    execute(
        path,
        "DELETE FROM messages WHERE timestamp > 0 AND topic_id IN "
        "(SELECT id FROM topics WHERE name LIKE '%/metadata') AND id NOT IN (SELECT min(m.id) FROM messages m "
        "JOIN topics t ON t.id = m.topic_id WHERE t.name LIKE '%/metadata' GROUP BY t.id)",
    )
    found, _ = read(path)
    for topic, image in ((COLOUR, bgr), (DEPTH, depth)):
        assert [shot.stamp_ns for shot in found[topic][1:]] == [shot.logged_ns for shot in found[topic][1:]]
        for index, shot in enumerate(found[topic]):
            assert np.array_equal(shot.payload, image(index))


def test_a_cut_database_gives_what_lies_before_the_cut(tmp_path: Path, recording: Path) -> None:
    content = recording.read_bytes()
    path = tmp_path / "take.db3"
    rng = random.Random(4)
    for size in sorted(rng.randrange(30_000, len(content) - 5000) for _ in range(10)):
        path.write_bytes(content[:size])
        found, lost = read(path)
        assert lost is not None
        assert sum(map(len, found.values())) > 0
        for topic, image in ((COLOUR, bgr), (DEPTH, depth), (INFRA, grey)):
            for index, shot in enumerate(found.get(topic, [])):
                assert np.array_equal(shot.payload, image(index))


@pytest.mark.verifies(
    "recording",
    "RealSense `.bag`",
    "layout",
    "topics and fields of the SDK's writer, by its source",
    "a file of a real camera",
)
def test_a_bag_of_the_older_sdk_is_read_to_the_last_pixel(tmp_path: Path) -> None:
    path = write_bag(tmp_path / "take.bag", FRAMES)
    assert RealSenseBag.recognises(path)
    found, lost = read(path)
    check(found[COLOUR], [bgr(index) for index in range(FRAMES)])
    check(found[DEPTH], [depth(index) for index in range(FRAMES)])
    infra = Stream("infrared", 1, "y16", 2)
    check(found[INFRA], [np.repeat(pixels(infra, index)[:, :, 1:], 3, axis=2) for index in range(FRAMES)])
    assert [shot.payload for shot in found["/device_0/color/camera_info"]] == [LENS]
    assert lost is None


def test_other_recordings_are_refused(tmp_path: Path) -> None:
    other = ros.write_ros1(tmp_path / "other.bag", 1)
    folder = ros.write_ros2(tmp_path / "other", 1)
    database = next(folder.glob("*.db3"))
    for path in (other, database):
        assert not RealSenseBag.recognises(path)
        with refuses(BagError, field=("RealSense", "SDK")):
            RealSenseBag(path)
    assert not RealSenseBag.recognises(folder)
    assert not RealSenseBag.recognises(tmp_path / "absent.db3")


@pytest.mark.verifies("recording", "RealSense `.db3`", "own package", "lenses project as in pyrealsense2")
@pytest.mark.parametrize("model", ["brown_conrady", "modified_brown_conrady", "inverse_brown_conrady"])
def test_lenses_project_as_the_sdk_does(model: str) -> None:
    rs = load_rs()
    lens = rs.intrinsics()
    lens.width = 1280
    lens.height = 720
    lens.fx = 640.0
    lens.fy = 641.0
    lens.ppx = 643.0
    lens.ppy = 357.0
    lens.model = getattr(rs.distortion, model)
    lens.coeffs = [-0.055, 0.066, -0.0003, 0.0008, -0.021]
    name = model.replace("_", " ").title()
    found = make_intrinsics((1280, 720), (640.0, 641.0, 643.0, 357.0), name, lens.coeffs)
    camera = np.array([[found.fx, 0, found.cx], [0, found.fy, found.cy], [0, 0, 1]])
    rays = np.append(np.random.default_rng(6).uniform(-0.5, 0.5, (50, 2)), np.ones((50, 1)), axis=1)
    pixels = cv2.projectPoints(rays, np.zeros(3), np.zeros(3), camera, np.array(found.coeffs))[0][:, 0]
    expected = [rs.rs2_project_point_to_pixel(lens, list(ray)) for ray in rays]
    assert np.abs(pixels - expected).max() < 0.05


@pytest.mark.parametrize(
    ("model", "coeffs", "expected"),
    [
        ("None", COEFFS, Intrinsics(60.0, 61.0, 31.5, 23.5)),
        ("Brown Conrady", (0.0,) * 5, Intrinsics(60.0, 61.0, 31.5, 23.5)),
        ("Inverse Brown Conrady", COEFFS, LENS),
        ("Kannala Brandt4", COEFFS, Intrinsics(60.0, 61.0, 31.5, 23.5, "fisheye", COEFFS[:4])),
    ],
)
def test_lenses_of_every_model(model: str, coeffs: tuple[float, ...], expected: Intrinsics) -> None:
    assert make_intrinsics((64, 48), (60.0, 61.0, 31.5, 23.5), model, coeffs) == expected


def test_lenses_that_are_none() -> None:
    assert make_intrinsics((64, 48), (0.0, 0.0, 0.0, 0.0), "None", (0.0,) * 5) is None
    for matrix, model, coeffs in (
        ((60.0, 61.0, 31.5, 23.5), "Ftheta", COEFFS),
        ((float("nan"), 61.0, 31.5, 23.5), "None", COEFFS),
        ((60.0, 61.0, 31.5, 23.5), "Brown Conrady", (0.1,)),
    ):
        with refuses(MessageError, field="lens"):
            make_intrinsics((64, 48), matrix, model, coeffs)
