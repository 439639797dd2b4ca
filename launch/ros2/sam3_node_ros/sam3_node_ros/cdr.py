"""Reads and writes serialised messages of ROS 2 (CDR) without building them field by field in Python.

A camera's messages come here as bytes: pixels stay where they are, and only the fields that are used become Python's.
The sender is not trusted. Each length is compared with the bytes that are left before anything is made of it, so a
hostile message costs no more than its own size. Source: OMG DDS-XTypes 1.3, section 7.4, encoding version 1, which all
middlewares of ROS 2 write.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from sam3_node.bags.messages.ros_images import MessageError
from sam3_node.types import Buffer

BEGIN = 4
"""Bytes before the first field. Fields are aligned to the distance from there."""
LITTLE_ENDIAN = b"\x00\x01\x00\x00"
"""First bytes of a message in CDR with the low byte first"""
MAX_NAMES = 4096
"""Names in one message of joints. Each becomes a text of Python."""
MAX_TEXT = 4096
"""Bytes of one text, such as the name of a coordinate frame, which is kept with its image."""


class CdrReader:
    """Reads the fields of one message in their order. Raises MessageError where the bytes are none."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")
        head = bytes(self._data[:BEGIN])
        # the last two bytes are options, which tell the padding at the end
        if len(head) < BEGIN or head[0] or head[1] > 1:
            raise MessageError(
                f"expected CDR, which begins with 00 00 or 00 01, found {head.hex(' ') or 'nothing'}"
            )
        self._order = "<" if head[1] else ">"
        self._place = BEGIN

    def read_number(self, form: str) -> Any:
        """Return a number of a form of `struct`: B, i, I, Q or d."""
        size = struct.calcsize(form)
        return struct.unpack(self._order + form, self._take(size, size))[0]

    def read_text(self) -> str:
        """Return a text of at most MAX_TEXT bytes. Those that are no UTF-8 are replaced."""
        size = self.read_number("I")
        if size > MAX_TEXT:
            raise MessageError(f"expected a text of at most {MAX_TEXT} bytes, found {size}")
        text = bytes(self._take(size, 1))
        return text.removesuffix(b"\0").decode("utf-8", "replace")

    def read_texts(self) -> list[str]:
        """Return a list of at most MAX_NAMES texts."""
        count = self.read_number("I")
        if count > MAX_NAMES:
            raise MessageError(f"expected at most {MAX_NAMES} names, found {count}")
        return [self.read_text() for _ in range(count)]

    def read_bytes(self) -> memoryview:
        """Return a list of bytes, which are not copied."""
        return self._take(self.read_number("I"), 1)

    def read_doubles(self, count: int | None = None) -> npt.NDArray[np.float64]:
        """Return `count` numbers, or a list of numbers, which are not copied."""
        if count is None:
            count = int(self.read_number("I"))
            # an empty list has no element that would be aligned
            if count == 0:
                return np.empty(0)
        return np.frombuffer(self._take(8 * count, 8), self._order + "f8")

    def _take(self, size: int, alignment: int) -> memoryview:
        """Return the next bytes, of which the first is aligned."""
        begin = self._place + (BEGIN - self._place) % alignment
        if size > len(self._data) - begin:
            raise MessageError(
                f"expected {size} bytes at byte {begin} of the message, found {max(0, len(self._data) - begin)}"
            )
        self._place = begin + size
        return self._data[begin : self._place]


def read_message(data: Buffer, type_name: str) -> Any:
    """Return a serialised message of a camera or of joints, with ROS's names of the fields that are used.

    Raises MessageError for other bytes, and for a type that no camera has.
    """
    read = _READERS.get(type_name)
    if read is None:
        raise MessageError(f"expected a type of {', '.join(_READERS)}, found {type_name}")
    return read(CdrReader(data))


def _read_header(cdr: CdrReader) -> SimpleNamespace:
    stamp = SimpleNamespace(sec=cdr.read_number("i"), nanosec=cdr.read_number("I"))
    return SimpleNamespace(stamp=stamp, frame_id=cdr.read_text())


def _read_image(cdr: CdrReader) -> SimpleNamespace:
    return SimpleNamespace(
        header=_read_header(cdr),
        height=cdr.read_number("I"),
        width=cdr.read_number("I"),
        encoding=cdr.read_text(),
        is_bigendian=cdr.read_number("B"),
        step=cdr.read_number("I"),
        data=cdr.read_bytes(),
    )


def _read_compressed_image(cdr: CdrReader) -> SimpleNamespace:
    return SimpleNamespace(header=_read_header(cdr), format=cdr.read_text(), data=cdr.read_bytes())


def _read_ffmpeg_packet(cdr: CdrReader) -> SimpleNamespace:
    return SimpleNamespace(
        header=_read_header(cdr),
        width=cdr.read_number("i"),
        height=cdr.read_number("i"),
        encoding=cdr.read_text(),
        pts=cdr.read_number("Q"),
        flags=cdr.read_number("B"),
        is_bigendian=cdr.read_number("B"),
        data=cdr.read_bytes(),
    )


def _read_compressed_video(cdr: CdrReader) -> SimpleNamespace:
    # its stamp and frame_id have the layout of a header
    return SimpleNamespace(header=_read_header(cdr), data=cdr.read_bytes(), format=cdr.read_text())


def _read_camera_info(cdr: CdrReader) -> SimpleNamespace:
    return SimpleNamespace(
        header=_read_header(cdr),
        height=cdr.read_number("I"),
        width=cdr.read_number("I"),
        distortion_model=cdr.read_text(),
        d=cdr.read_doubles(),
        k=cdr.read_doubles(9),
        r=cdr.read_doubles(9),
        p=cdr.read_doubles(12),
        binning_x=cdr.read_number("I"),
        binning_y=cdr.read_number("I"),
        roi=SimpleNamespace(
            x_offset=cdr.read_number("I"),
            y_offset=cdr.read_number("I"),
            height=cdr.read_number("I"),
            width=cdr.read_number("I"),
        ),
    )


def _read_joint_state(cdr: CdrReader) -> SimpleNamespace:
    return SimpleNamespace(header=_read_header(cdr), name=cdr.read_texts(), position=cdr.read_doubles())


_READERS: dict[str, Callable[[CdrReader], SimpleNamespace]] = {
    "sensor_msgs/msg/Image": _read_image,
    "sensor_msgs/msg/CompressedImage": _read_compressed_image,
    "ffmpeg_image_transport_msgs/msg/FFMPEGPacket": _read_ffmpeg_packet,
    "foxglove_msgs/msg/CompressedVideo": _read_compressed_video,
    "sensor_msgs/msg/CameraInfo": _read_camera_info,
    "sensor_msgs/msg/JointState": _read_joint_state,
}


class CdrWriter:
    """Writes the fields of one message in their order, with the low byte first."""

    def __init__(self) -> None:
        self._data = bytearray(LITTLE_ENDIAN)

    def write_numbers(self, form: str, *values: float) -> None:
        """Append numbers of one form of `struct`: B, i, I, H, f or d."""
        self._align(struct.calcsize(form))
        self._data += struct.pack(f"<{len(values)}{form}", *values)

    def write_text(self, text: str) -> None:
        """Append a text."""
        encoded = text.encode() + b"\0"
        self.write_numbers("I", len(encoded))
        self._data += encoded

    def write_header(self, sec: int, nanosec: int, frame_id: str) -> None:
        """Append a std_msgs/Header."""
        self.write_numbers("i", sec)
        self.write_numbers("I", nanosec)
        self.write_text(frame_id)

    def write_count(self, items: Sequence[object]) -> None:
        """Append the length of a list, whose items follow."""
        self.write_numbers("I", len(items))

    def finish(self, pixels: Buffer | None = None) -> bytes:
        """Return the message; with `pixels`, its last field is a list of these bytes."""
        if pixels is None:
            return bytes(self._data)
        pixels = memoryview(pixels).cast("B")
        self.write_numbers("I", len(pixels))
        # one copy of all pixels
        return b"".join((self._data, pixels))

    def _align(self, size: int) -> None:
        self._data += bytes((BEGIN - len(self._data)) % size)
