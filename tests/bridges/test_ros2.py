import random
import re
import struct
import sys
import threading
import time
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from sam3_node_ros import link
from sam3_node_ros.link import Ros2Bridge, Ros2Settings
from sam3_node_ros.parts import Header
from sam3_node_ros.sent_images import MAX_HEADERS

from sam3_node.client import ObjectPlace, PerceptionClient
from sam3_node.errors import SettingsError, TransportError, WireError
from sam3_node.transport import MaskPublisher
from sam3_node.transport.tap import PoseSubscriber
from sam3_node.types import Frame, Instance, Intrinsics, Mask, MaskFrame
from sam3_node.wire import decode_depth, decode_image
from tests.support.processes import until
from tests.support.refuses import mentions
from tests.support.ros2 import import_type, make_box, make_header, player, serialise
from tests.support.ros2_site import IMAGE, RGB, SIZE, OpenSite, Site, image

pytestmark = pytest.mark.verifies(
    "stream", "ROS 2 topics of a camera", "own package", "messages of ROS 2 Jazzy", "a camera's driver"
)

MILLIMETRES = np.random.default_rng(2).integers(300, 5000, SIZE, dtype=np.uint16)
PACKED_DEPTH = bytes(12) + cv2.imencode(".png", MILLIMETRES)[1].tobytes()
INFO = "/cam/color/camera_info"
DEPTH = "/cam/aligned_depth_to_color/image_raw"


def compressed(stamp_ns: int, format_: str = "jpeg") -> Any:
    data = array("B", cv2.imencode(".jpg", RGB[:, :, ::-1])[1].tobytes())
    return import_type("sensor_msgs/msg/CompressedImage")(
        header=make_header(stamp_ns), format=format_, data=data
    )


def camera_info(stamp_ns: int) -> Any:
    return player.make_camera_info(Intrinsics(60.0, 61.0, 7.5, 5.5), SIZE[1], SIZE[0], make_header(stamp_ns))


def joint_state(stamp_ns: int, names: list[str], positions: list[float]) -> Any:
    velocities = array("d", [0.1] * len(names))
    return import_type("sensor_msgs/msg/JointState")(
        header=make_header(stamp_ns), name=names, position=array("d", positions), velocity=velocities
    )


@pytest.mark.parametrize("padding", [0, 5])
def test_an_image_is_sent_with_its_pixels_and_stamp(site: Site, padding: int) -> None:
    stamp_ns = time.time_ns()
    frame = site.send((IMAGE, image(stamp_ns, padding=padding)))
    assert (frame.camera, frame.capture_ns, frame.clock) == ("cam0", stamp_ns, "system")
    assert np.array_equal(decode_image(frame)[:, :, ::-1], RGB)
    assert not site.warnings


def test_an_image_of_12_bits_is_bright_and_told_once(site: Site) -> None:
    grey = RGB[:, :, 0].astype("<u2") << 4 | 15
    for _ in range(2):
        frame = site.send((IMAGE, image(time.time_ns(), grey, "mono16")))
        assert np.array_equal(decode_image(frame)[:, :, 0], RGB[:, :, 0])
    assert [mentions(line, "12", "16") for line in site.warnings] == [True]


def test_a_compressed_image_is_passed_on_unchanged(open_site: OpenSite) -> None:
    topic = f"{IMAGE}/compressed"
    site = open_site(image_topic=topic)
    assert site.bridge.subscriptions == ((topic, "sensor_msgs/msg/CompressedImage"),)
    message = compressed(time.time_ns())
    frame = site.send((topic, message))
    assert (frame.encoding, bytes(frame.colour)) == ("jpeg", message.data.tobytes())


def test_depth_and_intrinsics_go_with_their_image(open_site: OpenSite) -> None:
    site = open_site(depth_topic=DEPTH, camera_info_topic=INFO)
    types = [one.type.rpartition("/")[2] for one in site.bridge.subscriptions]
    assert types == ["Image", "Image", "CameraInfo"]
    now_ns = time.time_ns()
    depth = image(now_ns + 3_000_000, MILLIMETRES, "16UC1")
    frame = site.send((INFO, camera_info(now_ns)), (IMAGE, image(now_ns)), (DEPTH, depth))
    assert frame.depth.aligned
    assert np.array_equal(decode_depth(frame.depth), MILLIMETRES)
    assert frame.intrinsics == Intrinsics(60.0, 61.0, 7.5, 5.5)
    assert frame.capture_ns == now_ns


def test_depth_of_another_size_is_aligned_if_a_parameter_says_so(open_site: OpenSite) -> None:
    now_ns = time.time_ns()
    smaller = np.ascontiguousarray(MILLIMETRES[::2, ::2])
    for given in (True, False):
        site = open_site(depth_topic="/camera/depth/image_raw", depth_aligned=given)
        frame = site.send(
            (IMAGE, image(now_ns)), ("/camera/depth/image_raw", image(now_ns, smaller, "16UC1"))
        )
        assert frame.depth.aligned == given
        assert np.array_equal(decode_depth(frame.depth), smaller)
        site.close()


def test_what_depth_has_lost_is_told_once(open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning about what is past would be repeated for ever."""
    monkeypatch.setattr(link, "REPEAT_S", 0.0)
    site = open_site(depth_topic=DEPTH)
    begin_ns = time.time_ns()

    def send(first: int, shift_ns: int) -> bool:
        """Send images and depth, with stamps that are apart. Return True if that is told."""
        site.warnings.clear()
        for number in range(first, first + 3 * link.MIN_FRAMES):
            now_ns = begin_ns + number * 33_000_000
            site.bridge.take(DEPTH, image(now_ns + shift_ns, MILLIMETRES, "16UC1"))
            site.bridge.take(IMAGE, image(now_ns))
        return bool(site.warnings)

    assert send(0, 17 * 10**9)
    send(100, 0)
    assert not send(200, 0)


def test_joint_states_are_sent_with_their_stamps_as_joints_of_the_robot(
    open_site: OpenSite, tmp_path: Path
) -> None:
    """An arm and its gripper may send theirs apart; velocities alone, and other robots, are none of them."""
    endpoint = f"ipc://{tmp_path}/joints"
    name = "/joint_states"
    site = open_site(joint_states_topic=name, joints=endpoint, robot="arm")
    assert (name, "sensor_msgs/msg/JointState") in site.bridge.subscriptions
    now_ns = time.time_ns()
    states = [
        (now_ns, ["elbow", "wrist"], [0.5, -1.0]),
        (now_ns + 5, ["finger"], [0.02]),
        (17, ["elbow"], [0.6]),
    ]
    received: list[Any] = []
    with PoseSubscriber(endpoint) as robot:

        def attempt() -> list[Any]:
            for stamp_ns, names, positions in (*states, (now_ns, ["elbow"], [])):
                site.bridge.take(name, joint_state(stamp_ns, names, positions))
            received.extend(robot.take(100))
            begins = [number for number, one in enumerate(received[:-2]) if one.stamp_ns == now_ns]
            return received[begins[0] : begins[0] + 3] if begins else []

        found = until(attempt, "the joints")
    assert [(one.robot, one.stamp_ns, one.clock) for one in found] == [
        ("arm", now_ns, "system"),
        ("arm", now_ns + 5, "system"),
        ("arm", 17, "device"),
    ]
    # none has the joints of another, whose time it would renew
    assert [one.positions for one in found] == [
        dict(zip(names, positions, strict=True)) for _, names, positions in states
    ]
    assert not site.warnings
    assert not site.frames.take(50)


PROJECTION = [50.0, 0, 7.0, 0, 0, 51.0, 5.0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("topic", "settings", "resolved"),
    [
        ("/cam/color/image_rect", {}, None),
        ("/cam/color/image", {"image_rectified": True}, None),
        ("image", {}, "/cam/image_rect_color"),
    ],
)
def test_rectified_images_have_the_projection(
    open_site: OpenSite, topic: str, settings: dict[str, Any], resolved: str | None
) -> None:
    site = open_site(image_topic=topic, camera_info_topic=INFO, resolved=resolved, **settings)
    now_ns = time.time_ns()
    info = camera_info(now_ns)
    info.p = np.array(PROJECTION)
    frame = site.send((INFO, info), (topic, image(now_ns)))
    assert frame.intrinsics == Intrinsics(50.0, 51.0, 7.0, 5.0)


def test_intrinsics_of_another_size_are_scaled_or_left_out_with_a_warning(open_site: OpenSite) -> None:
    site = open_site(camera_info_topic=INFO)
    now_ns = time.time_ns()
    info = camera_info(now_ns)
    info.width = 2 * SIZE[1]
    info.height = 2 * SIZE[0]
    assert site.send((INFO, info), (IMAGE, image(now_ns))).intrinsics == Intrinsics(30.0, 30.5, 3.75, 2.75)
    assert not site.warnings
    info.width = 3 * SIZE[1]
    # the frames that were lost on the way were told of, too
    assert site.send((INFO, info), (IMAGE, image(time.time_ns()))).intrinsics is None
    assert f"found intrinsics of {3 * SIZE[1]} x {2 * SIZE[0]}" in site.warnings[0]


def test_depth_that_reaches_no_image_is_told(open_site: OpenSite) -> None:
    site = open_site(depth_topic=DEPTH)
    now_ns = time.time_ns()
    for index in range(link.MIN_FRAMES + 4):
        stamp_ns = now_ns + index * 33_000_000
        site.bridge.take(IMAGE, image(stamp_ns))
        site.bridge.take(DEPTH, image(stamp_ns + 3600 * 10**9, MILLIMETRES, "16UC1"))
    (warning,) = site.warnings
    assert DEPTH in warning
    assert re.search(r"its clock is about 3[56]\d\d\.\d+ s ahead of the clock of colour", warning)


def test_depth_that_does_not_come_delays_images_by_a_bounded_time(open_site: OpenSite) -> None:
    site = open_site(depth_topic=DEPTH, depth_aligned=True)
    frame = site.send((IMAGE, image(time.time_ns())))
    assert frame.depth is None


def test_stamps_of_another_clock_are_said_to_be(site: Site) -> None:
    for stamp_ns in (5_000_000_000, time.time_ns() - 3600 * 10**9):  # a simulation, a recording
        frame = site.send((IMAGE, image(stamp_ns)))
        assert (frame.capture_ns, frame.clock) == (stamp_ns, "device")


def test_without_stamps_the_arrival_counts_and_masks_have_stamp_0(site: Site, tmp_path: Path) -> None:
    before_ns = time.time_ns()
    frame = site.send((IMAGE, image(0)))
    assert before_ns <= frame.capture_ns <= time.time_ns()
    told = [text for text in site.warnings if mentions(text, "0", "arrival")]
    assert told == site.warnings[:1]
    site.publish()
    with MaskPublisher(f"ipc://{tmp_path}/masks") as publisher:
        assert site.publish_masks(publisher, frame)[1] == (0, 0, "optical")


def test_what_cannot_be_an_image_is_refused_once_and_the_next_is_taken(site: Site) -> None:
    now_ns = time.time_ns()
    short = image(now_ns)
    short.height = 500
    bad = [
        image(now_ns, MILLIMETRES, "16UC1"),
        image(now_ns, encoding="yuv444"),
        short,
        SimpleNamespace(),
        None,
    ]
    for message in bad:
        site.bridge.take(IMAGE, message)
    assert len(site.warnings) == 1
    assert f"{IMAGE}: expected a colour image, found encoding '16UC1'" in site.warnings[0]
    assert site.send((IMAGE, image(now_ns))).capture_ns == now_ns


MESSAGES = {
    IMAGE: lambda: image(5, padding=3),
    DEPTH: lambda: image(5, MILLIMETRES, "16UC1"),
    INFO: lambda: camera_info(5),
    "/joint_states": lambda: joint_state(5, ["elbow", "wrist"], [0.5, -1.0]),
}
# a header with an empty name of its frame
BEGIN = b"\0\1\0\0" + struct.pack("<iII", 5, 0, 1) + b"\0\0\0\0"
HOSTILE = {
    "nothing": b"",
    "half of a beginning": b"\0\1",
    "another encoding": b"\0\7\0\0" + bytes(64),
    "a text of 4 GB": b"\0\1\0\0" + struct.pack("<iII", 5, 0, 2**32 - 1) + b"camera",
    "an image of 4 GB": BEGIN
    + struct.pack("<II", 2, 2)
    + b"\6\0\0\0mono8\0\0\0"
    + struct.pack("<II", 2, 2**32 - 1),
    "a text of a megabyte": b"\0\1\0\0" + struct.pack("<iII", 5, 0, 1 << 20) + bytes(1 << 20),
    "a billion joints": BEGIN + struct.pack("<I", 10**9) + bytes(4096),
    "a billion positions": BEGIN + struct.pack("<III", 0, 10**9, 0) + bytes(4096),
    "zeros": bytes(4096),
    "ones": b"\0\1\0\0" + b"\xff" * 4096,
}


@pytest.fixture
def complete(open_site: OpenSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A bridge with all topics that tells each warning."""
    monkeypatch.setattr(link, "REPEAT_S", 0.0)
    joints = {"joint_states_topic": "/joint_states", "joints": f"ipc://{tmp_path}/joints"}
    return open_site(depth_topic=DEPTH, camera_info_topic=INFO, **joints)


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("topic", MESSAGES)
def test_bytes_that_are_no_message_are_refused_with_a_warning(
    complete: Site, topic: str, data: bytes
) -> None:
    complete.bridge.take(topic, data)
    # zeros are a CameraInfo of a camera that was never calibrated, and a JointState without joints
    assert len(complete.warnings) == 1 or topic in (INFO, "/joint_states")
    for warning in complete.warnings:
        assert warning.startswith(f"{topic}: expected ")
        assert len(warning) < 1000


@pytest.mark.parametrize("topic", MESSAGES)
def test_messages_that_end_early_or_have_wrong_bytes_never_end_the_bridge(complete: Site, topic: str) -> None:
    whole = serialise(MESSAGES[topic]())
    for size in range(len(whole)):
        complete.bridge.take(topic, whole[:size])
    # the end of JointState holds velocities, which are not read
    assert len(complete.warnings) > 20
    chance = random.Random(4)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(4, min(len(damaged), 120))] = chance.choice((0, 1, 127, 128, 255))
        complete.bridge.take(topic, bytes(damaged))
    complete.warnings.clear()
    now_ns = time.time_ns()
    whole_ones = ((INFO, camera_info(now_ns)), (IMAGE, image(now_ns)), (DEPTH, depth_of(now_ns)))

    def is_newest(frame: Frame) -> bool:
        return frame.capture_ns == now_ns and frame.depth is not None

    # some damaged images are images, which come first
    frame = until(lambda: next(filter(is_newest, [complete.send(*whole_ones)]), None), "the newest frame")
    assert np.array_equal(decode_image(frame)[:, :, ::-1], RGB)
    assert np.array_equal(decode_depth(frame.depth), MILLIMETRES)


def depth_of(stamp_ns: int) -> Any:
    return image(stamp_ns, MILLIMETRES, "16UC1")


def test_a_warning_comes_again_later_with_the_number_of_those_between(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = image(time.time_ns(), encoding="yuv444")
    for _ in range(5):
        site.bridge.take(IMAGE, wrong)
    monkeypatch.setattr(link, "REPEAT_S", 0.0)
    site.bridge.take(IMAGE, wrong)
    assert len(site.warnings) == 2
    assert mentions(site.warnings[0], "rgb8", "bgr8")
    assert site.warnings[1].endswith("(4 more since the last warning)")


def test_a_huge_image_is_refused_before_it_is_converted(site: Site) -> None:
    size = {"width": 2**31, "height": 2**31, "step": 0, "is_bigendian": 0}
    site.bridge.take(IMAGE, SimpleNamespace(encoding="bayer_rggb8", data=b"", **size))
    assert mentions(site.warnings[0], "2147483648 x 2147483648")


def test_an_image_that_needs_opencv_is_refused_without_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    site.bridge.take(IMAGE, image(time.time_ns(), np.zeros((4, 4), np.uint8), "bayer_rggb8"))
    told = "expected OpenCV (Ubuntu's python3-opencv) to convert 'bayer_rggb8', found none: install"
    assert told in site.warnings[0]
    for encoding, pixels in (("bgr8", RGB), ("mono8", RGB[:, :, 0].copy())):
        assert site.send((IMAGE, image(time.time_ns(), pixels, encoding))).encoding == encoding


@pytest.mark.parametrize(
    ("module", "data", "format_", "library"),
    [
        ("cv2", PACKED_DEPTH, "32FC1; compressedDepth png", "OpenCV"),
        ("av", b"RIFF\0\0\0\0WEBP", "webp", "PyAV"),
    ],
)
def test_no_extra_of_this_package_is_advised_beside_ros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, data: bytes, format_: str, library: str
) -> None:
    site = Site(tmp_path, image_topic=f"{IMAGE}/compressed", depth_topic=f"{DEPTH}/compressedDepth")
    monkeypatch.setitem(sys.modules, module, None)
    message = compressed(time.time_ns(), format_)
    message.data = array("B", data)
    topic = site.settings.depth_topic if library == "OpenCV" else site.settings.image_topic
    site.bridge.take(topic, message)
    site.close()
    (warning,) = site.warnings
    assert f"expected {library} (" in warning
    assert f"to convert '{format_}', found none: install it, or send rgb8" in warning
    assert "sam3-node[" not in warning


def test_masks_have_the_header_of_their_image_also_after_the_node_was_away(
    site: Site, tmp_path: Path
) -> None:
    stamp_ns = time.time_ns()
    frame = site.send((IMAGE, image(stamp_ns)))
    expected = Header(*divmod(stamp_ns, 10**9), "optical")
    site.publish()
    for _ in range(2):
        with MaskPublisher(f"ipc://{tmp_path}/masks") as publisher:
            masks, found = site.publish_masks(publisher, frame)
            assert (masks.seq, found) == (frame.seq, expected)
    site.bridge.stop()
    site.bridge.stop()


def test_masks_that_came_while_stopped_are_not_published(site: Site, tmp_path: Path) -> None:
    frame = site.send((IMAGE, image(time.time_ns())))
    site.publish()
    with MaskPublisher(f"ipc://{tmp_path}/masks") as publisher:
        masks, _ = site.publish_masks(publisher, frame)
        site.bridge.stop()
        site.published.clear()
        publisher.send(replace(masks, skipped=7))
        inbox = site.bridge._client._masks._queue
        assert until(lambda: inbox.peek(lambda item: item[0].skipped == 7, 1000), "the masks")
        site.publish()
        until(lambda: inbox.peek(lambda _: True, 0) is None, "a reader")
        assert not site.published
        site.publish_masks(publisher, frame)


def test_masks_of_other_images_are_passed_over(site: Site, tmp_path: Path) -> None:
    frame = site.send((IMAGE, image(time.time_ns())))
    passed: list[int] = []

    def publish(*found: Any) -> None:
        site.published.append(found)
        passed.append(found[0].capture_ns)

    site.bridge.start(publish)
    with MaskPublisher(f"ipc://{tmp_path}/masks") as publisher:
        site.publish_masks(publisher, frame)
        for later_ns in range(1, 4):
            publisher.send(MaskFrame("cam0", frame.seq, frame.capture_ns + later_ns, SIZE[1], SIZE[0]))
        site.publish_masks(publisher, frame)
    assert set(passed) == {frame.capture_ns}


def test_a_publisher_that_fails_does_not_end_the_thread(site: Site, tmp_path: Path) -> None:
    frame = site.send((IMAGE, image(time.time_ns())))

    def publish(*found: Any) -> None:
        site.published.append(found)
        raise RuntimeError("no space")

    site.bridge.start(publish)
    with MaskPublisher(f"ipc://{tmp_path}/masks") as publisher:
        for _ in range(2):
            site.publish_masks(publisher, frame)
    assert [text for text in site.warnings if "no masks:" not in text] == ["masks: RuntimeError: no space"]


def test_silence_is_explained(open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENCE_S", 0.0)
    site = open_site(timeout_ms=100)
    site.publish()
    assert until(lambda: site.warnings, "a warning")[0].startswith("no masks: no node is connected at ipc:")


def test_an_arm_that_is_silent_is_told_until_its_joints_come(
    open_site: OpenSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Velocities alone are no positions, so an arm that sends nothing else is silent, too."""
    name = "/joint_states"
    site = open_site(timeout_ms=100, joint_states_topic=name, joints=f"ipc://{tmp_path}/joints")
    status = {"cameras": {"cam0": {"fps": 15.0}}, "paused": False}
    monkeypatch.setattr(site.bridge._probe, "status", lambda: status)
    with MaskPublisher(site.settings.masks) as publisher:
        site.publish()
        frame = site.send((IMAGE, image(time.time_ns())))
        site.publish_masks(publisher, frame)
        assert site.bridge.check_health()[:2] == (link.OK, "masks come")
        monkeypatch.setattr(site.bridge, "_joints_s", time.monotonic() - 60)
        site.bridge.take(name, joint_state(time.time_ns(), ["elbow"], []))
        site.publish_masks(publisher, frame)
        level, message, _ = site.bridge.check_health()
        assert level == link.WARNING
        assert mentions(message, "masks come", name, "60 s", "ros2 topic hz")
        told = until(lambda: [text for text in site.warnings if "JointState" in text], "a warning")
        assert mentions(told[0], name)
        site.bridge.take(name, joint_state(time.time_ns(), ["elbow"], [0.5]))
        site.publish_masks(publisher, frame)
        assert site.bridge.check_health().level == link.OK
        # what the node lacks is told as well, such as joints of other names
        status["cameras"]["cam0"]["spatial_problem"] = "no joints of robot"
        level, message, values = site.bridge.check_health()
        assert (level, values["spatial_problem"]) == (link.WARNING, "no joints of robot")
        assert mentions(message, "no joints of robot")


def test_points_come_with_the_masks_else_from_the_node(open_site: OpenSite) -> None:
    site = open_site(timeout_ms=100)
    header = Header(1, 2, "optical")
    masks = MaskFrame("cam0", 0, 1, 4, 4)
    points_m = np.ones((2, 3), "<f4")
    shown = Instance(
        7, "", 0.5, "tracked", 1, 0, Mask.empty((4, 4)), frame="base", points_m=points_m.tobytes()
    )
    found = site.bridge.find_points(masks, header, shown)
    assert (found.points_m.tolist(), found.frame, found.header) == (points_m.tolist(), "base", header)
    assert site.bridge.find_points(masks, header, replace(shown, points_m=None)) is None
    assert mentions(site.warnings[0], "node", "connected")
    assert site.bridge.check_health().level == link.ERROR


def test_headers_are_bounded(site: Site) -> None:
    message = image(time.time_ns(), np.zeros((1, 1, 3), np.uint8))
    for _ in range(MAX_HEADERS + 10):
        site.bridge.take(IMAGE, message)
    assert len(site.bridge._images) == MAX_HEADERS


def test_without_a_node_services_answer_with_an_error_and_images_are_still_taken(open_site: OpenSite) -> None:
    site = open_site(timeout_ms=300)
    response = import_type("sam3_node_msgs/srv/RemoveObject").Response()
    request = import_type("sam3_node_msgs/srv/RemoveObject").Request(id="7")
    waiting = threading.Thread(target=site.bridge.services["remove_object"], args=(request, response))
    waiting.start()
    site.send((IMAGE, image(time.time_ns())))
    waiting.join()
    assert (response.success, response.code) == (False, "no_answer")
    assert mentions(response.message, "node", "connected")


def test_boxes_of_an_image_or_a_photo_become_an_exemplar(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(PerceptionClient, "add_exemplar", lambda _, name, **given: asked.append(given))
    kind = import_type("sam3_node_msgs/srv/AddExemplar")
    request = kind.Request(name="bolt", boxes=[make_box((2, 1, 8, 6))], text="steel bolt")
    assert site.bridge.services["add_exemplar"](request, kind.Response()).success
    request.photo.data = b"JPEG"
    request.labels = [0]
    assert site.bridge.services["add_exemplar"](request, kind.Response()).success
    shown = {"boxes": [(2, 1, 8, 6)], "text": "steel bolt"}
    assert asked == [
        {**shown, "labels": None, "seq": None, "camera": site.settings.camera},
        {**shown, "labels": [0], "photo": b"JPEG"},
    ]


def make_place(**fields: Any) -> ObjectPlace:
    return ObjectPlace("cam0", 7, "mug", "lost", False, epoch=31, **fields)


def test_places_have_the_stamp_of_the_image_that_showed_them(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp_ns = time.time_ns()
    site.bridge.take(IMAGE, image(stamp_ns))
    position = {"position_m": (0.5, 0.25, 0.125), "size_m": 0.1, "covariance_m2": (1e-6, 0, 0, 2e-6, 0, 3e-6)}
    places = [
        make_place(seq=0, capture_ns=stamp_ns, age_s=1.5, frame="camera", confidence=0.75, **position),
        make_place(seq=9, capture_ns=3 * 10**9 + 4, age_s=20.0, frame="base", held=True, **position),
        make_place(seq=8, capture_ns=17, age_s=30.0, hidden_by="robot"),
        make_place(),
    ]
    asked: list[tuple[Any, ...]] = []

    def where(_: PerceptionClient, wanted: Any = None, **given: Any) -> list[ObjectPlace]:
        asked.append((wanted, given))
        return places

    monkeypatch.setattr(PerceptionClient, "where", where)
    kind = import_type("sam3_node_msgs/srv/Where")
    answer = site.bridge.services["where"](kind.Request(name="mug"), kind.Response())
    assert answer.success, answer.message
    seen, earlier, flat, never = answer.detections
    stamps = [(one.header.stamp.sec, one.header.stamp.nanosec) for one in answer.detections]
    assert stamps == [divmod(stamp_ns, 10**9), (3, 4), (0, 17), (0, 0)]
    assert (seen.header.frame_id, earlier.header.frame_id) == (make_header(0).frame_id, "base_link")
    (result,) = seen.results
    assert (result.hypothesis.class_id, result.hypothesis.score, seen.id) == ("mug", 0.75, "7@1f")
    assert (result.pose.pose.position.x, result.pose.covariance[7]) == (0.5, 2e-6)
    assert seen.bbox.size.x == 0.1
    assert not any(one.results[0].pose.covariance.any() for one in (flat, never))
    assert (list(answer.ages), list(answer.has_position)) == (
        [1.5, 20.0, 30.0, -1.0],
        [True, True, False, False],
    )
    assert (list(answer.held), list(answer.hidden_by)) == ([False, True, False, False], ["", "", "robot", ""])
    assert (list(answer.states), list(answer.in_view)) == (["lost"] * 4, [False] * 4)
    site.bridge.services["where"](kind.Request(id="7@1f"), kind.Response())
    site.bridge.services["where"](kind.Request(), kind.Response())
    assert asked == [
        ("mug", {"camera": "cam0"}),
        (7, {"camera": "cam0", "epoch": 31}),
        (None, {"camera": "cam0"}),
    ]


def test_requests_that_cannot_be_meant_are_answered(site: Site) -> None:
    request = import_type("sam3_node_msgs/srv/AddObject").Request()
    request.stamp.sec = 5
    for service, sent, code in (
        ("add_object", request, "unknown_frame"),
        ("remove_object", SimpleNamespace(id="cup"), "bad_request"),
        ("set_prompts", SimpleNamespace(prompts=["cup"], scores=[0.1, 0.2]), "bad_request"),
        ("where", SimpleNamespace(name="cup", id="7"), "bad_request"),
        ("remove_object", SimpleNamespace(), "internal"),
    ):
        response = import_type("sam3_node_msgs/srv/AddObject").Response()
        assert site.bridge.services[service](sent, response) is response
        assert (response.success, response.code) == (False, code)
        assert response.message


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        *(
            (changes, SettingsError)
            for changes in (
                {"image_topic": ""},
                {"depth_topic": IMAGE},
                {"timeout_ms": 0},
                {"depth_aligned": True},
                {"image_rectified": True},
                {"joints": "tcp://127.0.0.1:5554"},
                {"robot": "arm"},
                {"container": True},
                {"joint_states_topic": IMAGE},
            )
        ),
        ({"camera": "left camera"}, WireError),
        ({"robot": "left/arm", "joint_states_topic": "/joint_states"}, WireError),
        *(({name: "nowhere"}, TransportError) for name in ("frames", "masks")),
        ({"joint_states_topic": "/joint_states", "joints": "nowhere"}, TransportError),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception]
) -> None:
    settings = Ros2Settings(image_topic=IMAGE, frames=f"ipc://{tmp_path}/frames")
    with pytest.raises(error):
        Ros2Bridge(replace(settings, **changes), print)
    Ros2Bridge(settings, print).close()  # nothing was left open
