"""Calls of pyarrow and h5py in a child process.

Both libraries can crash on damaged files, and allocate what a file of some kilobytes declares. The child has limits of
memory and processor time (`isolated_calls`). If it ends, the call raises BagError, and the next one starts another.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import Lock
from typing import Any, TypedDict

import msgpack

from ..errors import BagError, require
from ..files import ANY_SIZE, check_regular, describe_stand_in
from ..resources import Closeable

_CHILD = Path(__file__).with_name("isolated_calls.py")
# threads would take memory that counts against the child's limit
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_IO_THREADS"), "1")
# a file must not make HDF5 load code; a file on a read-only disk cannot be locked
_NO_PLUGINS = {"HDF5_PLUGIN_PRELOAD": "::", "HDF5_USE_FILE_LOCKING": "FALSE"}
# bytes of a reply above which it is refused
_MAX_REPLY = 1 << 30


class _Answer(TypedDict, total=False):
    """The reply to a request: the value, or what went wrong."""

    value: Any
    error: str


class IsolatedCalls(Closeable):
    """Calls of one library, `module`, which `extra` of this package installs. The child starts with the first call."""

    def __init__(self, module: str, extra: str) -> None:
        self._module = module
        self._extra = extra
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._lock = Lock()
        self._refused: set[Path] = set()

    def call(self, function: str, path: Path, **arguments: Any) -> Any:
        """Return what a function of `isolated_calls` gives for a file.

        Raises BagError that names the file if the function fails or exceeds its limits, MissingExtraError if the
        library is absent.
        """
        with self._lock:
            # a file that ended a child would end each child
            if path in self._refused:
                raise BagError(self._describe_refusal(path))
            if stand_in := describe_stand_in(path):
                raise BagError(f"{path}: expected a whole file, found {stand_in}")
            # the child would wait for ever for a pipe
            try:
                check_regular(path, ANY_SIZE)
            except OSError as error:
                raise BagError(f"{path}: {error.strerror or error}") from error

            # look for the library here: its absence has its own error, and costs no process
            if self._child is None:
                if find_spec(self._module) is None:
                    require(self._module, self._extra)
                self._start()
                self._request("import_module", self._module, {})
            return self._request(function, path, arguments)

    def close(self) -> None:
        """End the child. Idempotent."""
        child = self._child
        self._child = None
        if child is not None:
            child.kill()
            child.wait()
            self._pipe.close()

    def _request(self, function: str, path: Path | str, arguments: Mapping[str, object]) -> Any:
        request = msgpack.packb(
            {"function": function, "path": os.fsencode(path), "arguments": arguments}, default=os.fspath
        )
        try:
            self._pipe.send_bytes(request)
            data = self._pipe.recv_bytes(_MAX_REPLY)
            reply: _Answer = msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogateescape")
        except (OSError, EOFError, ValueError):
            self.close()
            if isinstance(path, Path):
                self._refused.add(path)
            raise BagError(self._describe_refusal(path)) from None
        except BaseException:  # the reply to this request would be taken for that to the next
            self.close()
            raise
        if "error" in reply:
            raise BagError(f"{path}: {reply['error']}")
        return reply["value"]

    def _describe_refusal(self, path: Path | str) -> str:
        return (
            f"{path}: expected a whole file, found one that {self._module} cannot read within its limits: damaged, or "
            "larger unpacked than its size allows"
        )

    def _start(self) -> None:
        self._pipe, other_end = Pipe()
        with other_end:
            # -P: this package's folder is no place to import from, it has an mcap.py
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD), str(other_end.fileno())],
                pass_fds=[other_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # libraries may print
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD, **_NO_PLUGINS},
                start_new_session=True,  # an interrupt is for the caller, which may still have to read
            )
