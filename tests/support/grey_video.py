"""Encode a grey video that becomes brighter, packet by packet. A process that only encodes imports nothing else."""

import av
import numpy as np

OPTIONS = {
    "libsvtav1": {"svtav1-params": "pred-struct=1"},
    "mpeg4": {},
    "libx264": {"tune": "zerolatency"},
    "libx265": {"tune": "zerolatency", "x265-params": "pools=1:log-level=none"},
}
USUAL_OPTIONS = {"lag-in-frames": "0", "deadline": "realtime"}
"""of libvpx, which must not wait for later pictures"""


def level(index: int) -> int:
    """Return the brightness of a picture."""
    return 40 + 15 * index


def encode(codec: str, count: int, size: tuple[int, int]) -> list[bytes]:
    """Return the packets of `count` pictures of `size` (height, width)."""
    context = av.CodecContext.create(codec, "w")
    context.height, context.width, context.pix_fmt = *size, "yuv420p"
    context.time_base = 1
    context.gop_size = 6
    context.max_b_frames = 0
    context.options = OPTIONS.get(codec, USUAL_OPTIONS)
    found = []
    for index in range(count):
        image = av.VideoFrame.from_ndarray(np.full((*size, 3), level(index), np.uint8), format="bgr24")
        image.pts = index
        found += [bytes(packet) for packet in context.encode(image)]
    return found + [bytes(packet) for packet in context.encode(None) if packet.size]
