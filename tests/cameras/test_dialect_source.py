"""Sources of camera.dialect over real sockets: names, stamps, newest images, restarts, hostile servers and senders."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from sam3_node.cameras import server_source as dialect_source
from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.server_source import MAX_CAMERAS, ServerSource, StampReader
from sam3_node.cameras.sources import open_camera
from sam3_node.errors import CameraError, TransportError
from sam3_node.processes import signals
from sam3_node.settings import CameraSettings
from sam3_node.transport.foreign import MAX_FOREIGN_BYTES
from sam3_node.types import NANOSECONDS, Image
from tests.support.camera_servers import (
    BLUE,
    PERIOD_S,
    RED,
    StubServer,
    bare_jpeg,
    base64_jpeg,
    groot,
    image_where,
    imagezmq,
    jpeg,
    lerobot,
    opened,
    picture,
)
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions, refuses
from tests.support.threads import in_thread
from tests.support.transport_peer import open_peer, sockets_of, wait_until

HUB = "tcp://127.0.0.1:0"
GOOD = lerobot({"head": base64_jpeg(picture())})


def alternate(index: int) -> list[bytes]:
    """Return the images of two cameras in turn."""
    return imagezmq("right" if index % 2 else "left", picture())


@contextmanager
def serving(
    make: Callable[[int], list[bytes]], dialect: str, *, period_s: float = PERIOD_S, **settings: Any
) -> Iterator[ServerSource]:
    """Run a server that sends these messages, and open it."""
    with (
        StubServer(make, period_s=period_s) as server,
        opened(server.endpoint, dialect, **settings) as source,
    ):
        yield source


def is_close(image: Image, colour: tuple[int, int, int]) -> bool:
    return bool(np.abs(image[10, 10].astype(int) - colour).max() <= 2)


def until(condition: Callable[[], object]) -> None:
    wait_until(condition, PATIENCE_S)


def test_each_camera_of_a_message_comes_under_its_own_name_with_its_stamp() -> None:
    def make(index: int) -> list[bytes]:
        stamps = {"head cam": time.time() - 0.2, "wrist": time.time() - 0.1}
        return groot({"head cam": base64_jpeg(picture(RED)), "wrist": jpeg(picture(BLUE))}, stamps)

    with serving(make, "groot") as source:
        head = image_where(source, lambda image: image.camera == "head_cam")
        wrist = image_where(source, lambda image: image.camera == "wrist")
    assert is_close(head.pixels(), RED)
    assert is_close(wrist.pixels(), BLUE)
    for image, delay_s in ((head, 0.2), (wrist, 0.1)):
        assert image.times["arrival_ns"] - image.capture_ns >= delay_s * 1e9
        assert image.capture_ns == pytest.approx(image.times["server_stamp_s"] * 1e9, abs=1e6)


def test_bare_jpegs_are_stamped_on_arrival_and_named_by_their_topic() -> None:
    def make(index: int) -> list[bytes]:
        good = (bare_jpeg(picture(RED), "left cam"), bare_jpeg(picture(BLUE)))
        return ([b"garbage"], *good)[index % 3]

    with serving(make, "jpeg", name="front") as source:
        left = image_where(source, lambda image: image.camera == "left_cam")
        front = image_where(source, lambda image: image.camera == "front")
        wait_until(lambda: source.counts.rejected)
        assert mentions(source.counts.last_error, "JPEG", "PNG")
    assert is_close(left.pixels(), RED)
    assert is_close(front.pixels(), BLUE)
    for image in (left, front):
        assert image.capture_ns == image.times["arrival_ns"]
    with (
        StubServer(lambda index: bare_jpeg(picture(), str(index))) as server,
        opened(f"{server.endpoint}?camera=*", "jpeg", name="any") as source,
    ):
        assert {image_where(source).camera for _ in range(3)} == {"any"}


@pytest.mark.parametrize(("swap", "colour"), [("auto", RED), ("yes", RED), ("no", BLUE)])
def test_red_and_blue_are_exchanged_as_the_settings_say(swap: str, colour: tuple[int, int, int]) -> None:
    with serving(lambda _: GOOD, "lerobot", swap_red_blue=swap) as source:
        assert is_close(image_where(source).pixels(), colour)
        assert not source.is_finite


def test_raw_images_are_exchanged_too() -> None:
    with serving(lambda _: imagezmq("pi", picture(RED)), "imagezmq", swap_red_blue="yes") as source:
        assert is_close(image_where(source).pixels(), BLUE)


def test_a_slow_reader_gets_the_newest_image_and_knows_what_it_missed() -> None:
    def make(index: int) -> list[bytes]:
        return imagezmq("pi", np.frombuffer(np.array([index, 0, 0], "<i4"), np.uint8).reshape(2, 2, 3))

    def number(image: CapturedImage) -> int:
        return int(image.pixels().reshape(-1)[:4].view("<i4")[0])

    with serving(make, "imagezmq", period_s=0.001) as source:
        first = number(image_where(source))
        before = source.lost
        until(lambda: source.lost > before + 20)
        assert number(image_where(source)) > first + 20


def test_each_camera_that_alternates_in_the_messages_is_heard() -> None:
    with serving(alternate, "imagezmq") as source:
        for camera in ("left", "right") * 3:
            image_where(source, lambda image, name=camera: image.camera == name)


def test_an_image_that_comes_again_with_its_stamp_is_given_once() -> None:
    stamp = time.time()

    def make(index: int) -> list[bytes]:
        changed = index >= 100  # the same stamp, but another image
        return lerobot({"head": base64_jpeg(picture(BLUE if changed else RED))}, {"head": stamp})

    with serving(make, "lerobot") as source:
        assert is_close(image_where(source).pixels(), RED)
        second = image_where(source)
        assert is_close(second.pixels(), BLUE)
        assert source.counts.repeated > 0


def test_a_server_may_be_late_and_be_restarted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "NOTICE_S", 0.3)
    monkeypatch.setattr(signals, "REPEAT_S", 0.1)
    endpoint = f"ipc://{tmp_path}/server"
    with opened(endpoint, "imagezmq") as source:
        said = ""

        def is_told(text: str) -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return text in said

        until(lambda: is_told(f"no server publishes at {endpoint}: start it"))
        assert mentions(said, "--dialect imagezmq-hub")
        for colour in (RED, BLUE):
            with StubServer(lambda _, colour=colour: imagezmq("pi", picture(colour)), endpoint):
                image_where(source, lambda image, colour=colour: is_close(image.pixels(), colour))
        said = ""
        until(lambda: is_told("no server publishes at"))


def test_hostile_messages_are_counted_and_told_and_the_images_come_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    messages = [[b"\xff" * 100], GOOD, [b"{"], [b"", b""], [b"x"] * 30, [b"[" * 5000], [b""], [b"beat"]]
    with serving(lambda index: messages[index % len(messages)], "lerobot") as source:
        for _ in range(3):
            assert image_where(source).camera == "head"
        until(lambda: source.counts.rejected > 12)
        assert source.lost >= source.counts.rejected
    assert mentions(caplog.text, "image", "read")


def test_a_reason_that_comes_again_after_good_images_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    sent = [b"{"]
    with serving(lambda _: sent, "lerobot") as source:
        until(lambda: source.counts.rejected)
        sent[:] = GOOD
        image_where(source)
        caplog.clear()
        sent[:] = [b"{"]
        until(lambda: mentions(caplog.text, "image", "read"))


def test_a_part_that_is_too_large_ends_the_connection_and_not_the_process() -> None:
    def make(index: int) -> list[bytes]:
        return [bytes(MAX_FOREIGN_BYTES + 1)] if index == 5 else GOOD

    with serving(make, "lerobot") as source:
        (connection,) = sockets_of(source._receiver)
        image_where(source)
        until(lambda: connection.handshakes > 1)
        image_where(source)


def test_a_wrong_dialect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with serving(lambda _: GOOD, "groot") as source:
        until(lambda: source.counts.rejected)
        assert mentions(source._explain_silence(), "--dialect lerobot")
    assert mentions(caplog.text, "msgpack", "JSON")


def test_names_that_never_end_are_bounded_and_may_be_taken_for_one_camera() -> None:
    with StubServer(lambda index: imagezmq(f"frame {index}", picture())) as server:
        with opened(server.endpoint, "imagezmq") as source:
            until(lambda: source.counts.rejected)
            assert f"expected at most {MAX_CAMERAS} cameras, found another" in source.counts.last_error
            assert len(source._cameras) == MAX_CAMERAS
        with opened(f"{server.endpoint}?camera=*", "imagezmq", name="pi") as source:
            assert {image_where(source).camera for _ in range(5)} == {"pi"}
            assert source.counts.rejected == 0


def test_one_camera_is_chosen_and_a_wrong_choice_names_the_others() -> None:
    images = {"left": jpeg(picture(RED)), "right": jpeg(picture(BLUE))}
    with StubServer(lambda _: groot(images)) as server:
        with opened(f"{server.endpoint}?camera=right", "groot", name="arm") as source:
            chosen = image_where(source)
            assert chosen.camera == "arm"
            assert is_close(chosen.pixels(), BLUE)
        with opened(f"{server.endpoint}?camera=middle", "groot") as source:
            until(lambda: source._others)
            assert mentions(source._explain_silence(), "'middle'", "'left'", "'right'")


def test_the_rate_is_limited_for_each_camera() -> None:
    with serving(alternate, "imagezmq", fps=1.0) as source:
        assert {image_where(source).camera for _ in range(2)} == {"left", "right"}
        third = image_where(source)
        fourth = image_where(source)
    assert {third.camera, fourth.camera} == {"left", "right"}


def send(source: ServerSource, parts: list[bytes]) -> bytes:
    """Send a message to a hub as a REQ socket, and return the answer."""
    with open_peer(zmq.REQ, source.endpoint) as socket:
        socket.rcvtimeo = int(PATIENCE_S * 1000)
        socket.send_multipart(parts)
        return socket.recv()


def test_a_hub_answers_every_message_also_those_that_it_cannot_read() -> None:
    with opened(HUB, "imagezmq-hub") as source:
        for parts in ([b""], [b"{}"], [b"{}", b"x"], [b"x"] * 40, GOOD, imagezmq("pi", picture(RED))):
            assert send(source, parts) == b"OK"
        assert is_close(image_where(source).pixels(), RED)
        until(lambda: source.counts.rejected == 5)


def test_two_senders_do_not_mix_under_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect_source, "_SHARED_S", PATIENCE_S)
    with opened(HUB, "imagezmq-hub") as source:
        send(source, imagezmq("pi", picture(RED)))
        image_where(source)
        send(source, imagezmq("pi", picture(BLUE)))
        until(lambda: source.counts.rejected == 1)
        assert mentions(source.counts.last_error, "name")
        monkeypatch.setattr(dialect_source, "_SHARED_S", 0.0)  # the first has been silent for this time
        send(source, imagezmq("pi", picture(BLUE)))
        assert is_close(image_where(source).pixels(), BLUE)


def test_a_flood_of_tiny_messages_leaves_room_for_a_sender() -> None:
    def flood(stop: threading.Event) -> None:
        with open_peer(zmq.DEALER, source.endpoint) as socket:
            socket.sndtimeo = 100
            for _ in range(30_000):
                if stop.is_set():
                    return
                try:
                    socket.send_multipart([b"", b"x"], copy=True)
                except zmq.Again:
                    continue

    with opened(HUB, "imagezmq-hub") as source, in_thread(flood):
        for i in range(5):
            assert send(source, imagezmq(f"pi{i}", picture())) == b"OK"
            assert image_where(source).camera == f"pi{i}"


def test_a_hub_beyond_this_machine_needs_the_word_insecure() -> None:
    settings = CameraSettings(dialect="imagezmq-hub")
    with refuses(TransportError, field=("senders", "true")):
        open_camera("tcp://0.0.0.0:0", settings)
    open_camera("tcp://0.0.0.0:0", settings, insecure=True).close()


@pytest.mark.parametrize(
    ("uri", "settings", "reason"),
    [
        ("tcp://robot:5555", {}, "--dialect"),
        ("webcam:0", {"dialect": "groot"}, ("tcp://HOST:PORT", "--dialect", "webcam:0")),
        ("tcp://*:5555", {"dialect": "imagezmq"}, ("REQ/REP", "--dialect")),
        ("tcp://*:5555", {"dialect": "groot"}, "tcp://robot:5555"),
        ("tcp://robot:1", {"dialect": "groot", "calibration": "a.toml"}, "NAME"),
    ],
)
def test_settings_that_do_not_fit_are_errors(
    uri: str, settings: dict[str, str], reason: str | tuple[str, ...]
) -> None:
    with refuses(CameraError, field=reason):
        open_camera(uri, CameraSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("dialect", ["groot", "imagezmq-hub"])
def test_a_malformed_address_is_an_error(dialect: str) -> None:
    with refuses(TransportError, field="tcp://host:port"):
        open_camera("tcp://robot", CameraSettings(dialect=dialect))  # type: ignore[arg-type]


def test_a_stop_ends_the_iteration() -> None:
    stop = threading.Event()
    source = open_camera("tcp://127.0.0.1:1", CameraSettings(dialect="groot"), stop)
    stop.set()
    assert list(source) == []
    source.close()
    source.close()


NOW_NS = 1_800_000_000 * NANOSECONDS
MS = NANOSECONDS // 1000


def seconds(unix_ns: int) -> float:
    return unix_ns / NANOSECONDS


@pytest.mark.parametrize("age_s", [0.04, 3.0])
def test_a_stamp_of_unix_time_is_kept_and_old_images_are_told_once(
    age_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    reader = StampReader("head")
    age_ns = round(age_s * NANOSECONDS)
    for i in range(5):
        stamp_ns = NOW_NS + i * 33 * MS
        assert reader.read(seconds(stamp_ns), stamp_ns + age_ns) == pytest.approx(stamp_ns, abs=MS)
    assert caplog.text.count("camera head: its stamps are 3.0 s before the arrival") == (age_s == 3)
    assert age_s == 3 or not caplog.text


def test_a_stamp_after_the_arrival_is_not_of_the_future() -> None:
    assert StampReader("head").read(seconds(NOW_NS + 20 * MS), NOW_NS) == NOW_NS


@pytest.mark.parametrize(
    "offset_s", [-1_799_995_000.0, -3600.0, 7.0, 86400.0], ids=["monotonic", "late", "early", "day"]
)
def test_another_clock_gives_the_arrival_less_the_jitter(
    offset_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Delays of 5 ms and more; the constant 5 ms cannot be seen from one side."""
    reader = StampReader("head")
    jitter = random.Random(1)
    errors = []
    for i in range(400):
        true_ns = NOW_NS + i * 33 * MS
        arrival_ns = true_ns + 5 * MS + jitter.randrange(30 * MS)
        errors.append(reader.read(seconds(true_ns) + offset_s, arrival_ns) - true_ns)
    assert max(errors[60:]) < 9 * MS
    assert min(errors[60:]) > 3 * MS
    assert caplog.text.count("expected stamps in Unix seconds, found") == 1


@pytest.mark.parametrize("stamp", [None, 0.0, -1.0, 1e300, -1e300])
def test_without_a_usable_stamp_the_arrival_is_taken(stamp: float | None) -> None:
    reader = StampReader("head")
    assert [reader.read(stamp, NOW_NS + i) for i in range(3)] == [NOW_NS, NOW_NS + 1, NOW_NS + 2]


def test_times_increase_where_stamps_repeat_or_go_back() -> None:
    reader = StampReader("head")
    stamps = [0, 33, 33, 10, -5000, 66, 40, 20_000, 99]
    times = [
        reader.read(seconds(NOW_NS + stamp * MS), NOW_NS + (40 + i * 33) * MS)
        for i, stamp in enumerate(stamps)
    ]
    assert all(later > earlier for earlier, later in itertools.pairwise(times))
    assert max(time - (NOW_NS + (40 + i * 33) * MS) for i, time in enumerate(times)) <= 0
    assert reader.read(seconds(NOW_NS), 1) == times[-1] + 1  # the host's clock went back, too


def test_no_stamps_make_it_fail() -> None:
    reader = StampReader("head")
    random_ = random.Random(2)
    last = 0
    for i in range(2000):
        stamp = random_.choice(
            [random_.uniform(-1e10, 1e10), random_.expovariate(1e-9), 1.8e9 + i / 30, 5e3 + i, 0.0]
        )
        now = reader.read(stamp, NOW_NS + i * 33 * MS)
        assert now > last
        last = now
