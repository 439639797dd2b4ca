"""The node of `launch/ros2` under rclpy and Fast DDS, with a running sam3-node: three processes on this machine."""

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.transport.tap import PoseSubscriber
from tests.support.patience import PATIENCE_S
from tests.support.processes import until
from tests.support.refuses import mentions
from tests.support.ros2 import (
    DEPTH,
    IMAGE,
    INFO,
    Robot,
    import_type,
    make_box,
    make_header,
    make_image,
    stamp_ns,
)

pytestmark = pytest.mark.verifies(
    "viewer",
    "ROS 2 node",
    "own package",
    "rclpy 7.1 (Jazzy) over Fast DDS, three processes",
    "rviz, ros2 launch",
)

LABEL = "red mug"


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Robot]:
    made = Robot(tmp_path_factory.mktemp("ros2"), DETECTOR__KIND="yolo-world")
    try:
        made.bridge = made.start_bridge(
            joint_states_topic="/joint_states",
            joints=made.joints,
            collision_objects_topic="/collision_object",
        )
        assert made.trigger("configure")
        assert made.trigger("activate")
        made.node = made.start_node()
        yield made
        assert made.bridge.process.poll() is None
    finally:
        made.close()


def is_mug(detection: Any) -> bool:
    return bool(detection.results[0].hypothesis.class_id == LABEL)


def find_mug(robot: Robot) -> Any:
    """Return the detections of the first frame with a mug, and its detection."""
    assert robot.call("set_prompts", prompts=[LABEL], scores=[0.3]).success
    found = robot.wait_for(lambda message: any(map(is_mug, message.detections)), "the mug")
    return found, next(filter(is_mug, found.detections))


def is_true(robot: Robot, message: Any, detection: Any) -> bool:
    """Return True for the mug at its true place on the image of the message's stamp: its colours are right, too."""
    mug_id = next(id for id, label in robot.clip.labels.items() if label == LABEL)
    rows, columns = np.nonzero(robot.clip.truth(robot.sent[stamp_ns(message)])[mug_id])
    centre = detection.bbox.center.position
    return is_mug(detection) and max(abs(centre.x - columns.mean()), abs(centre.y - rows.mean())) < 8


def has_stamp(header: Any) -> Any:
    return lambda message: message.header.stamp == header.stamp


def true_box(robot: Robot, message: Any) -> tuple[int, int, int, int]:
    """Return the box of the clip's first object on the image of a message."""
    truth = robot.clip.truth(robot.sent[stamp_ns(message)])
    rows, columns = np.nonzero(truth[next(iter(robot.clip.labels))])
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


def test_an_object_by_name_comes_back_with_the_stamp_of_its_image(robot: Robot) -> None:
    robot.wait_for(lambda message: True, "masks")
    find_mug(robot)
    is_right = lambda message: any(is_true(robot, message, one) for one in message.detections)  # noqa: E731
    found = robot.wait_for(is_right, "the mug at its place")
    assert found.header.frame_id == "wrist_optical"
    assert all(one.header == found.header for one in found.detections)


def test_it_says_where_the_mug_is(robot: Robot) -> None:
    found, _ = find_mug(robot)

    def ask() -> Any:
        robot.show()
        answer = robot.call("where", name=LABEL)
        assert answer.success, answer.message
        return any(answer.in_view) and answer

    answer = until(ask, "the mug's place")
    mug = answer.detections[0]
    assert answer.in_view[0]
    assert answer.states[0] == "tracked"
    assert mug.header.frame_id == found.header.frame_id
    assert stamp_ns(mug) in robot.sent
    assert 0 <= answer.ages[0] < PATIENCE_S
    if answer.has_position[0]:
        assert abs(mug.results[0].pose.pose.position.z - 1.0) < 0.01
    assert [one.id for one in robot.call("where", id=mug.id).detections] == [mug.id]
    nowhere = robot.call("where", name="no such thing")
    assert (nowhere.success, list(nowhere.detections)) == (True, [])


def test_it_says_what_can_be_picked_or_why_not(robot: Robot) -> None:
    """All depth is 1 m, so that the mug is a part of a wall, from which nothing can be taken."""
    find_mug(robot)

    def ask() -> Any:
        robot.show()
        answer = robot.call(
            "next_pick", label=LABEL, opening_m=0.1, max_age_ms=1000.0 * PATIENCE_S, covered=True
        )
        assert answer.success, answer.message
        # the depth of an image may be lost on its way
        has_depth = answer.up.z == -1.0
        return answer if has_depth and (answer.picks or answer.refused) else None

    answer = until(ask, "a pick")
    assert stamp_ns(answer) in robot.sent
    assert answer.header.frame_id == "wrist_optical"
    assert all(one.label == LABEL and one.reason for one in (*answer.picks, *answer.refused))
    refused = robot.call("next_pick", opening_m=-1.0)
    assert (refused.success, refused.code) == (False, "bad_request")


def test_a_planner_is_told_what_the_scene_lacks(robot: Robot) -> None:
    """Without a calibration there is no table, and no body in the robot's base."""
    text = "expected a table to stand objects on"
    robot.wait_for_past(lambda log: mentions(log.msg, "/collision_object", text), "/rosout")
    assert not robot.received["/collision_object"]
    assert all(message.markers[0].action == 3 for message in robot.received["/sam3_bridge/scene_markers"])


def test_the_joint_states_of_the_graph_reach_the_endpoint_of_the_robot(robot: Robot) -> None:
    kind = import_type("sensor_msgs/msg/JointState")
    publisher = robot.ros.create_publisher(kind, "/joint_states", 10)
    with PoseSubscriber(robot.joints) as joints:

        def arrives() -> Any:
            header = make_header(time.time_ns())
            publisher.publish(kind(header=header, name=["elbow"], position=[0.5]))
            return joints.take(100)

        found = until(arrives, "the joints")[-1]
    assert (found.robot, found.positions, found.clock) == ("robot", {"elbow": 0.5}, "system")
    assert abs(found.stamp_ns - time.time_ns()) < 60e9


def test_all_outputs_of_a_frame_agree(robot: Robot) -> None:
    find_mug(robot)
    topics = ("label_table", "label_image", "detections", "mask")
    outputs = lambda message: [robot.poll(has_stamp(message.header), topic) for topic in topics]  # noqa: E731
    # DDS may lose a large message: the first frame of which all came
    is_whole = lambda found: found.detections and is_mug(found.detections[0]) and all(outputs(found))  # noqa: E731
    found = robot.wait_for(is_whole, "3-D", "detections_3d")
    mug = found.detections[0]
    assert found.header.frame_id == "wrist_optical"
    assert abs(mug.results[0].pose.pose.position.z - 1.0) < 0.01
    assert mug.results[0].pose.covariance[0] > 0
    table, image, flat, mask = outputs(found)
    place = next(index for index, one in enumerate(flat.detections) if one.id == mug.id)
    assert table.class_map[place].class_name == LABEL
    values = np.frombuffer(image.data, "<u2").reshape(image.height, image.width)
    is_inside = values == table.class_map[place].class_id
    rows, columns = np.nonzero(is_inside)
    box = flat.detections[place].bbox
    assert (columns.min() + columns.max() + 1) / 2 == pytest.approx(box.center.position.x, abs=2)
    assert rows.max() + 1 - rows.min() == pytest.approx(box.size_y, abs=2)
    assert np.array_equal(
        np.frombuffer(mask.data, np.uint8).reshape(is_inside.shape), is_inside * np.uint8(255)
    )
    of_mug = lambda message: [one for one in message.markers if one.text == f"{LABEL} {mug.id.split('@')[0]}"]  # noqa: E731
    (marker,) = of_mug(robot.wait_for(of_mug, "its marker", "markers"))
    assert stamp_ns(marker) in robot.sent
    is_of_mug = lambda message: [one for one in message.transforms if one.child_frame_id == f"wrist/{mug.id}"]  # noqa: E731
    (transform,) = is_of_mug(robot.wait_for(is_of_mug, "its frame", "/tf"))
    assert abs(transform.transform.translation.z - 1.0) < 0.01
    cloud = robot.wait_for(lambda message: message.width, "points", "points")
    points = np.frombuffer(cloud.data, "<f4").reshape(-1, 3)
    assert np.abs(points[:, 2] - 1.0).max() < 0.01
    assert stamp_ns(cloud) in robot.sent
    kind = import_type("sensor_msgs/msg/JointState")
    joints = robot.ros.create_publisher(kind, "/joint_states", 10)

    def is_well(message: Any) -> bool:
        # the health also says when joints have not come for some seconds
        joints.publish(kind(header=make_header(time.time_ns()), name=["elbow"], position=[0.5]))
        return bool(message.status[0].level == b"\0")

    (status,) = robot.wait_for(is_well, "health", "/diagnostics").status
    assert (status.name, status.hardware_id) == ("/sam3_bridge: camera wrist", "wrist")
    assert {"fps", "latency_p50_ms"} <= {pair.key for pair in status.values}


def test_the_object_of_mask_and_points_is_a_parameter(robot: Robot) -> None:
    find_mug(robot)
    robot.wait_for(lambda message: any(message.data), "the mug's mask", "mask")
    assert robot.set_parameter("object", "no such thing") == ""
    robot.wait_for(lambda message: not any(message.data), "an empty mask", "mask")
    assert robot.set_parameter("object", LABEL) == ""
    robot.wait_for(lambda message: any(message.data), "the mug's mask", "mask")
    assert robot.set_parameter("object", "") == ""


def test_an_object_is_added_on_a_past_image_refined_and_removed(robot: Robot) -> None:
    assert robot.call("set_prompts", prompts=[]).success
    shown = robot.wait_for(lambda message: True, "masks")
    box = true_box(robot, shown)
    added = robot.call("add_object", box=make_box(box), label="by hand", stamp=shown.header.stamp)
    assert added.success, added.message
    is_it = lambda one: one.id == added.id and one.results[0].hypothesis.class_id == "by hand"  # noqa: E731
    robot.wait_for(lambda message: any(map(is_it, message.detections)), "it")
    point = import_type("vision_msgs/msg/Point2D")(x=(box[0] + box[2]) / 2, y=(box[1] + box[3]) / 2)
    refined = robot.call("refine_object", id=added.id, points=[point], labels=[1])
    assert refined.success, refined.message
    assert 0 < refined.score <= 1
    number, epoch = added.id.split("@")
    other = robot.call("remove_object", id=f"{number}@{int(epoch, 16) ^ 1:x}")
    assert (other.success, other.code) == (False, "node_restarted")
    assert robot.call("remove_object", id=added.id).success
    robot.wait_for(lambda message: all(one.id != added.id for one in message.detections), "its absence")
    again = robot.call("remove_object", id=added.id)
    assert (again.success, again.code) == (False, "unknown_object")
    like = robot.call("add_exemplar", name="it", boxes=[make_box(box)], labels=[1], stamp=shown.header.stamp)
    assert (like.success, like.code) == (False, "bad_request")
    assert "sam3-concept" in like.message  # the detector of this node finds names only


def test_a_client_of_isaac_ros_adds_and_removes_objects_by_its_own_ids(robot: Robot) -> None:
    assert robot.call("set_prompts", prompts=[]).success
    shown = robot.wait_for(lambda message: True, "masks")
    box = true_box(robot, shown)
    add, remove = (
        import_type(f"isaac_ros_segment_anything2_interfaces/srv/{name}")
        for name in ("AddObjects", "RemoveObject")
    )
    request = add.Request(bbox_object_ids=["mine"], bbox_coords=[make_box(box)])
    request.request_header = make_header(stamp_ns(shown))
    added = robot.request("/add_objects", add, request)
    assert (added.success, list(added.object_ids)) == (True, ["mine"]), added.message
    is_it = lambda one: one.results[0].hypothesis.class_id == "mine"  # noqa: E731
    found = robot.wait_for(lambda message: any(map(is_it, message.detections)), "it")
    place = next(index for index, one in enumerate(found.detections) if is_it(one))
    table = robot.wait_for_past(has_stamp(found.header), "label_table")
    assert list(added.object_indices) == [table.class_map[place].class_id]
    again = robot.request("/add_objects", add, request)
    assert (again.success, again.message.split(":")[0]) == (False, "bad_request")
    # an error in the second object leaves nothing of the first
    wrong = add.Request(bbox_object_ids=["a", "b"], bbox_coords=[make_box(box), make_box((5, 5, 1, 1))])
    assert not robot.request("/add_objects", add, wrong).success
    removed = robot.request("/remove_object", remove, remove.Request(object_id="mine"))
    assert (removed.success, list(removed.object_ids)) == (True, []), removed.message
    robot.wait_for(lambda message: not message.detections, "its absence")
    unknown = robot.request("/remove_object", remove, remove.Request(object_id="mine"))
    assert (unknown.success, unknown.message.split(":")[0]) == (False, "unknown_object")


def read_masks(answer: Any) -> list[np.ndarray]:
    """Return the masks of an answer at the size of the image."""
    masks = []
    for detection, mask in zip(answer.detections.detections, answer.masks, strict=True):
        box = detection.bbox
        x = round(box.center.position.x - box.size_x / 2)
        y = round(box.center.position.y - box.size_y / 2)
        full = np.zeros((480, 640), np.bool_)
        crop = np.frombuffer(mask.data, np.uint8).reshape(mask.height, mask.width)
        full[y : y + mask.height, x : x + mask.width] = crop == 255
        masks.append(full)
    return masks


def find_iou(mask: np.ndarray, truth: np.ndarray) -> float:
    return float((mask & truth).sum() / (mask | truth).sum())


def test_an_image_of_the_camera_is_segmented_once_by_points_and_boxes(robot: Robot) -> None:
    assert robot.call("set_prompts", prompts=[]).success
    robot.wait_for(lambda message: not message.detections, "no objects")
    shown = robot.wait_for(lambda message: True, "masks")
    box = true_box(robot, shown)
    truth = robot.clip.truth(robot.sent[stamp_ns(shown)])[next(iter(robot.clip.labels))]
    x = (box[0] + box[2]) / 2
    y = (box[1] + box[3]) / 2
    point = import_type("vision_msgs/msg/Point2D")(x=x, y=y)
    asked = ({"points": [point], "labels": [1]}, {"boxes": [make_box(box)], "multimask": True})
    for prompt in asked:
        answer = robot.call("segment", **prompt, stamp=shown.header.stamp)
        assert answer.success, answer.message
        assert answer.detections.header == shown.header
        assert not answer.label_image.data
        (mask,) = read_masks(answer)
        assert find_iou(mask, truth) > 0.7
    newest = robot.call("segment", boxes=[make_box(box), make_box((10, 10, 60, 60))], with_label_image=True)
    assert newest.success, newest.message
    assert stamp_ns(newest.detections) in robot.sent
    values = np.frombuffer(newest.label_image.data, "<u2").reshape(480, 640)
    entries = [entry.class_id for entry in newest.label_table.class_map]
    assert entries == list(range(1, len(newest.masks) + 1))
    assert set(np.unique(values)) <= {0, *entries}
    # nothing is tracked afterwards
    robot.wait_for(lambda message: True, "masks")
    assert not robot.wait_for(lambda message: True, "masks").detections


def test_names_are_looked_for_once_on_the_newest_image(robot: Robot) -> None:
    assert robot.call("set_prompts", prompts=[]).success
    robot.wait_for(lambda message: not message.detections, "no objects")
    mug_id = next(id for id, label in robot.clip.labels.items() if label == LABEL)

    def look() -> Any:
        robot.show()
        time.sleep(0.1)
        answer = robot.call("segment", names=[LABEL], scores=[0.3])
        assert answer.success, answer.message
        assert all(map(is_mug, answer.detections.detections))
        truth = robot.clip.truth(robot.sent[stamp_ns(answer.detections)])[mug_id]
        return any(find_iou(mask, truth) > 0.7 for mask in read_masks(answer)) and answer

    answer = until(look, "the mug at its place")
    earlier = make_header(stamp_ns(answer.detections) - 1).stamp
    refused = robot.call("segment", names=[LABEL], stamp=earlier)
    assert (refused.success, refused.code) == (False, "unknown_frame")
    # nothing is tracked afterwards
    assert not robot.wait_for(lambda message: True, "masks").detections


def test_an_image_that_is_sent_is_segmented(robot: Robot) -> None:
    index = 7
    pixels = robot.clip.image(index)
    header = make_header(99, "elsewhere")
    image = make_image(header, pixels, "bgr8", padding=5)
    photo = import_type("sensor_msgs/msg/CompressedImage")(
        header=header, format="png", data=cv2.imencode(".png", pixels)[1].tobytes()
    )
    mug_id = next(id for id, label in robot.clip.labels.items() if label == LABEL)
    truth = robot.clip.truth(index)[mug_id]
    rows, columns = np.nonzero(truth)
    box = make_box((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
    for sent in ({"image": image}, {"photo": photo}):
        for prompt, label in (({"boxes": [box]}, ""), ({"names": [LABEL]}, LABEL)):
            answer = robot.call("segment", **sent, **prompt)
            assert answer.success, answer.message
            assert answer.detections.header == header
            assert answer.detections.detections[0].results[0].hypothesis.class_id == label
            assert find_iou(read_masks(answer)[0], truth) > 0.7


def test_everything_on_an_image_is_segmented_once(robot: Robot) -> None:
    shown = robot.wait_for(lambda message: True, "masks")
    answer = robot.call(
        "segment_everything", grid=4, min_iou=0.01, min_stability=0.01, most=5, stamp=shown.header.stamp
    )
    assert answer.success, answer.message
    assert answer.detections.header == shown.header
    assert 0 < len(answer.masks) <= 5
    assert all(mask.any() for mask in read_masks(answer))
    nothing = robot.call("segment_everything", grid=1, min_iou=1.0)
    assert nothing.success
    assert nothing.message
    assert not nothing.masks
    wrong = robot.call("segment_everything", grid=99)
    assert (wrong.success, wrong.code) == (False, "bad_request")


@pytest.mark.parametrize(
    ("fields", "code", "told"),
    [
        ({}, "bad_request", ("points", "names")),
        ({"names": ["red mug"], "boxes": [make_box((1, 1, 9, 9))]}, "bad_request", ("points", "names")),
        ({"names": ["red mug"], "scores": [0.1, 0.2]}, "bad_request", "scores"),
        ({"names": ["spaceship"]}, "unknown_phrase", "spaceship"),
        ({"boxes": [make_box((1, 1, 9, 9))] * 65}, "bad_request", ("boxes", "64", "65")),
        ({"boxes": [make_box((1, 1, 9, 9))] * 2, "multimask": True}, "bad_request", "multimask"),
        ({"boxes": [make_box((9000, 1, 9009, 9))]}, "bad_request", "box"),
        ({"boxes": [make_box((1, 1, 9, 9))], "stamp": make_header(5).stamp}, "unknown_frame", "stamp"),
        (
            {
                "boxes": [make_box((1, 1, 9, 9))],
                "photo": import_type("sensor_msgs/msg/CompressedImage")(data=b"no picture"),
            },
            "bad_request",
            "photo",
        ),
        (
            {
                "boxes": [make_box((1, 1, 9, 9))],
                "image": import_type("sensor_msgs/msg/Image")(
                    width=2**31, height=2**31, encoding="bgr8", data=b"12"
                ),
            },
            "bad_request",
            "image",
        ),
    ],
)
def test_a_request_to_segment_that_cannot_be_meant_is_answered(
    robot: Robot, fields: dict[str, Any], code: str, told: Any
) -> None:
    robot.wait_for(lambda message: True, "masks")
    answer = robot.call("segment", **fields)
    assert (answer.success, answer.code) == (False, code), answer.message
    assert mentions(answer.message, *([told] if isinstance(told, str) else told))


@pytest.mark.parametrize(
    "data", [b"", b"\0\1", bytes(64), b"\0\1\0\0" + b"\xff" * 64, b"\0\1\0\0" + b"\x7f" * 100_000]
)
def test_bytes_on_a_topic_that_are_no_image_change_nothing(robot: Robot, data: bytes) -> None:
    for topic in (IMAGE, DEPTH, INFO):
        for _ in range(5):
            with suppress(RuntimeError):  # ROS itself refuses some
                robot.cameras[topic].publish(data)
    robot.wait_for(lambda message: True, "masks")
    assert robot.call("segment", boxes=[make_box((100, 100, 150, 150))]).success


def test_duplicate_and_late_stamps_are_frames_of_their_own(robot: Robot) -> None:
    now_ns = time.time_ns()
    for stamp in (now_ns, now_ns, now_ns - 3 * 10**9, now_ns + 10**8):
        robot.received["/sam3_bridge/detections"].clear()
        until(lambda: robot.show(stamp) and robot.poll(lambda one: stamp_ns(one) == stamp), "its masks")  # noqa: B023


def test_an_inactive_node_neither_subscribes_nor_publishes_and_goes_on_when_activated(robot: Robot) -> None:
    robot.wait_for(lambda message: True, "masks")
    assert not robot.trigger("configure")  # it is
    assert robot.trigger("deactivate")
    for publisher in robot.cameras.values():
        until(lambda: not publisher.get_subscription_count(), "the end of subscriptions")  # noqa: B023
    robot.received["/sam3_bridge/detections"].clear()
    robot.show()
    assert robot.call("set_prompts", prompts=[]).success  # services answer all the same
    assert not robot.received["/sam3_bridge/detections"]
    assert robot.trigger("activate")
    robot.wait_for(lambda message: True, "masks")


def test_only_the_camera_s_topics_are_subscribed_to_as_sensor_data(robot: Robot) -> None:
    for topic in (IMAGE, DEPTH, INFO):
        (end,) = until(lambda: robot.ros.get_subscriptions_info_by_topic(topic), topic)  # noqa: B023
        assert (end.node_name, end.qos_profile.reliability.name) == ("sam3_bridge", "BEST_EFFORT")
    outputs = robot.ros.get_publishers_info_by_topic("/sam3_bridge/detections")
    assert [end.qos_profile.reliability.name for end in outputs] == ["RELIABLE"]


def test_a_node_that_went_away_comes_back_unseen_with_other_ids(robot: Robot) -> None:
    _, before = find_mug(robot)
    robot.node.kill()
    (status,) = robot.wait_for(
        lambda message: message.status[0].level > b"\0", "a warning", "/diagnostics"
    ).status
    assert "no node" in status.message
    robot.node = robot.start_node()
    robot.wait_for(lambda message: True, "masks of the new node")
    # also before the new node has an object
    for service, fields in (("remove_object", {}), ("refine_object", {"box": make_box((1, 1, 9, 9))})):
        stale = robot.call(service, id=before.id, **fields)
        assert (stale.success, stale.code) == (False, "node_restarted")
    _, after = find_mug(robot)
    assert before.id.split("@")[1] != after.id.split("@")[1]
    robot.wait_for_past(lambda entry: mentions(entry.msg, "ids", "wrist"), "/rosout")


def test_cleanup_releases_all_and_the_node_can_be_configured_again(robot: Robot) -> None:
    assert robot.trigger("deactivate")
    assert robot.trigger("cleanup")
    until(lambda: not robot.find("add_object").service_is_ready(), "the end of services")
    until(lambda: not robot.ros.count_publishers("/sam3_bridge/mask"), "the end of outputs")
    assert robot.trigger("configure")
    assert robot.trigger("activate")
    robot.wait_for(lambda message: True, "masks")


def test_a_second_node_on_the_same_endpoint_stays_unconfigured_and_ends_on_sigterm(robot: Robot) -> None:
    second = robot.start_bridge("second")
    assert not robot.trigger("configure", name="second")
    assert robot.state("second") == "unconfigured"
    is_told = lambda one: one.level == 40 and robot.places["frames"] in one.msg  # noqa: E731
    until(lambda: any(map(is_told, robot.received["/rosout"])), "its error")
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(PATIENCE_S) == 0


def test_an_error_in_a_transition_releases_all_and_shutdown_is_final(robot: Robot) -> None:
    third = robot.start_bridge("third", image_topic="no topic", frames=f"ipc://{robot.folder}/third")
    assert not robot.trigger("configure", name="third")
    assert robot.state("third") == "unconfigured"
    assert robot.set_parameter("image_topic", "/third/image", name="third") == ""
    assert robot.trigger("configure", name="third")  # the endpoint is free again
    assert robot.trigger("shutdown_inactive", name="third")
    assert robot.state("third") == "finalized"
    third.process.send_signal(signal.SIGINT)
    assert third.process.wait(PATIENCE_S) == 0


def test_a_node_may_start_by_itself_and_then_refuses_what_would_have_no_effect(robot: Robot) -> None:
    fourth = robot.start_bridge("fourth", autostart="true", frames=f"ipc://{robot.folder}/fourth")
    until(lambda: robot.state("fourth") == "active", "the node to be active")
    assert mentions(robot.set_parameter("sure_only", True, name="fourth"), "sure_only", "clean")
    assert robot.set_parameter("object", "mug", name="fourth") == ""
    fourth.process.send_signal(signal.SIGTERM)
    assert fourth.process.wait(PATIENCE_S) == 0
