"""The clients of a chaos soak: a reader that checks ids, a client that changes objects, and a stranger.

Each object has a label that no other ever has. So an id with two labels has had two meanings.
"""

from __future__ import annotations

import math
import random
import threading
import time
from contextlib import suppress
from typing import Any

import zmq

from sam3_node.client import PerceptionClient
from sam3_node.errors import Sam3NodeError
from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import Request, pack_frame, pack_request
from tools.bench.latency.age import read_timing

MALFORMED_HZ = 20.0
MAX_OBJECTS = 4


class Reader:
    """A thread that reads all masks, and checks their ids."""

    def __init__(self, client: PerceptionClient, keeps_epochs: bool) -> None:
        self._client, self._keeps_epochs = client, keeps_epochs
        self._lock = threading.Lock()
        self._ages_ms: dict[str, list[float]] = {}
        self._labels: dict[tuple[str, int | None, int], str] = {}
        self._epochs: dict[str, set[int | None]] = {}
        self._given: set[tuple[str, int | None, int]] = set()
        self._gap_s = self.step_ms = 0.0
        self._confused = self._reused = 0
        self.last_s = self._watched_s = time.monotonic()
        self._late_ms, self._wanted, self._on_time = math.inf, 0, 0
        self.recovery_s = math.inf
        """Seconds from `watch_recovery` until frames were on time; inf as long as they are not"""
        self.masks = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for masks in self._client:
            with self._lock:
                self._take(masks)

    @property
    def cameras(self) -> set[str]:
        """The cameras that masks have come of."""
        with self._lock:
            return set(self._epochs)

    def _take(self, masks: MaskFrame) -> None:
        timing, now_s = read_timing(masks), time.monotonic()
        self.masks += 1
        self._ages_ms.setdefault(masks.camera, []).append(round(timing.age, 2))
        self._epochs.setdefault(masks.camera, set()).add(masks.epoch)
        if masks.camera == "cam0":
            self._gap_s, self.last_s = max(self._gap_s, now_s - self.last_s), now_s
            self.step_ms = 0.9 * self.step_ms + 0.1 * timing.step if self.step_ms else timing.step
            self._note_recovery(timing.age, now_s)
        for instance in masks.instances:
            key = (masks.camera, masks.epoch, instance.id)
            if self._labels.setdefault(key, instance.label) != instance.label:
                self._confused += 1

    def add(self, camera: str, epoch: int | None, object_id: int, label: str) -> None:
        """Take a new object's id, which nobody may have had before."""
        with self._lock:
            key = (camera, epoch, object_id)
            self._reused += key in self._given or self._labels.get(key, label) != label
            self._given.add(key)
            self._labels.setdefault(key, label)

    def watch_recovery(self, limit_ms: float, frames: int) -> None:
        """Begin to wait for `frames` frames of cam0 in a row, none older than this at the start of its step."""
        with self._lock:
            self._late_ms, self._wanted, self._on_time = limit_ms, frames, 0
            self._watched_s, self.recovery_s = time.monotonic(), math.inf

    def _note_recovery(self, age_ms: float, now_s: float) -> None:
        if age_ms > self._late_ms:
            self._on_time = 0
            return
        if self._on_time == 0:
            self._first_s = now_s
        self._on_time += 1
        if self._on_time == self._wanted:
            self.recovery_s = min(self.recovery_s, self._first_s - self._watched_s)

    def sample(self) -> dict[str, Any]:
        """Return what came since the last sample, and what ids have shown so far."""
        with self._lock:
            ages, self._ages_ms = self._ages_ms, {}
            masks, self.masks = self.masks, 0
            gap_s, self._gap_s = max(self._gap_s, time.monotonic() - self.last_s), 0.0
            stays = self._epochs.get("cam0", set())
            return {
                "masks": masks,
                "ages_ms": ages,
                "longest_gap_s": round(gap_s, 2),
                "ids": len(self._labels),
                "epochs": {camera: len(found) for camera, found in self._epochs.items()},
                "confused_ids": self._confused,
                "reused_ids": self._reused,
                "lost_epochs": max(0, len(stays) - 1) if self._keeps_epochs else 0,
            }


class Prompter:
    """A thread that adds, corrects and removes objects. Each has a label that no other ever had."""

    def __init__(self, client: PerceptionClient, reader: Reader, chance: random.Random) -> None:
        self._client, self._reader, self._chance = client, reader, chance
        self._stop = threading.Event()
        self._count = 0
        self.refused = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._chance.uniform(0.2, 1.0)):
            try:
                self._act()
            except Sam3NodeError:  # a node that restarts, an object that has gone, a camera that is silent
                self.refused += 1

    def _act(self) -> None:
        place = [(self._chance.uniform(10, 150), self._chance.uniform(10, 110))]
        objects = self._client.list_objects(camera="cam0")
        if len(objects) >= MAX_OBJECTS:
            return self._client.remove_object(objects[0].id, camera="cam0")
        if objects and self._chance.random() < 0.3:
            self._client.refine_object(objects[-1].id, points=place, camera="cam0")
            return None
        self._count += 1
        label, low = f"object {self._count}", self._chance.random() < 0.5
        added = self._client.add_object(
            points=place, label=label, camera="cam0", priority="low" if low else "normal"
        )
        return self._reader.add("cam0", added.epoch, added.id, label)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Stranger:
    """A thread that sends malformed frames and requests."""

    def __init__(self, frames: str, control: str, chance: random.Random) -> None:
        self._frames, self._control, self._chance = frames, control, chance
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        frame = pack_frame(Frame("odd", 1, time.time_ns(), 16, 12, "bgr8", bytes(576)))
        request = [pack_request(Request(1, "add_object", {"camera": "odd", "points": [[3.0, 3.0]]}))]
        with (
            zmq.Context() as context,
            context.socket(zmq.PUB) as camera,
            context.socket(zmq.DEALER) as client,
        ):
            camera.linger = client.linger = 0
            camera.bind(self._frames)
            client.connect(self._control)
            while not self._stop.wait(1 / MALFORMED_HZ):
                camera.send_multipart(self._damage(frame))
                with suppress(zmq.Again):
                    client.send_multipart(self._damage(request), zmq.NOBLOCK)
                with suppress(zmq.Again):
                    client.recv_multipart(zmq.NOBLOCK)

    def _damage(self, whole: Any) -> list[bytes]:
        """Return a message with a few bytes changed, cut off, or all of them random."""
        parts, chance = [bytes(part) for part in whole], self._chance
        index = chance.randrange(len(parts))
        part = bytearray(parts[index])
        if chance.random() < 0.3:
            part = bytearray(chance.randbytes(chance.randrange(200)))
        elif chance.random() < 0.5:
            part = part[: chance.randrange(len(part) + 1)]
        else:
            for _ in range(4):
                part[chance.randrange(len(part))] = chance.randrange(256)
        parts[index] = bytes(part)
        return parts

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
