"""The epochs that a client knows: which ids are still those of the objects that a policy means."""

from __future__ import annotations

import threading

from ..errors import NodeRestarted

MAX_CAMERAS = 1024


class KnownEpochs:
    """The epoch of each camera that the user of a client has seen last. Threads may share it.

    None is the epoch of a node that sends none. Beyond MAX_CAMERAS, the camera that was seen first is forgotten.
    """

    def __init__(self) -> None:
        self._epochs: dict[str, int | None] = {}
        self._lock = threading.Lock()

    def meet(self, camera: str, epoch: int | None, node: str | None = None) -> NodeRestarted | None:
        """Note the epoch of masks or of a result. Return the error to raise if the camera had another one before."""
        with self._lock:
            known = camera in self._epochs
            old = self._epochs.get(camera)
            self._epochs[camera] = epoch
            if len(self._epochs) > MAX_CAMERAS:
                del self._epochs[next(iter(self._epochs))]
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

    def find(self, camera: str | None) -> tuple[str, int] | None:
        """Return the camera and the epoch for a request; None if there is none to check.

        Without `camera`, this is the only camera that is known, if it is.
        """
        with self._lock:
            if camera is None and len(self._epochs) == 1:
                camera = next(iter(self._epochs))
            epoch = self._epochs.get(camera) if camera is not None else None
        return None if camera is None or epoch is None else (camera, epoch)

    def names(self) -> tuple[str, ...]:
        """Return the cameras that are known."""
        with self._lock:
            return tuple(self._epochs)

    def forget(self, camera: str, epoch: int) -> None:
        """Forget a camera's epoch, whose end the user has been told about."""
        with self._lock:
            if self._epochs.get(camera) == epoch:
                del self._epochs[camera]
