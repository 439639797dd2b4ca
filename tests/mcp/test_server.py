"""Tests of `sam3-node mcp`: keys, HTTP on loopback, its options, and the extra that it needs."""

import http.client
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest

from sam3_node import unfinished_requests
from sam3_node.addresses import Address
from sam3_node.cli.main import main
from sam3_node.errors import BusyError, SettingsError
from sam3_node.mcp import server
from sam3_node.mcp.server import CallTurns, check_loopback, run_http
from sam3_node.mcp.tools import AgentTools
from sam3_node.settings import load_settings
from tests.support.agents import Agent, connect, start_agent
from tests.support.key_rig import Keys
from tests.support.node_rig import Rig, until
from tests.support.patience import PATIENCE_S
from tests.support.transport_peer import NOBODY


class KeyedRig(Rig):
    """A node and a camera with keys."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.keys = Keys(folder / "keys")
        self.environment["SAM3_TRANSPORT__CAMERA_KEYS"] = "cam0"
        self.environment["SAM3_TRANSPORT__FRAMES"] = self.frames[0]
        self.start("run", TRANSPORT__KEYS=self.keys_of("node", "node"))
        scene = "scene:shapes?width=160&height=120"
        self.start("camera", scene, "--camera.loop", TRANSPORT__KEYS=self.keys_of("camera", "cam0"))

    def keys_of(self, machine: str, *secrets: str) -> str:
        """Create a machine with these secrets, and return its folder of keys."""
        return str(self.keys.machine(machine, *secrets).keys)

    def of(self, machine: str, *secrets: str) -> dict[str, str]:
        """Create a machine with these secrets, and return the environment of its processes."""
        return self.environment | {"SAM3_TRANSPORT__KEYS": self.keys_of(machine, *secrets)}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedRig]:
    with KeyedRig(tmp_path_factory.mktemp("keyed")) as rig:
        yield rig


def wait_for_masks(agent: Agent) -> None:
    until(lambda: not agent.call("find").is_error, "masks for the agent")


def test_a_readers_key_reads_and_the_node_refuses_the_rest(rig: KeyedRig) -> None:
    with start_agent(rig.of("watcher", "watcher"), "--allow-edits") as agent:
        wait_for_masks(agent)
        seen = agent.ask("look", keep_s=10)
        assert seen.picture is not None
        # the picture comes, and the refusal with it
        assert "does not keep this frame" in seen.facts["notes"][0]
        assert "watcher" in seen.facts["notes"][0]
        for tool, arguments in (
            ("add", {"points": [[80, 60]]}),
            ("name", {"names": ["cup"]}),
            ("remove", {"id": 1}),
        ):
            text = agent.fail(tool, **arguments)
            assert text.startswith("forbidden: ")
            assert "watcher" in text
        assert agent.ask("find").facts["objects"] == []


def test_a_reader_gets_positions_from_masks_and_no_points(rig: KeyedRig) -> None:
    with (
        start_agent(rig.of("policy", "policy"), "--allow-edits") as operator,
        start_agent(rig.of("second watcher", "watcher")) as reader,
    ):
        wait_for_masks(operator)
        wait_for_masks(reader)
        added = operator.ask("add", points=[[80, 60]]).facts
        until(lambda: reader.ask("find").facts["objects"], "the object")
        assert reader.fail("points", id=added["id"]).startswith("forbidden: ")
        assert reader.ask("points", id=added["id"], count=0).facts["id"] == added["id"]
        operator.ask("remove", id=added["id"])


def test_a_stranger_is_told_which_key_is_missing(rig: KeyedRig) -> None:
    with start_agent(rig.environment) as agent:
        assert "expects a key" in agent.fail("find")


@pytest.fixture
def url(rig: KeyedRig) -> str:
    """Return the endpoint of a server over HTTP."""
    process = rig.launch("mcp", "--http", "127.0.0.1:0", TRANSPORT__KEYS=rig.keys_of("host", "watcher"))
    line = process.next_line()
    assert line.startswith("mcp at http://127.0.0.1:"), line
    return line.removeprefix("mcp at ")


def test_hosts_of_this_machine_use_http_and_no_page_of_another_site(url: str) -> None:
    with connect(url) as agent:
        assert list(agent.tools) == ["find", "look", "points", "where", "wait", "next_pick", "list_names"]
        wait_for_masks(agent)
        assert agent.ask("look").picture is not None
    address, _, path = url.removeprefix("http://").partition("/")
    body = '{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}'
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    for changed, status in (
        ({"Host": "evil.example"}, 421),
        ({"Host": f"evil.example:{address.partition(':')[2]}"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"content-type": "text/plain"}, 400),
    ):
        connection = http.client.HTTPConnection(address)
        connection.request("POST", f"/{path}", body, headers | changed)
        assert connection.getresponse().status in (status, 415)
        connection.close()
    connection = http.client.HTTPConnection(address)
    connection.request("POST", f"/{path}", b"x" * (server.MAX_BODY_BYTES + 1), headers)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_http_is_for_this_machine_alone(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="no password"):
        check_loopback(Address(host, 8470))
    brackets = f"[{host}]" if ":" in host else host
    assert main(["mcp", "--http", f"{brackets}:8470"]) == 2
    assert "expected an address of this machine alone" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert main(["mcp"]) == 2
    output = capsys.readouterr()
    assert "pip install 'sam3-node[mcp]'" in output.err
    assert output.out == ""


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, **bounds: float) -> Iterator[tuple[str, int]]:
    """Serve tools without a node over HTTP, with these bounds of unfinished requests; yield host and port."""
    for name, value in bounds.items():
        monkeypatch.setattr(unfinished_requests, name, value)
    stop = threading.Event()
    urls: queue.Queue[str] = queue.Queue()
    settings = load_settings(overrides={"transport.masks": NOBODY, "transport.control": "tcp://127.0.0.1:7"})
    with AgentTools(settings) as tools, ThreadPoolExecutor(1) as thread:
        serving = thread.submit(run_http, tools, Address("127.0.0.1", 0), stop, urls.put)
        try:
            yield "127.0.0.1", urlsplit(urls.get(timeout=PATIENCE_S)).port or 0
        finally:
            stop.set()
            serving.result(PATIENCE_S)


def has_ended(connection: socket.socket) -> bool:
    """Wait until a server has closed a connection."""
    connection.settimeout(PATIENCE_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_requests_without_an_end_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n"
    with serving(monkeypatch, MAX_UNFINISHED=3) as address, ExitStack() as stack:
        opened = []
        for part in (b"", begun, begun + b"\r\n{", b"", b""):
            opened.append(stack.enter_context(socket.create_connection(address, PATIENCE_S)))
            opened[-1].sendall(part)
        assert has_ended(opened[0])
        assert has_ended(opened[1])
        # a whole request is answered all the same
        connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
        connection.request("GET", "/elsewhere")
        assert connection.getresponse().status == 404
        connection.close()
    with serving(monkeypatch, MAX_REQUEST_S=0.2) as address, ExitStack() as stack:
        for part in (b"", begun, begun + b"\r\n{"):
            late = stack.enter_context(socket.create_connection(address, PATIENCE_S))
            late.sendall(part)
            assert has_ended(late)


def test_calls_take_turns_and_rest_after_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_WAITING", 4)
    running = 0
    most = 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        end_s = time.thread_time() + 0.02
        while time.thread_time() < end_s:
            pass
        running -= 1

    async def run() -> tuple[int, float]:
        turns = CallTurns()
        refused = 0

        async def call() -> None:
            nonlocal refused
            try:
                await turns.run(work)
            except BusyError:
                refused += 1

        begin_s = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(call)
        return refused, time.monotonic() - begin_s

    refused, passed_s = anyio.run(run)
    assert (refused, most) == (6, 1)
    assert passed_s >= 4 * 0.02 + 3 * server.REST * 0.02
