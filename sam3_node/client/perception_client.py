"""The client for robot policies: it reads the newest masks and controls the node while it runs.

It needs pyzmq, msgpack, msgspec, numpy and zstandard only. Points, boxes and masks are in pixels of the camera's frame.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from ..errors import AuthenticationError, NodeRestarted, NotSeenError, RequestError, TransportError
from ..resources import closed_on_error
from ..resumable import Resumable, resume
from ..schema import operations as ops
from ..transport import ControlClient, MaskSubscriber, Security
from ..transport.security import find_endpoint
from ..types import Delivery, MaskFrame
from . import values
from .diagnosis import Description, Wanted, diagnose, find_sending_camera
from .mask_reader import CallbackThread, Deadline, FoundObject, KnownEpochs, LabelSearch, OnError, OnMasks
from .requests import ClientRequests

MASKS_ENDPOINT = "tcp://127.0.0.1:5551"
CONTROL_ENDPOINT = "tcp://127.0.0.1:5552"
POLL_S = 0.05
"""Time between two questions for a camera that sends."""
SAMPLE_MS = 1000
"""Longest time to look at what comes instead of masks."""


class PerceptionClient(ClientRequests):
    """A client of one node: it reads masks at endpoint `masks` and sends requests to `control`.

    It is a context manager: `with PerceptionClient() as node:` connects to the endpoints that the environment variables
    SAM3_TRANSPORT__MASKS and SAM3_TRANSPORT__CONTROL name, as every command does; without them, to the node on this
    machine, at its default endpoints. The node may start later, and may restart. With `cameras`, masks of other cameras
    are ignored. With `sure_only`, doubtful instances are left out. Requests raise RequestError or a subclass
    (UnknownObjectError, UnknownFrameError, CapacityError) when the node refuses them, and TransportError when it does
    not answer within `timeout_ms`. The argument `camera` is optional while one camera sends frames.

    Object ids begin again when the node is restarted. Before the client returns anything with ids of the new epoch, it
    raises NodeRestarted, once for each camera: forget the ids of that camera, and go on. With `on_restart`, it calls
    that with the error instead, and goes on itself. A request that names an id of an earlier epoch always raises it.
    The argument `epoch` of such requests is the object's epoch (AddedObject.epoch); without it, the client takes the
    one that it has seen last.

    Threads may share a client: each message is taken by one of them, requests take turns, and one thread of the client
    alone uses the sockets of masks. NodeRestarted is raised in the thread that meets it first, so threads that hold ids
    should pass `epoch` with them.

    `security` names the folder of keys; without it, the environment variables SAM3_TRANSPORT__KEYS and
    SAM3_TRANSPORT__KEY do. Requests raise AuthenticationError within a second if the node refuses the key, and
    ForbiddenError if the key's role does not permit them; `latest` goes on to wait, and a warning is logged.
    """

    def __init__(
        self,
        masks: str | None = None,
        control: str | None = None,
        *,
        delivery: Delivery = "newest",
        cameras: Sequence[str] = (),
        timeout_ms: int = 2000,
        on_restart: Callable[[NodeRestarted], object] | None = None,
        sure_only: bool = False,
        security: Security | None = None,
    ) -> None:
        cameras = values.check_names(cameras, "cameras")
        if masks is None:
            masks = find_endpoint("MASKS", MASKS_ENDPOINT)
        if control is None:
            control = find_endpoint("CONTROL", CONTROL_ENDPOINT)
        self._wanted = Wanted(masks, control, delivery, tuple(cameras))
        self._on_restart = on_restart
        self._sure_only = sure_only
        self._epochs = KnownEpochs()
        self._held: deque[MaskFrame] = deque()  # masks whose NodeRestarted was raised in their place
        self._together: dict[str, MaskFrame] = {}  # of each camera, for `latest_of_all`
        self._callbacks: CallbackThread | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._timeout_ms = timeout_ms
        self._control = ControlClient(control, timeout_ms, security)
        with closed_on_error(self._control):
            self._masks = MaskSubscriber(masks, delivery, cameras, security, lazy=True)

    @property
    def connected(self) -> bool:
        """True while a peer is connected at the masks endpoint of the node."""
        return bool(self._masks.connected)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def newest(self, camera: str | None = None) -> MaskFrame | None:
        """Return the newest masks of a camera at once, None if there are none yet; without a name, of any camera.

        They stay: another call returns the same ones until newer ones come, however old they are; see their `age_ms`.
        Raises NodeRestarted as `latest` does, and TransportError with lossless delivery, which `latest` reads, and
        after `close`.
        """
        self._require_open()
        self._require_newest("newest")
        masks = self._masks.newest.get(camera)
        # masks of an ended epoch were on their way when the node was started again
        if masks is None or self._epochs.has_ended(masks.camera, masks.epoch):
            return None
        self._report(self._epochs.meet(masks.camera, masks.epoch, masks.node))
        return self._filter(masks)

    def latest(self, timeout_ms: int | None = None) -> MaskFrame | None:
        """Return the newest masks that were not returned before; cameras take turns.

        Returns None when no masks arrive within `timeout_ms` (None: no limit), and when the client is closed meanwhile.
        Raises NodeRestarted once when the ids of a camera have begun again; the next call returns its masks. Raises
        TransportError once callbacks get the masks, after `close`, and in a process that was forked from the client's.
        """
        self._require_open()
        return self._read_latest(timeout_ms)

    def _read_latest(self, timeout_ms: int | None) -> MaskFrame | None:
        """Return the same; None after `close`, so that a caller that waits just ends."""
        if self._callbacks is not None:
            raise TransportError(
                "the masks of this client go to its callbacks: look with `newest`, or open another client to read them"
            )
        return self._take_next(timeout_ms)

    def latest_of_all(
        self, cameras: Sequence[str], timeout_ms: int | None = None, max_spread_ms: float = math.inf
    ) -> values.MasksOfCameras | None:
        """Wait for new masks of any camera. Return the newest masks of each of `cameras`.

        Their captures are at most `max_spread_ms` apart. Returns None, and raises NodeRestarted, as `latest` does.
        Masks from before a restart are forgotten. Masks of other cameras are passed over.
        """
        values.check_names(cameras, "cameras")
        self._require_open()
        return self._read_latest_of_all(cameras, timeout_ms, max_spread_ms)

    def _read_latest_of_all(
        self, cameras: Sequence[str], timeout_ms: int | None, max_spread_ms: float
    ) -> values.MasksOfCameras | None:
        deadline = Deadline(timeout_ms)
        while True:
            masks = self._read_latest(deadline.left_ms)
            if masks is None:
                return None
            self._together[masks.camera] = masks
            for _ in cameras:  # also messages that wait
                waiting = self._read_latest(0)
                if waiting is None:
                    break
                self._together[waiting.camera] = waiting
            known = self._together.copy()
            if all(camera in known for camera in cameras):
                found = values.MasksOfCameras({camera: known[camera] for camera in cameras})
                if found.spread_ms <= max_spread_ms:
                    return found

    def __iter__(self) -> Iterator[MaskFrame]:
        """Yield the newest masks as they arrive, until `close`. NodeRestarted does not end the iterator.

        Raises TransportError for a client that is closed already.
        """
        self._require_open()
        return cast(Iterator[MaskFrame], iter(partial(self._read_latest, None), None))

    def on_masks(self, callback: OnMasks, on_error: OnError | None = None) -> None:
        """Call `callback` with all masks that `latest` would return, until `close`. There may be several callbacks.

        All callbacks run in one thread of the client, one at a time, in the order in which they were added. While one
        runs, newer masks replace waiting ones; with lossless delivery, the node waits. A callback may call every
        method of the client, `close` too, but those that take masks. No callback runs after `close` has returned.

        What a callback raises goes to its `on_error`, in that thread, and ends nothing; without `on_error` it is logged
        with its traceback. So does NodeRestarted if the client has no `on_restart`, and TransportError if no masks can
        come any more.
        """
        self._require_open()
        # two threads may add the first callback at once, but only one thread may call them
        with self._starting:
            self._require_open()
            if self._callbacks is None:
                self._callbacks = CallbackThread(lambda: self._take_next(None), lambda: self._masks.is_over)
            self._callbacks.add(callback, on_error)

    def wait_for(
        self,
        label: str,
        timeout_ms: int | None = 30_000,
        *,
        camera: str | None = None,
        most: int | None = None,
    ) -> FoundObject:
        """Wait until an object with `label` is tracked, and return it with its masks. No masks are taken.

        An object counts in state "tracked", in masks of a camera that sends; with `sure_only`, not if it is doubtful.
        Of several, the one with the best score is returned. With `most`, more than that many on one camera raise
        AmbiguousError, which names them.
        Raises NotSeenError that says what was seen instead if there is none within `timeout_ms` (None: no limit), and
        TransportError that says what is missing if no masks came. Raises NodeRestarted as `latest` does, and
        TransportError with lossless delivery and after `close`.
        """
        return self._wait_for(self._search(label, camera, most), timeout_ms)

    def wait_for_held(
        self, id: int, timeout_ms: int | None = 30_000, *, camera: str | None = None
    ) -> FoundObject:
        """Wait until the gripper holds an object, and return it with its masks. No masks are taken.

        The node needs the robot's poses and depth. Raises the errors of `wait_for`.
        """
        return self._wait_for(self._search_held(id, camera), timeout_ms)

    def wait_until_seen(
        self, name_or_id: int | str, timeout_ms: int | None = 30_000, *, camera: str | None = None
    ) -> FoundObject:
        """Wait until an object is in view by a mask that is not doubtful, and return it with its masks.

        `name_or_id` is its id, also of one that was lost, or the name that any of several may have; then the one with
        the best score is returned. No masks are taken. Raises the errors of `wait_for`.
        """
        return self._wait_for(self._search_seen(name_or_id, camera), timeout_ms)

    def _wait_for(self, search: LabelSearch, timeout_ms: int | None) -> FoundObject:
        deadline = Deadline(timeout_ms)
        found = self._masks.newest.wait(search.find, deadline.before_reason_s)
        return self._settle(search, found, deadline)

    def wait_for_camera(self, timeout_ms: int | None = 30_000) -> str:
        """Wait until the node has processed a frame of a camera that sends, and return that camera's name.

        With `cameras`, other cameras do not count. Raises TransportError that says what is missing when there is none
        within `timeout_ms` (None: no limit). Node and camera may start later than this call.
        """
        search = self._search_camera(timeout_ms)
        while (camera := resume(search)) is None:
            time.sleep(POLL_S)
        return camera

    def _search_camera(self, timeout_ms: int | None) -> Resumable[str]:
        """Ask the node for a camera that sends, once in each turn."""
        self._require_open()
        deadline = Deadline(timeout_ms)
        reason = ""
        while not self._closed:
            description = None
            if self.connected:  # without a node, a request would wait in vain
                with suppress(TransportError):
                    description = self._describe(deadline)
            camera = find_sending_camera(description, self._wanted.cameras)
            if camera is not None:
                return camera
            # near the end: find out why it fails, which takes some time of its own
            if not reason and deadline.before_reason_s == 0:
                reason = self._explain(deadline)
            if deadline.left_s == 0:
                kind = AuthenticationError if self._masks.refusals else TransportError
                raise kind(f"no camera sent frames within {timeout_ms} ms: {reason}")
            yield
        raise TransportError("cannot wait for a camera: this client is closed")

    def diagnosis(self) -> str:
        """Return one line that says what keeps masks from arriving, and what to do about it.

        It asks the node, and takes up to the client's `timeout_ms` if none answers. While no masks have come, it looks
        for up to a second at what the masks endpoint sends instead, such as the frames of a camera.
        """
        self._require_open()
        return self._explain(Deadline(None))

    def _explain(self, deadline: Deadline) -> str:
        """Return the diagnosis, made in the time that is left."""
        # what the node says of itself, then what the masks endpoint sends
        description = None
        try:
            description = self._describe(deadline)
        except AuthenticationError as error:
            return str(error)
        except TransportError:
            pass
        # the node answers, but another endpoint may refuse the key
        if self._masks.refusals:
            return self._masks.refusals[0]
        arrivals = self._masks.count_arrivals(deadline.limit_ms(SAMPLE_MS))
        return diagnose(description, self._wanted, self.connected, arrivals)

    def close(self) -> None:
        """Close both connections. Calls that wait for masks return None, later ones raise TransportError. Idempotent.

        In a process that was forked after the client was made, it leaves the connections to the first process.
        """
        if self._is_forked:
            self._closed = True
        else:
            # a thread that adds a callback just now either starts its thread before, or finds the client closed
            with self._starting:
                self._closed = True
            self._held.clear()
            self._masks.close()
            if self._callbacks is not None:
                self._callbacks.join()
        self._control.close()

    def _require_open(self) -> None:
        """Raise TransportError after `close`, and in a process that was forked after this client was made."""
        self._require_process()
        if self._closed:
            raise TransportError("this client is closed: make another one")

    def _search(self, label: str, camera: str | None, most: int | None) -> LabelSearch:
        self._require_open()
        values.check_label(label)
        self._require_newest("wait_for")
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise RequestError(f"most: expected a whole number of at least 1, found {most!r}")
        return LabelSearch(self._masks, label, camera, self._sure_only, self._epochs.has_ended, most)

    def _search_held(self, id: int, camera: str | None) -> LabelSearch:
        self._require_open()
        self._require_newest("wait_for_held")
        camera = self._epochs.name_camera(camera)
        return LabelSearch(
            self._masks, "", camera, self._sure_only, self._epochs.has_ended, id=id, goal="held"
        )

    def _search_seen(self, name_or_id: int | str, camera: str | None) -> LabelSearch:
        self._require_open()
        self._require_newest("wait_until_seen")
        values.check_target(name_or_id)
        label = ""
        id = None
        if isinstance(name_or_id, str):
            label = name_or_id
        else:
            # ids of several cameras are equal
            id = name_or_id
            camera = self._epochs.name_camera(camera)
        return LabelSearch(
            self._masks, label, camera, self._sure_only, self._epochs.has_ended, id=id, goal="seen"
        )

    def _settle(self, search: LabelSearch, found: FoundObject | None, deadline: Deadline) -> FoundObject:
        """Return what a search has found, or finds until its end; else raise the error that says what was seen."""
        reason = ""
        if found is None and not self._closed:
            # find out why no masks come, and go on looking until the end
            if search.describe_sight() is None:
                reason = self._explain(deadline)
            found = self._masks.newest.wait(search.find, deadline.left_s)
        if found is not None:
            masks = found.masks
            self._report(self._epochs.meet(masks.camera, masks.epoch, masks.node))
            return FoundObject(self._filter(masks), found.instance)
        if self._closed:
            raise TransportError(f"cannot wait for {search.target}: this client is closed")
        sight = search.describe_sight()
        if sight is None:
            kind = AuthenticationError if self._masks.refusals else TransportError
            raise kind(f"no masks came within {deadline.timeout_ms} ms: {reason}")
        missing = f"no {search.target} was {search.goal}"
        if search.id is not None:
            missing = f"{search.target} was not {search.goal}"
        raise NotSeenError(f"{missing} within {deadline.timeout_ms} ms: {sight}")

    def _take_next(self, timeout_ms: int | None) -> MaskFrame | None:
        """Take the next masks of an epoch that has not ended; raise or report if theirs is new."""
        deadline = Deadline(timeout_ms)
        # masks of an ended epoch were on their way when the node was started again
        masks = self._take(deadline)
        while masks is not None and self._epochs.has_ended(masks.camera, masks.epoch):
            masks = self._take(deadline)
        if masks is None:
            return None
        restart = self._epochs.meet(masks.camera, masks.epoch, masks.node)
        # the error is raised in place of the masks, which the next call returns
        if restart is not None and self._on_restart is None:
            self._held.append(masks)
        self._report(restart)
        return self._filter(masks)

    def _take(self, deadline: Deadline) -> MaskFrame | None:
        """Return the next masks: first masks that an error held back, or newer ones of their camera."""
        try:
            held = self._held.popleft()
        except IndexError:
            return self._masks.take(deadline.left_ms)
        # newer masks of a camera replace the ones that were held back; masks of other cameras go on waiting
        newer = self._masks.take(0) if self._wanted.delivery == "newest" else None
        if newer is not None and newer.camera == held.camera:
            return newer
        if newer is not None:
            self._held.append(newer)
        return held

    def _filter(self, masks: MaskFrame) -> MaskFrame:
        return masks.without_doubtful() if self._sure_only else masks

    def _report(self, restart: NodeRestarted | None) -> None:
        """Raise the error, or call `on_restart` with it. None is no error."""
        if restart is None:
            return
        self._together.clear()  # `latest_of_all` must not mix epochs
        if self._on_restart is None:
            raise restart
        self._on_restart(restart)

    def _require_newest(self, name: str) -> None:
        if self._wanted.delivery != "newest":
            raise TransportError(
                f"{name} needs delivery 'newest'; with 'every', read all masks with `latest`"
            )

    def _describe(self, deadline: Deadline) -> Description:
        """Ask the node for its description, in half of the time that is left at most."""
        timeout_ms = deadline.limit_ms(2 * self._timeout_ms) // 2
        return cast(Description, self._control.call_within(timeout_ms, ops.DescribeNode.op))
