"""Copy between device and host, waiting for nothing but the copy."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor on the host, which begins at once and is complete when `read` returns."""

    def __init__(self, values: Tensor) -> None:
        """Begin to copy what the current stream has written by now.

        From a GPU, the copy goes to pinned memory, behind an event. A plain copy later would wait for everything that
        the device was given in between.
        """
        self._ready: torch.cuda.Event | None = None
        self._values = copy_pinned(values)
        if values.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> npt.NDArray[Any]:
        """Wait for the copy, and for nothing that the device was given later; return the values."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._values.numpy()


def copy_pinned(values: Tensor) -> Tensor:
    """Copy a tensor to pinned memory of the host, in the order of the current stream, without waiting for it."""
    if not values.is_cuda:
        # on a CPU the tensor itself could change before it is read
        return values.clone()
    pinned = torch.empty_like(values, device="cpu", pin_memory=True)
    return pinned.copy_(values, non_blocking=True)


def copy_to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device, in the order of the current stream, without waiting for it."""
    tensor = torch.from_numpy(values)
    # a copy from memory that is not pinned would make the host wait
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
