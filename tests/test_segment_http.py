"""The example of `segment` behind HTTP bounds what a request may cost."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import pycocotools.mask
import pytest

from tests.support.hostility import MEGABYTE, large_jpeg, large_png, limited_memory
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

pytest.importorskip("starlette", reason="the extra console is not installed")

JPEG = cv2.imencode(".jpg", np.full((48, 64, 3), 90, np.uint8))[1].tobytes()
PLACE = {"type": "http", "method": "POST", "path": "/segment", "query_string": b"", "headers": []}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("segment_http", ROOT / "examples/segment_http.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(image: bytes, **args: Any) -> bytes:
    return json.dumps({"image": base64.b64encode(image).decode(), **args}).encode()


async def post(example: ModuleType, receive: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[int, Any]:
    """Return the status and the content of the answer."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await example.app(PLACE, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run the work in a thread, because a browser of other tests may keep a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def answer(example: ModuleType, body: bytes) -> tuple[int, Any]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    return run(post(example, receive))


def test_an_image_of_many_pixels_is_refused_before_it_is_decoded(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cv2, "imdecode", lambda *args: pytest.fail("decoded"))
    for image in (large_png(), large_png(colour=0), large_jpeg(JPEG)):
        body = ask(image, points=[[30, 20]])
        with limited_memory(8):
            status, content = answer(example, body)
        assert status == 400
        assert "8192 x 8192" in content["error"]


def test_what_is_no_request_is_an_error(example: ModuleType) -> None:
    bodies = (b"", b"x", b"{}", b"[]", b"[" * 200_000, b'{"image": 3}', ask(b"no image"), ask(JPEG, box=[1]))
    for body in (*bodies, ask(JPEG), ask(JPEG[:-9], points=[[30, 20]]), ask(JPEG, points=[[900, 900]])):
        status, content = answer(example, body)
        assert status == 400, body[:80]
        assert content["error"]


def test_a_body_is_read_up_to_its_limit(example: ModuleType) -> None:
    parts = 0

    async def receive() -> dict[str, Any]:
        nonlocal parts
        parts += 1
        return {"type": "http.request", "body": bytes(MEGABYTE), "more_body": True}

    status, content = run(post(example, receive))
    assert status == 413
    assert str(example.MAX_BODY) in content["error"]
    assert parts == example.MAX_BODY // MEGABYTE + 1


def test_a_body_that_does_not_end_frees_its_place(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "BODY_S", 0.05)
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])

    async def receive() -> dict[str, Any]:
        for part in parts:
            return part
        await asyncio.Event().wait()
        raise AssertionError

    status, content = run(post(example, receive))
    assert status == 408
    assert "0.05 s" in content["error"]
    assert not example.places.locked()
    monkeypatch.undo()
    status, _ = answer(example, ask(JPEG, points=[[30, 20]]))
    assert status == 200


def test_requests_are_carried_out_one_at_a_time_and_too_many_are_refused(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = threading.Semaphore(1)
    go = threading.Event()

    def find(body: bytearray) -> list[str]:
        assert running.acquire(blocking=False)
        assert go.wait(PATIENCE_S)
        running.release()
        return []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def flood() -> list[int]:
        tasks = [asyncio.create_task(post(example, receive)) for _ in range(example.MAX_REQUESTS + 3)]
        refused, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result()[0] for task in refused} == {503}
        go.set()
        return sorted([status for status, _ in await asyncio.gather(*tasks)])

    monkeypatch.setattr(example, "find_masks", find)
    assert run(flood()) == [200] * example.MAX_REQUESTS + [503] * 3
    monkeypatch.undo()
    status, masks = answer(example, ask(JPEG, points=[[30, 20]], box=[8, 8, 50, 40]))
    assert status == 200
    (best,) = masks
    assert 0 <= best["score"] <= 1
    assert pycocotools.mask.decode(best["rle"]).shape == (48, 64)
