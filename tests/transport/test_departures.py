"""Tests of processes that outlive their peers: whoever is killed, hangs or sends what it likes, the others go on."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from sam3_node.transport import FrameSubscriber
from sam3_node.wire import Request, pack_request
from tests.support.raw_zmtp import frame, ping, raw_peer, reset
from tests.support.repeats import repetitions
from tests.support.transport_peer import next_line, output_of, peer, wait_until
from tests.transport.test_restart import free_endpoint

TCP = "tcp://127.0.0.1:*"
IDLE_MS = 1500
"""Interval of a camera that is idle, and so does not look at its socket, for longer than peers of old versions wait."""


def publishes(endpoint: str) -> bool:
    """Return True if a new subscriber receives a frame."""
    with FrameSubscriber([endpoint]) as subscriber:
        return subscriber.take(10_000) is not None


@pytest.mark.parametrize("subscriptions", [9, 40])
def test_an_idle_publisher_survives_subscribers_that_leave(subscriptions: int) -> None:
    with peer("camera", TCP, "cam0", "newest", IDLE_MS, 100_000, 16) as camera:
        endpoint = next_line(camera)
        for _ in range(repetitions(2, 20)):
            with zmq.Context() as context, context.socket(zmq.SUB) as reader:
                for number in range(subscriptions):
                    reader.subscribe(f"frame/cam{number}")
                monitor = reader.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                reader.connect(endpoint)
                assert monitor.poll(10_000)
                time.sleep(0.1)  # the subscriptions travel
                reader.disable_monitor()
        assert publishes(endpoint)
        assert camera.poll() is None


@pytest.mark.parametrize("kind", ["SUB", "DEALER"])
def test_a_peer_that_pings_and_leaves_ends_nobody(kind: str) -> None:
    """The pings lie behind more messages than a short queue holds: libzmq reads them after the peer has left."""
    role = ("camera", TCP, "cam0", "newest", 100, 100_000, 16) if kind == "SUB" else ("server", TCP)
    slow = pack_request(Request(1, "slow", {"seconds": 0.4}))
    with peer(*role) as process:
        endpoint = next_line(process)
        for _ in range(repetitions(2, 20)):
            with raw_peer(endpoint, kind) as stranger:
                parts = (frame(b"\x01topic%d" % n if kind == "SUB" else b"junk") + ping() for n in range(200))
                stranger.sendall((b"" if kind == "SUB" else frame(slow)) + b"".join(parts))
                time.sleep(0.2)
                reset(stranger)
            time.sleep(0.4)
            assert process.poll() is None
        with raw_peer(endpoint, kind):
            assert process.poll() is None


class Running:
    """A peer process whose lines are counted as they come."""

    def __init__(self, stack: ExitStack, *args: object) -> None:
        self._stack, self._args = stack, args
        self.start()

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        self.process = self._stack.enter_context(peer(*self._args))
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        next_line(self.process)
        threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
        try:
            for line in output_of(process):
                lines.put(line.strip())
        except ValueError:
            return  # closed at the end of the test

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait(10)

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.process.pid, number)

    def wait_for(self, word: str) -> None:
        """Wait for a line that contains `word`, among those that come from now on."""
        while not self.lines.empty():
            self.lines.get()
        deadline_s = time.monotonic() + 20
        while word not in self.lines.get(timeout=20):
            assert time.monotonic() < deadline_s, f"no line with {word!r}"


PROGRESS = {"node": "", "policy": "", "recorder": "masks/", "asker": "answer"}
"""Word in the lines that a process prints while all is well."""


@contextmanager
def robot(folder: Path) -> Iterator[dict[str, Running]]:
    """Run a camera, a node, a policy that holds the interpreter, a recorder and a client of control."""
    frames, masks, control = free_endpoint(), f"ipc://{folder}/masks", free_endpoint()
    with ExitStack() as stack:
        yield {
            "camera": Running(stack, "camera", frames, "cam0", "newest", 10, 10_000_000, 300),
            "node": Running(stack, "node", frames, masks, control),
            "policy": Running(stack, "policy", masks, 300),
            "recorder": Running(stack, "recorder", frames, masks),
            "asker": Running(stack, "asker", control),
        }


@pytest.mark.parametrize("victim", ["camera", "node", "policy", "recorder", "asker"])
def test_every_process_goes_on_after_another_was_killed_or_hung(victim: str, tmp_path: Path) -> None:
    with robot(tmp_path) as running:
        for _ in range(repetitions(1, 20)):
            running[victim].kill()
            running[victim].start()
            check_progress(running)
            running[victim].signal(signal.SIGSTOP)
            time.sleep(0.7)  # the queues to it fill
            running[victim].signal(signal.SIGCONT)
            check_progress(running)


def check_progress(running: dict[str, Running]) -> None:
    for name, word in PROGRESS.items():
        running[name].wait_for(word)
    ended = {name: item.process.poll() for name, item in running.items() if item.process.poll() is not None}
    assert not ended


def test_a_policy_that_holds_the_interpreter_survives_a_node_that_restarts(tmp_path: Path) -> None:
    with robot(tmp_path) as running, ExitStack() as stack:
        policy = Running(stack, "policy", f"ipc://{tmp_path}/masks", 1500)
        for _ in range(repetitions(1, 5)):
            policy.wait_for("")  # it begins to hold the interpreter, and masks pile up
            time.sleep(0.5)
            running["node"].kill()
            running["node"].start()
            policy.wait_for("")
            policy.wait_for("")
            assert policy.process.poll() is None


def test_a_subscriber_with_many_topics_receives_each_of_them() -> None:
    cameras = [f"cam{number}" for number in range(40)]
    with (
        peer("camera", TCP, "cam39", "newest", 20, 100_000, 16) as process,
        FrameSubscriber([next_line(process)], cameras=cameras, max_cameras=40) as subscriber,
    ):
        wait_until(lambda: subscriber.take(100))
