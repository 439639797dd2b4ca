"""Runs a job through a live node, with each edit on its frame. A replay without a node gives the same results.

The replay pushes frames without loss, as the node's only camera and the only reader of its masks. It follows frames in
flight until the node publishes their masks, or the node's counts show that they failed.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

from ..errors import ReplayError, Sam3NodeError, SettingsError, TransportError, WireError
from ..resources import Closeable
from ..schema.fields import convert
from ..schema.operations import OPERATIONS, Operation
from ..schema.replies import ReplyT
from ..settings import TransportSettings
from ..transport import ControlClient, FramePublisher, MaskSubscriber, Security
from ..transport.security import ANY_CAMERA
from ..types import Frame, MaskFrame
from .completion import JobSession, ProgressCallback, check_identity, clear_results, job_session, read_digests
from .event_log import ADD_EVERYTHING, Action, Edit, Step
from .job import SECTIONS, Job
from .player import ActionPlayer, add_everything
from .shards import LIMITS, ShardLimits, Shards, ShardWriter
from .store import ReplayCounts, Summary

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 8
"""Number of frames that are sent ahead of their masks."""
POLL_MS = 100
"""Time of one wait for masks."""
STATUS_MS = 3000
"""Time that the node may take to answer `status` and `describe`."""
REPLY_MS = 30_000
"""Time that the node may take to answer any other request."""
SILENT_S = 0.5
"""Time without masks after which the node's counts are checked."""
DISCONNECTED_S = 2.0
"""Time without a connection after which the node counts as gone."""
CONNECT_S = 10.0
"""Time that the node may take to connect to frames, and its masks to connect here."""
IDLE_S = 60.0
"""Time that the node may take to become idle before the replay begins."""
FOREIGN_READER_S = 10.0
"""Time without masks of stepped frames after which another reader must have taken them."""
HANG_S = 300.0
"""Time without progress after which the node hangs. A model that is compiled on its first frame takes minutes."""
IDLE_POLLS = 3
"""Number of waits in a row with equal counts after which the node is idle."""
TIMING_EDITS = ("pause", "resume")
"""Edits that change when a node steps frames, but not the masks."""

# what was expected of a node without masks, and what was found
_NO_PUBLISHER = (
    "to publish masks at its configured endpoint",
    "no publisher; set the endpoint with --transport.masks",
)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Endpoints of a node. `frames` and `masks` are given if they differ from the node's own settings.

    `security` defaults to the environment's.
    """

    control: str
    frames: str | None = None
    masks: str | None = None
    security: TransportSettings | None = None


def run_live(
    job: Job,
    endpoints: Endpoints,
    progress: ProgressCallback = lambda *_: None,
    stop: threading.Event | None = None,
    again: bool = False,
    limits: ShardLimits = LIMITS,
) -> Summary:
    """Push every frame of a job's first recording through a running node, and write results to the folder `job.out`.

    The node's state cannot be kept, so a job that ended early starts over. A finished job does not need the node. After
    `stop` is set, the outputs of what is done are written, and StoppedError is raised. Complete shards are kept.

    Raises ReplayError for a job that a live node cannot run, or if the folder has results of another job. Raises
    SettingsError and TransportError as LiveNode does, and the exceptions of reading and writing.
    """
    # refuse what no live node can do before it is connected
    _check_job(job)
    with job_session(job, progress, stop, again, has_settings=False, live=True) as session:
        if finished := session.read_finished():
            return session.write(finished)
        with LiveNode(endpoints, session.stop) as node:
            _check_settings(job, node.description["settings"])
            _clear_unfinished(session, node.description)
            summary = _push_frames(node, session, limits)
        return session.finish(summary, "start over, because the node's state cannot be kept")


def _check_job(job: Job) -> None:
    if job.mode != "every" or job.strategy != "forward":
        raise ReplayError(
            f"a live node steps every frame, forward: expected that, found {job.mode}, {job.strategy}; replay without "
            "--connect"
        )

    if job.calibrations:
        raise ReplayError(
            "--calibration: a live node has its own calibrations; start it with spatial.calibration, or replay without "
            "--connect"
        )


def _check_settings(job: Job, node_settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ReplayError if a setting of the job differs from the node's."""
    for section, chosen in job.settings.items():
        for name, value in chosen.items():
            node_value = node_settings[section].get(name)
            if node_value != value:
                raise ReplayError(
                    f"{section}.{name}: the node has {node_value!r:.60}, found {value!r:.60} for this replay; a live "
                    "node has its own settings: leave this setting out, or start the node with it"
                )


def _clear_unfinished(session: JobSession, description: Mapping[str, Any]) -> None:
    """Delete the results of a run that ended early, and store the identity of this run with the node's settings."""
    # the user learns why the run takes as long as before
    frames = ReplayCounts(**Shards(session.store).cursor().totals).counts["frames"]
    if frames:
        session.schedule.notes.add(
            f"{frames} frames of a run that ended early are pushed again: the node's state of that run is lost"
        )
    clear_results(session.store)
    settings = {name: description["settings"][name] for name in SECTIONS}
    check_identity(session.store, {**session.identity, "settings": settings, **read_digests(description)})


def _push_frames(node: LiveNode, session: JobSession, limits: ShardLimits) -> Summary:
    """Push all frames, up to a stop, and write their masks to shards."""
    schedule = session.schedule
    player = LivePlayer(node)
    served_before = node.begin(schedule.cameras)
    if served_before:
        schedule.notes.add(
            f"the node had frames of {', '.join(served_before)} before: object ids continue from those it gave then"
        )

    # whatever ends the run, the frames so far are kept
    total = schedule.count_frames()
    writer = ShardWriter(Shards(session.store), player, limits)
    try:
        with suppress(StoppedWaitingError):  # raised only after a stop: the summary says so
            for masks in player.play(takewhile(lambda _: not session.stop.is_set(), schedule.actions())):
                writer.add(masks)
                session.progress("pushing", writer.frames, total)
    finally:
        writer.flush()

    stepped = max(sum(writer.totals.frames.values()), 1)
    notes = [*schedule.remarks, *player.notes, *node.read_spatial_problems(schedule.cameras)]
    is_complete = not session.stop.is_set()
    # names that a stopped run has not found may be on its other frames
    unfound = {}
    if is_complete:
        unfound = writer.totals.describe_unfound(node.request("status"))
    return Summary.from_counts(
        writer.totals,
        schedule.job,
        model=node.description["model"],
        device=node.description["device"],
        lost=schedule.lost,
        notes=notes,
        unfound=unfound,
        complete=is_complete,
        stages_ms={name: round(us / stepped / 1e3, 3) for name, us in player.stages_us.items()},
    )


class LivePlayer(ActionPlayer):
    """Pushes frames through a node, and sends the edits between them as control requests."""

    def __init__(self, node: LiveNode) -> None:
        super().__init__()
        self._node = node

    def play(self, actions: Iterable[Action]) -> Iterator[MaskFrame | None]:
        """Apply actions and yield the masks of each, if it has any. The masks come in order, some frames late.

        Before an edit, this waits for the masks of all earlier frames. An error of a frame or an edit is logged and
        counted, and has no other effect. Raises TransportError if the node fails, after the masks until then.
        """
        try:
            for action in actions:
                if isinstance(action, Edit):
                    yield from self._edit_between(action)
                else:
                    yield from self._push(action)
            self._node.settle()
            self._node.check()
        except TransportError:
            # masks that came before the failure are results, too
            yield from self._take_settled()
            raise
        yield from self._take_settled()

    def _push(self, step: Step) -> Iterator[MaskFrame | None]:
        try:
            self._node.push(step)
        except WireError as error:
            # a frame that was not sent fails after those before it
            log.error("camera %s: frame %d cannot be sent: %s", step.frame.camera, step.frame.seq, error)
            self._node.settle()
            yield from self._take_settled()
            yield self._make_outcome(step, None)
            return
        # edits on a frame need the node to stand at it
        if step.edits:
            self._node.settle()
        yield from self._take_settled()

    def _edit_between(self, edit: Edit) -> Iterator[MaskFrame | None]:
        self._node.settle()
        yield from self._take_settled()
        self._edit(edit)
        yield None

    def _take_settled(self) -> Iterator[MaskFrame | None]:
        settled = self._node.sent.settled
        while settled:
            yield self._make_outcome(*settled.popleft())

    def _make_outcome(self, step: Step, masks: MaskFrame | None) -> MaskFrame | None:
        """Return the masks of a step after its edits; a step with edits is the last one sent."""
        self.counts["frames"] += 1
        if masks is None:
            self.counts["failed"] += 1
        else:
            self.stages_us.update(masks.stages_us)
            # as in a replay without a node, the same job gives the same bytes
            masks = replace(
                masks,
                received_ns=step.received_ns,
                published_ns=0,
                skipped=step.skipped,
                stages_us={},
                node=None,
                epoch=None,
            )
        return self._edit_on(step, masks)

    def _edit(self, edit: Edit) -> Any:
        if edit.op in TIMING_EDITS:
            return None
        try:
            if edit.op == ADD_EVERYTHING:
                return add_everything(edit, self._node.carry_out, self.notes)
            result = self._node.request(edit.op, **edit.args)
            kind = OPERATIONS.get(edit.op)
            return result if kind is None else convert(result, kind.Reply, edit.op)
        except TransportError:
            raise
        except Sam3NodeError as error:
            self._refuse(edit, error)
            return None


class StoppedWaitingError(TransportError):
    """Raised when a replay is stopped while it waits for a silent node."""


class NodeCounts(NamedTuple):
    """The node's counts of frames: stepped ones, and lost ones, which it did not accept or whose step failed."""

    stepped: int = 0
    lost: int = 0

    @classmethod
    def from_status(cls, status: Mapping[str, Any], cameras: Collection[str]) -> NodeCounts:
        """Read the counts of these cameras from the node's reply to `status`. Refused frames are of any camera."""
        served = [status["cameras"][name] for name in cameras if name in status["cameras"]]
        stepped = sum(camera["stepped"] for camera in served)
        failed = sum(camera["failed"] for camera in served)
        return cls(stepped, failed + status["frames_rejected"])

    def since(self, before: NodeCounts) -> NodeCounts:
        """Return the difference to earlier counts."""
        return NodeCounts(self.stepped - before.stepped, self.lost - before.lost)


class InFlightFrames:
    """Frames that were sent and are not settled, and the outcomes of settled ones until the sender takes them.

    With lossless delivery, a node publishes masks in the order in which frames were sent, and none for a failed frame.
    """

    def __init__(self) -> None:
        self.in_flight: deque[Step] = deque()
        self.settled: deque[tuple[Step, MaskFrame | None]] = deque()
        """The frames that the node has finished, in order, with their masks; None if the step failed."""
        self.count = 0
        """Number of frames that were sent."""
        self.received = 0
        """Number of these whose masks came."""
        self.lost = 0
        """Number of these that failed."""

    def add(self, step: Step) -> None:
        """Add a frame that was sent."""
        self.in_flight.append(step)
        self.count += 1

    def receive(self, masks: MaskFrame) -> int:
        """Settle the frame of these masks. Return the number of earlier frames, which therefore have none."""
        keys = [step.frame.key for step in self.in_flight]
        # masks of another sender's frame would settle the wrong one
        if masks.key not in keys:
            log.warning(
                "camera %s: masks of frame %d, which was not sent, are ignored", masks.camera, masks.seq
            )
            return 0
        failed = keys.index(masks.key)
        self._settle_failed(failed)
        self.received += 1
        self.settled.append((self.in_flight.popleft(), masks))
        return failed

    def update(self, done: NodeCounts) -> None:
        """Settle all frames as failed if the node's counts of these frames say that it has finished all."""
        if done.stepped == self.received and done.lost >= self.lost + len(self.in_flight):
            self._settle_failed(len(self.in_flight))

    def contradicts(self, done: NodeCounts) -> bool:
        """Return True if the counts are below the results received: they are not of the node that got the frames."""
        return done.stepped < self.received or done.lost < self.lost

    def _settle_failed(self, count: int) -> None:
        self.lost += count
        for _ in range(count):
            step = self.in_flight.popleft()
            place = step.frame.camera, step.frame.seq
            log.error("camera %s: frame %d failed in the node; its log says why", *place)
            self.settled.append((step, None))


class LiveNode(Closeable):
    """A node with lossless delivery (`every`). A context manager.

    It binds the endpoint of frames, by default the first of the node's `transport.frames`, and connects to the endpoint
    of masks, by default the node's `transport.masks`. No other camera or reader may be connected. `stop` ends waiting
    for a silent node. Raises TransportError if no node answers or the endpoint of frames is in use, SettingsError for a
    node with other delivery.
    """

    def __init__(self, endpoints: Endpoints, stop: threading.Event) -> None:
        if endpoints.security is not None:
            security = Security.from_settings(endpoints.security)
        else:
            security = Security.from_environment()
        control = endpoints.control
        self._endpoint = control
        self._stop = stop
        with ExitStack() as opened:
            # a client of its own asks for the status, because it waits less than one that edits
            self._status_client = opened.enter_context(ControlClient(control, STATUS_MS, security))
            self.description: dict[str, Any] = self._status_client.call("describe")
            """The node's description of itself."""
            transport = self.description["settings"]["transport"]
            # with other delivery, the node would skip frames of the recording
            _check_delivery(transport["delivery"], control)

            self._control = opened.enter_context(ControlClient(control, REPLY_MS, security))
            self._frames = FramePublisher(
                endpoints.frames or transport["frames"][0], "every", security.for_camera(ANY_CAMERA)
            )
            # frames in flight are lost with the replay: closing does not wait for them
            opened.callback(self._frames.close, 0)
            masks = endpoints.masks or _resolve_endpoint(control, transport["masks"])
            self._masks = opened.enter_context(MaskSubscriber(masks, "every", security=security))
            self._opened = opened.pop_all()
        self._reset_counts((), NodeCounts())

    def begin(self, cameras: Sequence[str]) -> list[str]:
        """Remove all objects from the node and restore its configured prompts.

        Wait first for frames of other senders, and discard their masks. Return the `cameras` that the node had served
        before. Raises SettingsError if the node cannot serve these cameras, TransportError if it does not become idle.
        """
        # counts from here on are of this replay's frames
        self._wait_until(lambda: bool(self._masks.connected), CONNECT_S, *_NO_PUBLISHER)
        # a paused node takes no frames
        self.request("resume")
        self._reset_counts(cameras, self._wait_idle(cameras))
        status = self._read_status()
        self._check_camera_limit(sorted({*cameras, *status["cameras"]}))
        self.request("reset")

        # no prompts at all first, because that removes exemplars, too
        prompts = self.description["settings"]["detector"]["prompts"]
        if status["prompts"] != prompts or status.get("exemplars"):
            self.request("set_prompts", prompts=[])
            self.request("set_prompts", prompts=prompts)
        return [camera for camera in cameras if camera in status["cameras"]]

    def carry_out(self, operation: Operation[ReplyT]) -> ReplyT:
        """Let the node carry out an operation, as `request` does."""
        return operation.read_reply(self.request(operation.op, **operation.to_args()))

    def request(self, op: str, **args: Any) -> Any:
        """Send a control request, which the node carries out at once. Call `settle` first to place it between frames.

        Raises RequestError and its subclasses, or TransportError if the node does not answer.
        """
        # a request to a node that is gone would wait for its whole timeout
        self._wait_until(
            lambda: bool(self._masks.connected), DISCONNECTED_S, f"to answer '{op}'", "that it is gone"
        )
        return self._control.call(op, **args)

    def push(self, step: Step) -> None:
        """Send the next frame, as soon as fewer than MAX_IN_FLIGHT are in flight and the node accepts it.

        Raises WireError for an inconsistent or too large frame, which is not sent, and the exceptions of `settle`.
        """
        idle_s = time.monotonic()
        while len(self.sent.in_flight) >= MAX_IN_FLIGHT or not self._send(step.frame):
            self._poll_masks()
            # a node with frames in flight is connected, however slow
            if self.sent.in_flight:
                idle_s = time.monotonic()
            if time.monotonic() - idle_s > CONNECT_S:
                raise self._make_error(
                    f"to take frames from {self._frames.endpoint}", "that it does not connect there"
                )
        self.sent.add(step)

    def settle(self) -> None:
        """Wait until no frame is in flight.

        Raises TransportError if the node ends, hangs or was restarted, or if another reader receives masks, and its
        subclass StoppedWaitingError after a stop.
        """
        while self.sent.in_flight:
            self._poll_masks()

    def check(self) -> None:
        """Raise TransportError unless the node stepped exactly the frames whose masks were received."""
        # another reader may have taken masks of frames that count as failed here
        done = self._count_done()
        if done.stepped != self.sent.received:
            raise self._make_count_error(done)

    def read_spatial_problems(self, cameras: Sequence[str]) -> list[str]:
        """Return why the last frames with depth of these cameras have no 3-D fields, a line for each camera."""
        served = self._read_status()["cameras"]
        problems = {camera: served.get(camera, {}).get("spatial_problem") for camera in cameras}
        return [f"{camera}: 3-D: {problem}" for camera, problem in problems.items() if problem]

    def close(self) -> None:
        """Disconnect without waiting for frames in flight. Idempotent."""
        self._opened.close()

    def _reset_counts(self, cameras: Sequence[str], before: NodeCounts) -> None:
        self._cameras = cameras
        self._before = before
        self.sent = InFlightFrames()
        self._last_done = NodeCounts()
        # when the node's counts were compared last, and when they changed last
        self._checked_s = time.monotonic()
        self._progress_s = self._checked_s

    def _send(self, frame: Frame) -> bool:
        """Send a frame. Return False if the queue is full."""
        try:
            return self._frames.send(frame, timeout_ms=0)
        except TransportError as error:  # the frame is larger than a message may be
            raise WireError(str(error)) from error

    def _poll_masks(self) -> None:
        """Wait up to POLL_MS for masks. Check the node's counts if there were none for SILENT_S."""
        masks = self._masks.take(POLL_MS)
        now_s = time.monotonic()
        if masks is not None:
            self._checked_s = now_s
            self._progress_s = now_s
            # masks that pass over earlier frames say that these failed, or that the node is another one
            if self.sent.receive(masks):
                self._count_done()
        elif now_s - self._checked_s > SILENT_S:
            self._check_missing_masks()
            self._checked_s = time.monotonic()

    def _check_missing_masks(self) -> None:
        """Settle frames that failed in the node. Raise TransportError if the node makes no progress."""
        if self._stop.is_set():
            raise StoppedWaitingError(f"stopped waiting for the masks of {len(self.sent.in_flight)} frames")
        done = self._count_done()
        if done != self._last_done:
            self._last_done = done
            self._progress_s = time.monotonic()
        self.sent.update(done)

        # stepped frames whose masks do not come went to another reader; a node that does not step may still compile
        silent_s = time.monotonic() - self._progress_s
        max_silent_s = HANG_S
        if done.stepped > self.sent.received:
            max_silent_s = FOREIGN_READER_S
        if self.sent.in_flight and silent_s > max_silent_s:
            raise self._make_count_error(done)

    def _read_status(self) -> dict[str, Any]:
        """Return the node's reply to `status`. A node that starts replies late."""
        begin_s = time.monotonic()
        connected_s = begin_s
        while True:
            try:
                status: dict[str, Any] = self._status_client.call("status")
                return status
            except TransportError as error:
                # the connection of masks stays while a busy node does not answer
                now_s = time.monotonic()
                if self._masks.connected:
                    connected_s = now_s
                if now_s - connected_s > DISCONNECTED_S:
                    raise self._make_error(
                        f"to answer {len(self.sent.in_flight)} more frames", "that it is gone"
                    ) from error
                if self._stop.is_set() or now_s - begin_s > HANG_S:
                    raise

    def _count_done(self) -> NodeCounts:
        """Return the node's counts since `begin`. Raise TransportError if they contradict the masks received."""
        done = NodeCounts.from_status(self._read_status(), self._cameras).since(self._before)
        if self.sent.contradicts(done):
            raise self._make_count_error(done)
        return done

    def _wait_idle(self, cameras: Sequence[str]) -> NodeCounts:
        """Discard masks until no more come and the node's counts are stable. Return these counts."""
        recent: deque[NodeCounts] = deque(maxlen=IDLE_POLLS)

        # a step between two looks would change the counts, so several looks must agree
        def is_idle() -> bool:
            masks = self._masks.take(POLL_MS)
            status = self._read_status()
            recent.append(NodeCounts.from_status(status, cameras))
            if masks is not None or status.get("stepping"):
                recent.clear()
            return len(recent) == IDLE_POLLS and len(set(recent)) == 1

        self._wait_until(is_idle, IDLE_S, "to become idle", "frames of other senders; stop its cameras")
        return recent[-1]

    def _wait_until(
        self, condition: Callable[[], bool], timeout_s: float, expected: str, actual: str
    ) -> None:
        begin_s = time.monotonic()
        while not condition():
            if time.monotonic() - begin_s > timeout_s:
                raise self._make_error(expected, actual)
            time.sleep(0.01)

    def _check_camera_limit(self, cameras: Sequence[str]) -> None:
        max_cameras = self.description["settings"]["tracker"]["max_cameras"]
        if len(cameras) > max_cameras:
            raise SettingsError(
                f"the node at {self._endpoint}: expected a limit of at least {len(cameras)} cameras, "
                f"{', '.join(cameras)}, including those that it served before, found {max_cameras}; restart it with "
                "--tracker.max_cameras"
            )

    def _make_count_error(self, done: NodeCounts) -> TransportError:
        return self._make_error(
            f"to have stepped {self.sent.received} frames, whose masks came, and to have failed on {self.sent.lost}, "
            f"of {self.sent.count} that were sent",
            f"{done.stepped} and {done.lost}; the node hangs or was started again, or another camera or reader is "
            "connected and takes messages",
        )

    def _make_error(self, expected: str, actual: str) -> TransportError:
        return TransportError(f"expected the node at {self._endpoint} {expected}; found {actual}")


def _check_delivery(delivery: str, control: str) -> None:
    if delivery != "every":
        raise SettingsError(
            f"the node at {control}: expected lossless delivery, found {delivery!r}, which skips frames; start the "
            "node with sam3-node run --transport.delivery every"
        )


def _resolve_endpoint(control: str, endpoint: str) -> str:
    """Return an endpoint of the node as seen from here. One bound on all addresses gets the host of `control`."""
    # a node that is bound to all addresses does not say under which one it is reached
    host = re.match("tcp://.+:", control)
    if host is None:
        return endpoint
    return re.sub(r"^tcp://(\*|0\.0\.0\.0):", host[0], endpoint)
