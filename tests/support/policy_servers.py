"""Servers that are written from the published layouts of GR00T, openpi and GraspGen, without this package."""

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import zmq
from msgpack import packb, unpackb

from tests.support.threads import repeating


def _encode_gr00t(array: Any) -> Any:
    """An array becomes the bytes of numpy.save."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}


def _decode_gr00t(value: Any) -> Any:
    if "__ndarray_class__" in value:
        return np.load(io.BytesIO(value["as_npy"]), allow_pickle=False)
    return value


def _encode_openpi(array: Any) -> Any:
    """An array becomes a map with keys of bytes."""
    head = {b"__ndarray__": True, b"data": array.tobytes()}
    return {**head, b"dtype": array.dtype.str, b"shape": array.shape}


def _decode_openpi(value: Any) -> Any:
    if b"__ndarray__" in value:
        return np.frombuffer(value[b"data"], value[b"dtype"]).reshape(value[b"shape"])
    return value


def _encode_graspgen(array: Any) -> Any:
    """As msgpack_numpy does; an array of objects becomes a pickle."""
    if isinstance(array, np.generic):
        return {b"nd": False, b"type": array.dtype.str, b"data": array.tobytes()}
    kind = b"O" if array.dtype.kind == "O" else b""
    head = {b"nd": True, b"type": array.dtype.str, b"kind": kind, b"shape": array.shape}
    return {**head, b"data": array.dumps() if kind else array.tobytes()}


def _decode_graspgen(value: Any) -> Any:
    if b"nd" in value:
        array = np.frombuffer(value[b"data"], value[b"type"])
        return array.reshape(value[b"shape"]) if value[b"nd"] else array[0]
    return value


gr00t_pack = partial(packb, default=_encode_gr00t)
gr00t_unpack = partial(unpackb, object_hook=_decode_gr00t)
openpi_pack = partial(packb, default=_encode_openpi)
openpi_unpack = partial(unpackb, object_hook=_decode_openpi)
graspgen_pack = partial(packb, default=_encode_graspgen)
graspgen_unpack = partial(unpackb, object_hook=_decode_graspgen)


@contextmanager
def serve(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """Answer each request on a REP socket. Yields its endpoint."""
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        def answer_one() -> None:
            if socket.poll(20):
                socket.send(answer(socket.recv()))

        with repeating(answer_one):
            yield f"tcp://127.0.0.1:{port}"


def serve_gr00t(act: Callable[[dict[str, Any], Any], Any]) -> AbstractContextManager[str]:
    """Serve `act(observation, options)` as GR00T's policy server does. Yields its endpoint."""

    def answer(message: bytes) -> bytes:
        request = gr00t_unpack(message)
        if request["endpoint"] == "ping":
            return gr00t_pack({"status": "ok", "message": "Server is running"})
        try:
            return gr00t_pack(act(**request["data"]))
        except Exception as error:
            return gr00t_pack({"error": repr(error)})

    return serve(answer)


@contextmanager
def serve_openpi(act: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    """Serve `act(observation)` as openpi's policy server does: metadata first. Yields its address."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.server import ServerConnection
    from websockets.sync.server import serve as serve_websocket

    def handle(connection: ServerConnection) -> None:
        connection.send(openpi_pack({"model": "test"}))
        with suppress(ConnectionClosed):  # the policy's client has what it wanted
            while True:
                observation = openpi_unpack(connection.recv())
                try:
                    reply = openpi_pack(act(observation))
                except Exception as error:
                    connection.send(repr(error))  # as openpi's server does, which then closes the connection
                    return
                connection.send(reply)

    with serve_websocket(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()
