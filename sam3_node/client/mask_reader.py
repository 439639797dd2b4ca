"""Read the masks of a node: the newest, one after another, by callbacks, or until an object is there.

`KnownEpochs` tells which ids are still valid. `LabelSearch` looks for an object by its label. `CallbackThread` calls a
client's callbacks, one at a time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from ..errors import (
    AmbiguousError,
    AuthenticationError,
    NodeRestarted,
    NotSeenError,
    RequestError,
    TransportError,
    did_you_mean,
)
from ..transport import MaskSubscriber, Security
from ..transport.sockets import SocketOwner
from ..types import CAMERA_SILENT_S, Delivery, Instance, MaskFrame
from .values import MasksOfCameras, check_label, check_names

log = logging.getLogger(__name__)

OnMasks = Callable[[MaskFrame], object]
OnError = Callable[[BaseException], object]


class _Callback(NamedTuple):
    on_masks: OnMasks
    on_error: OnError | None


class CallbackThread:
    """Passes what `read` returns to every callback, in the order in which they were added, until it returns None.

    What a callback raises goes to its `on_error`, or to the log if it has none, and changes nothing else. What `read`
    raises goes to each of them, and ends the thread only if `is_over` is true then.
    """

    def __init__(self, read: Callable[[], MaskFrame | None], is_over: Callable[[], bool]) -> None:
        self._read, self._is_over = read, is_over
        self._callbacks: tuple[_Callback, ...] = ()
        self._thread = threading.Thread(target=self._run, name="sam3-node callbacks", daemon=True)

    def add(self, on_masks: OnMasks, on_error: OnError | None) -> None:
        """Call `on_masks` from the next masks on. The first one starts the thread."""
        self._callbacks = (*self._callbacks, _Callback(on_masks, on_error))
        if len(self._callbacks) == 1:
            self._thread.start()

    @property
    def is_current(self) -> bool:
        """True in the thread that calls the callbacks."""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait until no callback runs any more. It returns at once in a callback."""
        if self._thread.is_alive() and not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                masks = self._read()
            except BaseException as error:  # NodeRestarted, or what the client's on_restart has raised
                for callback in self._callbacks:
                    _report(callback, error)
                if self._is_over():
                    return
                continue
            if masks is None:
                return
            for callback in self._callbacks:
                try:
                    callback.on_masks(masks)
                except (
                    BaseException
                ) as error:  # of whatever kind: sys.exit must not end this thread in silence
                    _report(callback, error)


def _report(callback: _Callback, error: BaseException) -> None:
    """Pass an error to the callback's `on_error`, or to the log."""
    if callback.on_error is not None:
        try:
            callback.on_error(error)
            return
        except BaseException as another:
            log.error("on_error of a callback has raised", exc_info=another)
    log.error("a callback of masks: %s: %s", type(error).__name__, error, exc_info=error)


class FoundObject(NamedTuple):
    """An object in the newest masks of its camera."""

    masks: MaskFrame
    instance: Instance


class LabelSearch:
    """Looks for a tracked object with `label` in the masks of cameras that send. Upper and lower case count as equal.

    Without `camera`, it searches all cameras. With `sure_only`, a doubtful object does not count. Of more
    objects than `most` on one camera, none is chosen.
    """

    def __init__(
        self,
        subscriber: MaskSubscriber,
        label: str,
        camera: str | None,
        sure_only: bool,
        has_ended: Callable[[str, int | None], bool],
        most: int | None = None,
    ) -> None:
        self._subscriber = subscriber
        self._label, self._camera = label, camera
        self._sure_only, self._has_ended = sure_only, has_ended
        self._most = most

    def find(self) -> FoundObject | None:
        """Return the object. Of several, it is the surest one of the camera that sent last.

        Raises AmbiguousError, which names them, for more than `most`.
        """
        for masks in reversed(self._list_masks()):
            found = [instance for instance in masks.instances if self._fits(instance)]
            if self._most is not None and len(found) > self._most:
                raise AmbiguousError(describe_rivals(self._label, found, self._most, masks.camera))
            if found:
                return FoundObject(masks, max(found, key=lambda instance: instance.score))
        return None

    def describe_sight(self) -> str | None:
        """Return one line that says what the newest masks have instead; None if no camera sends masks."""
        sent = self._list_masks()
        if not sent:
            return None
        seen = Counter(
            f"{instance.label or 'unnamed'} ({instance.state}{', doubtful' * instance.doubtful})"
            for masks in sent
            for instance in masks.instances
        )
        prompts = sorted({prompt for masks in sent for prompt in masks.prompts})
        labels = {instance.label for masks in sent for instance in masks.instances}
        names = ", ".join(f"{count} {name}" if count > 1 else name for name, count in sorted(seen.items()))
        return (
            f"the newest masks of {', '.join(masks.camera for masks in sent)} have {names or 'no objects'}"
            f"{did_you_mean(self._label, labels)}; the node looks for {', '.join(prompts) or 'no names'}: set_prompts "
            "names objects to look for, add_object marks one"
        )

    def _list_masks(self) -> list[MaskFrame]:
        """Return the newest masks of the cameras that are searched, send, and have not begun new ids since."""
        return [
            masks
            for masks in self._subscriber.newest.get_all()
            if self._camera in (None, masks.camera)
            and (self._subscriber.silent_s(masks.camera) or 0.0) < CAMERA_SILENT_S
            and not self._has_ended(masks.camera, masks.epoch)
        ]

    def _fits(self, instance: Instance) -> bool:
        return (
            instance.label.casefold() == self._label.casefold()
            and instance.state == "tracked"
            and not (self._sure_only and instance.doubtful)
        )


def describe_rivals(label: str, found: Sequence[Instance], most: int, camera: str | None) -> str:
    """Return one line that names the objects of a label where only `most` were asked for, and the remedy."""
    names = ", ".join(map(_describe_rival, found))
    where = f" on camera {camera}" if camera else ""
    return (
        f"expected at most {most} {label!r}{where}, found {len(found)}: {names}; remove or rename the wrong "
        f"one, name it more exactly, or let the node look for {most} with set_prompts(..., most={most})"
    )


def _describe_rival(instance: Instance) -> str:
    sure = "" if instance.name_confidence is None else f", name {instance.name_confidence:.2f}"
    return f"object {instance.id} {instance.label!r} at {instance.box}{sure}"


MAX_CAMERAS = 1024


class KnownEpoch(NamedTuple):
    """The epoch of one camera's ids."""

    camera: str
    epoch: int


class KnownEpochs:
    """The epoch of each camera that the user of a client has seen last. Threads may share it.

    None is the epoch of a node that sends none. Beyond MAX_CAMERAS, the camera that was seen first is forgotten.
    """

    def __init__(self) -> None:
        self._epochs: dict[str, int | None] = {}
        self._ended: dict[str, int] = {}
        self._lock = threading.Lock()

    def meet(self, camera: str, epoch: int | None, node: str | None = None) -> NodeRestarted | None:
        """Note the epoch of masks or of a result. Return the error to raise if the camera had another one before."""
        with self._lock:
            known = camera in self._epochs
            old = self._epochs.get(camera)
            self._epochs[camera] = epoch
            _drop_first(self._epochs)
            if known and old is not None and old != epoch:
                self._ended[camera] = old
                _drop_first(self._ended)
        if not known or old == epoch:
            return None
        return NodeRestarted(
            f"object ids of camera {camera} have begun again (epoch {old}, now {epoch}): the node was started again, "
            "or served the camera anew; forget its ids, add its objects again, and go on: the next call returns masks",
            camera=camera,
            old_epoch=old,
            new_epoch=epoch,
            node=node,
        )

    def find(self, camera: str | None) -> KnownEpoch | None:
        """Return the epoch to send with a request; None if there is none. Without `camera`, take the only camera."""
        with self._lock:
            if camera is None and len(self._epochs) == 1:
                camera = next(iter(self._epochs))
            epoch = self._epochs.get(camera) if camera is not None else None
        return None if camera is None or epoch is None else KnownEpoch(camera, epoch)

    def has_ended(self, camera: str, epoch: int | None) -> bool:
        """Return True for an epoch whose end was reported: its masks were on their way when the node was restarted."""
        with self._lock:
            return epoch is not None and self._ended.get(camera) == epoch

    def name_camera(self, camera: str | None) -> str | None:
        """Return the camera whose object a request names. Ids of several cameras are equal, so it must be clear."""
        with self._lock:
            names = tuple(self._epochs)
        if camera is None and len(names) > 1:
            raise RequestError(
                f"camera: expected a name, as this client has seen ids of several: {', '.join(names)}"
            )
        return names[0] if camera is None and names and self.find(names[0]) else camera

    def end(self, known: KnownEpoch) -> None:
        """Note that the end of an epoch was reported; the next one is not known yet."""
        with self._lock:
            if self._epochs.get(known.camera) == known.epoch:
                del self._epochs[known.camera]
                self._ended[known.camera] = known.epoch
                _drop_first(self._ended)


def _drop_first(epochs: dict[str, Any]) -> None:
    """Forget the camera that was seen first, beyond MAX_CAMERAS."""
    if len(epochs) > MAX_CAMERAS:
        del epochs[next(iter(epochs))]


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
        """Return the newest masks of a camera at once, None if there are none yet; without a name, of any camera.

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
