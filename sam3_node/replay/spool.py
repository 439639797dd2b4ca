"""Frames put aside on disk, to be read from the last to the first: most recordings can only be read forward."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgpack

from ..closing import Closing
from ..errors import OutputError
from ..types import Frame
from ..wire import pack_frame, unpack_frame


class Placed(NamedTuple):
    """A frame, and which of the results of the first pass is its own, counted from 0 over all cameras."""

    place: int
    frame: Frame


class Spool(Closing):
    """Frames in a file in `folder`, colour as it is encoded, without depth; 16 bytes of each are in memory.

    The file has no name: nothing of it is left once this is closed or the process has ended, in whatever way. Raises
    OutputError where the disk is full. A context manager.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in close
        except OSError as error:
            raise self._cannot(error) from error
        self._offsets = array("q", [0])
        self._places = array("q")

    def __len__(self) -> int:
        return len(self._places)

    def append(self, place: int, frame: Frame) -> None:
        """Put the next frame aside."""
        data = msgpack.packb(pack_frame(replace(frame, depth=None)))
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise self._cannot(error) from error
        self._places.append(place)
        self._offsets.append(self._offsets[-1] + len(data))

    def backward(self) -> Iterator[Placed]:
        """All frames, the last first, one in memory at a time."""
        for number in reversed(range(len(self))):
            begin, end = self._offsets[number : number + 2]
            parts = msgpack.unpackb(os.pread(self._file.fileno(), end - begin, begin))
            yield Placed(self._places[number], unpack_frame(parts))

    def close(self) -> None:
        """Forget all frames. Idempotent."""
        with suppress(OSError):  # what a full disk did not take is not wanted any more
            self._file.close()

    def _cannot(self, error: OSError) -> OutputError:
        return OutputError(
            f"cannot put frames aside in {self._folder} for a second pass: {error.strerror or error}; it takes as much "
            "room as the frames take in the recording"
        )
