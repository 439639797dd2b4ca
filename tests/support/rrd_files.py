"""Reading of .rrd files by Rerun's own reader, and Rerun's program as a viewer without a window."""

import contextlib
import socket
import warnings
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

from tests.support.processes import Process, until

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


@contextlib.contextmanager
def rerun_program(port: int, path: Path) -> Iterator[Process]:
    """Run Rerun's program, which receives a stream at a port and writes it to a file."""
    program = Path(util.find_spec("rerun_cli").origin).parent / "rerun"
    command = [str(program), "--save", str(path), "--bind", "127.0.0.1", "--port", str(port)]
    with Process.spawn(command) as process:
        until(lambda: _is_open(port), "the viewer's port")
        yield process


def _is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
