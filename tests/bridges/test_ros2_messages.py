from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.reader import make_reader
from mcap_ros2.decoder import DecoderFactory
from rosbags.rosbag2 import Reader, StoragePlugin, Writer
from sam3_node_ros.messages import (
    MAX_VALUE,
    ROTATION_VARIANCE_RAD2,
    Header,
    MaskMessages,
    assign_values,
    format_id,
    import_type,
    parse_id,
    read_header,
    read_prompt,
)

from sam3_node.bags import open_bag
from sam3_node.bags.messages.ros_images import read_stamp
from sam3_node.errors import RequestError
from sam3_node.replay.davis_png import paint_indices
from sam3_node.types import Instance, Mask, MaskFrame
from sam3_node.wire import MAX_EPOCH, decode_image
from tests.support.refuses import refuses
from tests.support.ros2.messages import RELEASES, VISION_MSGS, deserialise, find_class, open_store, serialise

pytestmark = pytest.mark.verifies(
    "viewer",
    "ROS 2 messages: vision_msgs 4, label image",
    "other implementation",
    "CDR and bags of Humble and Jazzy by rosbags, read by mcap-ros2-support",
    "DDS, rviz",
)

HEADER = Header(1_700_000_000, 123_456_789, "camera_color_optical_frame")
SIZE = (12, 16)
EPOCH = 0x1F3A9C
MAKE = MaskMessages("base_link", find_class)


def instance(id: int, box: tuple[int, int, int, int], score: float = 0.5, **fields: Any) -> Instance:
    x0, y0, x1, y1 = box
    mask = Mask(SIZE, box, np.ones((y1 - y0, x1 - x0), np.bool_))
    return Instance(id, f"thing {id}", score, "tracked", 3, 0, mask, **fields)


def placed(id: int, frame: str) -> Instance:
    return instance(
        id,
        (1, 1, 4, 3),
        position_m=(0.1, 0.2, 0.9),
        frame=frame,
        extent_m=(0.3, 0.2, 0.1),
        covariance_m2=(1e-4, 2e-5, 3e-5, 4e-4, 5e-5, 9e-4),
        extent_centre_m=(0.11, 0.21, 0.95),
        extent_quaternion_xyzw=(0.0, 0.0, math.sin(0.3), math.cos(0.3)),
    )


HIDDEN = replace(instance(3, (0, 0, 1, 1)), mask=Mask.empty(SIZE), state="occluded")
FOUND = (instance(7, (2, 1, 8, 6), 0.9), instance(2, (6, 4, 12, 10), 0.6), HIDDEN, placed(9, "camera"))
MASKS = MaskFrame("cam0", 5, 1_700_000_000_123_456_789, *SIZE[::-1], epoch=EPOCH, instances=FOUND)
MAKERS = {
    "detections": MAKE.make_detections_2d,
    "detections_3d": MAKE.make_detections_3d,
    "label_image": MAKE.make_label_image,
    "label_table": MAKE.make_label_table,
}


def over_cdr(message: Any, release: str = "jazzy") -> Any:
    """Return a message as rosbags reads it in a release."""
    return open_store(release).deserialize_cdr(serialise(message, release), message.type_name)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("topic", MAKERS)
def test_messages_pass_cdr_with_their_header(topic: str, release: str) -> None:
    message = MAKERS[topic](MASKS, HEADER)
    found = over_cdr(message, release)
    assert read_header(found) == HEADER
    assert read_stamp(found) == MASKS.capture_ns
    data = serialise(message, release)
    assert serialise(deserialise(data, message.type_name), release) == data


@pytest.mark.parametrize(("sec", "nanosec"), [(0, 0), (0, 1), (2**31 - 1, 999_999_999), (1_700_000_000, 1)])
def test_stamps_are_exact_to_the_nanosecond(sec: int, nanosec: int) -> None:
    for make in MAKERS.values():
        found = over_cdr(make(MASKS, Header(sec, nanosec, "")))
        assert read_header(found) == (sec, nanosec, "")
        assert all(read_header(one) == (sec, nanosec, "") for one in getattr(found, "detections", ()))


def test_detections_have_box_label_score_and_id() -> None:
    first, second, _ = over_cdr(MAKE.make_detections_2d(MASKS, HEADER)).detections
    assert (first.id, second.id) == ("7@1f3a9c", "2@1f3a9c")
    box = first.bbox
    assert (box.center.position.x, box.center.position.y, box.center.theta) == (5.0, 3.5, 0.0)
    assert (box.size_x, box.size_y) == (6.0, 5.0)
    (result,) = first.results
    assert (result.hypothesis.class_id, result.hypothesis.score) == ("thing 7", 0.9)


def test_a_detection_in_3d_has_pose_covariance_and_oriented_box() -> None:
    found = over_cdr(MAKE.make_detections_3d(MASKS, HEADER))
    (detection,) = found.detections  # those without a position have none
    assert detection.id == "9@1f3a9c"
    assert read_header(detection) == read_header(found) == HEADER
    (result,) = detection.results
    position = result.pose.pose.position
    assert (position.x, position.y, position.z) == (0.1, 0.2, 0.9)
    covariance = result.pose.covariance.reshape(6, 6)
    assert np.array_equal(covariance[:3, :3], [[1e-4, 2e-5, 3e-5], [2e-5, 4e-4, 5e-5], [3e-5, 5e-5, 9e-4]])
    assert np.array_equal(covariance[3:, 3:], np.eye(3) * ROTATION_VARIANCE_RAD2)
    assert not covariance[:3, 3:].any()
    assert not covariance[3:, :3].any()
    centre, size = detection.bbox.center, detection.bbox.size
    assert (centre.position.x, centre.position.y, centre.position.z) == (0.11, 0.21, 0.95)
    assert (centre.orientation.z, centre.orientation.w) == (math.sin(0.3), math.cos(0.3))
    assert (size.x, size.y, size.z) == (0.3, 0.2, 0.1)


def test_positions_in_the_base_have_its_frame_id() -> None:
    masks = replace(MASKS, instances=(placed(9, "base"),))
    found = over_cdr(MAKE.make_detections_3d(masks, HEADER))
    assert read_header(found) == read_header(found.detections[0]) == HEADER._replace(frame_id="base_link")


def test_a_position_alone_gives_a_box_without_size() -> None:
    masks = replace(MASKS, instances=(instance(1, (1, 1, 4, 3), position_m=(0.0, 0.5, 1.0), frame="camera"),))
    (detection,) = over_cdr(MAKE.make_detections_3d(masks, HEADER)).detections
    assert detection.bbox.center.position.y == 0.5
    assert detection.bbox.center.orientation.w == 1.0
    assert detection.bbox.size.x == 0.0
    assert not detection.results[0].pose.covariance.any()


def test_label_image_and_table_belong_together() -> None:
    image = over_cdr(MAKE.make_label_image(MASKS, HEADER))
    assert (image.encoding, image.height, image.width, image.step) == ("mono16", *SIZE, 2 * SIZE[1])
    assert not image.is_bigendian
    values = image.data.view("<u2").reshape(SIZE)
    table = over_cdr(MAKE.make_label_table(MASKS, HEADER))
    detections = over_cdr(MAKE.make_detections_2d(MASKS, HEADER)).detections
    entries = [(entry.class_id, entry.class_name) for entry in table.class_map]
    assert entries == [(7, "thing 7"), (2, "thing 2"), (9, "thing 9")]
    assert [entry[1] for entry in entries] == [one.results[0].hypothesis.class_id for one in detections]
    assert set(np.unique(values)) == {0, 7, 2, 9}
    assert values[5, 7] == 7  # both have this pixel, and 7 has the better score
    assert values[9, 11] == 2
    assert values[0, 0] == 0


def test_of_equal_scores_the_lower_id_is_on_top_as_in_other_label_images() -> None:
    first, *others = (replace(one, score=0.5) for one in MASKS.instances)
    for instances in ((first, *others), (*others, first)):
        masks = replace(MASKS, instances=instances)
        values = np.frombuffer(MAKE.make_label_image(masks, HEADER).data, "<u2").reshape(SIZE)
        assert values[5, 7] == 2  # 7 has this pixel, too
        assert np.array_equal(values, paint_indices(masks))


def test_no_instance_gives_empty_messages() -> None:
    masks = replace(MASKS, instances=())
    assert over_cdr(MAKE.make_detections_2d(masks, HEADER)).detections == []
    assert over_cdr(MAKE.make_detections_3d(masks, HEADER)).detections == []
    assert over_cdr(MAKE.make_label_table(masks, HEADER)).class_map == []
    assert not over_cdr(MAKE.make_label_image(masks, HEADER)).data.any()


@pytest.mark.parametrize(
    ("ids", "values"),
    [
        ([1, 2, 300], [1, 2, 300]),
        ([MAX_VALUE, MAX_VALUE + 1], [MAX_VALUE, 1]),
        ([1, MAX_VALUE + 1, 2], [1, 2, 3]),
        ([MAX_VALUE, 2 * MAX_VALUE], [MAX_VALUE, 1]),
        ([10**12], [(10**12 - 1) % MAX_VALUE + 1]),
    ],
)
def test_values_are_ids_as_long_as_they_fit(ids: list[int], values: list[int]) -> None:
    assert assign_values(ids) == values


@pytest.mark.parametrize("epoch", [None, 1, MAX_EPOCH])
def test_an_id_is_read_back(epoch: int | None) -> None:
    assert parse_id(format_id(12, epoch)) == (12, epoch)


@pytest.mark.parametrize(
    "text", ["", "7@", "@7", "-1", "7@xyz", "7@ffffffffffffff", "7 ", "9" * 16, "a" * 500]
)
def test_another_id_is_refused(text: str) -> None:
    with refuses(RequestError, field="id"):
        parse_id(text)


def request(**fields: Any) -> Any:
    return find_class("sam3_node_msgs/msg/AddObject_Request")(**fields)


def mono8(pixels: np.ndarray, encoding: str = "mono8") -> Any:
    height, width = pixels.shape
    return find_class("sensor_msgs/msg/Image")(
        height=height, width=width, encoding=encoding, step=width, data=list(pixels.ravel().tolist())
    )


def test_prompts_of_a_request() -> None:
    point, box = find_class("vision_msgs/msg/Point2D"), find_class("vision_msgs/msg/BoundingBox2D")
    assert read_prompt(request()) == {}
    points = [point(x=3.0, y=4.5), point(x=1.0, y=0.5)]
    expected = {"points": [(3.0, 4.5), (1.0, 0.5)], "labels": [1, 0]}
    assert read_prompt(request(points=points, labels=[1, 0])) == expected
    wide = box(size_x=6.0, size_y=5.0)
    wide.center.position = point(x=5.0, y=3.5)
    assert read_prompt(request(box=wide)) == {"box": (2.0, 1.0, 8.0, 6.0)}
    pixels = np.zeros((3, 4), np.uint8)
    pixels[1, 2] = 200
    assert np.array_equal(read_prompt(request(mask=mono8(pixels)))["mask"], pixels > 0)


def test_prompts_that_cannot_be_meant_are_refused() -> None:
    box = find_class("vision_msgs/msg/BoundingBox2D")(size_x=6.0, size_y=5.0)
    box.center.theta = 0.1
    with refuses(RequestError, field=("0", "theta")):
        read_prompt(request(box=box))
    with refuses(RequestError, field=("mono8", "rgb8")):
        read_prompt(request(mask=mono8(np.ones((2, 3), np.uint8), "rgb8")))
    short = mono8(np.ones((2, 3), np.uint8))
    short.height = 900
    with pytest.raises(RequestError, match="3 x 900 mono8"):
        read_prompt(request(mask=short))


@pytest.mark.parametrize("storage", ["SQLITE3", "MCAP"])
@pytest.mark.parametrize("release", RELEASES)
def test_a_bag_of_the_messages_is_read_back(tmp_path: Path, release: str, storage: str) -> None:
    store = open_store(release)
    messages = {topic: make(MASKS, HEADER) for topic, make in MAKERS.items()}
    with Writer(tmp_path / "bag", version=9, storage_plugin=StoragePlugin[storage]) as writer:
        for topic, message in messages.items():
            connection = writer.add_connection(f"/{topic}", message.type_name, typestore=store)
            writer.write(connection, MASKS.capture_ns, serialise(message, release))
    with Reader(tmp_path / "bag") as reader:
        found = {connection.topic[1:]: (connection, bytes(data)) for connection, _, data in reader.messages()}
    assert found.keys() == messages.keys()
    for topic, (connection, data) in found.items():
        assert connection.msgtype == messages[topic].type_name
        assert data == serialise(messages[topic], release)
    if storage == "MCAP":  # another implementation of CDR, by the definitions in the file
        (path,) = (tmp_path / "bag").glob("*.mcap")
        with path.open("rb") as file:
            items = make_reader(file, decoder_factories=[DecoderFactory()]).iter_decoded_messages()
            decoded = {item.channel.topic[1:]: item.decoded_message for item in items}
        for message in decoded.values():
            assert read_header(message) == HEADER
        assert [one.id for one in decoded["detections"].detections] == ["7@1f3a9c", "2@1f3a9c", "9@1f3a9c"]
        assert decoded["detections_3d"].detections[0].bbox.size.x == 0.3
        assert [one.class_id for one in decoded["label_table"].class_map] == [7, 2, 9]


def test_the_label_image_is_an_image_for_other_programs(tmp_path: Path) -> None:
    store, message = open_store(), MAKE.make_label_image(MASKS, HEADER)
    with Writer(tmp_path / "bag", version=9) as writer:
        connection = writer.add_connection("/label_image", message.type_name, typestore=store)
        writer.write(connection, MASKS.capture_ns, serialise(message))
    with open_bag(tmp_path / "bag") as bag:
        (frame,) = bag
    assert (frame.capture_ns, frame.height, frame.width) == (MASKS.capture_ns, *SIZE)
    assert decode_image(frame).shape == (*SIZE, 3)


def test_types_are_those_of_the_installed_packages() -> None:
    from collections import OrderedDict

    assert import_type("collections/abc/Sized") is not OrderedDict
    with pytest.raises(ModuleNotFoundError):
        import_type("no_such_msgs/msg/Thing")


def test_the_definitions_are_complete() -> None:
    used = {field for name in VISION_MSGS for field in find_class(f"vision_msgs/msg/{name}").fields}
    assert {"header", "results", "bbox", "id", "class_map"} <= used
