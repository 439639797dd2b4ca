import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.reader import make_reader
from mcap_ros2.decoder import DecoderFactory
from rosbags.rosbag2 import StoragePlugin, Writer
from sam3_node_ros.messages import (
    MAX_VALUE,
    ROTATION_VARIANCE_RAD2,
    MaskMessages,
    assign_values,
    choose_instance,
    read_prompt,
    read_prompts,
)
from sam3_node_ros.parts import Header, format_id, parse_id, read_header

from sam3_node.bags import open_bag
from sam3_node.bags.messages.ros_images import read_stamp
from sam3_node.errors import RequestError
from sam3_node.geometry import rotation_from_quaternion
from sam3_node.schema.fields import MAX_EPOCH
from sam3_node.types import Instance, Mask, MaskFrame, Plane
from sam3_node.wire import decode_image
from tests.support import ros2
from tests.support.refuses import refuses

DiagnosticStatus = ros2.import_type("diagnostic_msgs/msg/DiagnosticStatus")
Marker = ros2.import_type("visualization_msgs/msg/Marker")
PointField = ros2.import_type("sensor_msgs/msg/PointField")
pytestmark = pytest.mark.verifies(
    "viewer",
    "ROS 2 messages: vision_msgs 4, label image",
    "own package",
    "CDR and bags of Jazzy, read by rosbags and mcap-ros2-support",
    "rviz",
)

HEADER = Header(1_700_000_000, 123_456_789, "camera_color_optical_frame")
SIZE = (12, 16)
EPOCH = 0x1F3A9C
MAKE = MaskMessages("base_link")


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
    "mask": lambda masks, header: MAKE.make_mask(masks, header, ""),
}


def over_cdr(message: Any, release: str = "jazzy") -> Any:
    """Return a message as rosbags reads it in a release."""
    return ros2.open_store(release).deserialize_cdr(ros2.serialise(message), ros2.name_type(message))


@pytest.mark.parametrize("release", ros2.RELEASES)
@pytest.mark.parametrize("topic", MAKERS)
def test_messages_pass_cdr_with_their_header(topic: str, release: str) -> None:
    message = MAKERS[topic](MASKS, HEADER)
    found = over_cdr(message, release)
    assert read_header(found) == HEADER
    assert read_stamp(found) == MASKS.capture_ns
    by_rosbags = bytes(ros2.open_store(release).serialize_cdr(found, ros2.name_type(message)))
    assert ros2.deserialise(by_rosbags, ros2.name_type(message)) == message


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
    centre = detection.bbox.center
    size = detection.bbox.size
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
        assert np.array_equal(values, masks.paint_indices())


def test_no_instance_gives_empty_messages() -> None:
    masks = replace(MASKS, instances=())
    assert over_cdr(MAKE.make_detections_2d(masks, HEADER)).detections == []
    assert over_cdr(MAKE.make_detections_3d(masks, HEADER)).detections == []
    assert over_cdr(MAKE.make_label_table(masks, HEADER)).class_map == []
    assert not over_cdr(MAKE.make_label_image(masks, HEADER)).data.any()


@pytest.mark.parametrize(
    ("wanted", "id"),
    [
        ("", 7),
        ("2", 2),
        ("2@1f3a9c", 2),
        ("2@1f3a9d", None),
        ("thing 9", 9),
        ("3", None),
        ("cup", None),
        ("2@", None),
    ],
)
def test_one_object_is_chosen_by_id_or_label_else_the_best_sure_one(wanted: str, id: int | None) -> None:
    doubtful = replace(instance(8, (0, 0, 2, 2), 0.99), doubtful=True)
    masks = replace(MASKS, instances=(*FOUND, doubtful))
    chosen = choose_instance(masks, wanted)
    assert (chosen and chosen.id) == id
    pixels = over_cdr(MAKE.make_mask(masks, HEADER, wanted)).data.reshape(SIZE)
    expected = chosen.mask.full() if chosen else np.zeros(SIZE, np.bool_)
    assert np.array_equal(pixels, expected * np.uint8(255))


@pytest.mark.parametrize(("frame", "frame_id"), [("camera", HEADER.frame_id), ("base", "base_link")])
@pytest.mark.parametrize("count", [0, 5])
def test_a_cloud_has_its_points_in_metres(count: int, frame: str, frame_id: str) -> None:
    points_m = np.arange(3 * count, dtype=np.float32).reshape(count, 3)
    cloud = over_cdr(MAKE.make_points(points_m, frame, HEADER))
    assert read_header(cloud) == HEADER._replace(frame_id=frame_id)
    assert [(field.name, field.offset, field.datatype) for field in cloud.fields] == [
        (name, 4 * place, PointField.FLOAT32) for place, name in enumerate("xyz")
    ]
    assert (cloud.width, cloud.height, cloud.point_step, cloud.row_step) == (count, 1, 12, 12 * count)
    assert np.array_equal(cloud.data.view("<f4").reshape(-1, 3), points_m)


def test_sure_objects_with_a_position_have_a_frame() -> None:
    doubtful = replace(placed(4, "camera"), doubtful=True)
    masks = replace(MASKS, instances=(*FOUND, doubtful))
    (transform,) = over_cdr(MAKE.make_transforms(masks, HEADER)).transforms
    assert (read_header(transform), transform.child_frame_id) == (HEADER, "cam0/9@1f3a9c")
    moved = transform.transform.translation
    turned = transform.transform.rotation
    assert (moved.x, moved.y, moved.z, turned.z, turned.w) == (0.1, 0.2, 0.9, math.sin(0.3), math.cos(0.3))
    masks = replace(MASKS, instances=(placed(9, "base"),))
    assert MAKE.make_transforms(masks, HEADER).transforms[0].header.frame_id == "base_link"


def standing(id: int, **fields: Any) -> Instance:
    turned = (0.0, 0.0, math.sin(0.3), math.cos(0.3))
    box = {"upright_centre_m": (0.4, 0.1, 0.05), "upright_quaternion_xyzw": turned}
    return replace(placed(id, "base"), upright_size_m=(0.06, 0.08, 0.1), **box, **fields)


def test_sure_objects_have_the_box_in_which_they_stand() -> None:
    found = (*FOUND, standing(5, confidence=0.8), standing(6, doubtful=True), standing(7))
    message = over_cdr(MAKE.make_upright_boxes(replace(MASKS, instances=found), HEADER))
    one, other = message.detections
    assert (one.id, other.id) == ("5@1f3a9c", "7@1f3a9c")
    assert read_header(message) == read_header(one) == HEADER._replace(frame_id="base_link")
    centre = one.bbox.center
    assert (centre.position.x, centre.position.y, centre.position.z) == (0.4, 0.1, 0.05)
    assert (centre.orientation.z, centre.orientation.w) == (math.sin(0.3), math.cos(0.3))
    assert (one.bbox.size.x, one.bbox.size.y, one.bbox.size.z) == (0.06, 0.08, 0.1)
    (result,) = one.results
    assert (result.hypothesis.class_id, result.hypothesis.score) == ("thing 5", 0.8)
    assert result.pose.pose == centre


@pytest.mark.parametrize("normal", [(0.0, 0.0, 1.0), (0.6, 0.0, 0.8), (0.0, -0.8, 0.6), (0.0, 0.0, -1.0)])
def test_the_table_is_a_pose_with_z_up(normal: tuple[float, float, float]) -> None:
    assert MAKE.make_table(MASKS, HEADER) is None
    message = over_cdr(MAKE.make_table(replace(MASKS, table=Plane(normal, -0.2, 0.001)), HEADER))
    assert read_header(message) == HEADER._replace(frame_id="base_link")
    turned = message.pose.orientation
    up = rotation_from_quaternion((turned.x, turned.y, turned.z, turned.w))[:, 2]
    assert up == pytest.approx(normal)
    place = message.pose.position
    assert (place.x, place.y, place.z) == pytest.approx([-0.2 * side for side in normal])


def test_markers_replace_those_before_with_a_box_and_a_label_for_each_object() -> None:
    doubtful = replace(placed(4, "camera"), doubtful=True)
    clear, *markers = over_cdr(
        MAKE.make_markers(replace(MASKS, instances=(*FOUND, doubtful)), HEADER)
    ).markers
    assert clear.action == Marker.DELETEALL
    kinds = [Marker.CUBE, Marker.TEXT_VIEW_FACING]
    assert [(one.ns, one.id, one.type) for one in markers] == [
        (*name, kind)
        for name, kind in zip([("box", 0), ("label", 0), ("box", 1), ("label", 1)], 2 * kinds, strict=True)
    ]
    assert all(read_header(one) == HEADER and one.lifetime.sec and one.color.a for one in markers)
    assert (markers[0].pose.position.z, markers[0].scale.x, markers[1].text) == (0.95, 0.3, "thing 9 9")
    assert markers[0].color.g != markers[2].color.g
    assert len(MAKE.make_markers(replace(MASKS, instances=()), HEADER).markers) == 1


def test_diagnostics_have_level_message_and_values() -> None:
    array = over_cdr(MAKE.make_diagnostics(1, "/sam3_bridge: camera cam0", "silent", {"fps": 3.5}, HEADER))
    (status,) = array.status
    assert (status.level, status.hardware_id, status.message) == (DiagnosticStatus.WARN[0], "cam0", "silent")
    assert [(pair.key, pair.value) for pair in status.values] == [("fps", "3.5")]


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
    return ros2.import_type("sam3_node_msgs/srv/AddObject").Request(**fields)


def mono8(pixels: np.ndarray, encoding: str = "mono8") -> Any:
    return ros2.make_image(ros2.make_header(0), pixels, encoding)


def test_prompts_of_a_request() -> None:
    point, box = (ros2.import_type(f"vision_msgs/msg/{name}") for name in ("Point2D", "BoundingBox2D"))
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
    box = ros2.import_type("vision_msgs/msg/BoundingBox2D")(size_x=6.0, size_y=5.0)
    box.center.theta = 0.1
    with refuses(RequestError, field=("0", "theta")):
        read_prompt(request(box=box))
    with refuses(RequestError, field=("mono8", "rgb8")):
        read_prompt(request(mask=mono8(np.ones((2, 3), np.uint8), "rgb8")))
    short = mono8(np.ones((2, 3), np.uint8))
    short.height = 900
    with pytest.raises(RequestError, match="3 x 900 mono8"):
        read_prompt(request(mask=short))


def isaac_request(boxes: str = "", points: str = "", labels: Sequence[int] = (), **fields: Any) -> Any:
    """Return a request of AddObjects: a box or a point for each letter, which is its object's id."""
    point = ros2.import_type("vision_msgs/msg/Point2D")
    fields = {
        "bbox_object_ids": list(boxes),
        "bbox_coords": [ros2.make_box((0, 0, 4, 2))] * len(boxes),
        "point_object_ids": list(points),
        "point_coords": [point(x=float(n), y=1.5) for n in range(len(points))],
        "point_labels": list(labels),
    } | fields
    return ros2.import_type("isaac_ros_segment_anything2_interfaces/srv/AddObjects").Request(**fields)


def test_prompts_of_isaac_ros_are_gathered_by_object() -> None:
    assert read_prompts(isaac_request()) == {}
    assert read_prompts(isaac_request("ab", "cdc", [1, 1, 0])) == {
        "a": {"box": (0.0, 0.0, 4.0, 2.0)},
        "b": {"box": (0.0, 0.0, 4.0, 2.0)},
        "c": {"points": [(0.0, 1.5), (2.0, 1.5)], "labels": [1, 0]},
        "d": {"points": [(1.0, 1.5)], "labels": [1]},
    }
    assert read_prompts(isaac_request(points="d"))["d"]["labels"] == [1]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (isaac_request("aa"), "bbox_object_ids"),
        (isaac_request("a", "a"), "bbox_object_ids"),
        (isaac_request("a", bbox_object_ids=["a", "b"]), "bbox_object_ids"),
        (isaac_request(points="a", point_object_ids=[]), "point_object_ids"),
        (isaac_request(points="ab", labels=[1]), "point_labels"),
    ],
)
def test_other_prompts_of_isaac_ros_are_refused(request_: Any, field: str) -> None:
    with refuses(RequestError, field=field):
        read_prompts(request_)


@pytest.fixture(scope="module")
def bag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the layout of ROS 2 with a message of each topic."""
    path = tmp_path_factory.mktemp("messages") / "bag"
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        for topic, make in MAKERS.items():
            message = make(MASKS, HEADER)
            connection = writer.add_connection(
                f"/{topic}", ros2.name_type(message), typestore=ros2.open_store()
            )
            writer.write(connection, MASKS.capture_ns, ros2.serialise(message))
    return path


def test_a_bag_of_the_messages_is_read_by_another_implementation(bag: Path) -> None:
    (path,) = bag.glob("*.mcap")
    with path.open("rb") as file:  # by the definitions in the file
        items = make_reader(file, decoder_factories=[DecoderFactory()]).iter_decoded_messages()
        decoded = {item.channel.topic[1:]: item.decoded_message for item in items}
    assert decoded.keys() == MAKERS.keys()
    assert all(read_header(message) == HEADER for message in decoded.values())
    assert [one.id for one in decoded["detections"].detections] == ["7@1f3a9c", "2@1f3a9c", "9@1f3a9c"]
    assert decoded["detections_3d"].detections[0].bbox.size.x == 0.3
    assert [one.class_id for one in decoded["label_table"].class_map] == [7, 2, 9]


@pytest.mark.parametrize("topic", ["label_image", "mask"])
def test_the_images_are_images_for_other_programs(bag: Path, topic: str) -> None:
    with open_bag(bag, [f"/{topic}"]) as opened:
        (frame,) = opened
    assert (frame.capture_ns, frame.height, frame.width) == (MASKS.capture_ns, *SIZE)
    assert decode_image(frame).shape == (*SIZE, 3)


HASHES = {  # of the packages that ROS releases
    "Detection2DArray": "214274120007f4a683866481336b70310268cfa107aebe9d594a6acf75bda968",
    "Detection3DArray": "793f5eab9595ac1c0da07873cc859db42eae51f0ee76056db8562515d830e018",
    "LabelInfo": "3d37df4015cdf660cc851c51897f2acd957e1ca6205ba0a99aebffb9406b0783",
}


@pytest.mark.parametrize("name", HASHES)
def test_generated_types_have_the_hash_of_the_published_definitions(name: str) -> None:
    described = json.loads((Path(sys.prefix) / f"share/vision_msgs/msg/{name}.json").read_text())
    (found,) = [
        one["hash_string"] for one in described["type_hashes"] if one["type_name"].endswith(f"/{name}")
    ]
    assert found == f"RIHS01_{HASHES[name]}"
