"""The attackers of tools.bench.latency.attacks: each is a function that attacks until an event is set.

An attack that is cut off connects again after a pause. All of them use the loopback interface only.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count, cycle
from typing import Any, NamedTuple

import cv2
import numpy as np
import zmq

from sam3_node.transport import FramePublisher
from sam3_node.types import Frame, Mask
from sam3_node.wire import Request, encode_mask, pack_frame, pack_request
from tests.support.raw_zmtp import connect, frame, ping, raw_peer, reset

MAX_SIDE = 16384
BODY_BYTES = 15 << 20
PAUSE_S = 0.1
CONNECTIONS, HALF_OPEN = 2000, 900
NAMES, SCANS = 1500, 10_000
FRAMES_HZ = 30

POINT = {"camera": "cam0", "points": [[320.0, 240.0]]}


class Target(NamedTuple):
    """The endpoints of a node: of its camera, of a second camera that the attacker plays, and its own."""

    frames: str
    second: str
    masks: str
    control: str


Attack = Callable[[Target, threading.Event], None]


def _pack_large_mask() -> dict[str, Any]:
    full = np.zeros((MAX_SIDE, MAX_SIDE), np.bool_)
    full[0, 0] = full[-1, -1] = True
    return encode_mask(Mask.from_full(full))


def _send_requests(bodies: Iterator[bytes], target: Target, stop: threading.Event, ahead: int = 1000) -> None:
    """Send requests as fast as the node takes them, and read the replies."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger, client.sndhwm = 0, ahead
        client.connect(target.control)
        body = next(bodies)
        while not stop.is_set():
            events = client.poll(100, zmq.POLLIN | zmq.POLLOUT)
            if events & zmq.POLLIN:
                client.recv()
            if events & zmq.POLLOUT:
                client.send(body)
                body = next(bodies)


def _requests(op: str, arguments: dict[str, Any]) -> Attack:
    def attack(target: Target, stop: threading.Event) -> None:
        _send_requests((pack_request(Request(n, op, arguments)) for n in count(1)), target, stop)

    return attack


def _large_requests(op: str, arguments: Callable[[], dict[str, Any]]) -> Attack:
    def attack(target: Target, stop: threading.Event) -> None:
        _send_requests(cycle([pack_request(Request(1, op, arguments()))]), target, stop, ahead=4)

    return attack


def _malformed(target: Target, stop: threading.Event) -> None:
    cut = pack_request(Request(1, "status"))[:-3]
    _send_requests(cycle([b"", b"junk", os.urandom(2000), cut, b"\xdd\xff\xff\xff\xff"]), target, stop)


def _raw(place: str, kind: str, make: Callable[[], bytes]) -> Attack:
    """Return an attack that sends the same bytes again and again, and connects anew when it is cut off."""

    def attack(target: Target, stop: threading.Event) -> None:
        data = make()
        while not stop.is_set():
            with contextlib.suppress(OSError, AssertionError), raw_peer(getattr(target, place), kind) as peer:
                peer.settimeout(1)
                while not stop.is_set():
                    with contextlib.suppress(TimeoutError):
                        peer.sendall(data)
            stop.wait(PAUSE_S)

    return attack


def _subscribe(size: int) -> Callable[[], bytes]:
    return lambda: b"".join(frame(b"\x01" + os.urandom(size)) for _ in range(1000))


def _half_open(target: Target, stop: threading.Event) -> None:
    """Hold connections without a handshake, a third at each socket."""
    places = cycle([target.frames, target.masks, target.control])
    while not stop.is_set():
        with ExitStack() as stack:
            for _ in range(HALF_OPEN):
                with contextlib.suppress(OSError):
                    stack.enter_context(connect(next(places)))
            stop.wait(2)


def _connects(target: Target, stop: threading.Event) -> None:
    """Connect to the sockets one after the other, with a handshake, and hold the connections."""
    places = cycle([(target.masks, "SUB"), (target.control, "DEALER")])
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            with contextlib.suppress(OSError, AssertionError):
                stack.enter_context(raw_peer(*next(places)))
            if stop.is_set():
                return
        stop.wait()


def _pings(target: Target, stop: threading.Event) -> None:
    """Send PINGs behind more messages than a short queue holds, and reset the connection."""
    junk = b"".join(frame(b"\x01%d" % n) + ping() for n in range(300))
    for place, kind in cycle([(target.frames, "SUB"), (target.masks, "SUB"), (target.control, "DEALER")]):
        if stop.is_set():
            return
        with contextlib.suppress(OSError, AssertionError), raw_peer(place, kind) as peer:
            peer.sendall(junk)
            stop.wait(0.05)
            reset(peer)


def _publish(make: Callable[[int], Frame], hz: float = FRAMES_HZ, burst: int = 1) -> Attack:
    """Return an attack by a camera of the second endpoint."""

    def attack(target: Target, stop: threading.Event) -> None:
        with zmq.Context() as context, context.socket(zmq.PUB) as camera:
            camera.linger, camera.sndhwm = 0, 0
            camera.bind(target.second)
            seq = 0
            while not stop.wait(1 / hz):
                for _ in range(burst):
                    camera.send_multipart(pack_frame(make(seq)))
                    seq += 1

    return attack


def _grey(camera: str, seq: int, ahead_s: float = 0.0) -> Frame:
    capture_ns = time.time_ns() + int(1e9 * ahead_s)
    return Frame(camera, seq, capture_ns, 64, 48, "mono8", bytes(64 * 48), sent_ns=time.time_ns())


def _jpeg(side: int, *options: int) -> bytes:
    return cv2.imencode(".jpg", np.full((side, side, 3), 90, np.uint8), options)[1].tobytes()


def _jpeg_of_many_scans() -> bytes:
    """Return a progressive JPEG in which the last scan is repeated."""
    data = _jpeg(1024, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * SCANS + data[-2:]


def _jpeg_of_two_sizes() -> bytes:
    """Return a JPEG of 12000 x 12000 behind a marker with fill bytes; a reader that skips them finds 64 x 64."""
    large = _jpeg(12000)
    body = bytearray(large[large.index(b"\xff\xc0") : large.index(b"\xff\xc0") + 19])
    body[5:9] = struct.pack(">HH", 64, 64)
    return large[:2] + b"\xff\xe0\x00\x15" + bytes(body) + b"\xff\xff\xff" + large[3:]


def _images(make: Callable[[], bytes], side: int) -> Attack:
    def attack(target: Target, stop: threading.Event) -> None:
        data = make()
        _publish(lambda seq: Frame("evil", seq, time.time_ns(), side, side, "jpeg", data))(target, stop)

    return attack


def _same_name(target: Target, stop: threading.Event) -> None:
    with FramePublisher(target.second) as camera:
        for seq in count():
            if stop.wait(1 / FRAMES_HZ):
                return
            camera.send(_grey("cam0", seq))


def _large_frames(target: Target, stop: threading.Event) -> None:
    """Send frames whose pixels are noise, as large as the node accepts by default."""
    pixels = os.urandom(4096 * 4096)
    _publish(lambda seq: Frame("evil", seq, time.time_ns(), 4096, 4096, "mono8", pixels), 5)(target, stop)


ATTACKS: dict[str, Attack] = {
    "segment requests": _requests("segment", POINT),
    "refine requests": _requests("refine_object", {**POINT, "id": 1}),
    "status requests": _requests("status", {}),
    "malformed requests": _malformed,
    "huge masks": _large_requests("add_object", lambda: {"camera": "cam0", "mask": _pack_large_mask()}),
    "huge requests": _large_requests("segment", lambda: {**POINT, "label": os.urandom(BODY_BYTES)}),
    "small junk to control": _raw("control", "DEALER", lambda: frame(b"junk") * 20_000),
    "empty messages to control": _raw("control", "DEALER", lambda: frame(b"") * 40_000),
    "a request of empty parts": _raw("control", "DEALER", lambda: frame(b"", more=True) * 40_000),
    "a request of large parts": _raw("control", "DEALER", lambda: frame(bytes(1 << 16), more=True) * 8),
    "a subscription of parts": _raw("masks", "SUB", lambda: frame(b"\x01" + bytes(400), more=True) * 500),
    "subscriptions, 12 bytes": _raw("masks", "SUB", _subscribe(12)),
    "subscriptions, 4 KB": _raw("masks", "SUB", _subscribe(4000)),
    "subscriptions to camera": _raw("frames", "SUB", _subscribe(70)),
    "half-open handshakes": _half_open,
    "2000 connections": _connects,
    "pings and resets": _pings,
    "1500 camera names": _publish(lambda seq: _grey(f"evil{seq % NAMES}", seq), 50, 30),
    "a camera of the same name": _same_name,
    "jpeg of 10000 scans": _images(_jpeg_of_many_scans, 1024),
    "jpeg of two sizes": _images(_jpeg_of_two_sizes, 64),
    "large frames": _large_frames,
    "frames 10 s ahead": _publish(lambda seq: _grey("evil", seq, 10.0)),
    "frames 10 s behind": _publish(lambda seq: _grey("evil", seq, -10.0)),
}
"""By name. The attacks of a camera come from the second endpoint of the node."""
