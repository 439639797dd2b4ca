"""The images that were sent to the node: their headers, which their masks get, and the newest one as a picture."""

from __future__ import annotations

import threading
from typing import Any

from sam3_node.client import ObjectPlace
from sam3_node.errors import UnknownFrameError
from sam3_node.types import NANOSECONDS, FrameKey

from .messages import Picture
from .parts import Header

MAX_HEADERS = 1024
"""Images whose headers are remembered, to give them to their masks."""


class SentImages:
    """The last MAX_HEADERS images of one camera, which has this topic. Several threads may ask."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._headers: dict[FrameKey, Header] = {}
        self._newest: tuple[int, Picture] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._headers)

    def add(self, key: FrameKey, header: Header) -> None:
        """Remember an image, and forget the oldest one."""
        with self._lock:
            self._headers[key] = header
            if len(self._headers) > MAX_HEADERS:
                del self._headers[next(iter(self._headers))]

    def keep(self, seq: int, picture: Picture) -> None:
        """Keep the newest image, in place of the one before."""
        self._newest = seq, picture

    def get(self, key: FrameKey) -> Header | None:
        """Return the header of an image; None if it was not sent here, or long ago."""
        with self._lock:
            return self._headers.get(key)

    def find_header(self, seq: int) -> Header | None:
        """Return the header of the last image with a number; None if it was not sent here, or long ago."""
        with self._lock:
            return next((header for key, header in reversed(self._headers.items()) if key.seq == seq), None)

    def require_header(self, seq: int, camera: str) -> Header:
        """Return the header of the last image with a number. Raises UnknownFrameError."""
        header = self.find_header(seq)
        if header is None:
            raise UnknownFrameError(
                f"image: expected one of the last {MAX_HEADERS} that this ROS node sent, found that the latest of "
                f"sam3-node is another; send an image of camera {camera}"
            )
        return header

    def find_seq(self, stamp: Any) -> int | None:
        """Return the seq of the last image with a stamp; None for stamp 0. Raises UnknownFrameError."""
        if not (stamp.sec or stamp.nanosec):
            return None
        with self._lock:
            for key, header in reversed(self._headers.items()):
                if (header.sec, header.nanosec) == (stamp.sec, stamp.nanosec):
                    return key.seq
        raise UnknownFrameError(
            f"stamp: expected the stamp of one of the last {MAX_HEADERS} images, found {stamp.sec}.{stamp.nanosec:09d}"
        )

    def find_picture(self, stamp: Any) -> Picture:
        """Return the image with a stamp, the newest one for 0. Raises UnknownFrameError for one that is not the newest.

        Raises UnknownFrameError before the first one as well.
        """
        seq = self.find_seq(stamp)
        if self._newest is None:
            raise UnknownFrameError(
                "image: expected one of the camera, found none yet; activate the node, and look at "
                f"ros2 topic hz {self._topic}"
            )
        newest_seq, picture = self._newest
        if seq not in (None, newest_seq):
            raise UnknownFrameError(
                f"stamp: names are looked for on the newest image, found that {stamp.sec}.{stamp.nanosec:09d} is of an "
                "earlier one; leave the stamp at 0, or send the image"
            )
        return picture

    def find_header_of(self, place: ObjectPlace) -> Header:
        """Return the header of the image that showed an object last; made of its time if that was sent long ago."""
        if place.seq is None or place.capture_ns is None:
            return Header(0, 0, "")
        with self._lock:
            sent = self._headers.get(FrameKey(place.camera, place.seq, place.capture_ns))
            newest = next(reversed(self._headers.values()), None)
        if sent is not None:
            return sent
        frame_id = "" if newest is None else newest.frame_id
        return Header(*divmod(place.capture_ns, NANOSECONDS), frame_id)
