"""Discovery of cameras from the topics of common drivers: matching depth and intrinsics, unique names."""

from pathlib import Path

from sam3_node.bags.discovery import Camera, choose_cameras, find_cameras, settle_kinds
from sam3_node.bags.formats.mcap import McapBag
from sam3_node.bags.messages.ros_images import find_kind
from sam3_node.bags.samples import Topic
from sam3_node.errors import BagError
from tests.support.mcap_files import T0, Moment, colour_pixels, depth_pixels, write_ros2
from tests.support.refuses import refuses
from tests.support.tables import each_row

BAG = Path("table.mcap")


def topics(*names: str) -> list[Topic]:
    """Return ROS 2 topics with the types that their names suggest."""
    found = []
    for name in names:
        kind = "CompressedImage" if "compressed" in name else "Image"
        type_name = f"sensor_msgs/msg/{'CameraInfo' if name.endswith('camera_info') else kind}"
        found.append(Topic(name, type_name, find_kind(type_name, name)))
    return found


def parts(camera: Camera) -> tuple[str | None, ...]:
    return camera.name, camera.colour, camera.depth, camera.intrinsics


REALSENSE = topics(
    "/camera/depth/image_rect_raw",
    "/camera/depth/camera_info",
    "/camera/color/image_raw",
    "/camera/color/image_raw/compressed",
    "/camera/color/image_raw/compressedDepth",
    "/camera/color/camera_info",
    "/camera/aligned_depth_to_color/image_raw/compressedDepth",
    "/camera/aligned_depth_to_color/image_raw",
    "/camera/aligned_depth_to_color/camera_info",
)


def test_realsense_has_one_camera_with_aligned_depth() -> None:
    (camera,) = find_cameras(REALSENSE)
    assert camera == Camera(
        "camera",
        "/camera/color/image_raw",
        "/camera/aligned_depth_to_color/image_raw",
        "/camera/color/camera_info",
        aligned=True,
    )
    assert len(camera.topics) == 3


def test_infrared_cameras_are_cameras_of_their_own_without_depth() -> None:
    found = find_cameras([*REALSENSE, *topics("/camera/infra1/image_rect_raw", "/camera/infra1/camera_info")])
    assert [parts(camera) for camera in found][1] == (
        "camera_infra1",
        "/camera/infra1/image_rect_raw",
        None,
        "/camera/infra1/camera_info",
    )
    assert found[0].name == "camera_color"
    (alone,) = find_cameras(topics("/camera/infra1/image_rect_raw", "/camera/depth/image_rect_raw"))
    assert (alone.depth, alone.aligned) == ("/camera/depth/image_rect_raw", False)


def test_two_realsense_cameras_keep_their_own_depth() -> None:
    names = "color/image_raw/compressed color/camera_info aligned_depth_to_color/image_raw/compressedDepth"
    found = find_cameras(
        topics(*(f"/{side}/{side}/{name}" for side in ("front", "wrist") for name in names.split()))
    )
    assert [camera.name for camera in found] == ["front", "wrist"]
    for camera in found:
        assert all(topic.startswith(f"/{camera.name}/") for topic in camera.topics)
        assert len(camera.topics) == 3


DRIVERS = {  # topics, and camera, colour, depth and intrinsics that are found in them
    "Azure Kinect": (
        "/rgb/image_raw /rgb/camera_info /depth/image_raw /depth_to_rgb/image_raw /ir/image_raw",
        "rgb /rgb/image_raw /depth_to_rgb/image_raw /rgb/camera_info",
    ),
    "Kinect": (
        "/camera/ir/image_raw /camera/depth/image /camera/depth_registered/image_raw /camera/rgb/image_mono "
        "/camera/rgb/image_color /camera/rgb/camera_info",
        "camera_rgb /camera/rgb/image_color /camera/depth_registered/image_raw /camera/rgb/camera_info",
    ),
    "ZED": (
        "/zed/zed_node/left/image_rect_color /zed/zed_node/rgb/image_rect_color /zed/zed_node/rgb/camera_info "
        "/zed/zed_node/depth/depth_registered",
        "zed_node_rgb /zed/zed_node/rgb/image_rect_color /zed/zed_node/depth/depth_registered "
        "/zed/zed_node/rgb/camera_info",
    ),
    "ZED, left eye, intrinsics of its depth": (
        "/zed/zed_node/left/image_rect_color /zed/zed_node/depth/depth_registered "
        "/zed/zed_node/depth/camera_info",
        "zed_node /zed/zed_node/left/image_rect_color /zed/zed_node/depth/depth_registered "
        "/zed/zed_node/depth/camera_info",
    ),
    "Foxglove": (
        "/camera/image /camera/depth /camera/camera_info",
        "camera /camera/image /camera/depth /camera/camera_info",
    ),
    "no namespace": ("/image_raw /camera_info", "camera /image_raw - /camera_info"),
    "depth of another device": (
        "/usb_cam/image_raw/compressed /tof/depth/image_raw /tof/depth/camera_info",
        "usb_cam /usb_cam/image_raw/compressed /tof/depth/image_raw -",
    ),
}


@each_row(("names", "expected"), DRIVERS.values(), ids=DRIVERS)
def test_drivers(names: str, expected: str) -> None:
    found = [parts(camera) for camera in find_cameras(topics(*names.split()))]
    assert tuple(None if part == "-" else part for part in expected.split()) in found


def test_depth_whose_name_does_not_tell_is_known_by_its_kind() -> None:
    oak = [
        *topics("/oak/rgb/image_raw", "/oak/left/image_raw"),
        Topic("/oak/stereo/image_raw", "Image", "depth"),
    ]
    rgb, left = find_cameras(oak)
    assert (rgb.depth, left.depth) == ("/oak/stereo/image_raw", None)


def test_rectified_images_have_no_distortion_left() -> None:
    (camera,) = find_cameras(topics("/CAM_FRONT/image_rect_compressed", "/CAM_FRONT/camera_info"))
    assert (camera.name, camera.rectified, camera.intrinsics) == ("CAM_FRONT", True, "/CAM_FRONT/camera_info")


def test_of_one_sensor_raw_colour_is_taken_unless_another_is_asked_for() -> None:
    names = ("/cam/image_rect", "/cam/image_mono", "/cam/image_raw/compressed", "/cam/image_raw")
    (camera,) = find_cameras(topics(*names))
    assert camera.colour == "/cam/image_raw"
    for name in names:
        (camera,) = find_cameras(topics(*names), {name})
        assert (camera.name, camera.colour) == ("cam", name)


def test_names_are_unique_and_valid_whatever_the_topics() -> None:
    long = "/" + "/".join("x" * 30 for _ in range(4))
    names = ("image", "/a b/image", "/a_b/image", "/ä/image", "/ö/image", f"{long}/image", f"{long}y/image")
    found = [camera.name for camera in find_cameras(topics(*names))]
    assert len(set(found)) == len(names)
    for name in found:
        assert 1 <= len(name) <= 64
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz_0123456789xy")


def test_names_grow_only_as_long_as_they_must() -> None:
    two = topics("/robot1/camera/color/image_raw", "/robot2/camera/color/image_raw")
    assert [camera.name for camera in find_cameras(two)] == ["robot1_camera", "robot2_camera"]
    stereo = topics("/stereo/left/image_raw", "/stereo/right/image_raw")
    assert [camera.name for camera in find_cameras(stereo)] == ["stereo_left", "stereo_right"]


def test_a_choice_is_by_name_or_topic() -> None:
    both = topics("/front/image", "/wrist/image", "/wrist/image/compressed", "/wrist/depth")
    for wanted in (["wrist"], ["/wrist/image"]):
        (camera,) = choose_cameras(BAG, both, wanted)
        assert parts(camera) == ("wrist", "/wrist/image", "/wrist/depth", None)
    (camera,) = choose_cameras(BAG, both, ["/wrist/image/compressed"])
    assert camera.colour == "/wrist/image/compressed"
    assert len(choose_cameras(BAG, both)) == 2


def test_a_wanted_depth_is_preferred() -> None:
    (camera,) = choose_cameras(BAG, REALSENSE, ["camera", "/camera/depth/image_rect_raw"])
    assert (camera.depth, camera.aligned) == ("/camera/depth/image_rect_raw", False)


def test_a_choice_that_is_absent_is_an_error_with_what_there_is() -> None:
    with refuses(BagError, field=("table.mcap", "/camera/color/image_raw")):
        choose_cameras(BAG, REALSENSE, ["wirst"])
    with refuses(BagError, field="/camera/depth/image_rect_raw"):
        choose_cameras(BAG, REALSENSE, ["/camera/depth/image_rect_raw"])


def test_without_a_camera_the_topics_are_told() -> None:
    with refuses(BagError, field=("tf2_msgs/TFMessage", "/cam/depth", "sensor_msgs/msg/Image")):
        choose_cameras(BAG, [Topic("/tf", "tf2_msgs/TFMessage", "other"), *topics("/cam/depth")])
    with refuses(BagError, field="70"):
        choose_cameras(BAG, [Topic(f"/t{index}", "x", "other") for index in range(100)])


def test_the_first_image_tells_what_a_name_does_not(tmp_path: Path) -> None:
    depth = depth_pixels(0).tobytes()
    colour = colour_pixels(0).tobytes()
    images = [
        ("/oak/stereo/image_raw", depth, "16UC1", "depth"),
        ("/rgb_to_depth/image_raw", colour, "bgr8", "colour"),
        ("/oak/rgb/image_raw", depth, "16UC1", "colour"),
        ("/depth/image", colour, "bgr8", "depth"),
        ("/cam/image", colour, "hsv8", "colour"),  # an unknown encoding is no reason not to open
        ("/cam/confidence_map", colour, "mono8", "other"),
    ]
    moments = [Moment(topic, "raw", T0, data, encoding) for topic, data, encoding, _ in images]
    path = write_ros2(tmp_path / "odd.mcap", [*moments, Moment("/cam/camera_info", "info", T0)])
    expected = {topic: kind for topic, *_, kind in images} | {"/cam/camera_info": "intrinsics"}
    assert {topic.name: topic.kind for topic in settle_kinds(McapBag(path))} == expected


def test_topics_of_dots_name_no_camera_by_dots() -> None:
    names = [camera.name for camera in find_cameras(topics("/../image", "/./image", "/.../image"))]
    assert names
    assert all(name.strip(".") for name in names)


RECTIFIED = """
    /camera/image_rect /camera/image_rect_color /camera/image_rect/compressed /camera/infra1/image_rect_raw
    /zed/zed_node/rgb/image_rect_color /zed/zed_node/rgb/color/rect/image /stereo/left/image_mono_rect
    /rectified/left/image /camera/rgb/image_rectified /camera/imageRect /camera/left_rect/image
    /camera/image_undistorted
"""
RAW = """
    /camera/image_raw /camera/direct/image /rectangle/image_color /camera/image_corrected
    /camera/unrectified/image /camera/erect/image /indirect_rgb/image_raw
"""


@each_row(
    ("name", "rectified"),
    [*((name, True) for name in RECTIFIED.split()), *((name, False) for name in RAW.split())],
)
def test_images_with_rectified_in_a_word_are_rectified(name: str, rectified: bool) -> None:
    (camera,) = find_cameras(topics(name))
    assert camera.rectified == rectified


def test_a_rectified_image_beside_the_raw_one_shares_its_calibration() -> None:
    found = find_cameras(topics("/cam/image_raw", "/cam/rectified/image", "/cam/camera_info"))
    assert [(camera.colour, camera.intrinsics, camera.rectified) for camera in found] == [
        ("/cam/image_raw", "/cam/camera_info", False),
        ("/cam/rectified/image", "/cam/camera_info", True),
    ]


def test_a_rectified_calibration_is_of_the_rectified_image() -> None:
    infos = [
        Topic(f"/left/{name}", "sensor_msgs/msg/CameraInfo", "intrinsics")
        for name in ("camera_info_rect", "camera_info")
    ]
    (camera,) = find_cameras([*topics("/left/image_rect"), *infos])
    assert camera.intrinsics == "/left/camera_info_rect"
    (camera,) = find_cameras([*topics("/left/image_raw"), *infos])
    assert camera.intrinsics == "/left/camera_info"


def test_depth_packed_for_depth_wins_over_a_picture_of_depth() -> None:
    names = "/cam/color/image_raw /cam/depth/image_raw/compressed /cam/depth/image_raw/compressedDepth"
    (camera,) = find_cameras(topics(*names.split()))
    assert camera.depth == "/cam/depth/image_raw/compressedDepth"
