"""Tests of liveness: a peer that hangs is noticed, and nobody else is taken for one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import zmq

from sam3_node.transport import FramePublisher, FrameSubscriber, MaskSubscriber, StreamTap
from sam3_node.transport.sockets import ReconnectingSocket, open_subscriber, receive_parts
from sam3_node.wire import pack_frame
from tests.support.transport_peer import hold_interpreter, make_frame, next_line, peer, wait_until
from tests.support.wire_examples import golden
from tests.transport.test_restart import free_endpoint

TCP = "tcp://127.0.0.1:*"


def test_a_hung_node_is_noticed_by_masks_and_tap_and_received_again(tmp_path: Path) -> None:
    frames, masks, control = free_endpoint(), free_endpoint(), free_endpoint()
    with (
        peer("node", frames, masks, control) as node,
        MaskSubscriber(masks) as subscriber,
        StreamTap([frames], masks, (), 1 << 20) as tap,
    ):
        next_line(node)
        wait_until(lambda: subscriber._sockets[0]._watched and tap._sockets[1]._watched)
        for _ in range(2):
            os.kill(node.pid, signal.SIGSTOP)
            wait_until(lambda: not subscriber.connected and not tap.connected)
            os.kill(node.pid, signal.SIGCONT)
            wait_until(lambda: subscriber.connected and tap.connected)
        with FramePublisher(frames) as camera:
            wait_until(lambda: camera.send(make_frame(7)) and subscriber.take(100))
            wait_until(lambda: (message := tap.take(100)) and bytes(message.parts[0]) == b"masks/cam0")


def test_the_sender_of_a_message_is_connected_though_its_handshake_was_not_looked_for() -> None:
    with FramePublisher(TCP) as camera:
        connection = ReconnectingSocket(open_subscriber([b"frames"], 1 << 20), camera.endpoint)
        try:
            wait_until(lambda: camera.send(make_frame(7)) and receive_parts(connection.socket))
            assert not connection.alive
            connection.hear(is_beat=False)
            assert connection.alive
            assert connection.handshakes == 1
        finally:
            connection.close()


def test_idle_publishers_and_those_without_beats_are_not_taken_for_hung() -> None:
    with (
        FramePublisher(TCP) as idle,
        zmq.Context() as context,
        context.socket(zmq.PUB) as plain,
        context.socket(zmq.SUB) as clock,
    ):
        plain.linger = 0
        port = plain.bind_to_random_port("tcp://127.0.0.1")
        with FrameSubscriber([idle.endpoint, f"tcp://127.0.0.1:{port}"]) as subscriber:
            wait_until(lambda: plain.send_multipart(pack_frame(make_frame(0))) or subscriber.take(20))
            clock.connect(idle.endpoint)
            clock.subscribe(b"")
            beats = [clock.recv_multipart() for _ in range(6)]
            assert beats == [golden("beat")] * 6
            assert [socket.handshakes for socket in subscriber._sockets] == [1, 1]
            assert subscriber.rejected == 0


def test_a_subscriber_that_could_not_listen_does_not_take_its_peer_for_hung() -> None:
    with (
        peer("camera", TCP, "cam0", "newest", 50, 100_000, 16) as camera,
        FrameSubscriber([next_line(camera)]) as subscriber,
    ):
        seqs: list[int] = []
        for _ in range(2):
            for _ in range(3):
                received = subscriber.take(10_000)
                assert received is not None
                seqs.append(received.frame.seq)
            hold_interpreter(2500)
        wait_until(lambda: (got := subscriber.take(1000)) and got.frame.seq > seqs[-1] + 40)
        assert subscriber._sockets[0].handshakes == 1
        assert seqs == sorted(set(seqs))
