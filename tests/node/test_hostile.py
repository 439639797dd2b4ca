"""Hostile frames and requests: the node counts and answers them, and goes on."""

import zmq

from sam3_node.client import PerceptionClient
from sam3_node.wire import Request, pack_frame, pack_request
from tests.support.hostility import mutations
from tests.support.node_rig import Rig, has_ids, masks_where, picture, until
from tests.support.patience import PATIENCE_MS
from tests.support.repeats import repetitions
from tests.support.transport_peer import open_peer

HOSTILE = repetitions(2_000, 10_000)


def check_tracking(client: PerceptionClient, tracked: int) -> None:
    is_there = has_ids("cam0", tracked)
    aged = masks_where(client, is_there, "tracking")
    masks_where(client, lambda masks: is_there(masks) and masks.seq > aged.seq, "tracking goes on")


def test_hostile_frames_do_not_stop_the_tracking(rig: Rig, client: PerceptionClient) -> None:
    tracked = client.add_object(points=[(160, 120)], camera="cam0").id
    before = client.status()["frames_rejected"]
    whole = [bytes(part) for part in pack_frame(picture(1, "odd", 16, 12))]
    with zmq.Context() as context, context.socket(zmq.PUB) as camera:
        camera.set_hwm(0)
        camera.linger = 0
        camera.bind(rig.frames[1])
        until(lambda: camera.send(b"") or client.status()["frames_rejected"] > before, "the node listens")
        for parts in mutations(whole, HOSTILE, seed=1):
            camera.send_multipart(parts)
        end = [bytes(part) for part in pack_frame(picture(2, "odd", 16, 14))]
        last = masks_where(
            client,
            lambda masks: (masks.camera == "odd" and masks.height == 14) or camera.send_multipart(end),
            "a good frame after the bad ones",
        )
    assert last.width == 16
    # of the messages that come together, only the newest is looked at
    assert client.status()["frames_rejected"] > before + HOSTILE / 20
    check_tracking(client, tracked)


def test_hostile_requests_are_each_answered(rig: Rig, client: PerceptionClient) -> None:
    tracked = client.add_object(points=[(160, 120)], camera="cam0").id
    box = {"box": [5, 5, 50, 50], "camera": "cam0"}
    wholes = [
        pack_request(Request(7, op, args))
        for op, args in (("status", {}), ("segment", box), ("list_objects", {}))
    ]
    answered = sent = 0
    with open_peer(zmq.DEALER, rig.control) as asker:
        requests = [iter(mutations([whole], HOSTILE // 2, seed)) for seed, whole in enumerate(wholes)]
        while sent < HOSTILE:
            batch = [next(requests[number % 3])[-1] or b"?" for number in range(30)]
            for request in batch:
                asker.send(request)
            sent += len(batch)
            for _ in batch:
                assert asker.poll(PATIENCE_MS), "a request was not answered"
                asker.recv()
                answered += 1
    assert answered == sent
    check_tracking(client, tracked)
