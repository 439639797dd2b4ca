"""The epochs that a client knows: which ids are still those of the objects that a policy means."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from ..errors import NodeRestarted, RequestError

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
        """Return the epoch to send with a request; None if there is none. Without `camera`, that of the only camera."""
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
