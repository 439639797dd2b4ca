"""Messages of cameras are read from CDR, and masks written to it, as ROS itself does."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from rosbags.serde import SerdeError
from sam3_node_ros.cdr import MAX_NAMES, MAX_TEXT, CdrReader, CdrWriter, read_message
from sam3_node_ros.messages import MaskMessages, write_detections_2d, write_label_image, write_mask
from sam3_node_ros.parts import Header

from sam3_node.bags.messages.ros_images import MessageError, read_payload
from sam3_node.types import Instance, Intrinsics, Mask, MaskFrame
from tests.support import ros2
from tests.support.refuses import refuses

PIXELS = np.arange(6 * 7 * 3, dtype=np.uint8).reshape(6, 7, 3)
FRAMES = ("", "a", "cam", "camera_optical", "Ärmel")
SIZE = (12, 17)


def make_messages(frame_id: str) -> dict[str, Any]:
    header = ros2.make_header(1_700_000_000_123_456_789, frame_id)
    info = ros2.player.make_camera_info(Intrinsics(60.0, 61.0, 7.5, 5.5), 17, 12, header)
    info.roi.x_offset = 3
    info.binning_y = 2
    joints = ros2.import_type("sensor_msgs/msg/JointState")(
        header=header, name=["elbow", "", "wrist"], position=[0.5, -1.0, 2.0], effort=[1.0]
    )
    return {
        "image": ros2.make_image(header, PIXELS, "bgr8", padding=3),
        "compressed": ros2.import_type("sensor_msgs/msg/CompressedImage")(
            header=header, format="jpeg", data=b"\xff\xd8 etc"
        ),
        "packet": ros2.import_type("ffmpeg_image_transport_msgs/msg/FFMPEGPacket")(
            header=header, width=17, height=12, encoding="libx264", pts=1 << 40, flags=1, data=b"\0\0\1 etc"
        ),
        "info": info,
        "joints": joints,
        "no joints": ros2.import_type("sensor_msgs/msg/JointState")(header=header),
    }


def serialise(message: Any, order: str) -> bytes:
    """Return a message in CDR of ROS, or of rosbags with the high byte first."""
    if order == "little":
        return ros2.serialise(message)
    type_name = ros2.name_type(message)
    data = ros2.serialise(message)
    # ROS may pad the end, which rosbags does not expect
    for padding in range(16):
        with suppress(SerdeError):
            found = ros2.open_store().deserialize_cdr(data[: len(data) - padding], type_name)
            return bytes(ros2.open_store().serialize_cdr(found, type_name, little_endian=False))
    raise AssertionError(type_name)


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("frame_id", FRAMES)
@pytest.mark.parametrize("name", make_messages(""))
def test_a_message_is_read_as_ros_wrote_it(name: str, frame_id: str, order: str) -> None:
    message = make_messages(frame_id)[name]
    found = read_message(serialise(message, order), ros2.name_type(message))
    assert (found.header.stamp.sec, found.header.stamp.nanosec) == (1_700_000_000, 123_456_789)
    assert found.header.frame_id == frame_id
    names = vars(found).keys() - {"header", "roi"}
    for part in names:
        assert list(np.atleast_1d(getattr(found, part))) == list(np.atleast_1d(getattr(message, part))), part
    if name == "info":
        assert found.roi.x_offset == 3


@pytest.mark.parametrize("name", ["image", "info"])
def test_what_is_read_has_the_same_content_as_the_message_of_ros(name: str) -> None:
    message = make_messages("camera")[name]
    kind = ros2.name_type(message)
    assert read_payload(read_message(ros2.serialise(message), kind), kind, name) == read_payload(
        message, kind, name
    )


def instance(id: int, box: tuple[int, int, int, int], label: str, score: float) -> Instance:
    x0, y0, x1, y1 = box
    return Instance(id, label, score, "tracked", 3, 0, Mask(SIZE, box, np.ones((y1 - y0, x1 - x0), np.bool_)))


INSTANCES = (
    instance(7, (2, 1, 8, 6), "red mug", 0.9),
    instance(2, (6, 4, 12, 10), "", 0.6),
    instance(3, (0, 0, 5, 5), "Becher", 0.1),
)


@pytest.mark.parametrize("frame_id", FRAMES)
@pytest.mark.parametrize("count", range(4))
def test_masks_are_written_as_ros_writes_their_messages(count: int, frame_id: str) -> None:
    masks = MaskFrame("cam0", 5, 6, *SIZE[::-1], epoch=0x1F3A9C, instances=INSTANCES[:count])
    header = Header(1_700_000_000, 123_456_789, frame_id)
    make = MaskMessages()
    for written, message in (
        (write_detections_2d(masks, header), make.make_detections_2d(masks, header)),
        (write_label_image(masks, header), make.make_label_image(masks, header)),
        (write_mask(masks, header, "2"), make.make_mask(masks, header, "2")),
    ):
        assert ros2.deserialise(written, ros2.name_type(message)) == message
        # bytes of the padding are not compared: ROS leaves them as they were
        assert len(written) in range(len(ros2.serialise(message)) - 3, len(ros2.serialise(message)) + 4)


def test_texts_and_names_are_bounded() -> None:
    cdr = CdrWriter()
    cdr.write_text("x" * MAX_TEXT)
    with refuses(MessageError, field=(str(MAX_TEXT), str(MAX_TEXT + 1))):
        CdrReader(cdr.finish()).read_text()
    cdr = CdrWriter()
    cdr.write_numbers("I", MAX_NAMES + 1)
    with refuses(MessageError, field=(str(MAX_NAMES), str(MAX_NAMES + 1))):
        CdrReader(cdr.finish()).read_texts()


def test_a_type_that_no_camera_has_is_refused() -> None:
    with refuses(MessageError, field=("sensor_msgs/msg/Image", "std_msgs/msg/String")):
        read_message(bytes(8), "std_msgs/msg/String")
