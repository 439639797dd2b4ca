"""Masks of a node for the tests of observations."""

import time
from dataclasses import replace

import numpy as np

from sam3_node.errors import NodeRestarted
from sam3_node.types import Instance, Mask, MaskFrame

T0 = 1_700_000_000_000_000_000
"""Unix time of the capture, ns"""
FRAME = (96, 128)
"""height and width"""


def make_instance(id: int, label: str, box: tuple[int, int, int, int] = (16, 32, 48, 64)) -> Instance:
    """Return a sure, tracked object whose mask fills a box (x0, y0, x1, y1)."""
    full = np.zeros(FRAME, np.bool_)
    full[box[1] : box[3], box[0] : box[2]] = True
    return Instance(id, label, 0.95, "tracked", 7, 0, Mask.from_full(full), confidence=0.9)


def make_frame(*instances: Instance, camera: str = "cam0", seq: int = 0) -> MaskFrame:
    """Return masks of a frame that was captured at T0."""
    return MaskFrame(camera, seq, T0, FRAME[1], FRAME[0], instances=instances, epoch=7)


def fresh(*instances: Instance) -> MaskFrame:
    """Return masks that have just been captured."""
    return replace(make_frame(*instances), capture_ns=time.time_ns())


class Client:
    """A client with prepared masks, each of which may be None or an error; then it has none."""

    def __init__(self, *waiting: MaskFrame | NodeRestarted | None) -> None:
        self.waiting = list(waiting)

    def latest(self, timeout_ms: int | None = None) -> MaskFrame | None:
        found = self.waiting.pop(0) if self.waiting else None
        if isinstance(found, NodeRestarted):
            raise found
        return found
