"""The health of a node: probes that wait for no step, and when it is alive and ready, with a real node."""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.errors import SettingsError, TransportError
from sam3_node.node import monitoring
from sam3_node.node.health import BOUNDS_S, Health, Histogram
from sam3_node.node.monitoring import MAX_CONNECTIONS
from sam3_node.node.node import Node
from sam3_node.processes.notify import Watchdog
from sam3_node.processes.supervisor import NODE_READY, Group, Process
from sam3_node.settings import GroupSettings, HealthSettings, ModelSettings, Settings
from sam3_node.transport import FramePublisher
from tests.support.near_node import HealthyNode, ask, connect, held_step, send_raw
from tests.support.node_rig import picture, tiny_environment, until, unworried_client
from tests.support.paths import ROOT
from tests.support.repeats import repetitions

NEVER_S = 300.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HealthyNode]:
    with HealthyNode(tmp_path_factory.mktemp("healthy"), deadline_s=0.5) as served:
        yield served


def ready(served: HealthyNode) -> bool:
    return ask(served.url, "/readyz")[0] == 200


def test_ready_turns_false_when_frames_stop_and_true_again(served: HealthyNode) -> None:
    for _ in range(2):
        until(lambda: served.send_as() and ready(served), "ready")
        status, text = until(lambda: (found := ask(served.url, "/readyz"))[0] == 503 and found, "not ready")
        assert (status, text.startswith("no masks for ")) == (503, True)
        assert ask(served.url, "/healthz") == (200, "the main loop turns\n")


def test_ready_turns_false_when_a_step_hangs_and_true_again(
    served: HealthyNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: served.send_as() and ready(served), "ready")
    with held_step(served.send_as, monkeypatch):
        until(lambda: "the step of a frame has run for" in ask(served.url, "/readyz")[1], "not ready")
        assert ask(served.url, "/healthz")[0] == 200, "a supervisor may still wait"
        assert "sam3_node_ready 0.0" in ask(served.url, "/metrics")[1], "metrics wait for no step, either"
    until(lambda: served.send_as() and ready(served), "ready again")


def test_a_paused_node_is_alive_and_not_ready(served: HealthyNode) -> None:
    until(lambda: served.send_as() and ready(served), "ready")
    served.client.call("pause")
    assert ask(served.url, "/readyz") == (503, "the node is paused: sam3-node resume\n")
    assert ask(served.url, "/healthz")[0] == 200
    served.client.call("resume")
    until(lambda: served.send_as() and ready(served), "ready again")


def test_a_step_that_takes_too_long_is_not_alive_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = GroupSettings(hang_step_s=0.5)
    with HealthyNode(tmp_path, deadline_s=0.5, group=group) as served:
        for _ in range(5):  # the first step takes longer than the others, and sets no limit alone
            served.send()
        with held_step(served.send_as, monkeypatch):
            text = until(lambda: (found := ask(served.url, "/healthz"))[0] == 503 and found[1], "it hangs")
            assert "the main loop hangs" in text
            assert "sam3_node_alive 0.0" in ask(served.url, "/metrics")[1]
        until(lambda: ask(served.url, "/healthz")[0] == 200, "alive again")


def test_probes_are_answered_while_slow_peers_hold_connections(
    served: HealthyNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # none of them ends by its age
    monkeypatch.setattr(monitoring, "MAX_CONNECTION_S", 2 * NEVER_S)
    monkeypatch.setattr(monitoring._Handler, "timeout", 2 * NEVER_S)
    with ExitStack() as opened:
        slow = [opened.enter_context(connect(served.url)) for _ in range(3 * MAX_CONNECTIONS)]
        for peer in slow[::2]:
            peer.sendall(b"GET /metr")
        assert ask(served.url, "/healthz")[0] == 200
        slow[0].settimeout(NEVER_S)
        assert slow[0].recv(1) == b"", "the oldest connection was closed"
        monkeypatch.setattr(monitoring, "MAX_CONNECTION_S", 0.1)
        for peer in slow:  # all of them end without the peer's help
            peer.settimeout(NEVER_S)
            until(lambda peer=peer: is_closed(peer), "the connection ends")  # type: ignore[misc]


def is_closed(peer: Any) -> bool:
    try:
        return not peer.recv(1 << 16)
    except OSError:
        return True


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", 404),
        (b"GET /healthz?x=1 HTTP/1.1\r\nHost: localhost:1\r\n\r\n", 200),
        (b"HEAD /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nHost: [::1]:99\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
        (b"GET /healthz HTTP/1.1\r\nHost: [\r\n\r\n", 403),
        (b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:80@evil.example\r\n\r\n", 403),
        (b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n", 403),
        (b"GET //[ HTTP/1.1\r\n\r\n", 404),
        (b"POST /healthz HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 501),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"\x00\xff nonsense HTTP/1.1\r\n\r\n", 501),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_requests_are_refused(served: HealthyNode, request_text: bytes, status: int) -> None:
    answer = send_raw(served.url, request_text)
    assert answer.split()[1] == str(status).encode()
    assert b"Traceback" not in answer
    assert ask(served.url, "/healthz")[0] == 200


def test_metrics_need_a_package_and_probes_do_not(
    served: HealthyNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status, text = ask(served.url, "/metrics")
    assert status == 503
    assert "pip install 'sam3-node[node]'" in text
    assert ask(served.url, "/healthz")[0] == 200


def test_a_taken_or_wrong_address_is_explained(served: HealthyNode) -> None:
    taken = served.url.removeprefix("http://")
    for bind, error, said in (
        (taken, TransportError, "stop the process that uses it, or set health.bind"),
        ("9464", SettingsError, "health.bind: expected HOST:PORT such as 127.0.0.1:9464, found '9464'"),
    ):
        node = Node(Settings(health=HealthSettings(bind=bind)))
        with pytest.raises(error, match=re.escape(said)):
            node.__enter__()


class NotingWatchdog(Watchdog):
    """A watchdog that notes how long the work that begins may take."""

    def __init__(self, hang_s: float) -> None:
        super().__init__(hang_s)
        self.limits_s: list[float] = []

    def begin(self, limit_s: float) -> None:
        self.limits_s.append(limit_s)
        super().begin(limit_s)


def list_limits(settings: Settings, steps_s: list[float], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the limit of each of the steps, which take these times, and of the one after them."""
    watchdog = NotingWatchdog(settings.group.hang_s)
    health = Health(settings, watchdog)
    now_s = 1000.0
    limits_s = []
    with monkeypatch.context() as patch:
        patch.setattr("sam3_node.node.health.time", SimpleNamespace(monotonic=lambda: now_s))
        for took_s in (*steps_s, 0.0):
            watchdog.limits_s.clear()
            with health.step():
                limits_s += watchdog.limits_s
                now_s += took_s
    return limits_s


def test_the_limit_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    group = GroupSettings(hang_s=100.0, hang_step_s=8.0)
    limits_s = list_limits(Settings(group=group), [0.5, 2.0, 2.0, 400.0, *[30.0] * 25], monkeypatch)
    assert limits_s[0] == 100.0, "the first step may compile"
    assert limits_s[1] == 8.0
    assert limits_s[4] == 20.0
    assert limits_s[-1] == 100.0
    compiling = Settings(group=group, model=ModelSettings(compile=True))
    assert list_limits(compiling, [0.5], monkeypatch) == [100.0, 100.0]


def test_the_verdicts_before_the_first_frame() -> None:
    health = Health(Settings())
    assert health.check_alive() == (True, "the model is being loaded")
    assert health.check_ready() == (False, "the model is being loaded")
    health.serving = True
    assert health.check_alive() == (True, "the main loop turns")
    assert "no frame has been stepped yet" in health.check_ready().reason


def test_a_step_that_fails_is_measured_and_does_not_make_ready() -> None:
    health = Health(Settings())
    health.serving = True
    health.watchdog = Watchdog(600.0)
    with pytest.raises(ZeroDivisionError), health.step():
        _ = 1 / (not health.stepping)
    assert not health.stepping
    assert health.step_times.cumulative()[-1] == ("+Inf", 1)
    assert not health.check_ready().ok


def test_a_histogram_counts_up_to_each_bound() -> None:
    times = Histogram()
    for seconds in (-1.0, 0.0, BOUNDS_S[0], 0.0011, BOUNDS_S[-1], 99.0):
        times.observe(seconds)
    rows = times.cumulative()
    assert rows[0] == ("0.001", 3)
    assert rows[1] == ("0.0025", 4)
    assert rows[-2:] == [("10.0", 5), ("+Inf", 6)]
    assert times.sum_s == pytest.approx(109.0021)  # never falls


# a node whose step obeys a file: it never returns, fails as after an illegal memory access, or stops the node, which
# never ends then
OBEDIENT = """
import os, signal, sys, time, torch
from pathlib import Path
from sam3_node.node.saved_state import Snapshots
from sam3_node.perception.pipeline import Pipeline
order, step = Path(sys.argv.pop()), Pipeline.step

def obey(*args):
    what = ""
    if order.exists():  # an order that comes between these lines is left for the next step
        what = order.read_text()
        order.unlink()
    if what == "hang":
        time.sleep(100_000)
    if what == "fail":
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    if what == "end":
        Snapshots.close = lambda self: time.sleep(100_000)
        os.kill(os.getpid(), signal.SIGTERM)
    return step(*args)

Pipeline.step = obey
from sam3_node.__main__ import main
sys.exit(main())
"""


class Supervised:
    """A node under the supervisor of launch/start, a camera and a policy."""

    def __init__(self, folder: Path, group: Group, lines: list[str]) -> None:
        self.order = folder / "order"
        self.lines = lines
        self._group = group
        self.frames, self.masks, self.control = (f"ipc://{folder}/{name}" for name in "fmc")
        environment = tiny_environment(folder, self.frames, self.masks, self.control)
        environment |= {
            "PYTHONPATH": str(ROOT),
            "SAM3_GROUP__HANG_STEP_S": "4",
            "SAM3_LOGGING__FORMAT": "json",
        }
        command = (sys.executable, "-c", OBEDIENT, "run", str(self.order))
        group.start(Process("node", command, NODE_READY, environment, "on-failure", watchdog_s=16.0))

    def give(self, order: str) -> None:
        """Give the node an order for its next step. It reads the file whole or not at all."""
        written = self.order.with_suffix(".new")
        written.write_text(order)
        written.replace(self.order)

    def serve(self, camera: FramePublisher, policy: PerceptionClient, seqs: Iterator[int]) -> str:
        """Send frames until masks come, and return the name of the node that made them."""

        def find() -> str | None:
            assert not self._group.poll(0.02), self.lines
            camera.send(picture(next(seqs)))
            masks = policy.latest(timeout_ms=20)
            return masks.node if masks is not None else None

        return until(find, "masks")

    def serve_again(
        self, camera: FramePublisher, policy: PerceptionClient, seqs: Iterator[int], old: str
    ) -> str:
        """Send frames until another node than `old` answers."""

        def find() -> str | None:
            name = self.serve(camera, policy, seqs)
            return name if name != old else None

        try:
            return until(find, "a new node")
        except AssertionError as error:
            raise AssertionError(f"{error}; the node and its supervisor said: {self.lines[-30:]}") from None


IS_WHOLE = repetitions(0, 1) == 1
ORDERS = ("hang", "fail", "end") if IS_WHOLE else ("hang",)


@pytest.mark.skipif(sys.platform != "linux", reason="the supervisor's watchdog is tested on Linux")
def test_a_node_that_hangs_or_lost_its_gpu_is_replaced(tmp_path: Path) -> None:
    lines: list[str] = []
    with Group(echo=lines.append) as group:
        served = Supervised(tmp_path, group, lines)
        with (
            FramePublisher(served.frames) as camera,
            unworried_client(served.masks, served.control) as policy,
        ):
            seqs = iter(range(1_000_000))
            name = served.serve(camera, policy, seqs)
            for order in ORDERS:
                served.give(order)
                name = served.serve_again(camera, policy, seqs, name)
    text = "\n".join(lines)
    assert "node says that it hangs: killed" in text
    assert any("the main loop has hung" in line and "in obey" in line for line in lines), "the log says where"
    if IS_WHOLE:
        assert "the GPU has failed, and this process can use it no longer: AcceleratorError" in text
        assert "node ended with exit code 4; restarting" in text
