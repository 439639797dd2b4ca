"""A client of Foxglove's WebSocket protocol (foxglove.sdk.v1), without the SDK that serves it.

Messages are decoded by the schemas that the server advertises.
"""

import base64
import json
import struct
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from tests.support.patience import PATIENCE_S

PROTOCOL = "foxglove.sdk.v1"
MESSAGE_DATA = 1


class Received(NamedTuple):
    """One message: its topic, the time that it was logged with, and its content."""

    topic: str
    time_ns: int
    message: Any
    data: bytes


class FoxgloveClient(ExitStack):
    """A connection. A context manager."""

    def __init__(self, url: str, **options: Any) -> None:
        websockets = pytest.importorskip("websockets.sync.client", reason="websockets is not installed")
        super().__init__()
        connecting = websockets.connect(url, subprotocols=[PROTOCOL], max_size=None, **options)
        self._socket = self.enter_context(connecting)
        assert self._socket.subprotocol == PROTOCOL
        self.channels: dict[str, dict[str, Any]] = {}
        self.types: list[tuple[str, str]] = []
        """Topics and schemas in the order in which they were advertised."""
        self._topics: dict[int, str] = {}
        self.info = json.loads(self._socket.recv(PATIENCE_S))
        assert self.info["op"] == "serverInfo"

    def subscribe(self, *topics: str) -> None:
        """Subscribe to topics, as soon as they are advertised."""
        while not set(topics) <= set(self.channels):
            self.receive()
        for topic in topics:
            channel = self.channels[topic]["id"]
            self._topics[channel] = topic
            self._send({"op": "subscribe", "subscriptions": [{"id": channel, "channelId": channel}]})

    def unsubscribe(self, topic: str) -> None:
        self._send({"op": "unsubscribe", "subscriptionIds": [self.channels[topic]["id"]]})

    def next(self, topic: str = "", timeout_s: float = PATIENCE_S) -> Received:
        """Return the next message, of a topic if one is given."""
        while True:
            received = self.receive(timeout_s)
            if received is not None and topic in ("", received.topic):
                return received

    def until_advertised(self, topic: str, schema: str) -> None:
        """Wait until a topic has this schema."""
        while self.channels.get(topic, {}).get("schemaName") != schema:
            self.receive()

    def _send(self, request: dict[str, Any]) -> None:
        self._socket.send(json.dumps(request))

    def receive(self, timeout_s: float = PATIENCE_S) -> Received | None:
        """Receive one message of the server. Return it if it is of a topic; note it if it is of the protocol."""
        data = self._socket.recv(timeout_s)
        if isinstance(data, str):
            self._note(json.loads(data))
            return None
        kind, subscription, time_ns = struct.unpack_from("<BIQ", data)
        assert kind == MESSAGE_DATA
        topic = self._topics[subscription]
        payload = data[13:]
        return Received(topic, time_ns, decode(self.channels[topic], payload), payload)

    def _note(self, message: dict[str, Any]) -> None:
        if message["op"] == "advertise":
            for channel in message["channels"]:
                self.channels[channel["topic"]] = channel
                self.types.append((channel["topic"], channel["schemaName"]))
        elif message["op"] == "unadvertise":
            gone = set(message["channelIds"])
            self.channels = {topic: item for topic, item in self.channels.items() if item["id"] not in gone}


def decode(channel: dict[str, Any], data: bytes) -> Any:
    """Decode a message by its channel's own schema."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    assert (channel["encoding"], channel["schemaEncoding"]) == ("protobuf", "protobuf")
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(channel["schema"])).file:
        pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName(channel["schemaName"]))
    message = kind()
    message.ParseFromString(data)
    return message


def stamp_ns(timestamp: Any) -> int:
    """Return a protobuf timestamp in nanoseconds."""
    return int(timestamp.seconds * 10**9 + timestamp.nanos)
