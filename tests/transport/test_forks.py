"""After a fork, what owns sockets raises in the new process, and the first process goes on undisturbed."""

import asyncio
import gc
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sam3_node import transport
from sam3_node.client import AsyncPerceptionClient, PerceptionClient
from sam3_node.errors import TransportError
from sam3_node.transport import ControlClient, FrameSubscriber, Security
from sam3_node.transport.control_server import ControlServer
from sam3_node.transport.foreign import ForeignHub, ForeignSubscriber
from sam3_node.transport.tap import PoseSubscriber, StreamTap
from sam3_node.wire import Reply
from tests.support.key_rig import Keys
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import mentions
from tests.support.transport_peer import make_frame, make_masks, wait_until
from tests.support.wire_examples import gripper_pose

HANG_S = 60.0


def in_child(call: Callable[[], Any]) -> str:
    """Return what a call says in a process that is forked here: the text of its TransportError, or "done"."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def run() -> None:
        try:
            call()
            writer.send("done")
        except TransportError as error:
            writer.send(str(error))
        except BaseException as error:
            writer.send(f"another error: {error!r}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, which are what is tested
        process = context.Process(target=run, daemon=True)
        process.start()
    try:
        assert reader.poll(HANG_S), "the call hangs"
        said = str(reader.recv())
        process.join(HANG_S)
        assert process.exitcode == 0
        return said
    finally:
        process.kill()


@pytest.fixture(params=["tcp", "ipc", "keys"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Yield all kinds of owners of sockets, connected."""
    numbers = iter(range(9))
    node = Security()
    camera = node
    robot = node
    policy = node
    if request.param == "keys":
        keys = Keys(tmp_path / "keys")
        roles = ("node", "cam0", "robot", "policy")
        node, camera, robot, policy = (keys.machine(name, name) for name in roles)
        policy = Security(policy.keys, camera_keys=("cam0",))

    def place() -> str:
        return f"ipc://{tmp_path}/{next(numbers)}" if request.param == "ipc" else "tcp://127.0.0.1:*"

    with ExitStack() as stack:
        enter = stack.enter_context
        found = SimpleNamespace()
        found.frames = enter(transport.FramePublisher(place(), security=camera.for_camera("cam0")))
        found.masks = enter(transport.MaskPublisher(place(), security=node))
        found.control = enter(ControlServer(place(), lambda r: Reply(r.id, "done"), security=node))
        found.poses = enter(transport.PosePublisher(place(), robot))
        found.hub = enter(ForeignHub(place(), lambda *_: None))
        endpoints = found.masks.endpoint, found.control.endpoint
        found.client = enter(PerceptionClient(*endpoints, timeout_ms=PATIENCE_MS, security=policy))
        found.async_client = AsyncPerceptionClient(*endpoints, timeout_ms=PATIENCE_MS, security=policy)
        stack.callback(lambda: asyncio.run(found.async_client.close()))
        found.requests = enter(ControlClient(found.control.endpoint, 20_000, policy))
        found.reader = enter(FrameSubscriber([found.frames.endpoint], security=policy))
        streams = ([found.frames.endpoint], found.masks.endpoint)
        found.tap = enter(StreamTap(*streams, (), 1 << 20, security=policy))
        found.robot = enter(PoseSubscriber(found.poses.endpoint, security=policy))
        found.foreign = enter(ForeignSubscriber("tcp://127.0.0.1:9", lambda *_: None))
        found.policy = policy
        go_on(found)
        yield found


def go_on(rig: SimpleNamespace) -> None:
    """Send and receive by everything."""
    wait_until(lambda: rig.masks.send(make_masks(1)) and rig.client.newest() and rig.client.latest(20))
    wait_until(lambda: rig.frames.send(make_frame(1)) and rig.reader.take(20) and rig.tap.take(20))
    wait_until(lambda: rig.poses.send(gripper_pose()) and rig.robot.take(20))
    assert rig.client.status() == rig.requests.call("status") == "done"


def calls(rig: SimpleNamespace) -> dict[str, Callable[[], Any]]:
    client = rig.client

    def awaited(name: str, *arguments: Any) -> Callable[[], Any]:
        async def run() -> Any:
            return await getattr(rig.async_client, name)(*arguments)

        return lambda: asyncio.run(run())

    return {
        "latest": lambda: client.latest(100),
        "newest": client.newest,
        "iteration": lambda: next(iter(client)),
        "latest_of_all": lambda: client.latest_of_all(["cam0"], 100),
        "wait_for": lambda: client.wait_for("cup", 100),
        "wait_for_camera": lambda: client.wait_for_camera(100),
        "on_masks": lambda: client.on_masks(print),
        "status": client.status,
        "diagnosis": client.diagnosis,
        "add_object": lambda: client.add_object(points=[(1, 1)]),
        "remove_object": lambda: client.remove_object(1),
        "list_objects": client.list_objects,
        "set_prompts": lambda: client.set_prompts(["cup"]),
        "fetch_snapshot": client.fetch_snapshot,
        "await latest": awaited("latest", 100),
        "await wait_for": awaited("wait_for", "cup", 100),
        "await status": awaited("status"),
        "requests": lambda: rig.requests.call("status"),
        "send frames": lambda: rig.frames.send(make_frame(1)),
        "send masks": lambda: rig.masks.send(make_masks(1)),
        "send poses": lambda: rig.poses.send(gripper_pose()),
        "wait_for_peer": lambda: rig.frames.wait_for_peer(100),
        "take frames": lambda: rig.reader.take(100),
        "peek": lambda: rig.reader.peek((), 100),
        "take poses": lambda: rig.robot.take(100),
        "take all": lambda: rig.tap.take(100),
        "receive requests": lambda: rig.control.receive(100),
        "check hub": rig.hub.check,
        "check foreign": rig.foreign.check,
    }


def test_every_call_says_that_sockets_do_not_survive_a_fork(rig: SimpleNamespace) -> None:
    for name, call in calls(rig).items():
        said = in_child(call)
        assert mentions(said, "forked"), f"{name}: {said}"
        assert mentions(said, "worker"), name
    go_on(rig)


def test_the_end_of_the_forked_process_disturbs_nothing(rig: SimpleNamespace) -> None:
    def close_all() -> None:
        assert not rig.client.connected
        for name, owner in list(vars(rig).items()):
            if name != "policy":
                for _ in range(2):
                    if name == "async_client":
                        asyncio.run(owner.close())
                    else:
                        owner.close()
                delattr(rig, name)
        gc.collect()

    assert in_child(close_all) == "done"
    assert in_child(gc.collect) == "done"
    go_on(rig)
    begin_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin_s < 0.4, "a thread was woken for ever"


def test_the_forked_process_may_have_a_client_of_its_own(rig: SimpleNamespace) -> None:
    def ask() -> None:
        endpoints = rig.masks.endpoint, rig.control.endpoint
        with PerceptionClient(*endpoints, timeout_ms=PATIENCE_MS, security=rig.policy) as client:
            assert client.status() == "done"

    assert in_child(ask) == "done"
    go_on(rig)
