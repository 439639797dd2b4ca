"""A node with cameras and clients in which something breaks every minute, and the log of what it does then.

Cameras and node are members of a group that restarts them, as `launch/start` does. A second camera comes and goes, a
stranger sends malformed frames and requests, and a client adds and removes objects. One member after the other is
killed (SIGKILL), stopped for good (SIGSTOP, which the watchdog must end), or stopped for a while. Then a camera sends
frames at several times the node's rate. Each object has a label that no other ever has, so an id with two labels has
had two meanings.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import zmq

from sam3_node.client import PerceptionClient
from sam3_node.errors import Sam3NodeError
from sam3_node.processes.supervisor import Group, Process
from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import Request, pack_frame, pack_request
from tools.bench import soak_episodes, soak_surfaces
from tools.bench.latency.age import read_timing
from tools.bench.soak_summary import MARGIN_MS

MALFORMED_HZ = 20.0
MAX_OBJECTS = 4
SIZE = "width=160&height=120"
FLAP_S = 7.0
MAX_LOAD_HZ = 240.0
PAUSE_S = 2.0
NEVER_S = 1e6
FLOW_S = 5.0
"""The next fault waits until masks have come within this time."""
READY_S = 300.0
RESTART_S = 15.0
"""Seconds after which a member that was ended runs again."""
READY_LINES = {"node": r"^node ready", soak_episodes.NAME: soak_episodes.READY}
"""Line of a member that is no camera and has started."""
FAULTS = ("kill", "stop", "pause")
PRIORITIES: tuple[Literal["low", "normal"], ...] = ("low", "normal")


class Reader:
    """A thread that reads all masks, and checks their ids."""

    def __init__(self, client: PerceptionClient, keeps_epochs: bool) -> None:
        self._client = client
        self._keeps_epochs = keeps_epochs
        self._lock = threading.Lock()
        self._ages_ms: dict[str, list[float]] = {}
        self._labels: dict[tuple[str, int | None, int], str] = {}
        self._epochs: dict[str, set[int | None]] = {}
        self._given: set[tuple[str, int | None, int]] = set()
        self._gap_s = self.step_ms = 0.0
        self._confused = self._reused = 0
        self.last_s = self._watched_s = time.monotonic()
        self._late_ms = math.inf
        self._wanted = 0
        self._on_time = 0
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
        timing = read_timing(masks)
        now_s = time.monotonic()
        self.masks += 1
        self._ages_ms.setdefault(masks.camera, []).append(round(timing.age, 2))
        self._epochs.setdefault(masks.camera, set()).add(masks.epoch)
        if masks.camera == "cam0":
            self._gap_s = max(self._gap_s, now_s - self.last_s)
            self.last_s = now_s
            self.step_ms = 0.9 * self.step_ms + 0.1 * timing.step if self.step_ms else timing.step
            self._note_recovery(timing.age, now_s)
        for instance in masks.instances:
            key = (masks.camera, masks.epoch, instance.id)
            # objects that a detector has found may change their names
            if self._labels.setdefault(key, instance.label) != instance.label and key in self._given:
                self._confused += 1

    def add(self, camera: str, epoch: int | None, object_id: int, label: str) -> None:
        """Take a new object's id, which no object may have had before."""
        with self._lock:
            key = (camera, epoch, object_id)
            self._reused += key in self._given or self._labels.get(key, label) != label
            self._given.add(key)
            self._labels.setdefault(key, label)

    def watch_recovery(self, limit_ms: float, frames: int) -> None:
        """Begin to wait for `frames` frames of cam0 in a row, none older than this at the start of its step."""
        with self._lock:
            self._late_ms = limit_ms
            self._wanted = frames
            self._on_time = 0
            self._watched_s = time.monotonic()
            self.recovery_s = math.inf

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
            ages = self._ages_ms
            self._ages_ms = {}
            masks = self.masks
            self.masks = 0
            gap_s = max(self._gap_s, time.monotonic() - self.last_s)
            self._gap_s = 0.0
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


class Worker(threading.Thread):
    """A thread that begins at once, and can be stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._over.set()
        self.join()


class Prompter(Worker):
    """A thread that adds, corrects and removes objects. Each has a label that no other ever had."""

    def __init__(self, client: PerceptionClient, reader: Reader, chance: random.Random) -> None:
        self._client = client
        self._reader = reader
        self._chance = chance
        self._count = self.refused = 0
        super().__init__()

    def run(self) -> None:
        while not self._over.wait(self._chance.uniform(0.2, 1.0)):
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
        label = f"object {self._count}"
        priority = self._chance.choice(PRIORITIES)
        added = self._client.add_object(points=place, label=label, camera="cam0", priority=priority)
        return self._reader.add("cam0", added.epoch, added.id, label)


class Stranger(Worker):
    """A thread that sends malformed frames and requests."""

    def __init__(self, frames: str, control: str, chance: random.Random) -> None:
        self._frames = frames
        self._control = control
        self._chance = chance
        super().__init__()

    def run(self) -> None:
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
            while not self._over.wait(1 / MALFORMED_HZ):
                camera.send_multipart(self._damage(frame))
                with suppress(zmq.Again):
                    client.send_multipart(self._damage(request), zmq.NOBLOCK)
                with suppress(zmq.Again):
                    client.recv_multipart(zmq.NOBLOCK)

    def _damage(self, whole: Any) -> list[bytes]:
        """Return a message with a few bytes changed, cut off, or all of them random."""
        parts = [bytes(part) for part in whole]
        chance = self._chance
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


@dataclass(frozen=True)
class Plan:
    """The length of each part in seconds, and what happens in it."""

    chaos_s: float
    overload_s: float
    quiet_s: float
    fault_every_s: float = 60.0
    sample_every_s: float = 5.0
    watchdog_s: float = 10.0
    camera_hz: float = 10.0
    load_factor: float = 4.0
    faults: tuple[str, ...] = FAULTS
    seed: int = 0
    keeps_epochs: bool = False
    """True if the node keeps ids and epochs across restarts"""
    settings: dict[str, str] = field(default_factory=dict)
    """environment of the node and its cameras"""
    surfaces: bool = False
    """True for what `soak_surfaces` does beside tracking"""
    episodes: bool = False
    """True for a recorder of the episodes that a client marks (`soak_episodes`)"""


class Soak:
    """One run. It writes a line of the log at once for everything that happens, so a cut run loses nothing."""

    def __init__(self, plan: Plan, log: Path) -> None:
        self._plan = plan
        self._log = log
        self._chance = random.Random(plan.seed)
        self._start_s = self._since_s = time.monotonic()
        self._phase = "start"
        self._source = f"scene:shapes?{SIZE}"
        self._settings = plan.settings
        self._visitor: soak_surfaces.Visitor | None = None
        self._recorded: soak_episodes.Recorded | None = None
        self._pids: dict[str, set[int]] = {}
        self._extra: dict[str, subprocess.Popen[bytes]] = {}
        self._resume: list[tuple[float, int]] = []
        self._unseen_s: list[tuple[float, float]] = []
        """spans in which the recorder did not run, by `time.monotonic`"""

    def run(self) -> None:
        """Run all parts of the plan."""
        plan = self._plan
        with ExitStack() as opened:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
            names = ("cam0", "flap", "stranger", "load")
            self._frames = {name: f"ipc://{folder}/{name}" for name in names}
            self._masks = f"ipc://{folder}/masks"
            self._control = f"ipc://{folder}/control"
            if plan.surfaces:
                collector = opened.enter_context(soak_surfaces.Collector())
                joints = f"ipc://{folder}/joints"
                self._source = soak_surfaces.SOURCE
                self._settings = plan.settings | soak_surfaces.make_settings(
                    folder, joints, collector.endpoint
                )
            self._write("head", **self._describe())
            if plan.episodes:
                self._recorded = soak_episodes.Recorded(self._log.parent)
            echo = None if self._recorded is None else self._recorded.note
            self._group = opened.enter_context(Group(grace_s=3.0, echo=echo))
            opened.callback(self._end_extra)
            self._group.start(self._make_camera("cam0", plan.camera_hz))
            self._group.start(self._make_node())
            if self._recorded is not None:
                self._group.start(self._make_recorder(self._recorded))
            self._group.wait_ready("node", READY_S)
            ends = (self._masks, self._control)
            readers, prompts, visits, marks, self._status_client = (
                opened.enter_context(
                    PerceptionClient(*ends, timeout_ms=5000, on_restart=lambda restart: None)
                )
                for _ in range(5)
            )
            self._reader = Reader(readers, plan.keeps_epochs)
            self._wait_for_masks("cam0")
            self._start_s = self._since_s = time.monotonic()
            prompter = Prompter(prompts, self._reader, random.Random(plan.seed + 1))
            opened.callback(prompter.stop)
            if plan.surfaces:
                self._visitor = soak_surfaces.Visitor(visits, random.Random(plan.seed + 3))
                opened.callback(self._visitor.stop)
            marker = None
            if plan.episodes:
                marker = soak_episodes.Marker(marks, random.Random(plan.seed + 4))
                opened.callback(marker.stop)
            self._break_things()
            self._overload()
            self._pass("quiet", plan.quiet_s)
            if marker is not None and self._recorded is not None:
                marker.stop()
                self._account(self._recorded, marker.marked)

    def _account(self, recorded: soak_episodes.Recorded, marked: list[soak_episodes.Marked]) -> None:
        """End the recorder, convert what it left, and write what became of each episode."""
        process = self._find_members().get(soak_episodes.NAME)
        if process is not None:
            process.terminate()
            end_s = time.monotonic() + soak_episodes.LAST_S
            while process.is_running() and time.monotonic() < end_s:
                self._group.poll(0.1)
        recorded.convert()
        self._write("episodes", **recorded.account(marked, self._unseen_s))

    def _describe(self) -> dict[str, Any]:
        plan = self._plan
        given = {name: getattr(plan, name) for name in ("camera_hz", "seed", "fault_every_s", "settings")}
        return {"settle_s": plan.watchdog_s + 15, "max_gap_s": plan.watchdog_s + 60, **given}

    def _break_things(self) -> None:
        """Break something every `fault_every_s`, beside a stranger and a camera that comes and goes."""
        plan = self._plan
        stranger = Stranger(self._frames["stranger"], self._control, random.Random(plan.seed + 2))
        try:
            self._pass("chaos", plan.chaos_s, chaos=True)
        finally:
            stranger.stop()
            self._end_extra()

    def _overload(self) -> None:
        """Let a camera send at a multiple of the node's rate; then measure how long cam0's frames stay too old."""
        plan = self._plan
        if not plan.overload_s:
            return
        rate_hz = 1000 / max(self._reader.step_ms, 0.1)
        load_hz = min(plan.load_factor * rate_hz, MAX_LOAD_HZ)
        self._write("phase", phase="overload", rate_hz=round(rate_hz, 2), load_hz=round(load_hz, 2))
        self._start_extra("load", load_hz)
        self._wait_for_masks("load")
        self._pass("overload", plan.overload_s)
        self._end_extra()
        self._reader.watch_recovery(1000 / plan.camera_hz + MARGIN_MS, frames=round(plan.camera_hz))
        self._pass("recovery", min(plan.quiet_s, 10.0))
        self._write("recovery", seconds=min(round(self._reader.recovery_s, 2), NEVER_S))

    def _pass(self, phase: str, seconds: float, chaos: bool = False) -> None:
        """Let time pass: keep the group, sample, and break things if there is `chaos`."""
        plan = self._plan
        self._sample()  # what came before belongs to the phase before
        self._phase = phase
        now_s = time.monotonic()
        end_s = now_s + seconds
        next_sample_s = now_s + plan.sample_every_s
        next_fault_s = now_s + plan.fault_every_s
        next_flap_s = now_s
        while (now_s := time.monotonic()) < end_s:
            self._group.poll(0.05)
            self._continue_paused()
            flows = now_s - self._reader.last_s < FLOW_S  # a process that still starts is not watched yet
            if chaos and now_s >= next_fault_s and flows:
                next_fault_s = now_s + plan.fault_every_s
                self._break_one()
            if chaos and now_s >= next_flap_s:
                next_flap_s += FLAP_S * self._chance.uniform(0.3, 1.0)
                self._flap()
            if now_s >= next_sample_s:
                next_sample_s = now_s + plan.sample_every_s
                self._sample()
        self._continue_paused(all_of_them=True)
        self._sample()

    def _break_one(self) -> None:
        """Kill a member, stop it for good, or stop it for a while."""
        members = self._find_members()
        name = self._chance.choice(sorted(members) or ["none"])
        fault = self._chance.choice(self._plan.faults)
        if name == "none":
            return
        process = members[name]
        self._write("fault", fault=fault, process=name)
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault == "pause":
            self._resume.append((time.monotonic() + PAUSE_S, process.pid))
        elif name == soak_episodes.NAME:
            now_s = time.monotonic()
            self._unseen_s.append((now_s, now_s + self._plan.watchdog_s + RESTART_S))

    def _continue_paused(self, all_of_them: bool = False) -> None:
        for item in [item for item in self._resume if all_of_them or item[0] <= time.monotonic()]:
            self._resume.remove(item)
            with suppress(psutil.NoSuchProcess):
                psutil.Process(item[1]).send_signal(signal.SIGCONT)

    def _flap(self) -> None:
        if "flap" in self._extra:
            self._end_extra()
        else:
            self._start_extra("flap", self._plan.camera_hz)

    def _start_extra(self, name: str, rate_hz: float) -> None:
        made = self._make_camera(name, rate_hz)
        silent = subprocess.DEVNULL
        environment = os.environ | dict(made.env)
        self._extra[name] = subprocess.Popen(made.command, env=environment, stdout=silent, stderr=silent)

    def _end_extra(self) -> None:
        for process in self._extra.values():
            process.terminate()
        for process in self._extra.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._extra.clear()

    def _make_camera(self, name: str, rate_hz: float) -> Process:
        source = f"scene:shapes?{SIZE}"
        environment = {"SAM3_TRANSPORT__FRAMES": self._frames[name]}
        # one camera alone sends the robot's joints
        if name == "cam0":
            source = self._source
        else:
            environment["SAM3_CAMERA__ROBOT"] = ""
        words = ("camera", source, "--camera.name", name, "--camera.fps", f"{rate_hz:g}")
        return self._make(name, words, **environment)

    def _make_node(self) -> Process:
        return self._make("node", ("run",), SAM3_TRANSPORT__FRAMES=",".join(self._frames.values()))

    def _make_recorder(self, recorded: soak_episodes.Recorded) -> Process:
        frames = {"SAM3_TRANSPORT__FRAMES": self._frames["cam0"]}
        return self._make(soak_episodes.NAME, recorded.words, **recorded.environment, **frames)

    def _make(self, name: str, words: tuple[str, ...], **environment: str) -> Process:
        endpoints = {"SAM3_TRANSPORT__MASKS": self._masks, "SAM3_TRANSPORT__CONTROL": self._control}
        command = (sys.executable, "-m", "sam3_node", *words)
        ready = READY_LINES.get(name, r"publishing on")
        environment = {**endpoints, **self._settings, **environment}
        return Process(name, command, ready, environment, "on-failure", self._plan.watchdog_s)

    def _find_members(self) -> dict[str, psutil.Process]:
        """Return the processes of the group that run, by name."""
        found = {}
        for process in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if process.status() == psutil.STATUS_ZOMBIE or "sam3_node" not in words:
                    continue
                name = _name_member(words)
                if name not in self._extra:
                    found[name] = process
        return found

    def _wait_for_masks(self, camera: str) -> None:
        end_s = time.monotonic() + READY_S
        while camera not in self._reader.cameras:
            self._group.check()
            self._group.poll(0.1)
            if time.monotonic() > end_s:
                raise SystemExit(f"no masks of {camera} came within {READY_S:g} s")

    def _sample(self) -> None:
        members = self._find_members()
        processes = {}
        for name, process in members.items():
            self._pids.setdefault(name, set()).add(process.pid)
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():
                processes[name] = {
                    "pid": process.pid,
                    "age_s": round(time.time() - process.create_time(), 1),
                    "rss_mb": round(process.memory_info().rss / 1e6, 2),
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
        status = self._ask_status() if self._phase not in ("start", "chaos") else {}
        cameras = status.get("cameras", {}).values()
        self._write(
            "sample",
            since_s=round(self._since_s - self._start_s, 2),
            phase=self._phase,
            processes=processes,
            missing=sorted(
                {"node", "cam0", *([soak_episodes.NAME] if self._plan.episodes else ())} - set(members)
            ),
            restarts={name: len(pids) - 1 for name, pids in self._pids.items()},
            over_budget=max((camera["over_budget"] for camera in cameras), default=0),
            shed_level=max((camera["shed_level"] for camera in cameras), default=0),
            rejected=[status.get("frames_rejected"), status.get("requests_rejected")],
            visits=self._visitor.done if self._visitor is not None else 0,
            **self._reader.sample(),
        )
        self._since_s = time.monotonic()

    def _ask_status(self) -> dict[str, Any]:
        try:
            return self._status_client.status()
        except Sam3NodeError:
            return {}

    def _write(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, "t_s": round(time.monotonic() - self._start_s, 2), **fields}
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _name_member(words: list[str]) -> str:
    """Return the name of a member of the group by its command line."""
    if "run" in words:
        return "node"
    return soak_episodes.NAME if "record" in words else words[words.index("--camera.name") + 1]
