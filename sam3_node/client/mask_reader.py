"""Reading masks of a node: the newest, one after another, by callbacks, or until an object is there."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

from ..errors import AuthenticationError, NodeRestarted, NotSeenError, RequestError, TransportError
from ..transport import MaskSubscriber, Security
from ..transport.sockets import SocketOwner
from ..types import Delivery, MaskFrame
from .callbacks import CallbackThread, OnError, OnMasks
from .label_search import FoundObject, LabelSearch
from .sessions import KnownEpochs
from .values import MasksOfCameras, check_label, check_names


class MaskReader(SocketOwner):
    """The part of a client that reads masks. Its methods may be called from several threads.

    One thread of its own receives; it alone uses the sockets. `latest` and iteration take: each message goes to one
    caller. `newest` and `wait_for` only look.
    """

    def __init__(
        self,
        masks: str,
        delivery: Delivery,
        cameras: Sequence[str],
        on_restart: Callable[[NodeRestarted], object] | None,
        sure_only: bool,
        security: Security | None,
    ) -> None:
        self._sure_only, self._delivery = sure_only, delivery
        self._on_restart = on_restart
        self._epochs = KnownEpochs()
        self._held: deque[MaskFrame] = deque()
        self._together: dict[str, MaskFrame] = {}  # of each camera, for `latest_of_all`
        self._callbacks: CallbackThread | None = None
        self._starting = threading.Lock()
        self._closed = False
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
        """Return the newest masks of a camera at once, None if there are none yet; without a name, those of any.

        They stay: another call returns the same ones until newer ones come, however old they are; see their `age_ms`.
        Raises NodeRestarted as `latest` does, and TransportError with lossless delivery, which `latest` reads, and
        after `close`.
        """
        self._require_open()
        self._require_newest("newest")
        masks = self._masks.newest.get(camera)
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
    ) -> MasksOfCameras | None:
        """Wait for new masks of any camera. Return the newest masks of each of `cameras`.

        Their captures are at most `max_spread_ms` apart. Returns None, and raises NodeRestarted, as `latest` does.
        Masks from before a restart are forgotten. Masks of other cameras are passed over.
        """
        check_names(cameras, "cameras")
        self._require_open()
        return self._read_latest_of_all(cameras, timeout_ms, max_spread_ms)

    def _read_latest_of_all(
        self, cameras: Sequence[str], timeout_ms: int | None, max_spread_ms: float
    ) -> MasksOfCameras | None:
        deadline_s = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        while True:
            masks = self._read_latest(_milliseconds_to(deadline_s))
            if masks is None:
                return None
            for _ in cameras:  # those that wait, too
                self._together[masks.camera] = masks
                masks = self._read_latest(0)
                if masks is None:
                    break
            else:
                self._together[masks.camera] = masks
            known = self._together.copy()
            if all(camera in known for camera in cameras):
                found = MasksOfCameras({camera: known[camera] for camera in cameras})
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
        runs, newer masks replace those that wait; with lossless delivery, the node waits. A callback may call every
        method of the client, `close` too, but those that take masks. No callback runs after `close` has returned.

        What a callback raises goes to its `on_error`, in that thread, and ends nothing; without `on_error` it is logged
        with its traceback. So does NodeRestarted if the client has no `on_restart`, and TransportError if no masks can
        come any more.
        """
        self._require_open()
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
        search = self._search(label, camera, most)
        found = self._masks.newest.wait(search.find, None if timeout_ms is None else timeout_ms / 1000)
        return self._settle(search, found, label, timeout_ms)

    def diagnosis(self) -> str:
        """Return one line that says what keeps masks from arriving, and what to do about it."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection. Calls that wait for masks return None, later ones raise TransportError. Idempotent."""
        if self._is_forked:
            self._closed = True
            return
        with self._starting:
            self._closed = True
        self._held.clear()
        self._masks.close()
        if self._callbacks is not None:
            self._callbacks.join()

    def _require_open(self) -> None:
        """Raise TransportError after `close`, and in a process that was forked after this client was made."""
        self._require_process()
        if self._closed:
            raise TransportError("this client is closed: make another one")

    def _search(self, label: str, camera: str | None, most: int | None) -> LabelSearch:
        self._require_open()
        check_label(label)
        self._require_newest("wait_for")
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise RequestError(f"most: expected a whole number of at least 1, found {most!r}")
        return LabelSearch(self._masks, label, camera, self._sure_only, self._epochs.has_ended, most)

    def _settle(
        self, search: LabelSearch, found: FoundObject | None, label: str, timeout_ms: int | None
    ) -> FoundObject:
        """Return what a search has found, or raise the error that says what was seen instead."""
        if found is not None:
            masks = found.masks
            self._report(self._epochs.meet(masks.camera, masks.epoch, masks.node))
            return FoundObject(self._filter(masks), found.instance)
        if self._closed:
            raise TransportError(f"cannot wait for {label!r}: this client is closed")
        sight = search.describe_sight()
        if sight is None:
            kind = AuthenticationError if self._masks.refusals else TransportError
            raise kind(f"no masks came within {timeout_ms} ms: {self.diagnosis()}")
        raise NotSeenError(f"no object {label!r} was tracked within {timeout_ms} ms: {sight}")

    def _take_next(self, timeout_ms: int | None) -> MaskFrame | None:
        """Take the next masks of an epoch that has not ended; raise or report if theirs is new."""
        deadline_s = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        masks = self._take(deadline_s)
        while masks is not None and self._epochs.has_ended(masks.camera, masks.epoch):
            masks = self._take(deadline_s)
        if masks is None:
            return None
        restart = self._epochs.meet(masks.camera, masks.epoch, masks.node)
        if restart is not None and self._on_restart is None:
            self._held.append(masks)
        self._report(restart)
        return self._filter(masks)

    def _take(self, deadline_s: float | None) -> MaskFrame | None:
        """Return the next masks: first those that an error held back, or newer ones of their camera."""
        try:
            held = self._held.popleft()
        except IndexError:
            return self._masks.take(_milliseconds_to(deadline_s))
        newer = self._masks.take(0) if self._delivery == "newest" else None
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
        self._together.clear()
        if self._on_restart is None:
            raise restart
        self._on_restart(restart)

    def _require_newest(self, name: str) -> None:
        if self._delivery != "newest":
            raise TransportError(
                f"{name} needs delivery 'newest'; with 'every', read all masks with `latest`"
            )


def _milliseconds_to(deadline_s: float | None) -> int | None:
    """Return the time that is left, not below 0."""
    return None if deadline_s is None else max(0, math.ceil((deadline_s - time.monotonic()) * 1000))
