"""Masks in an MCAP file: topic masks/<camera>, message encoding msgpack, each the body of a wire message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...errors import BagError, WireError
from ...types import MaskEncoding, MaskFrame
from ...wire import masks_topic, pack_masks, unpack_masks
from .container import MessageWriter, read_messages

ROOT = "masks/"


class MaskBagWriter(MessageWriter):
    """Writes masks to `path`; log time is the time of capture (where that is not
    Unix time, of arrival), publish time that of publishing, in ns.

    Masks are kept as COCO RLE unless told otherwise.
    """

    def __init__(self, path: Path, encoding: MaskEncoding = "rle") -> None:
        super().__init__(path)
        self._encoding = encoding

    def write(self, masks: MaskFrame) -> None:
        """Append one message."""
        topic, body = pack_masks(masks, self._encoding)
        taken_ns = masks.age_origin_ns
        self.add(topic.decode(), body, masks.seq, taken_ns, masks.published_ns or taken_ns)


def read_masks(path: Path) -> Iterator[MaskFrame]:
    """The masks of a file that MaskBagWriter wrote, in that order; of a truncated one what is whole, then BagError.

    Raises BagError, too, where it cannot be read, is no MCAP file or a message in it is not masks.
    """
    return masks_on(path, ROOT)


def masks_on(path: Path, root: str) -> Iterator[MaskFrame]:
    """The masks on the topics `root`<camera>; BagError as read_masks."""
    for topic, body in read_messages(path):
        if topic.startswith(root):
            try:
                yield unpack_masks([masks_topic(topic.removeprefix(root)), body])
            except WireError as error:
                raise BagError(f"{path}, topic {topic}: {error}") from error
