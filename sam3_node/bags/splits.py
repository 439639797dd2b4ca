"""A recording as a row of files: NAME.mcap, NAME_0001.mcap and so on, each of which opens alone."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..closing import Closing
from ..errors import OutputError
from .record_writer import RECORDING, RecordWriter

Metadata = Mapping[str, Any]


class Splits(Closing):
    """Opens file after file; a context manager.

    A file is full from `split_bytes` or `split_s` seconds on; 0 is no limit. What was told is in each file after that,
    and at its end what `summary` says then. Raises OutputError as RecordWriter, and where the name has later files.
    """

    def __init__(
        self, path: Path, split_bytes: float, split_s: float, summary: Callable[[], Metadata]
    ) -> None:
        later = sorted(path.parent.glob(f"{glob.escape(path.stem)}_[0-9][0-9][0-9][0-9]*.mcap"))
        if later:
            raise OutputError(
                f"expected a new name for the recording, found {later[0]} of an earlier one; choose another name"
            )
        self.paths: list[Path] = []
        self._path, self._split_bytes, self._split_s = path, split_bytes, split_s
        self._summary = summary
        self._told: dict[str, Metadata] = {}
        self._closed_bytes = self._closed_depths = 0
        self._writer = self._open()

    @property
    def bytes(self) -> int:
        """Length of all messages so far."""
        return self._closed_bytes + self._writer.bytes

    @property
    def depths_left_out(self) -> int:
        """Depth images that could not be decompressed; their frames were recorded without them."""
        return self._closed_depths + self._writer.depths_left_out

    def current(self) -> RecordWriter:
        """The file that the next message belongs in: a new one where the last is full."""
        too_long = self._split_bytes and self._writer.bytes >= self._split_bytes
        too_old = self._split_s and time.monotonic() - self._begun_s >= self._split_s
        if self._writer.bytes and (too_long or too_old):
            self._finish()
            self._closed_bytes += self._writer.bytes
            self._closed_depths += self._writer.depths_left_out
            self._writer = self._open()
        return self._writer

    def tell(self, name: str, values: Metadata) -> None:
        """Write metadata, in this file and in all that follow."""
        self._told[name] = values
        self._writer.write_metadata(name, values)

    def flush(self) -> None:
        """Have all on the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Finish the last file. Idempotent."""
        if not self._writer.closed:
            self._finish()

    def _open(self) -> RecordWriter:
        number = len(self.paths)
        path = self._path.with_name(f"{self._path.stem}_{number:04d}.mcap") if number else self._path
        writer = RecordWriter(path)
        self.paths.append(path)
        self._begun_s = time.monotonic()
        for name, values in self._told.items():
            writer.write_metadata(name, values)
        return writer

    def _finish(self) -> None:
        self._writer.write_metadata(RECORDING, self._summary())
        self._writer.close()
