"""Hand the pixels of frames to readers on the same machine in shared memory, without a socket's copies.

A camera writes its newest frames into a ring of slots, and publishes each place as `[b"shared/<camera>", place,
header]` beside the message with pixels. It does so only for large frames, and while somebody has subscribed to such
topics. A reader subscribes to both, and keeps the one that works: the memory of a process on another machine, of
another user or in another container cannot be opened. Who reads memory gets other frames as `[b"shared/<camera>", b"",
header, colour, depth?]`.

The memory is a file without a name (memfd_create): it is gone with the last process that has it, however that ends.
Readers open it through /proc, for which the kernel asks for the same user. It is sealed, so that a reader can neither
write to it nor find it shorter. A reader copies a frame and then looks whether the camera has come near its slot
meanwhile. So it never blocks a camera, and never hands over a picture that is half overwritten.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import os
import struct
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import zmq

from ..errors import WireError
from ..resources import Closeable
from ..types import Buffer, FramePlace
from ..wire import FRAMES_ROOT, SHARED_ROOT, pack_place, unpack_place
from .security import Socket
from .sockets import ReconnectingSocket

SLOTS = 6
"""Frames that a ring holds: a reader has the time of four frames to copy one."""
MIN_FRAME_BYTES = 2 << 20
"""Least size of a frame that is shared. A smaller one comes sooner through a socket, whose ends copy at one time."""
MIN_SLOTS = 3
"""Fewest frames of a ring. One is written, one is read, and one lies between."""
MAX_RING_BYTES = 64 << 20
"""Memory of a ring. Larger frames have fewer slots; those of which MIN_SLOTS do not fit are not shared."""
MAX_RINGS = 16
"""Rings of a publisher, one for each camera, and of a reader for each endpoint."""
RING_IDLE_S = 10.0
"""Seconds after which the ring of a camera that sends nothing gives way to another."""
MAX_MISSES = 5
"""Frames that may be overwritten one after the other. A reader that is so slow goes back to the socket."""
MAX_SUBSCRIPTIONS = 64
"""Subscriptions that a publisher knows. A peer that invents topics must not fill the memory."""
MAX_PER_TURN = 1024
"""Subscriptions that are read before a message is sent. Others wait."""

_NAME = "sam3-node-frames"
_MAGIC = b"sam3-node frames"
_HEAD = struct.Struct("<16s16sQ")
"""The magic, the token, and the number of the frame that was written last or is being written."""
_COUNTER = struct.Struct("<Q")
_COUNTER_OFFSET = _HEAD.size - _COUNTER.size
_DATA_OFFSET = mmap.PAGESIZE
_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1, which Python does not name: only the mapping that exists may write."""

Way = Literal["memory", "socket"]
"""Where a reader finds the pixels of frames: in shared memory, or in the messages."""

log = logging.getLogger(__name__)


class FrameRing(Closeable):
    """Memory in which a camera keeps its newest frames, of `slot_bytes` each, for readers on the same machine.

    Raises OSError if the system has no such memory, or not enough.
    """

    def __init__(self, slot_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("expected Linux")
        self.written_s = time.monotonic()
        """Time of the last frame."""
        pages = -(-slot_bytes // mmap.PAGESIZE)
        self.slot_bytes = pages * mmap.PAGESIZE
        self._slots = min(SLOTS, MAX_RING_BYTES // self.slot_bytes)
        if self._slots < MIN_SLOTS:
            raise OSError(f"{MIN_SLOTS} frames of {slot_bytes} bytes exceed {MAX_RING_BYTES} bytes")
        self._token = os.urandom(16)
        self._numbers = itertools.count()
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._descriptor, 0o600)
            # all of it now: a page that lacks later would end the process
            size = _DATA_OFFSET + self._slots * self.slot_bytes
            os.posix_fallocate(self._descriptor, 0, size)
            self._map = mmap.mmap(self._descriptor, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._map[: _HEAD.size] = _HEAD.pack(_MAGIC, self._token, 0)

    def write(self, parts: Sequence[Buffer]) -> FramePlace:
        """Write the pixels of a frame over those of the oldest, and return their place. They fit into a slot."""
        number = next(self._numbers)
        self.written_s = time.monotonic()
        # told before the first byte changes, so that a reader of the old frame notices
        _COUNTER.pack_into(self._map, _COUNTER_OFFSET, number)
        position = _DATA_OFFSET + number % self._slots * self.slot_bytes
        sizes = []
        for part in parts:
            size = memoryview(part).nbytes
            self._map[position : position + size] = part
            position += size
            sizes.append(size)
        return FramePlace(
            pid=os.getpid(),
            descriptor=self._descriptor,
            token=self._token,
            slots=self._slots,
            slot_bytes=self.slot_bytes,
            number=number,
            sizes=tuple(sizes),
        )

    def close(self) -> None:
        """Give the memory back. Readers keep what they have opened. Idempotent."""
        if not self._map.closed:
            self._map.close()
            os.close(self._descriptor)


class SharedFrames(Closeable):
    """The publisher's side: the rings of its cameras, while somebody asks for them.

    The owner calls it in the thread that uses the socket, an XPUB.
    """

    def __init__(self) -> None:
        self.subscriptions = 0
        """Number of subscriptions to frames in messages so far."""
        self._topics: set[bytes] = set()
        self._knows_all = True  # until so many have subscribed that some are not kept
        self._rings: dict[bytes, FrameRing] = {}
        self._has_shared = False  # so that a reader may have memory alone
        self._has_failed = False

    def read_subscriptions(self, socket: Socket) -> None:
        """Learn who has come and gone. Without readers, the memory is given back."""
        for _ in range(MAX_PER_TURN):
            if not socket.poll(0, zmq.POLLIN):
                break
            message = socket.recv(zmq.NOBLOCK)
            topic = message[1:]
            if message[:1] != b"\1":
                self._topics.discard(topic)
                continue
            self.subscriptions += topic.startswith(FRAMES_ROOT) or FRAMES_ROOT.startswith(topic)
            if topic in self._topics or len(self._topics) < MAX_SUBSCRIPTIONS:
                self._topics.add(topic)
            else:
                self._knows_all = False
        if self._has_shared and not any(topic.startswith(SHARED_ROOT) for topic in self._topics):
            self._has_shared = False
            self.close()

    def is_wanted(self, topic: bytes) -> bool:
        """Return False if nobody has subscribed to a topic."""
        return not self._knows_all or any(topic.startswith(wanted) for wanted in self._topics)

    def share(self, parts: Sequence[Buffer]) -> list[Buffer] | None:
        """Write the pixels of a frame's message into memory. Return the message of their place; None without readers.

        A small frame, and one for which there is no memory, stays in the message, for those who read memory alone.
        """
        topic = SHARED_ROOT + bytes(parts[0])[len(FRAMES_ROOT) :]
        # who subscribes to everything has the pixels of the other message
        if not any(wanted and topic.startswith(wanted) for wanted in self._topics):
            return None
        header, *pixels = parts[1:]
        size = sum(memoryview(part).nbytes for part in pixels)
        if size >= MIN_FRAME_BYTES:
            try:
                place = self._find_ring(topic, size).write(pixels)
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    log.warning("frames are not shared in memory, but sent through sockets: %s", error)
            else:
                self._has_shared = True
                return [topic, pack_place(place), header]
        return [topic, b"", header, *pixels] if self._has_shared else None

    def _find_ring(self, topic: bytes, size: int) -> FrameRing:
        ring = self._rings.get(topic)
        if ring is None or ring.slot_bytes < size:
            # the old one first: its memory may be needed
            if ring is not None:
                self._rings.pop(topic).close()
            self._make_place()
            ring = FrameRing(size)
            self._rings[topic] = ring
        return ring

    def _make_place(self) -> None:
        """Close the ring of a camera that sends no more, if there are too many. Raises OSError if all of them send."""
        if len(self._rings) < MAX_RINGS:
            return
        idle = min(self._rings, key=lambda topic: self._rings[topic].written_s)
        if time.monotonic() - self._rings[idle].written_s < RING_IDLE_S:
            raise OSError(f"expected at most {MAX_RINGS} cameras of one publisher, found another")
        self._rings.pop(idle).close()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()


class _OpenRing(NamedTuple):
    """Memory of a camera that a reader has opened."""

    token: bytes
    memory: mmap.mmap


class SharedFrameReader(Closeable):
    """The reader's side of one endpoint: subscribes to what works, and makes whole messages of frames.

    `topics` are those of the messages with pixels, to which the socket is subscribed already. The owner calls it in
    the thread that uses the socket.
    """

    def __init__(self, source: ReconnectingSocket, topics: Sequence[bytes]) -> None:
        self._source = source
        self._topics = topics
        self._shared_topics = find_shared_topics(topics)
        self._rings: dict[bytes, _OpenRing] = {}  # by topic
        self._way: Way | None = None
        self._handshakes = source.handshakes
        self._misses = 0  # frames in a row that were overwritten before they were read

    @property
    def reads_memory(self) -> bool:
        """True while the endpoint is read in memory alone."""
        return self._way == "memory"

    def follow_connection(self) -> None:
        """Subscribe to both after a new connection: the camera may be another program, user or version now."""
        if self._source.handshakes != self._handshakes:
            self._handshakes = self._source.handshakes
            self._choose(None)

    def resolve(self, parts: list[memoryview]) -> list[memoryview] | None:
        """Return the message of a frame with its pixels; None for one that came already, or was overwritten.

        Any other message is returned as it is.
        """
        if parts[0][: len(SHARED_ROOT)] != SHARED_ROOT:
            is_late = self.reads_memory and parts[0][: len(FRAMES_ROOT)] == FRAMES_ROOT
            return None if is_late else parts
        if self._way == "socket":
            return None
        if len(parts) < 3:
            return parts
        topic = memoryview(FRAMES_ROOT + bytes(parts[0][len(SHARED_ROOT) :]))
        if not parts[1]:
            # while both are subscribed to, the same frame comes in the other message
            return [topic, *parts[2:]] if self.reads_memory else None
        try:
            pixels = self._read(bytes(parts[0]), unpack_place(parts[1]))
        except (OSError, ValueError, WireError) as error:
            log.debug("%s: frames come through the socket: %s", self._source.endpoint, error)
            self._choose("socket")
            return None
        if pixels is None:
            self._misses += 1
            if self._misses >= MAX_MISSES:
                self._choose("socket")
            return None
        self._misses = 0
        self._choose("memory")
        return [topic, parts[2], *pixels]

    def _choose(self, way: Way | None) -> None:
        """Subscribe to one kind of messages; to both while it is not known which works."""
        if way == self._way:
            return
        socket = self._source.socket
        for kind, topics in (("memory", self._shared_topics), ("socket", self._topics)):
            had = self._way in (kind, None)
            needs = way in (kind, None)
            if had == needs:
                continue
            for topic in topics:
                socket.setsockopt(zmq.SUBSCRIBE if needs else zmq.UNSUBSCRIBE, topic)
        self._way = way
        self._misses = 0
        if way != "memory":
            self.close()

    def _read(self, topic: bytes, place: FramePlace) -> list[memoryview] | None:
        """Copy the pixels of a frame; None if they were overwritten. Raises OSError, ValueError for another place."""
        opened = self._rings.get(topic)
        if opened is None or opened.token != place.token:
            opened = _OpenRing(place.token, _open_ring(place))
            self._replace(topic, opened)
        ring = opened.memory
        size = sum(place.sizes)
        begin = _DATA_OFFSET + place.number % place.slots * place.slot_bytes
        if size > place.slot_bytes or begin + place.slot_bytes > len(ring):
            raise ValueError(f"expected a frame inside of a ring of {len(ring)} bytes, found another place")
        if not _is_whole(ring, place):
            return None
        # without giving way to other threads, for which this one would have to wait afterwards
        view = memoryview(ring[begin : begin + size])
        if not _is_whole(ring, place):
            return None
        ends = list(itertools.accumulate(place.sizes))
        return [view[end - part : end] for part, end in zip(place.sizes, ends, strict=True)]

    def _replace(self, topic: bytes, opened: _OpenRing) -> None:
        """Keep the memory of a camera in the place of its last one."""
        before = self._rings.pop(topic, None)
        if before is None and len(self._rings) >= MAX_RINGS:
            before = self._rings.pop(next(iter(self._rings)))
        if before is not None:
            before.memory.close()
        self._rings[topic] = opened

    def close(self) -> None:
        """Close the memory of cameras. Idempotent."""
        for opened in self._rings.values():
            opened.memory.close()
        self._rings.clear()


def find_shared_topics(topics: Sequence[bytes]) -> list[bytes]:
    """Return the topics of shared frames for those of frames; the topic b"" stands for all."""
    return [SHARED_ROOT + topic[len(FRAMES_ROOT) :] for topic in topics]


def _is_whole(ring: mmap.mmap, place: FramePlace) -> bool:
    """Return True while the camera has not come to the slot before that of a frame.

    One slot lies between what is read and what is written, so that the order in which processors see the writes of
    others does not matter.
    """
    head: int = _COUNTER.unpack_from(ring, _COUNTER_OFFSET)[0]
    return 0 <= head - place.number <= place.slots - 2


def _open_ring(place: FramePlace) -> mmap.mmap:
    """Map the memory that a place names, read-only. Raises OSError, ValueError if it is not what the place says."""
    path = f"/proc/{place.pid}/fd/{place.descriptor}"
    # nothing else is opened: opening alone could wait, or have an effect
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise ValueError("expected the memory of a camera, found another file")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = _DATA_OFFSET + place.slots * place.slot_bytes
        # a file that becomes shorter, or whose huge pages run out, would end this process
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        is_plain = os.fstatvfs(descriptor).f_bsize == mmap.PAGESIZE
        found = os.fstat(descriptor).st_size
        if not (is_sealed and is_plain and found == size <= _DATA_OFFSET + MAX_RING_BYTES):
            raise ValueError(f"expected sealed memory of {size} bytes, found other memory")
        ring = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    if ring[:_COUNTER_OFFSET] != _MAGIC + place.token:
        ring.close()
        raise ValueError("expected the token of the camera's memory, found another")
    return ring
