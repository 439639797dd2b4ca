"""Reading of .rrd files by Rerun's own reader, and Rerun's program as a viewer without a window."""

import contextlib
import os
import signal
import socket
import subprocess
import warnings
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

from tests.support.node_rig import PATIENCE_S, until

STATIC = -1
TIMELINES = ("capture_time", "frame")


def read_rrd(path: Path, *entities: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the components of each entity by the number of the frame, STATIC for static ones.

    With `entities`, only these are read. Images are bytes, all else is plain values.
    """
    from rerun.chunk import RrdReader

    found: dict[str, dict[int, dict[str, Any]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a file without a footer
        stream = RrdReader(path).stream()
        chunks = (stream.filter(content=list(entities)) if entities else stream).to_chunks()
    for chunk in chunks:
        batch = chunk.to_record_batch()
        columns = {name: batch[name] for name in batch.schema.names if ":" in name or name in TIMELINES}
        for index in range(batch.num_rows):
            row = {name: _read(name, column[index]) for name, column in columns.items()}
            values = {name: value for name, value in row.items() if value is not None}
            found.setdefault(chunk.entity_path, {}).setdefault(row.get("frame", STATIC), {}).update(values)
    return found


def _read(name: str, scalar: Any) -> Any:
    if name.endswith((":buffer", ":blob")) and scalar.is_valid:
        return [item.values.to_numpy().tobytes() for item in scalar]
    return scalar.as_py()


def count_rows(path: Path, entity: str) -> int:
    """Return the number of frames of an entity in a file that may still be written; 0 for one that cannot be read."""
    try:
        return len(read_rrd(path, entity).get(entity, {}))
    except Exception:  # the first bytes are not there yet
        return 0


class RerunProgram:
    """Rerun's program, which receives a stream at a port and writes it to a file."""

    def __init__(self, port: int, path: Path) -> None:
        package = util.find_spec("rerun_cli")
        assert package is not None
        assert package.origin is not None
        program = Path(package.origin).parent / "rerun"
        command = [program, "--save", path, "--bind", "127.0.0.1", "--port", str(port)]
        self.path = path
        self._log = path.with_suffix(".log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        until(lambda: _is_open(port), "the viewer's port")

    def stop(self) -> None:
        """Stop the program where it is, with its connections open."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        self._log.close()


@contextlib.contextmanager
def rerun_program(port: int, path: Path) -> Iterator[RerunProgram]:
    """Yield a running program, and end it."""
    program = RerunProgram(port, path)
    try:
        yield program
    finally:
        program.close()


def _is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
