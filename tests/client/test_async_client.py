"""The asyncio counterpart: the same arguments, methods and errors as the client, without blocking the event loop."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
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
from tests.support.refuses import refuses
from tests.support.transport_peer import make_masks

TCP = "tcp://127.0.0.1:*"
NOBODY = "tcp://127.0.0.1:9"
LONG_MS = 120_000
SYNC_ONLY = {"on_masks", "closed"}


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 120))


def masks_of(seq: int, epoch: int = 1) -> MaskFrame:
    return replace(make_masks(seq), epoch=epoch)


async def send_until(publisher: MaskPublisher, masks: MaskFrame, task: asyncio.Task[Any]) -> Any:
    """Publish masks until a task is done; return its result."""
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
        sync, twin = getattr(PerceptionClient, name), getattr(AsyncPerceptionClient, name)
        assert inspect.signature(sync) == inspect.signature(twin), name
        assert twin.__doc__ or name == "__init__"


def test_masks_requests_and_the_loop_go_on_together() -> None:
    """A request that is not answered yet stops neither masks nor the loop."""

    async def main() -> None:
        with ControlServer(TCP) as control, MaskPublisher(TCP) as publisher, ThreadPoolExecutor(1) as thread:
            async with AsyncPerceptionClient(
                publisher.endpoint, control.endpoint, timeout_ms=LONG_MS
            ) as client:
                assert client.newest() is None
                assert await client.latest(20) is None
                with request_id("shelf-3"):
                    status = asyncio.create_task(client.status())
                received = None
                while received is None:
                    received = await asyncio.get_running_loop().run_in_executor(thread, control.receive, 50)
                first = asyncio.create_task(client.latest())
                assert (await send_until(publisher, masks_of(1), first)).seq == 1
                assert client.newest() is not None
                assert not status.done()
                assert received[1].request_id == "shelf-3"
                control.reply(received[0], Reply(received[1].id, {"paused": False}))
                assert await status == {"paused": False}
                together = asyncio.create_task(client.latest_of_all(["cam0"]))
                assert (await send_until(publisher, masks_of(1), together)).masks["cam0"].seq == 1
                two = [asyncio.create_task(client.latest()) for _ in range(2)]
                for seq, task in enumerate(two):
                    assert (await send_until(publisher, masks_of(seq), task)) is not None
                while await client.latest(200) is not None:  # those that were sent too often
                    pass
                waiting = asyncio.create_task(client.latest())
                await asyncio.sleep(0)
            assert await waiting is None  # the client is closed
            with refuses(TransportError, field=("client", "closed")):
                await client.latest()
            with refuses(TransportError, field=("client", "closed")):
                await client.status()

    run(main)


def test_waiting_for_an_object_and_iteration() -> None:
    async def main() -> None:
        with MaskPublisher(TCP) as publisher:
            async with AsyncPerceptionClient(publisher.endpoint, NOBODY, timeout_ms=100) as client:
                with refuses(TransportError, field=("20", "within")):
                    await client.wait_for("cup", 20)
                found = await send_until(
                    publisher, masks_of(1), asyncio.create_task(client.wait_for("cup", LONG_MS))
                )
                assert found.instance.label == "cup"
                held = asyncio.create_task(client.wait_for_held(found.instance.id, LONG_MS))
                carried = replace(found.masks, instances=(replace(found.instance, held=True),))
                assert (await send_until(publisher, carried, held)).instance.held
                vain = asyncio.create_task(client.wait_for("plate", 500))
                with refuses(NotSeenError, field="plate"):
                    await send_until(publisher, masks_of(2), vain)

                async def collect() -> list[int]:
                    seen: list[int] = []
                    async for masks in client:
                        seen.append(masks.seq)
                        if masks.seq == 3:
                            break
                    return seen

                assert (await send_until(publisher, masks_of(3), asyncio.create_task(collect())))[-1] == 3

    run(main)


@pytest.mark.parametrize("has_callback", [False, True])
def test_a_restart_is_raised_or_called_back_in_the_loop(has_callback: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        errors: list[NodeRestarted] = []

        def on_restart(error: NodeRestarted) -> None:
            assert asyncio.get_running_loop() is loop
            errors.append(error)

        with MaskPublisher(TCP) as publisher:
            callback = on_restart if has_callback else None
            async with AsyncPerceptionClient(publisher.endpoint, NOBODY, on_restart=callback) as client:
                await send_until(publisher, masks_of(1), asyncio.create_task(client.latest()))
                epoch: int | None = 1
                while epoch == 1:
                    try:
                        masks = await send_until(
                            publisher, masks_of(2, 2), asyncio.create_task(client.latest())
                        )
                        epoch = masks.epoch
                    except NodeRestarted as error:
                        errors.append(error)
                assert [error.new_epoch for error in errors] == [2]

    run(main)


def test_a_camera_is_awaited_while_the_loop_runs(tmp_path: Path) -> None:
    """The node answers after some time, and says at first that no camera sends."""
    stats = {"cam0": {"stepped": 3, "silent_s": 0.1, "last_error": None}}
    asked: list[Request] = []

    def answer(request: Request) -> Reply:
        asked.append(request)
        return Reply(request.id, {"cameras": stats if len(asked) > 2 else {}})

    async def main() -> None:
        with ControlServer(TCP, answer) as control, MaskPublisher(TCP) as publisher:
            async with AsyncPerceptionClient(publisher.endpoint, control.endpoint) as client:
                camera = asyncio.create_task(client.wait_for_camera(LONG_MS))
                while not camera.done():
                    await asyncio.sleep(0.02)
                assert camera.result() == "cam0"

    run(main)


def test_it_belongs_to_one_event_loop() -> None:
    client = AsyncPerceptionClient(NOBODY, NOBODY, timeout_ms=50)

    async def look() -> None:
        await client.latest(0)

    asyncio.run(look())
    with refuses(TransportError, field=("event", "loop")):
        asyncio.run(look())
    client._client.close()
