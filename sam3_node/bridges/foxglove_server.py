"""Serves frames and masks to Foxglove: a WebSocket server of the foxglove-sdk.

Recordings have the same messages (`bags.messages.foxglove_out`). A topic without subscribers is not encoded. The
SDK keeps at most MAX_BACKLOG messages for a client that reads slowly, and drops the oldest.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from ..addresses import Address
from ..bags.messages import foxglove_out
from ..bags.messages.foxglove_out import Encoded
from ..errors import SettingsError, TransportError, WireError, require
from ..settings import Settings, read_address
from ..transport.mask_pairing import MAX_CAMERAS
from ..types import Frame, MaskFrame

EXTRA = "foxglove"
MAX_BACKLOG = 16
"""Messages that the SDK keeps for a client that reads slowly. It drops the oldest beyond them."""
TRANSFORMS = "/tf"
"""Topic of all transforms, as Foxglove expects it."""

log = logging.getLogger(__name__)


class _Channel(Protocol):
    """A channel of the SDK, for the messages of one topic."""

    def has_sinks(self) -> bool: ...

    def schema_name(self) -> str | None: ...

    def log(self, data: bytes, *, log_time: int) -> None: ...

    def close(self) -> None: ...


class FoxgloveServer:
    """A server that shows pictures, outlines, depth, calibration, transforms and positions.

    Raises MissingExtraError without the extra `foxglove`, SettingsError for an address that is not safe, and
    TransportError for one that cannot be bound.
    """

    def __init__(self, settings: Settings) -> None:
        address = safe_address(settings)
        self._sdk = require("foxglove", EXTRA)
        # what the messages are made of; imported here, so that the error names the extra before anything is bound
        for module in ("foxglove_schemas_protobuf.SceneUpdate_pb2", "mcap_protobuf.schema"):
            require(module, EXTRA)
        self._context = self._sdk.Context()
        self._channels: dict[str, dict[str, _Channel]] = {}  # of each camera, by topic
        self._shared: dict[str, _Channel] = {}
        # the SDK raises RuntimeError for an address that it cannot bind
        try:
            self._server = self._sdk.start_server(
                name="sam3-node",
                host=address.host,
                port=address.port,
                context=self._context,
                message_backlog_size=MAX_BACKLOG,
            )
        except RuntimeError as error:
            raise TransportError(
                f"cannot serve Foxglove at {address.host}:{address.port}: {error}; stop the process that uses it, or "
                "set bridge.bind"
            ) from error
        self.url = address.make_url("ws", self._server.port)
        """Address to open in Foxglove."""

    def show(self, frame: Frame | None, masks: MaskFrame) -> bool:
        """Send the topics of masks and frame that have subscribers. Return False if none has."""
        makers: dict[str, Callable[[], Encoded]] = _frame_makers(frame) if frame is not None else {}
        makers[f"/{masks.camera}/annotations"] = lambda: foxglove_out.encode_annotations(masks)
        makers[f"/{masks.camera}/scene"] = lambda: foxglove_out.encode_scene(masks)
        channels = self._find_channels(masks.camera)
        # transforms of all cameras are on one topic
        if masks.camera_pose is not None or masks.robot_pose is not None:
            self._publish(self._shared, TRANSFORMS, lambda: foxglove_out.encode_transforms(masks), masks)
        for topic, encode in makers.items():
            self._publish(channels, topic, encode, masks)
        return any(channel.has_sinks() for channel in channels.values())

    def close(self) -> None:
        """Stop the server."""
        self._server.stop()

    def _publish(
        self, channels: dict[str, _Channel], topic: str, encode: Callable[[], Encoded], masks: MaskFrame
    ) -> None:
        # nobody subscribes: nothing is encoded. The first message is encoded all the same, because it tells the type
        channel = channels.get(topic)
        if channel is not None and not channel.has_sinks():
            return
        try:
            message = encode()  # the first one also tells the channel's type
        except WireError as error:
            log.warning("skipped %s of frame %d: %s", topic, masks.seq, error)
            return
        name = message.kind.DESCRIPTOR.full_name
        if channel is None or channel.schema_name() != name:
            if channel is not None:  # the camera has changed its encoding
                channel.close()
            channel = self._open_channel(topic, message.kind, name)
            channels[topic] = channel
        channel.log(message.data, log_time=masks.capture_ns)

    def _open_channel(self, topic: str, kind: Any, name: str) -> _Channel:
        describe = require("mcap_protobuf.schema", EXTRA).build_file_descriptor_set
        schema = self._sdk.Schema(name=name, encoding="protobuf", data=describe(kind).SerializeToString())
        channel: _Channel = self._sdk.Channel(
            topic, schema=schema, message_encoding="protobuf", context=self._context
        )
        return channel

    def _find_channels(self, camera: str) -> dict[str, _Channel]:
        """Return the channels of a camera. Beyond MAX_CAMERAS, close those that were silent for longest."""
        # put back at the end: the first camera is the one that was silent for longest
        channels = self._channels.pop(camera, {})
        self._channels[camera] = channels
        if len(self._channels) > MAX_CAMERAS:
            for channel in self._channels.pop(next(iter(self._channels))).values():
                channel.close()
        return channels


def safe_address(settings: Settings) -> Address:
    """Return where to listen. Raises SettingsError for another address than loopback without bridge.insecure."""
    address = read_address("bridge.bind", settings.bridge.bind, "127.0.0.1:8765")
    if not address.is_loopback and not settings.bridge.insecure:
        raise SettingsError(
            f"bridge.bind: expected 127.0.0.1, found {address.host}: anyone who can connect would see the pictures. "
            "Use a tunnel such as ssh -L, or set bridge.insecure on a network that you trust"
        )
    return address


def _frame_makers(frame: Frame) -> dict[str, Callable[[], Encoded]]:
    """Return the encoder of each message about a frame, by topic."""
    root = f"/{frame.camera}"
    depth = frame.depth
    intrinsics = frame.intrinsics
    makers: dict[str, Callable[[], Encoded]] = {}
    if intrinsics is not None:
        makers[f"{root}/calibration"] = lambda: foxglove_out.encode_calibration(frame, intrinsics)
    makers[f"{root}/image"] = lambda: foxglove_out.encode_image(frame)
    if depth is not None:
        makers[f"{root}/depth"] = lambda: foxglove_out.encode_depth(frame, depth)
    return makers
