"""The example of `segment` behind HTTP answers as guides ask, says why it refuses, and bounds what a request costs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import importlib.util
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pycocotools.mask
import pytest

from sam3_node.errors import DeviceError
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import TrackerSettings
from sam3_node.tracking import Tracker
from sam3_node.types import Frame
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.hostility import MEGABYTE, damage, large_jpeg, large_png, limited_memory
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.processes import until
from tests.support.refuses import mentions
from tests.support.tiny import tiny_model

pytest.importorskip("starlette", reason="the extra console is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra console is not installed")

RNG = np.random.default_rng(5)
PIXELS = cv2.resize(RNG.integers(0, 255, (6, 8, 3), np.uint8), (64, 48), interpolation=cv2.INTER_CUBIC)
JPEG = cv2.imencode(".jpg", PIXELS)[1].tobytes()
POINT = {"points": [[30, 20]]}
JSON = {"content-type": "application/json"}
KEY = "a-key-of-this-test"
CHANGED = 400
"""Requests of random damage. Each takes a millisecond or the time of a mask."""
REFUSED_CODES = {400, 422}

Answer = tuple[int, Any]
Receive = Callable[[], Coroutine[Any, Any, Any]]


@pytest.fixture(scope="module")
def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("segment_http", ROOT / "examples/segment_http.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(loaded: ModuleType) -> Iterator[ModuleType]:
    """The example without kept images. No request may leave its place taken."""
    loaded.kept.clear()
    loaded.lost.clear()
    yield loaded
    assert not loaded.places.locked()
    assert loaded.places._value == loaded.MAX_REQUESTS


def text(image: bytes) -> str:
    return base64.b64encode(image).decode()


def ask(image: bytes = JPEG, **args: Any) -> bytes:
    return json.dumps({"image": text(image), **args}).encode()


async def call(
    example: ModuleType,
    receive: Receive,
    path: str = "/segment",
    method: str = "POST",
    server: tuple[str, int | None] = ("127.0.0.1", 8000),
    headers: dict[str, str] = JSON,
) -> Answer:
    """Return the status and the content of the answer."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    named = {"host": "127.0.0.1:8000"} | headers
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in named.items()],
        "server": server,
    }
    await example.app(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run the work in a thread, because a browser of other tests may keep a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def whole(body: bytes) -> Receive:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    return receive


def answer(example: ModuleType, body: bytes = b"", **request: Any) -> Answer:
    return run(call(example, whole(body), **request))


def get(example: ModuleType, path: str, **request: Any) -> Answer:
    return answer(example, path=path, method="GET", **request)


def decode(mask: dict[str, Any]) -> np.ndarray:
    return pycocotools.mask.decode(mask["rle"])


def segment_with_the_package(example: ModuleType, **prompt: Any) -> np.ndarray:
    pipeline = Pipeline(example.model, TrackerSettings(feature_cache=1), "http")
    image = cv2.imdecode(np.frombuffer(JPEG, np.uint8), cv2.IMREAD_COLOR)
    pipeline.step(Frame("http", 0, 0, 64, 48, "bgr8", image.tobytes()))
    return pipeline.prompting.segment(FramePrompt(**prompt)).mask.full()


def test_points_labels_and_a_box_give_the_masks_of_the_package(example: ModuleType) -> None:
    prompts: tuple[dict[str, Any], ...] = (
        {"points": [[30, 20], [5, 5]], "labels": [1, 0]},
        {"box": [8, 8, 50, 40]},
        {"points": [[30, 20]], "box": [8, 8, 50, 40]},
    )
    for prompt in prompts:
        status, (mask,) = answer(example, ask(**prompt))
        assert status == 200
        assert 0 <= mask["score"] <= 1
        assert (decode(mask) == segment_with_the_package(example, **prompt)).all()


def test_the_image_comes_under_either_name_and_as_a_url_of_a_browser(example: ModuleType) -> None:
    png = cv2.imencode(".png", PIXELS)[1].tobytes()
    expected = answer(example, ask(png, **POINT))
    assert expected[0] == 200
    for_urls = base64.urlsafe_b64encode(png).decode()
    assert set("-_") & set(for_urls)
    for image in (
        {"image": for_urls},
        {"image_b64": text(png)},
        {"image": f"data:image/png;base64,{text(png)}", "box": None},
    ):
        assert answer(example, json.dumps(image | POINT | {"boxes": []}).encode()) == expected
    for image in ({}, {"image": text(png), "image_b64": text(png)}):
        status, content = answer(example, json.dumps(image | POINT).encode())
        assert status == 422
        assert mentions(content["error"], "image_b64")


def test_each_of_the_boxes_gets_its_mask(example: ModuleType) -> None:
    boxes = [[8, 8, 50, 40], [0, 0, 20, 20], [30, 10, 60, 30]]
    status, masks = answer(example, ask(boxes=boxes))
    assert status == 200
    assert [mask["box"] for mask in masks] == [0, 1, 2]
    for mask, box in zip(masks, boxes, strict=True):
        assert (decode(mask) == segment_with_the_package(example, box=box)).all()
    for refused in ({"boxes": boxes, "labels": [1]}, {"boxes": boxes, "box": boxes[0]}, {"boxes": 3}):
        status, content = answer(example, ask(**refused))
        assert status == 422
        assert mentions(content["error"], "boxes")
    assert answer(example, ask(boxes=boxes[:1] * (example.MAX_BOXES + 1)))[0] == 422


def test_multimask_gives_all_masks_with_their_scores(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("sam2")
    monkeypatch.setattr(example, "model", model)
    monkeypatch.setattr(example, "tracker", Tracker(model, 1, 2, history=0))
    status, masks = answer(example, ask(multimask=True, **POINT))
    assert status == 200
    scores = [mask["score"] for mask in masks]
    assert len(scores) == model.candidates == 3
    assert scores == sorted(scores, reverse=True)
    assert len(answer(example, ask(**POINT))[1]) == 1
    masks = answer(example, ask(multimask=True, boxes=[[8, 8, 50, 40], [0, 0, 20, 20]]))[1]
    assert [mask["box"] for mask in masks] == [0, 0, 0, 1, 1, 1]
    example.kept.clear()


def test_features_are_kept_by_the_digest_and_the_least_used_go_first(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    preprocess = example.model.preprocess
    monkeypatch.setattr(example.model, "preprocess", lambda image: encoded.append(0) or preprocess(image))
    images = [cv2.imencode(".png", PIXELS + shift)[1].tobytes() for shift in range(example.MAX_KEPT + 1)]
    first = answer(example, ask(images[0], **POINT))
    for image in images[1:-1]:
        answer(example, ask(image, **POINT))
    assert answer(example, ask(images[0], **POINT)) == first
    assert len(encoded) == len(example.kept) == example.MAX_KEPT
    answer(example, ask(images[-1], **POINT))
    # the first was used since the second was
    assert [*example.kept][-2:] == [hashlib.sha256(images[place]).hexdigest() for place in (0, -1)]
    assert hashlib.sha256(images[1]).hexdigest() not in example.kept
    assert len(example.kept) == example.MAX_KEPT


def test_what_cannot_be_read_and_what_cannot_be_done_have_their_codes_and_reasons(
    example: ModuleType,
) -> None:
    unreadable = (b"", b"x", b"[]", b"3", b"[" * 4000, b"[" * 200_000, b'{"image": ' + b"9" * 5000 + b"}")
    images = (
        ask(b"no image", **POINT),
        ask(JPEG[:-9], **POINT),
        b'{"image": "\xc3\xa4", "points": [[1, 1]]}',
    )
    for body in (*unreadable, *images):
        status, content = answer(example, body)
        assert status == 400, body[:80]
        assert content["error"]
    undoable: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "points"),
        ({"box": [1]}, "box"),
        ({"points": [[900, 900]]}, "points"),
        ({"points": [["\ud800", "b"]]}, "points"),
        ({"points": [[float("nan"), 1]]}, "points"),
        ({"points": [[10**400, 1]]}, "points"),
        ({"points": {"x": 1}}, "points"),
        ({"points": [[True, False]]}, "points"),
        ({"labels": [1]}, "points"),
        ({"box": [8, 8, 50, 40], "labels": [1]}, "labels"),
        ({**POINT, "labels": [1, 1]}, "labels"),
        ({**POINT, "multimask": 1}, "multimask"),
        ({**POINT, "text": "red mug"}, "text"),
        ({**POINT, "\ud800": 1}, "fields"),
    )
    for args, field in undoable:
        status, content = answer(example, ask(**args))
        assert status == 422, args
        assert mentions(content["error"], field), content
    for body in (b"{}", b'{"image": 3, "points": [[1, 1]]}'):
        assert answer(example, body)[0] == 422


def test_values_nested_to_the_limit_of_the_parser_are_no_fault(example: ModuleType) -> None:
    for depth in range(800, 1010, 7):
        nested = b"[" * depth + b"]" * depth
        for name in (b"points", b"boxes", b"multimask", b"other"):
            status, _ = answer(example, ask()[:-1] + b', "' + name + b'": ' + nested + b"}")
            assert status in REFUSED_CODES


def test_an_image_of_many_pixels_is_refused_before_it_is_decoded(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cv2, "imdecode", lambda *args: pytest.fail("decoded"))
    for image in (large_png(), large_png(colour=0), large_jpeg(JPEG)):
        body = ask(image, **POINT)
        with limited_memory(8):
            status, content = answer(example, body)
        assert status == 400
        assert "8192 x 8192" in content["error"]
    assert not example.kept


def test_many_values_are_refused_before_they_are_parsed(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = SimpleNamespace(loads=lambda body: pytest.fail("parsed"))
    monkeypatch.setattr(example, "json", parser)
    for value in (b"{},", b"[],", b"1,", b'"",', b"[", b"0.1,"):
        body = b'{"points": [' + value * (3 * MEGABYTE // len(value)) + b"1]}"
        for encoded in (body, body[: MEGABYTE // 2].decode().encode("utf-16")):
            with limited_memory(4):
                status, content = answer(example, encoded)
            assert status == 400
            assert str(example.MAX_VALUES) in content["error"]


def test_long_numbers_and_texts_take_little_memory_and_time(example: ModuleType) -> None:
    long = b"1" * 3 * MEGABYTE
    for value in (long, b"0." + long, long + b"e5", b'"' + long + b'"', b'"' + b"\\u0001" * 500_000 + b'"'):
        body = b'{"image": "", "points": [[1, ' + value + b"]]}"
        with limited_memory(16):
            assert answer(example, body)[0] in REFUSED_CODES


def test_no_damage_to_a_request_is_a_fault_of_the_server(example: ModuleType) -> None:
    rng = random.Random(11)
    args = {"points": [[30, 20.5], [1, 2]], "labels": [1, 0], "box": [8, 8, 50, 40], "multimask": True}
    image = text(JPEG)
    statuses = set()
    for place in range(CHANGED):
        # half of the damage is to the image, which else would be most of the body
        if place % 2:
            body = ask(damage(JPEG, rng), **args)
        else:
            changed = damage(json.dumps({"image": "IMAGE", **args}).encode(), rng)
            body = changed.replace(b"IMAGE", image.encode())
        status, content = answer(example, body)
        assert status in {200, *REFUSED_CODES}, body
        assert status == 200 or content["error"]
        statuses.add(status)
    assert statuses == {200, *REFUSED_CODES}


def test_a_body_is_read_up_to_its_limit(example: ModuleType) -> None:
    parts = 0

    async def receive() -> dict[str, Any]:
        nonlocal parts
        parts += 1
        return {"type": "http.request", "body": bytes(MEGABYTE), "more_body": True}

    status, content = run(call(example, receive))
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

    status, content = run(call(example, receive))
    assert status == 408
    assert "0.05 s" in content["error"]

    async def leave() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    assert run(call(example, leave))[0] == 400
    assert answer(example, ask(**POINT))[0] == 200


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

    async def flood() -> list[int]:
        count = example.MAX_REQUESTS + 3
        tasks = [asyncio.create_task(call(example, whole(b"{}"))) for _ in range(count)]
        refused, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result()[0] for task in refused} == {503}
        # probes are answered meanwhile
        assert (await call(example, whole(b""), "/health", "GET"))[0] == 200
        assert (await call(example, whole(b""), "/ready", "GET"))[0] == 503
        go.set()
        return sorted([status for status, _ in await asyncio.gather(*tasks)])

    monkeypatch.setattr(example, "find_masks", find)
    assert run(flood()) == [200] * example.MAX_REQUESTS + [503] * 3
    assert get(example, "/ready")[0] == 200


def test_a_fault_of_the_server_is_told_without_a_traceback(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: Exception) -> Answer:
        def find(body: bytearray) -> list[str]:
            raise error

        monkeypatch.setattr(example, "find_masks", find)
        return answer(example, ask(**POINT))

    status, content = fail(RuntimeError("/home/of/the/server"))
    assert status == 500
    assert "home" not in content["error"]
    assert "/home/of/the/server" in caplog.text
    assert get(example, "/health")[0] == 200
    # a lost GPU stays lost: the supervisor has to know
    assert fail(DeviceError("the GPU has failed"))[0] == 500
    for path in ("/health", "/ready"):
        assert get(example, path) == (503, {"error": "the GPU has failed"})


def test_a_key_is_asked_of_all_but_probes(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "KEY", KEY)
    compared = []
    same = secrets.compare_digest
    monkeypatch.setattr(secrets, "compare_digest", lambda *two: compared.append(two) or same(*two))

    async def unread() -> dict[str, Any]:
        raise AssertionError("the body was read")

    wrong: tuple[dict[str, str], ...] = (
        {},
        {"x-api-key": ""},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": "\xe4" * 9},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer "},
        {"x-api-key": "guess", "authorization": f"Bearer {KEY}"},
    )
    for headers in wrong:
        assert run(call(example, unread, headers=JSON | headers))[0] == 401
        assert get(example, "/models", headers=headers)[0] == 401
    assert len(compared) == 2 * len(wrong)
    elsewhere = ("192.0.2.1", 8000)
    for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
        right = JSON | headers | {"host": "cell.example"}
        assert answer(example, ask(**POINT), headers=right, server=elsewhere)[0] == 200
    assert get(example, "/health", server=elsewhere) == (200, {"status": "ok"})
    assert get(example, "/ready", server=elsewhere)[0] == 200


def test_without_a_key_only_this_machine_is_answered(example: ModuleType) -> None:
    for server in (("192.0.2.1", 8000), ("2001:db8::1", 8000)):
        status, content = answer(example, ask(**POINT), server=server)
        assert status == 403
        assert mentions(content["error"], "SEGMENT_KEY")
    for server in (("::1", 8000), ("127.0.0.2", 8000), ("/run/segment.sock", None)):
        assert answer(example, ask(**POINT), server=server)[0] == 200
    # a page of another site whose name was made to resolve to this machine, or that sends what needs no leave
    assert answer(example, ask(**POINT), headers=JSON | {"host": "evil.example"})[0] == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx"):
        assert answer(example, ask(**POINT), headers={"content-type": kind})[0] == 415
    assert (
        answer(example, ask(**POINT), headers={"content-type": "Application/JSON; charset=utf-8"})[0] == 200
    )
    assert get(example, "/segment")[0] == 405
    assert get(example, "/nothing") == (404, {"error": "Not Found"})


def test_the_models_are_named(example: ModuleType) -> None:
    status, content = get(example, "/models")
    (model,) = content["models"]
    assert status == 200
    assert (model["name"], model["image_size"], model["masks"]) == ("nano", example.model.image_size, 1)


@contextmanager
def serve(example: ModuleType) -> Iterator[int]:
    """Serve the example in a thread, on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(example.app, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        until(lambda: server.started, "the server")
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def request(port: int, path: str, body: bytes | None = None, **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    method = "GET" if body is None else "POST"
    connection.request(
        method, path, body, JSON | {name.replace("_", "-"): at for name, at in headers.items()}
    )
    found = connection.getresponse()
    content = json.loads(found.read())
    connection.close()
    return found.status, content


def begin(port: int, opened: ExitStack) -> socket.socket:
    """Send a request whose body does not end."""
    peer = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
    head = "POST /segment HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    peer.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
    peer.settimeout(PATIENCE_S)
    return peer


def send_endless(port: int, count: int) -> bytes:
    """Declare a very long body, send the first `count` bytes, and return the status of the answer."""
    with socket.create_connection(("127.0.0.1", port)) as peer:
        head = "POST /segment HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        peer.sendall(f"{head}Content-Length: 100000000000\r\n\r\n".encode())
        peer.sendall(bytes(count))
        return peer.recv(4096).split()[1]


def test_slow_clients_take_all_places_for_a_while_at_most(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "BODY_S", 1.0)
    with serve(example) as port, ExitStack() as opened:
        assert request(port, "/segment", ask(**POINT))[0] == 200
        slow = [begin(port, opened) for _ in range(4 * example.MAX_REQUESTS)]
        statuses = []
        began_s = time.monotonic()
        for peer in slow:
            # who drips a byte now and then gains nothing
            with_answer = until(lambda peer=peer: peer.recv(4096), "an answer")  # type: ignore[misc]
            statuses.append(int(with_answer.split()[1]))
            assert request(port, "/health")[0] == 200
        assert statuses.count(408) >= example.MAX_REQUESTS
        assert set(statuses) == {408, 503}
        assert time.monotonic() - began_s < PATIENCE_S
        assert request(port, "/segment", ask(**POINT))[0] == 200


def test_clients_that_leave_and_bodies_too_long_leave_the_server_well(
    example: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(example) as port:
        for _ in range(3):
            with ExitStack() as opened:
                for _ in range(example.MAX_REQUESTS):
                    begin(port, opened)
        # the last of them may not have been accepted yet
        until(lambda: request(port, "/segment", ask(**POINT))[0] == 200, "a free place")
        until(lambda: send_endless(port, example.MAX_BODY + 1) == b"413", "the refusal of a long body")
        until(lambda: request(port, "/segment", ask(**POINT))[0] == 200, "a free place")
    assert "Traceback" not in caplog.text


def test_the_command_of_the_example_serves_with_a_key() -> None:
    words = [sys.executable, "-m", "uvicorn", "--app-dir", "examples", "--port", "0", "segment_http:app"]
    words += ["--limit-concurrency", "64"]
    environment = os.environ | {"SEGMENT_KEY": KEY}
    with subprocess.Popen(words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = next(line for line in server.stderr if "running on" in line)
            port = int(line.partition("127.0.0.1:")[2].split()[0])
            assert request(port, "/ready")[0] == 200
            assert request(port, "/segment", ask(**POINT))[0] == 401
            assert request(port, "/segment", ask(**POINT), X_API_Key=KEY)[0] == 200
        finally:
            server.kill()
