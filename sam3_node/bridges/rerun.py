"""The Rerun bridge: pictures, masks, tracks, positions and latencies for Rerun's viewer, live or in an .rrd file.

`rerun_entities` says what is logged where.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import OutputError, SettingsError, require
from ..files import prepare_output
from ..types import Frame, MaskFrame
from .rerun_entities import EXTRA, Entities

APPLICATION = "sam3-node"
SUFFIX = ".rrd"
SCHEMES = ("rerun", "rerun+http", "rerun+https")
DEFAULT_PORT = 9876
FLUSH_S = 0.5
WRITE_S = 10.0  # the SDK's thread that writes the file may end without a word when the disk is full
CONNECT_S = RETRY_S = 1.0

ABANDONED: list[Any] = []
"""Streams whose file could not be written. The SDK would wait without limit for the thread that wrote it."""

log = logging.getLogger(__name__)


class RerunStream:
    """A stream to the viewer at an address such as rerun+http://127.0.0.1:9876/proxy, or into a new .rrd file.

    A viewer that is not there, or has gone, is tried again every second; pairs of that time are not shown. Without a
    footer in the file, which would have to hold a line about all that was written, memory does not grow.
    Raises MissingExtraError without the extra `rerun`, SettingsError for another target, and OutputError if the file
    exists or cannot be written.
    """

    def __init__(self, target: str) -> None:
        self._path = None if "://" in target else Path(target)
        self._url = target
        self._address = _read_address(target) if self._path is None else None
        self._sdk = require("rerun", EXTRA)
        self._stream = self._sdk.RecordingStream(APPLICATION, recording_id=uuid.uuid4())
        self._stream.set_log_tick_enabled(False)
        self._entities = Entities(self._sdk, self._stream)
        self._is_connected = self._has_failed = False
        self._next_s = 0.0  # of the next flush, or of the next attempt to connect
        if self._path is not None:
            self._open_file(self._path)

    def show(self, frame: Frame | None, masks: MaskFrame) -> bool:
        """Log masks, and their frame if it is given. Return False if the viewer is not there.

        Waits while the viewer takes nothing. Raises OutputError if the file cannot be written any more.
        """
        if self._path is None and not self._is_connected and not self._connect():
            return False
        self._entities.log(frame, masks)
        if self._path is None:
            return self._flush_to_viewer()
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + FLUSH_S
            self._try(lambda: self._stream.flush(timeout_sec=WRITE_S))
        return True

    def close(self) -> None:
        """Finish the file, or let go of the viewer."""
        if self._has_failed:
            return
        if self._path is not None:
            self._try(lambda: self._stream.flush(timeout_sec=WRITE_S))
        with contextlib.suppress(RuntimeError):
            self._stream.disconnect()

    def _open_file(self, path: Path) -> None:
        if path.suffix != SUFFIX:
            raise SettingsError(
                f"expected a file NAME{SUFFIX} or an address such as rerun+http://127.0.0.1:{DEFAULT_PORT}/proxy, "
                f"found {str(path)!r:.80}"
            )
        prepare_output(path, overwrite=False)
        self._try(lambda: self._stream.save(path, write_footer=False))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except RuntimeError as error:
            self._has_failed = True
            ABANDONED.append(self._stream)
            raise OutputError(
                f"cannot write {self._path}: {error}; free some space, and choose another file"
            ) from error

    def _connect(self) -> bool:
        """Connect if the viewer's port is open, and begin anew with all that is sent once."""
        if self._address is None or time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + RETRY_S
        try:  # the SDK itself would wait, and keep all that is logged meanwhile
            socket.create_connection(self._address, CONNECT_S).close()
        except OSError:
            return False
        self._stream.connect_grpc(self._url)
        self._entities = Entities(self._sdk, self._stream)
        self._is_connected = True
        return True

    def _flush_to_viewer(self) -> bool:
        """Wait until everything is sent, so that nothing gathers here. Return False if the viewer has gone."""
        try:
            self._stream.flush()
        except RuntimeError as error:
            log.warning("the viewer has gone: %s", error)
            self._is_connected = False
        return self._is_connected


def _read_address(target: str) -> tuple[str, int]:
    """Return host and port of a viewer's address; SettingsError for anything else."""
    with contextlib.suppress(ValueError):  # of urlsplit, or of a port that is no number
        parts = urlsplit(target)
        if parts.scheme in SCHEMES and parts.hostname and parts.path == "/proxy":
            return parts.hostname, parts.port or DEFAULT_PORT
    raise SettingsError(
        f"expected a viewer's address such as rerun+http://127.0.0.1:{DEFAULT_PORT}/proxy, found {target!r:.80}"
    )
