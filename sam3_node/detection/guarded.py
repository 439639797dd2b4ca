"""Keep what another package's code, or a network of unknown speed, does wrong out of the frame step."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import EntryPoint
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import ModelError, RequestError, Sam3NodeError, summarize_error
from ..schema.state import Tensor
from ..types import Detection, Image
from .detectors import MAX_DETECTIONS, KnownNames
from .phrases import clean_phrase

_Work = tuple[Future[Any], Callable[[], Any]]


class OwnDetector(Protocol):
    """What a package offers under the entry point group `sam3_node.detectors`: a class, called with name and device.

    One that knows a fixed list of names may have them as `names`, a sequence of texts.
    """

    def prepare(self, phrases: Sequence[str]) -> Any:
        """Return a query for the phrases, as `Detector.prepare` does. Raises RequestError for one that is unknown."""

    def detect(self, image: Image, query: Any, threshold: float) -> Sequence[Detection]:
        """Return the detections on a BGR frame [h, w, 3] with a score above `threshold`, in any order."""


class GuardedQuery(NamedTuple):
    """The query of a detector, and the phrases that its answers may name."""

    phrases: tuple[str, ...]
    query: Any


class GuardedDetector:
    """A Detector around one that may raise anything, answer anything, or take too long.

    Each such fault is a ModelError, which costs the detections of one frame. With `limit_s`, calls run in a thread, and
    a frame waits for so many seconds. While a late call goes on, further frames have no detections.
    """

    def __init__(self, detector: OwnDetector, name: str) -> None:
        for method in ("prepare", "detect"):
            if not callable(getattr(detector, method, None)):
                raise ModelError(
                    f"{name}: expected a detector with prepare and detect, found none of {method}"
                )
        self.name = name
        self.detector = detector
        self.limit_s: float | None = None
        """Longest time of a call; None waits for its end, so that a replay does not depend on the machine's speed."""
        self._work: SimpleQueue[_Work] = SimpleQueue()
        self._running: Future[Any] | None = None
        self._thread: threading.Thread | None = None

    @property
    def known_names(self) -> KnownNames:
        """The `names` of the detector, or any if it has none; see `NamingDetector`. Raises ModelError."""
        with _explain(f"{self.name}: names failed"):
            names = getattr(self.detector, "names", None)
            if names is None:
                return KnownNames((), True)
            return KnownNames(tuple(_list_askable(names)), False)

    def prepare(self, phrases: Sequence[str]) -> GuardedQuery:
        """Return a query; see `Detector.prepare`. Raises ModelError if the detector raises none of this package's."""
        with _explain(f"{self.name}: prepare failed"):
            return GuardedQuery(tuple(phrases), self.detector.prepare(phrases))

    def detect(
        self, image: Image, query: GuardedQuery, threshold: float, trunk: Tensor | None = None
    ) -> list[Detection]:
        """Detect objects on a frame; see `Detector.detect`. Raises ModelError for a fault or a late answer."""
        # a copy, because a late call still reads it when the frame is gone
        call = partial(self.detector.detect, image.copy(), query.query, threshold)
        with _explain(f"{self.name}: detect failed"):
            answer = call() if self.limit_s is None else self._call_in_time(call, self.limit_s)
            height, width = image.shape[:2]
            found = [self._check(one, query.phrases, width, height) for one in answer]
        # a box outside the frame is empty once it is clipped
        found = [one for one in found if one.box[0] < one.box[2] and one.box[1] < one.box[3]]
        found.sort(key=lambda one: -one.score)
        return [one for one in found if one.score > threshold][:MAX_DETECTIONS]

    def _call_in_time(self, call: Callable[[], Any], limit_s: float) -> Any:
        if self._running is not None and not self._running.done():
            raise ModelError(
                f"{self.name}: an earlier frame still takes its time; this one has no detections"
            )
        if self._thread is None:
            # a daemon: a call that never ends must not keep the node from ending
            self._thread = threading.Thread(
                target=_run, args=(self._work,), name="sam3-detector", daemon=True
            )
            self._thread.start()
        self._running = Future()
        self._work.put((self._running, call))
        try:
            return self._running.result(limit_s)
        except TimeoutError as error:
            # the detector itself may raise this error
            if self._running.done():
                raise
            raise ModelError(
                f"{self.name}: expected detections within {1000 * limit_s:.0f} ms, found none; take a smaller network "
                "or a GPU, or raise --detector.max_ms"
            ) from error

    def _check(self, one: Any, phrases: Sequence[str], width: int, height: int) -> Detection:
        """Return a detection, clipped to the frame. Raises ModelError for anything else."""
        try:
            label, score, box = one[:3]
            score = float(score)
            x0, y0, x1, y1 = map(float, box)
        except (TypeError, ValueError, LookupError) as error:
            raise ModelError(
                f"{self.name}: expected Detection(label, score, box), found {one!r:.200}"
            ) from error
        if label not in phrases or not 0 <= score <= 1 or not all(map(math.isfinite, (x0, y0, x1, y1))):
            raise ModelError(
                f"{self.name}: expected a label that was asked for, a score in 0..1 and a box of finite numbers, found "
                f"{one!r:.200}"
            )
        clipped = (max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1))
        return Detection(label, score, clipped)


def _list_askable(names: Iterable[object]) -> Iterator[str]:
    """Yield names as they are asked for, without those that nobody can ask for."""
    for name in names:
        with suppress(RequestError):
            yield clean_phrase(name)


def _run(work: SimpleQueue[_Work]) -> None:
    """Carry out calls, one after another, for as long as the process lives."""
    while True:
        future, call = work.get()
        try:
            with torch.inference_mode():
                future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        # a frame and its detections must not stay until the next call
        del future, call


@contextmanager
def _explain(what: str) -> Iterator[None]:
    """Raise ModelError for what is no error of this package."""
    try:
        yield
    except Sam3NodeError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {summarize_error(error)}") from error


def load_installed(entry: EntryPoint, name: str, device: str) -> GuardedDetector:
    """Make the detector of another package: its class, called with `name` and the device. Raises ModelError."""
    with _explain(f"detector {entry.name} ({entry.value}): cannot be loaded"):
        # the kind in front: no name of the bundled weights, whose figures are not of this detector
        return GuardedDetector(entry.load()(name, device), f"{entry.name}:{name}")
