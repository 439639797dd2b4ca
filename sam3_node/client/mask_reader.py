"""Parts of a client that reads masks.

`KnownEpochs` tells which ids are still valid. `LabelSearch` looks for an object by its label. `CallbackThread` calls a
client's callbacks, one at a time.
"""

import logging
import math
import numbers
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..errors import AmbiguousError, NodeRestarted, RequestError, did_you_mean
from ..transport import MaskSubscriber
from ..types import CAMERA_SILENT_S, Instance, MaskFrame, keep_newest

REASON_S = 1.0
"""Seconds at the end of a wait for finding out why it fails."""
GRACE_S = 0.15
"""Seconds by which finding the reason may overrun the end of a wait."""
MAX_CAMERAS = 1024
"""Cameras whose epochs are remembered. A peer that invents names must not fill the memory."""
log = logging.getLogger(__name__)

Goal = Literal["tracked", "held", "seen"]
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
        self._read = read
        self._is_over = is_over
        self._callbacks: tuple[_Callback, ...] = ()
        self._thread = threading.Thread(target=self._run, name="sam3-node callbacks", daemon=True)

    def add(self, on_masks: OnMasks, on_error: OnError | None) -> None:
        """Call `on_masks` from the next masks on. The first one starts the thread."""
        # a new tuple: the thread may go through the old one meanwhile
        self._callbacks = (*self._callbacks, _Callback(on_masks, on_error))
        if len(self._callbacks) == 1:
            self._thread.start()

    def join(self) -> None:
        """Wait until no callback runs any more. It returns at once in a callback."""
        # a callback that closes the client runs in this thread, which cannot wait for itself
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                masks = self._read()
            except BaseException as error:  # NodeRestarted, or what the client's on_restart has raised
                for callback in self._callbacks:
                    _report(callback, error)
                # a restart is reported, and the masks go on; a failure of the subscriber ends them
                if self._is_over():
                    return
                continue
            if masks is None:
                return
            for callback in self._callbacks:
                try:
                    callback.on_masks(masks)
                except BaseException as error:  # also sys.exit must not end this thread in silence
                    _report(callback, error)


def _report(callback: _Callback, error: BaseException) -> None:
    """Pass an error to the callback's `on_error`, or to the log."""
    # an error of the handler itself is logged with the one that it was to handle
    if callback.on_error is not None:
        try:
            callback.on_error(error)
            return
        except BaseException as another:
            log.error("on_error of a callback has raised", exc_info=another)
    log.error("a callback of masks: %s: %s", type(error).__name__, error, exc_info=error)


class Deadline:
    """The end of a wait of `timeout_ms` from now on; None never ends.

    The last REASON_S, at most half of the wait, are for finding out why it will fail. That may overrun by GRACE_S.
    An infinite number never ends, either. Raises RequestError for what is no number.
    """

    def __init__(self, timeout_ms: float | None) -> None:
        # also numpy's numbers; True is a number to Python, and a wrong argument to a reader
        is_number = isinstance(timeout_ms, numbers.Real) and not isinstance(timeout_ms, bool)
        if timeout_ms is not None and (not is_number or math.isnan(timeout_ms)):
            raise RequestError(
                f"timeout_ms: expected milliseconds, or None to wait forever, found {timeout_ms!r}"
            )
        if timeout_ms == math.inf:
            timeout_ms = None
        self.timeout_ms = timeout_ms
        # half of a short wait, at most, is for the reason
        self._end_s = math.inf
        self._reason_s = 0.0
        if timeout_ms is not None:
            self._end_s = time.monotonic() + timeout_ms / 1000
            self._reason_s = min(REASON_S, timeout_ms / 2000)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, not below 0; None without an end."""
        if self.timeout_ms is None:
            return None
        return max(0.0, self._end_s - time.monotonic())

    @property
    def left_ms(self) -> int | None:
        """The same in milliseconds, rounded up."""
        left_s = self.left_s
        return None if left_s is None else math.ceil(left_s * 1000)

    @property
    def before_reason_s(self) -> float | None:
        """Seconds that are left before the reason is looked for."""
        left_s = self.left_s
        return None if left_s is None else max(0.0, left_s - self._reason_s)

    def limit_ms(self, timeout_ms: int) -> int:
        """Return the time for a part of the work that would take up to `timeout_ms`."""
        return round(min(timeout_ms, 1000 * max(0.0, self._end_s + GRACE_S - time.monotonic())))


class FoundObject(NamedTuple):
    """An object in the newest masks of its camera."""

    masks: MaskFrame
    instance: Instance


@dataclass(frozen=True, slots=True)
class LabelSearch:
    """Looks for a tracked object with `label` in the masks of cameras that send. Upper and lower case count as equal.

    Without `camera`, it searches all cameras. With `sure_only`, a doubtful object does not count. Of more
    objects than `most` on one camera, none is chosen. With `id`, it looks for the object with this id, whatever its
    label. `goal` says what it waits for: that the object is tracked, that the gripper holds it, or that a mask which is
    not doubtful shows it.
    """

    subscriber: MaskSubscriber
    label: str
    camera: str | None
    sure_only: bool
    has_ended: Callable[[str, int | None], bool]
    most: int | None = None
    id: int | None = None
    goal: Goal = "tracked"

    @property
    def target(self) -> str:
        """Name of the searched object, as errors give it."""
        if self.id is not None:
            return f"object {self.id}"
        return f"object {self.label!r}"

    def find(self) -> FoundObject | None:
        """Return the object. Of several, it is the surest one of the camera that sent last.

        Raises AmbiguousError, which names them, for more than `most`.
        """
        # the camera whose masks came last is asked first
        for masks in reversed(self._list_masks()):
            found = [instance for instance in masks.instances if self._fits(instance)]
            # of several objects the surest is meant, unless the caller has said how many there may be
            if self.most is not None and len(found) > self.most:
                raise AmbiguousError(describe_rivals(self.label, found, self.most, masks.camera))
            if found:
                return FoundObject(masks, max(found, key=lambda instance: instance.score))
        return None

    def describe_sight(self) -> str | None:
        """Return one line that says what the newest masks have instead; None if no camera sends masks."""
        sent = self._list_masks()
        if not sent:
            return None
        # an id that is not held needs other advice than a label that is not seen
        cameras = ", ".join(masks.camera for masks in sent)
        if self.id is not None:
            return f"the newest masks of {cameras} have {self._describe_ids(sent)}"
        # equal objects are counted: "2 cup (tracked)"
        seen: Counter[str] = Counter()
        labels: set[str] = set()
        prompts: set[str] = set()
        for masks in sent:
            prompts.update(masks.prompts)
            for instance in masks.instances:
                labels.add(instance.label)
                seen[_describe_state(instance)] += 1
        names = []
        for name, count in sorted(seen.items()):
            names.append(f"{count} {name}" if count > 1 else name)
        return (
            f"the newest masks of {cameras} have {', '.join(names) or 'no objects'}"
            f"{did_you_mean(self.label, labels)}; the node looks for {', '.join(sorted(prompts)) or 'no names'}: "
            "set_prompts names objects to look for, add_object marks one"
        )

    def _describe_ids(self, sent: Sequence[MaskFrame]) -> str:
        """List the objects by id with their state, and say what may help."""
        # the ids that there are, for a caller who has kept a wrong one
        objects = []
        for masks in sent:
            for instance in masks.instances:
                held = ", held" if instance.held else ""
                doubt = ", doubtful" if instance.doubtful else ""
                objects.append(f"{instance.id} {instance.label or 'unnamed'} ({instance.state}{doubt}{held})")
        advice = "`where` says where it was seen last"
        if self.goal == "held":
            advice = (
                "the node needs depth and the robot's poses (spatial.poses) to tell what the gripper holds"
            )
        return f"{', '.join(sorted(objects)) or 'no objects'}; {advice}"

    def _list_masks(self) -> list[MaskFrame]:
        """Return the newest masks of the cameras that are searched, send, and have not begun new ids since."""
        # a camera that is silent, or whose node was started again, shows nothing that is still true
        found = []
        for masks in self.subscriber.newest.get_all():
            is_wanted = self.camera in (None, masks.camera)
            silent_s = self.subscriber.silent_s(masks.camera) or 0.0
            has_ended = self.has_ended(masks.camera, masks.epoch)
            if is_wanted and silent_s < CAMERA_SILENT_S and not has_ended:
                found.append(masks)
        return found

    def _fits(self, instance: Instance) -> bool:
        if self.id is None:
            is_it = instance.label.casefold() == self.label.casefold()
        else:
            is_it = instance.id == self.id
        if not is_it:
            return False
        if self.goal == "held":
            return instance.held
        if self.goal == "seen":
            return instance.is_sure and instance.area > 0
        # a doubtful object counts unless the client's user wants sure ones only
        return instance.state == "tracked" and not (self.sure_only and instance.doubtful)


def _describe_state(instance: Instance) -> str:
    doubt = ", doubtful" if instance.doubtful else ""
    return f"{instance.label or 'unnamed'} ({instance.state}{doubt})"


def describe_rivals(label: str, found: Sequence[Instance], most: int, camera: str | None) -> str:
    """Return one line that names the objects of a label where only `most` were asked for, and the remedy."""
    names = ", ".join(map(_describe_rival, found))
    where = f" on camera {camera}" if camera else ""
    return (
        f"expected at most {most} {label!r}{where}, found {len(found)}: {names}; remove or rename the wrong "
        f"one, name it more exactly, or let the node look for {most} with set_prompts(..., most={most})"
    )


def _describe_rival(instance: Instance) -> str:
    sure = f", name {instance.name_confidence:.2f}" if instance.name_confidence is not None else ""
    return f"object {instance.id} {instance.label!r} at {instance.box}{sure}"


class KnownEpoch(NamedTuple):
    """The epoch of one camera's ids."""

    camera: str
    epoch: int


class KnownEpochs:
    """The epoch of each camera that the user of a client has seen last. Threads may share it.

    None is the epoch of a node that sends none. Beyond MAX_CAMERAS, the camera that was silent for longest is
    forgotten.
    """

    def __init__(self) -> None:
        self._epochs: dict[str, int | None] = {}
        self._ended: dict[str, int] = {}
        self._lock = threading.Lock()

    def meet(self, camera: str, epoch: int | None, node: str | None = None) -> NodeRestarted | None:
        """Note the epoch of masks or of a result. Return the error to raise if the camera had another one before."""
        with self._lock:
            # the new epoch is remembered before it is reported: the next call goes on with it
            known = camera in self._epochs
            old = self._epochs.get(camera)
            keep_newest(self._epochs, camera, epoch, MAX_CAMERAS)
            if known and old is not None and old != epoch:
                keep_newest(self._ended, camera, old, MAX_CAMERAS)
        if not known or old == epoch:
            return None
        # the first masks of a camera begin no epoch anew
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
            # with one camera its name may be left out
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
        # an id alone does not say which camera's object is meant
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
                keep_newest(self._ended, known.camera, known.epoch, MAX_CAMERAS)
