"""The asyncio counterpart: the same arguments, methods and errors as the client, without blocking the event loop."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sam3_node.client import AsyncPerceptionClient, PerceptionClient, request_id
from sam3_node.errors import NodeRestarted, NotSeenError, TransportError
from sam3_node.transport import MaskPublisher
from sam3_node.transport.control_server import ControlServer
from sam3_node.types import MaskFrame
from sam3_node.wire import Reply, Request
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.refuses import refuses
from tests.support.transport_peer import NOBODY, TCP, make_masks

SYNC_ONLY = {"on_masks", "closed"}


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), PATIENCE_S))

    return run


async def send_until(publisher: MaskPublisher, masks: MaskFrame, waiting: Awaitable[Any]) -> Any:
    """Publish masks until a coroutine or task is done; return its result."""
    task = asyncio.ensure_future(waiting)
    while not task.done():
        publisher.send(masks)
        await asyncio.wait((task,), timeout=0.01)
    return task.result()


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_it_has_the_methods_and_arguments_of_the_client() -> None:
    assert public_names(PerceptionClient) - public_names(AsyncPerceptionClient) == SYNC_ONLY
    assert public_names(AsyncPerceptionClient) <= public_names(PerceptionClient)
    for name in ("__init__", *public_names(AsyncPerceptionClient) - {"connected"}):
        sync = getattr(PerceptionClient, name)
        twin = getattr(AsyncPerceptionClient, name)
        assert inspect.signature(sync) == inspect.signature(twin), name
        assert twin.__doc__ or name == "__init__"


@in_loop
async def test_masks_requests_and_the_loop_go_on_together() -> None:
    """A request that is not answered yet stops neither masks nor the loop."""
    with ControlServer(TCP) as control, MaskPublisher(TCP) as publisher, ThreadPoolExecutor(1) as thread:
        async with AsyncPerceptionClient(
            publisher.endpoint, control.endpoint, timeout_ms=PATIENCE_MS
        ) as client:
            assert client.newest() is None
            assert await client.latest(20) is None
            with request_id("shelf-3"):
                status = asyncio.create_task(client.status())
            received = None
            while received is None:
                received = await asyncio.get_running_loop().run_in_executor(thread, control.receive, 50)
            assert (await send_until(publisher, make_masks(1, epoch=1), client.latest())).seq == 1
            assert client.newest() is not None
            assert not status.done()
            assert received[1].request_id == "shelf-3"
            control.reply(received[0], Reply(received[1].id, {"paused": False}))
            assert await status == {"paused": False}
            together = await send_until(publisher, make_masks(1, epoch=1), client.latest_of_all(["cam0"]))
            assert together.masks["cam0"].seq == 1
            two = [asyncio.create_task(client.latest()) for _ in range(2)]
            for seq, task in enumerate(two):
                assert (await send_until(publisher, make_masks(seq, epoch=1), task)) is not None
            while await client.latest(200) is not None:  # those that were sent too often
                pass
            waiting = asyncio.create_task(client.latest())
            await asyncio.sleep(0)
        assert await waiting is None  # the client is closed
        with refuses(TransportError, field=("client", "closed")):
            await client.latest()
        with refuses(TransportError, field=("client", "closed")):
            await client.status()


@in_loop
async def test_waiting_for_an_object_and_iteration() -> None:
    with MaskPublisher(TCP) as publisher:
        async with AsyncPerceptionClient(publisher.endpoint, NOBODY, timeout_ms=100) as client:
            with refuses(TransportError, field=("20", "within")):
                await client.wait_for("cup", 20)
            found = await send_until(publisher, make_masks(1, epoch=1), client.wait_for("cup", PATIENCE_MS))
            assert found.instance.label == "cup"
            held = client.wait_for_held(found.instance.id, PATIENCE_MS)
            carried = replace(found.masks, instances=(replace(found.instance, held=True),))
            assert (await send_until(publisher, carried, held)).instance.held
            seen = client.wait_until_seen(found.instance.id, PATIENCE_MS)
            assert (await send_until(publisher, found.masks, seen)).instance.label == "cup"
            with refuses(NotSeenError, field="plate"):
                await send_until(publisher, make_masks(2, epoch=1), client.wait_for("plate", 500))

            async def collect() -> list[int]:
                seen: list[int] = []
                async for masks in client:
                    seen.append(masks.seq)
                    if masks.seq == 3:
                        break
                return seen

            assert (await send_until(publisher, make_masks(3, epoch=1), collect()))[-1] == 3


@pytest.mark.parametrize("has_callback", [False, True])
@in_loop
async def test_a_restart_is_raised_or_called_back_in_the_loop(has_callback: bool) -> None:
    loop = asyncio.get_running_loop()
    errors: list[NodeRestarted] = []

    def on_restart(error: NodeRestarted) -> None:
        assert asyncio.get_running_loop() is loop
        errors.append(error)

    with MaskPublisher(TCP) as publisher:
        callback = on_restart if has_callback else None
        async with AsyncPerceptionClient(publisher.endpoint, NOBODY, on_restart=callback) as client:
            await send_until(publisher, make_masks(1, epoch=1), client.latest())
            epoch: int | None = 1
            while epoch == 1:
                try:
                    epoch = (await send_until(publisher, make_masks(2, epoch=2), client.latest())).epoch
                except NodeRestarted as error:
                    errors.append(error)
            assert [error.new_epoch for error in errors] == [2]


@in_loop
async def test_a_camera_is_awaited_while_the_loop_runs(tmp_path: Path) -> None:
    """The node answers after some time, and says at first that no camera sends."""
    stats = {"cam0": {"stepped": 3, "silent_s": 0.1, "last_error": None}}
    asked: list[Request] = []

    def answer(request: Request) -> Reply:
        asked.append(request)
        return Reply(request.id, {"cameras": stats if len(asked) > 2 else {}})

    with ControlServer(TCP, answer) as control, MaskPublisher(TCP) as publisher:
        async with AsyncPerceptionClient(publisher.endpoint, control.endpoint) as client:
            camera = asyncio.create_task(client.wait_for_camera(PATIENCE_MS))
            while not camera.done():
                await asyncio.sleep(0.02)
            assert camera.result() == "cam0"


def test_it_belongs_to_one_event_loop() -> None:
    client = AsyncPerceptionClient(NOBODY, NOBODY, timeout_ms=50)

    async def look() -> None:
        await client.latest(0)

    asyncio.run(look())
    with refuses(TransportError, field=("event", "loop")):
        asyncio.run(look())
    asyncio.run(client.close())
