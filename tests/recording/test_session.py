"""A node, a camera and `sam3-node record` as processes, beside an independent reader of both sockets: nothing of what
was sent is changed, and all is there.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from mcap.reader import make_reader
from mcap_protobuf.decoder import DecoderFactory

from sam3_node.bags.native import NODE, RECORDING
from sam3_node.bags.native.reader import RecordedMasks, RecordingReader
from sam3_node.wire import Event, decode_image, pack_event, unpack_event, unpack_frame, unpack_masks
from tests.support.node_rig import Rig, ids, masks_where
from tests.support.patience import PATIENCE_MS
from tests.support.threads import repeating
from tests.support.wire_examples import plain


@contextmanager
def listening(*endpoints: str) -> Iterator[list[list[bytes]]]:
    """Yield a list that gets the parts of every message of the endpoints, in a thread with its own sockets."""
    messages: list[list[bytes]] = []
    with zmq.Context() as context, ExitStack() as opened:
        poller = zmq.Poller()
        for endpoint in endpoints:
            socket = opened.enter_context(context.socket(zmq.SUB))
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(endpoint)
            poller.register(socket, zmq.POLLIN)
        with repeating(lambda: messages.extend(socket.recv_multipart() for socket, _ in poller.poll(50))):
            yield messages


@dataclasses.dataclass
class Session:
    """Recorded messages, and those that an independent reader received."""

    path: Path
    messages: list[list[bytes]]
    output: list[str]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    with (
        Rig(tmp_path_factory.mktemp("session")) as rig,
        listening(rig.frames[0], rig.masks) as messages,
    ):
        path = rig.folder / "session.mcap"
        recorder = rig.start("record", str(path))
        rig.node()
        rig.camera()
        edit(rig)
        assert recorder.terminate() == 0
        output = recorder.take_lines()
    return Session(path, messages, output)


def edit(rig: Rig) -> None:
    """Send requests of every kind, with masks between them."""
    with rig.client() as client:
        masks_where(client, lambda found: True, "the first masks")
        client.segment(points=[(20.0, 20.0)])  # changes nothing: no event
        mug = client.add_object(box=(100, 100, 200, 200), label="mug").id
        masks_where(client, lambda found: mug in ids(found), "the mug")
        client.refine_object(mug, points=[(150.0, 150.0)])
        client.pause()
        client.resume()
        client.remove_object(mug)
        masks_where(client, lambda found: mug not in ids(found), "no mug")
        client.reset()
        for _ in range(10):
            assert client.latest(timeout_ms=PATIENCE_MS) is not None


def test_frames_are_those_that_the_camera_sent(session: Session) -> None:
    sent = {
        found.seq: found
        for parts in session.messages
        if parts[0] == b"frame/cam0"
        for found in [unpack_frame([memoryview(part) for part in parts])]
    }
    recorded = {found.seq: found for found in RecordingReader([session.path]).frames()}
    both = recorded.keys() & sent.keys()
    assert len(both) > len(sent) / 2
    for seq in both:
        assert plain(recorded[seq]) == plain(sent[seq])


def test_masks_are_those_that_a_subscriber_got(session: Session) -> None:
    sent = {
        unpack_masks(list(parts)).seq: parts[1] for parts in session.messages if parts[0] == b"masks/cam0"
    }
    actions = RecordingReader([session.path]).actions()
    recorded = {action.masks.seq: action.body for action in actions if isinstance(action, RecordedMasks)}
    both = recorded.keys() & sent.keys()
    assert len(both) > len(sent) / 2
    for seq in both:
        assert recorded[seq] == sent[seq]


def test_events_are_whole_and_among_the_masks(session: Session) -> None:
    sent = [unpack_event(list(parts)) for parts in session.messages if parts[0] == b"events"]
    actions = list(RecordingReader([session.path]).actions())
    events = [action for action in actions if isinstance(action, Event)]
    assert events == sent
    assert [event.n for event in events] == list(range(7))
    assert [event.op for event in events] == [
        "served", "add_object", "refine_object", "pause", "resume", "remove_object", "reset",
    ]  # fmt: skip
    assert events[1].args["label"] == "mug"
    order = [parts for parts in session.messages if parts[0] in (b"events", b"masks/cam0")]
    bodies = [pack_event(item)[1] if isinstance(item, Event) else item.body for item in actions]
    kept = [parts[1] for parts in order if parts[1] in set(bodies)]
    assert kept == [body for body in bodies if body in {parts[1] for parts in order}]


def test_the_node_and_the_counts_are_in_the_metadata(session: Session) -> None:
    recorded = RecordingReader([session.path])
    (node,) = recorded.metadata()[NODE]
    (counts,) = recorded.metadata()[RECORDING]
    assert node["settings"]["model"]["name"].endswith("tiny")
    assert len(node["model_digest"]) == 64
    assert node["events"] in (0, 1)
    frames = [found.seq for found in recorded.frames()]
    found = [action.masks for action in recorded.actions() if isinstance(action, RecordedMasks)]
    assert counts["cameras"] == {
        "cam0": {
            "frames": len(frames),
            "frames_lost": frames[-1] - frames[0] + 1 - len(frames),
            "masks": len(found),
            "masks_lost": counts["cameras"]["cam0"]["masks_lost"],
            "skipped": sum(item.skipped for item in found),
        }
    }
    assert (counts["events"], counts["events_lost"], counts["rejected"]) == (7, 0, 0)
    assert session.output[-2].startswith(f"recorded {len(frames)} frames, {len(found)} masks, 7 events, ")
    assert session.output[-1].startswith("rate: ")


def test_mcaps_own_reader_decodes_it_by_foxgloves_schemas(session: Session) -> None:
    topics: dict[str, list[Any]] = {}
    with session.path.open("rb") as file:
        reader = make_reader(file, decoder_factories=[DecoderFactory()])
        wanted = ["/cam0/image", "/cam0/annotations"]
        for _, channel, _, message in reader.iter_decoded_messages(topics=wanted):
            topics.setdefault(channel.topic, []).append(message)
    first = next(RecordingReader([session.path]).frames())
    image = topics["/cam0/image"][0]
    pixels = np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, 3)
    assert np.array_equal(pixels, decode_image(first))
    labels = {text.text.split()[1] for found in topics["/cam0/annotations"] for text in found.texts}
    assert labels == {"mug"}
    stamps = {(item.timestamp.seconds, item.timestamp.nanos) for item in topics["/cam0/image"]}
    marked = {(item.timestamp.seconds, item.timestamp.nanos) for item in topics["/cam0/annotations"]}
    assert marked & stamps
