"""The policy developer's path: an own camera and arm without this package, and a policy that picks a block by name.

The node is killed while the gripper holds the block, and then the camera. Both are started again, and the policy goes
on. The bundled weights find, follow and measure; the cell knows the truth.
"""

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from sam3_node.client import PerceptionClient
from sam3_node.geometry import Array
from sam3_node.types import Instance, MaskFrame
from tests.support.node_rig import Rig, until, unworried_client
from tests.support.pages import block_with
from tests.support.patience import PATIENCE_S
from tests.support.pick_cell import LENS, Cell, write_files

pytest.importorskip("trimesh", reason="needs the extra robot")
pytest.importorskip("yourdfpy", reason="needs the extra robot")

PATIENCE_MS = round(1000 * PATIENCE_S)
PERIOD_NS = 66_666_667
"""Time between two moments on the clock of camera and robot."""
AGAIN_NS = 1_000_000
"""Time between two frames of one moment: the first was lost, or came before the robot's pose."""
AGAIN_MS = 500
"""Time without masks after which a frame counts as lost."""
SPEED_M = 0.02
"""Way of the gripper from one moment to the next."""
ABOVE_M = np.array([0, 0, 0.13])
BESIDE_M = np.array([-0.1, 0, 0])
POINTS_DOWN = [1.0, 0.0, 0.0, 0.0]
CALM = 4
"""Moments with a held block before each trouble."""
RECALL = 0.8
"""Least share of the moments in the gripper that are told as held. The lift begins them."""
BLOCK = 0
BALL = 1
BALL_PIXEL = (206.0, 111.0)
PROGRAM = """
import pickle
import sys

sys.modules["sam3_node"] = None  # the sender has no use of it
{sender}

def read():
    while True:
        yield pickle.load(sys.stdin.buffer)


{call}
"""


def policy(node: PerceptionClient, arm: "World") -> list[int]:
    """Pick the red block, and put it down beside the ball. Return both ids, before and after."""

    def find(label: str) -> Instance:
        while True:
            found = node.wait_for(label, PATIENCE_MS, most=1).instance
            # a doubtful mask has no position
            if found.position_m is not None:
                return found
            node.latest(PATIENCE_MS)

    node.wait_for_camera(PATIENCE_MS)
    node.set_prompts(["red block"], most=1)
    node.add_object(points=[BALL_PIXEL], label="goal")
    block = find("red block")
    ball = find("goal")

    arm.go(np.add(block.position_m, ABOVE_M))
    arm.go(block.position_m)
    arm.close()
    arm.go(np.add(block.position_m, ABOVE_M))
    node.wait_for_held(block.id, PATIENCE_MS)

    goal = np.add(find("goal").position_m, BESIDE_M)
    goal[2] = block.position_m[2]
    arm.go(goal + ABOVE_M)
    arm.go(goal)
    arm.open()
    arm.go(goal + ABOVE_M)
    for masks in node:
        if not any(instance.held for instance in masks.instances):
            break
    return [block.id, ball.id, find("red block").id, find("goal").id]


class Moment(NamedTuple):
    """The truth of a frame."""

    surfaces: list[Array | None]
    """by thing, the mean of its visible surface in the base"""
    carried: int | None
    """the thing in the gripper"""


class Sender:
    """A process that publishes what is fed to it, by a sender of docs/own-camera.md."""

    def __init__(self, call: str) -> None:
        name = call.partition("(")[0]
        sender = block_with("docs/own-camera.md", f"def {name}(")
        self._program = [sys.executable, "-c", PROGRAM.format(sender=sender, call=call)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._program, stdin=subprocess.PIPE)

    def feed(self, *values: Any) -> None:
        assert self._process.poll() is None
        assert self._process.stdin is not None
        pickle.dump(values, self._process.stdin)
        self._process.stdin.flush()

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.communicate(timeout=PATIENCE_S)


class World:
    """The cell in a thread. Its time goes on when the masks of the last moment have come, however long they take.

    A policy commands the arm from another thread.
    """

    def __init__(self, rig: Rig, poses: str) -> None:
        lens = asdict(LENS)
        self.camera = Sender(f"send_frames({rig.frames[0]!r}, read(), {lens!r}, clock='monotonic')")
        self.robot = Sender(f"send_robot({poses!r}, read(), clock='monotonic')")
        self.cell = Cell()
        self.moments: dict[int, Moment] = {}
        """by capture_ns"""
        self.masks: list[MaskFrame] = []
        """of each moment, with the gripper's pose"""
        self.troubles: list[Callable[[], None]] = []
        """what happens while the block is held, CALM moments after the one before"""
        self._goal = self.cell.tip
        self._moved = threading.Condition()
        self._ended = threading.Event()
        self._stamp_ns = PERIOD_NS
        self._client = rig.enter_context(unworried_client(rig.masks, rig.control))
        self._thread = rig.enter_context(ThreadPoolExecutor(1))
        rig.callback(self._end)
        self._life = self._thread.submit(self._live)
        self._life.add_done_callback(self._tell_end)

    def go(self, place: npt.ArrayLike) -> None:
        """Move the arm to a place, and wait until it is there."""
        with self._moved:
            self._goal = np.array(place)
            arrived = self._moved.wait_for(self._is_there, PATIENCE_S)
        assert arrived, f"the arm did not reach {place}"

    def close(self) -> None:
        with self._moved:
            self.cell.close()

    def open(self) -> None:
        with self._moved:
            self.cell.open()

    def _is_there(self) -> bool:
        # an error of the world ends the policy, too
        if self._life.done():
            self._life.result()
        return np.array_equal(self.cell.tip, self._goal)

    def _tell_end(self, _: object) -> None:
        with self._moved:
            self._moved.notify_all()

    def _live(self) -> None:
        calm = 0
        while not self._ended.is_set():
            with self._moved:
                way = self._goal - self.cell.tip
                length_m = float(np.linalg.norm(way))
                if length_m > SPEED_M:
                    self.cell.move(SPEED_M / length_m * way)
                else:
                    self.cell.move(way)
                self._moved.notify_all()
            self._stamp_ns += PERIOD_NS
            self._show()
            if not self.masks or not any(instance.held for instance in self.masks[-1].instances):
                continue
            calm += 1
            if self.troubles and calm > CALM:
                calm = 0
                self.troubles.pop(0)()

    def _show(self) -> None:
        """Send this moment, again and again, until masks of it have come that know the gripper."""
        picture = self.cell.render()
        moment = Moment(picture.surfaces, self.cell.carried)
        while not self._ended.is_set():
            self.moments[self._stamp_ns] = moment
            self.robot.feed(self._stamp_ns, self.cell.tip.tolist(), POINTS_DOWN, self.cell.joints())
            self.camera.feed(self._stamp_ns, picture.colour, picture.depth)
            while (masks := self._client.latest(timeout_ms=AGAIN_MS)) is not None:
                if masks.capture_ns == self._stamp_ns and masks.robot_pose is not None:
                    self.masks.append(masks)
                    return
            self._stamp_ns += AGAIN_NS

    def _end(self) -> None:
        self._ended.set()
        self._life.exception()
        self.camera.kill()
        self.robot.kill()


class Trouble:
    """Kills of the node and of the camera, each of which is started again."""

    def __init__(self, rig: Rig, world: World) -> None:
        self._rig = rig
        self._world = world
        self._node = rig.node()
        world.troubles += [self.kill_node, self.kill_camera]

    def kill_node(self) -> None:
        with self._rig.client() as client:
            saved = client.status()["snapshot"]["saved"]
            until(lambda: client.status()["snapshot"]["saved"] >= saved + 2, "a snapshot of the grasp")
        self._node.kill()
        self._node = self._rig.node()

    def kill_camera(self) -> None:
        self._world.camera.kill()
        self._world.camera.start()


def test_a_policy_picks_a_block_while_node_and_camera_are_killed(tmp_path: Path) -> None:
    calibration, urdf = write_files(tmp_path)
    poses = f"ipc://{tmp_path}/poses"
    with Rig(tmp_path) as rig:
        rig.environment |= {
            "SAM3_MODEL__NAME": "nano",
            "SAM3_DETECTOR__KIND": "yolo-world",
            "SAM3_SPATIAL__CALIBRATION": str(calibration),
            "SAM3_SPATIAL__POSES": poses,
            "SAM3_ROBOT__URDF": str(urdf),
            "SAM3_SNAPSHOT__PATH": str(tmp_path / "node.snapshot"),
            "SAM3_SNAPSHOT__EVERY_S": "0.1",
        }
        world = World(rig, poses)
        Trouble(rig, world)
        with rig.client() as client:
            ids = policy(client, world)
        assert world.troubles == []
    block, ball = ids[:2]
    assert ids == [block, ball, block, ball]
    check_ids(world.masks, block, ball)
    check_positions(world, {block: BLOCK, ball: BALL})
    check_held(world, block)


def check_ids(seen: list[MaskFrame], block: int, ball: int) -> None:
    """Ids and epoch stay, over another process of the node and another camera, whose seq begin again."""
    assert len({masks.node for masks in seen}) == 2
    assert len({masks.epoch for masks in seen}) == 1
    assert sum(later.seq < earlier.seq for earlier, later in pairwise(seen)) == 1
    assert {instance.id for masks in seen for instance in masks.instances} == {block, ball}


def check_positions(world: World, things: dict[int, int]) -> None:
    errors_m = []
    for masks in world.masks:
        surfaces = world.moments[masks.capture_ns].surfaces
        for instance in masks.instances:
            true_m = surfaces[things[instance.id]]
            if instance.position_m is not None and true_m is not None:
                errors_m.append(np.linalg.norm(np.subtract(instance.position_m, true_m)))
    assert len(errors_m) > len(world.masks)
    assert np.median(errors_m) < 0.005
    assert np.quantile(errors_m, 0.95) < 0.02


def check_held(world: World, block: int) -> None:
    """Most frames tell that the block is held; none tells it before the grasp, or of another thing."""
    carried = [world.moments[masks.capture_ns].carried == BLOCK for masks in world.masks]
    held = [[item.id for item in masks.instances if item.held] for masks in world.masks]
    assert all(ids in ([], [block]) for ids in held)
    assert not any(held[: carried.index(True)])
    right = sum(ids == [block] for ids, is_carried in zip(held, carried, strict=True) if is_carried)
    assert right >= RECALL * sum(carried)
    assert not held[-1]
