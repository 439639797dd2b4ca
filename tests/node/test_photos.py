"""Photos and masks of requests: bounded before they are decoded, and decoded while frames are stepped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import zmq

from sam3_node.errors import BusyError, RequestError
from sam3_node.node import photos
from sam3_node.resumable import resume, run_to_end
from sam3_node.settings import DetectorSettings, TrackerSettings
from sam3_node.transport.limits import rss_bytes
from sam3_node.wire import Request, codec, masks, pack_request, unpack_reply
from sam3_node.wire.images import MAX_PHOTO_FILE
from tests.support.hostility import MEGABYTE, large_jpeg, large_png
from tests.support.near_node import NearNode
from tests.support.node_rig import until
from tests.support.patience import PATIENCE_S
from tests.support.refuses import refuses
from tests.support.tiny_detectors import picture, write_tiny_sam3
from tests.support.transport_peer import open_peer

BOX = [10, 20, 60, 70]
PHOTO = cv2.imencode(".jpg", picture())[1].tobytes()
HOSTILE = {"png": large_png, "grey png": lambda: large_png(colour=0), "jpeg": lambda: large_jpeg(PHOTO)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearNode]:
    folder = tmp_path_factory.mktemp("served")
    write_tiny_sam3(folder / "detector")
    detector = DetectorSettings(kind="sam3-concept", name=str(folder / "detector"), score=0.9)
    with NearNode(folder, detector=detector) as served:
        served.send()
        yield served


class Held:
    """Photos whose decoding waits until the test lets it go on."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = threading.Event()

    def read(self, *args: Any) -> photos.Photo:
        self.begun += 1
        assert self.go.wait(PATIENCE_S)
        return read_photo(*args)


read_photo = photos.read_photo


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()
    monkeypatch.setattr(photos, "read_photo", held.read)
    yield held
    held.go.set()


def count_threads() -> int:
    return sum(thread.name.startswith("photo") for thread in threading.enumerate())


def ask_for_photo(number: int, photo: bytes = PHOTO) -> bytes:
    return pack_request(Request(number, "add_exemplar", {"name": "bolt", "boxes": [BOX], "photo": photo}))


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_a_photo_of_many_pixels_is_refused_before_it_is_decoded(
    served: NearNode, make: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = make()
    monkeypatch.setattr(cv2, "imdecode", lambda *args: pytest.fail("decoded"))
    before = rss_bytes()
    for _ in range(3):
        with refuses(RequestError, field=("photo", "8192", "scale")):
            served.client.call("add_exemplar", name="bolt", boxes=[BOX], photo=photo)
    served.send()
    assert rss_bytes() - before < 64 * MEGABYTE
    assert count_threads() == 0
    assert served.status()["exemplars"] == {}


def test_a_photo_of_many_bytes_is_refused(served: NearNode) -> None:
    with refuses(RequestError, field=("photo", str(MAX_PHOTO_FILE))):
        served.client.call("add_exemplar", name="bolt", boxes=[BOX], photo=PHOTO + bytes(MAX_PHOTO_FILE))


def test_masks_and_other_clients_go_on_while_a_photo_is_decoded(served: NearNode, held: Held) -> None:
    with open_peer(zmq.DEALER, served.control) as peer:
        peer.send(ask_for_photo(1))
        until(lambda: held.begun, "the photo is decoded")
        # of the same client, which may rely on the order
        peer.send(pack_request(Request(2, "set_prompts", {"prompts": ["spoon"]})))
        for seq in (5000, 5001, 5002):
            served.send(seq)
        assert served.client.call("list_objects") == {"objects": []}
        assert not peer.poll(0)
        assert served.status()["exemplars"] == {}
        held.go.set()
        replies = [unpack_reply(peer.recv()) for _ in range(2)]
    assert [(reply.id, reply.error, reply.result["prompts"]) for reply in replies] == [
        (1, None, ["bolt"]),
        (2, None, ["spoon"]),
    ]
    served.client.call("set_prompts", prompts=[])
    assert count_threads() == 0


def test_a_photo_that_waits_for_a_hand_over_is_not_used(served: NearNode, held: Held) -> None:
    with open_peer(zmq.DEALER, served.control) as peer:
        peer.send(ask_for_photo(1))
        until(lambda: held.begun, "the photo is decoded")
        served.client.call("hand_over", taker="another", token="t")
        held.go.set()
        error = unpack_reply(peer.recv()).error
    assert error is not None
    assert error.code == BusyError.code
    served.client.call("confirm_hand_over", token="t", accepted=False)
    assert served.status()["exemplars"] == {}
    served.send()


def test_a_node_that_stops_leaves_no_thread(tmp_path: Path, held: Held) -> None:
    write_tiny_sam3(tmp_path / "detector")
    detector = DetectorSettings(kind="sam3-concept", name=str(tmp_path / "detector"), score=0.9)
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        with NearNode(tmp_path, detector=detector) as served:
            served.send()
            peer.connect(served.control)
            peer.send(ask_for_photo(1))
            until(lambda: held.begun, "the photo is decoded")
            served.client.close()
            # the node waits for the thread, which cannot be stopped
            threading.Timer(0.1, held.go.set).start()
    assert count_threads() == 0


def test_one_photo_is_decoded_at_a_time_and_a_cancelled_one_frees_its_turn(held: Held) -> None:
    perception: Any = SimpleNamespace(
        reading_photo=False, settings=SimpleNamespace(tracker=TrackerSettings())
    )
    first, second = (photos.read_photo_in_turns(perception, PHOTO) for _ in range(2))
    assert resume(first) is None
    for _ in range(3):
        assert resume(second) is None
    assert held.begun == 1
    threading.Timer(0.1, held.go.set).start()
    first.close()
    assert count_threads() == 0
    assert np.array_equal(run_to_end(second).image, cv2.imdecode(np.frombuffer(PHOTO, np.uint8), 1))
    assert held.begun == 2
    assert not perception.reading_photo


def test_a_mask_of_many_counts_is_refused_before_it_is_decoded(
    served: NearNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "decode", lambda *args: pytest.fail("decoded"))
    mask = {"encoding": "rle", "size": [960, 1280], "box": [0, 0, 1280, 960], "data": b"1" * (8 << 20)}
    with refuses(RequestError, field=("mask", str(masks.MAX_PROMPT_BYTES))):
        served.client.call("add_object", mask=mask)
    served.send()


def test_a_mask_of_another_size_than_the_frame_is_not_decoded(
    served: NearNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "_decode_crop", lambda *args: pytest.fail("decoded"))
    side = 16384
    data = codec.compress(bytes(side * side // 8))
    mask = {"encoding": "bits+zstd", "size": [side, side], "box": [0, 0, side, side], "data": data}
    seq = served.send().seq
    with refuses(RequestError, field=("mask", str(side))):
        served.client.call("add_object", mask=mask, seq=seq)
