"""The newest masks of several cameras, with the time between their captures."""

from __future__ import annotations

from pathlib import Path

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.errors import NodeRestarted
from sam3_node.transport import MaskPublisher
from sam3_node.types import MaskFrame

MS = 1_000_000
WAIT_MS = 60_000


def masks(camera: str, seq: int, capture_ms: int, epoch: int = 1) -> MaskFrame:
    return MaskFrame(camera, seq, capture_ms * MS, 8, 8, epoch=epoch)


def test_the_newest_masks_of_all_cameras_and_their_spread(tmp_path: Path) -> None:
    at = f"ipc://{tmp_path}/m"
    with MaskPublisher(at) as node, PerceptionClient(at, f"ipc://{tmp_path}/c") as client:
        while client.latest(50) is None:
            node.send(masks("other", 0, 0))
        node.send(masks("left", 1, 100))
        assert client.latest_of_all(["left", "right"], timeout_ms=50) is None
        node.send(masks("right", 1, 130))
        found = client.latest_of_all(["left", "right"], WAIT_MS)
        assert found is not None
        assert [item.seq for item in found.masks.values()] == [1, 1]
        assert found.spread_ms == 30
        node.send(masks("right", 2, 230))
        assert client.latest_of_all(["left", "right"], 200, max_spread_ms=50) is None
        node.send(masks("left", 2, 220))
        found = client.latest_of_all(["left", "right"], WAIT_MS, max_spread_ms=50)
        assert found is not None
        assert ([item.seq for item in found.masks.values()], found.spread_ms) == ([2, 2], 10)


def test_masks_from_before_a_restart_are_forgotten(tmp_path: Path) -> None:
    at = f"ipc://{tmp_path}/m"
    with MaskPublisher(at) as node, PerceptionClient(at, f"ipc://{tmp_path}/c") as client:
        found = None
        while found is None:
            for camera in ("left", "right"):
                node.send(masks(camera, 0, 0))
            found = client.latest_of_all(["left", "right"], 50)
        while client.latest(100) is not None:
            pass
        node.send(masks("left", 0, 10, epoch=2))
        with pytest.raises(NodeRestarted):
            client.latest_of_all(["left", "right"], WAIT_MS)
        assert client.latest_of_all(["left", "right"], 100) is None
