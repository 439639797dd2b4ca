"""Frames, masks and events as a recorded node has them."""

from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import Event


def make_frame(seq: int, camera: str = "a", capture_ns: int | None = None) -> Frame:
    return Frame(
        camera, seq, 100 + seq if capture_ns is None else capture_ns, 2, 2, "mono8", bytes(4), sent_ns=5
    )


def make_masks(seq: int, skipped: int = 0, camera: str = "a") -> MaskFrame:
    return MaskFrame(camera, seq, 100 + seq, 2, 2, received_ns=7, skipped=skipped)


def served(n: int, camera: str = "a") -> Event:
    return Event(n, "served", {"camera": camera})
