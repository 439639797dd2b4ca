"""A relay of ipc:// connections that is cut at a chosen message, as a network may be."""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path


class Relay:
    """Listens at `path`, and forwards each connection to `target`, both directions, until it is cut. Close ends it.

    While it is cut, nothing passes and no peer can connect. `cut_at` waits for a text in what clients send, or, with
    `reply`, for the request to pass and then for the text in what they receive. The message with the last text is not
    delivered, and `then` is called.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.endpoint, self._target = f"ipc://{path}", str(target)
        self._lock = threading.Lock()
        self._request, self._reply = b"", b""
        self._then: Callable[[], object] = lambda: None
        self._has_passed = False
        self._open: list[socket.socket] = []
        self._is_cut = False
        self.was_cut = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_at(self, request: bytes, reply: bytes = b"", then: Callable[[], object] = lambda: None) -> None:
        """Connect again, and cut at the next message with this text."""
        with self._lock:
            self._is_cut = False
            self.was_cut.clear()
            self._request, self._reply, self._then, self._has_passed = request, reply, then, False

    def heal(self) -> None:
        """Forward everything again."""
        self.cut_at(b"")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._drop_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                node = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                with self._lock:
                    self._open += [client, node]
                    is_cut = self._is_cut
                try:
                    node.connect(self._target)
                except OSError:
                    is_cut = True
                if is_cut:
                    client.close()
                    node.close()
                    continue
                for ends in ((client, node, False), (node, client, True)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    if self._is_cut:
                        break
                    if self._is_last(data, is_reply):
                        self._is_cut = True
                        self._then()
                        self.was_cut.set()
                        break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if self._is_cut:
            self._drop_all()

    def _is_last(self, data: bytes, is_reply: bool) -> bool:
        if not is_reply and self._request and self._request in data:
            self._has_passed = True
            return not self._reply
        return is_reply and self._has_passed and self._reply in data

    def _drop_all(self) -> None:
        with self._lock:
            ends, self._open = self._open, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
