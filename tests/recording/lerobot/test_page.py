"""The programs of docs/lerobot.md: actions without this package, and episodes from a program."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from sam3_node import client
from sam3_node.transport.tap import StreamTap
from sam3_node.types import JointState
from sam3_node.wire import unpack_action, unpack_pose
from tests.support.pages import block_with
from tests.support.patience import PATIENCE_MS
from tests.support.threads import repeating

STATES = (({"elbow": 0.4}, None), ({"elbow": 0.4}, {"elbow": 0.5, "finger": 0.01}))


class RobotError(Exception):
    """Raised by a robot that stops within an episode."""


def define(text: str) -> dict[str, Any]:
    """Run the block of the page with this text, and return its names."""
    names: dict[str, Any] = {}
    exec(block_with("docs/lerobot.md", text), names)
    return names


def pace(*states: Any, count: int) -> Iterator[Any]:
    for _ in range(count):
        time.sleep(0.01)
        yield from states


def test_a_recorder_takes_joints_and_actions_that_were_sent_without_this_package(tmp_path: Path) -> None:
    send: Callable[..., None] = define("def send_arm")["send_arm"]
    endpoint = f"ipc://{tmp_path}/robot"
    with (
        StreamTap([f"ipc://{tmp_path}/frames"], f"ipc://{tmp_path}/masks", (), 1 << 20, endpoint) as tap,
        repeating(lambda: send(endpoint, pace(*STATES, count=20), "left-arm", "command")),
    ):
        found: dict[bytes, Any] = {}
        while len(found) < 2:
            arrived = tap.take(PATIENCE_MS)
            assert arrived is not None
            found[bytes(arrived.parts[0])] = arrived.parts
    joints = unpack_pose(found[b"joints/left-arm"])
    assert isinstance(joints, JointState)
    assert (joints.robot, joints.clock, joints.positions) == ("left-arm", "system", {"elbow": 0.4})
    action = unpack_action(found[b"action/left-arm"])
    assert (action.robot, action.source, action.clock) == ("left-arm", "command", "system")
    assert action.values == {"elbow": 0.5, "finger": 0.01}


@pytest.mark.parametrize("outcome", [True, False, RobotError()])
def test_an_episode_of_a_robot_that_fails_is_discarded(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = MagicMock()
    node.__enter__.return_value = node
    monkeypatch.setattr(client, "PerceptionClient", lambda: node)
    move = MagicMock(side_effect=[outcome])
    record_episode = define("def record_episode")["record_episode"]
    if isinstance(outcome, RobotError):
        with pytest.raises(RobotError):
            record_episode(move, "put the mug away")
    else:
        record_episode(move, "put the mug away")
    node.begin_episode.assert_called_once_with("put the mug away")
    node.end_episode.assert_called_once_with(keep=outcome is True)
