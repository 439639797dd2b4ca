"""The child process of `isolated`: calls pyarrow and h5py on files that may be damaged.

It is run as a file, and imports nothing of this package, so that it starts fast. A request through the connection that
its argument numbers is a msgpack map {function, path, arguments}; the reply is {value} or {error}.
"""

import json
import os
import resource
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import msgpack

BASE_BYTES = 160 << 20
"""Memory that a call may take beside four times the size of its file."""
CALL_S = 10
"""Processor time of one call."""
MAX_CHUNK_BYTES = 64 << 20
MAX_ITEMS = 20_000
BUFFER_BYTES = 1 << 16  # of each column; tables of episodes have hundreds
REPLY_BYTES = 16 << 20
BATCH_ROWS = 32  # of a table in memory at once: they may hold images
MAX_OPEN = 8
"""Files that stay open for their next rows: the cameras of a dataset may be read one beside the other."""


class CallError(Exception):
    """Raised when a file does not have what the call expects."""


def main() -> None:
    """Answer requests until the caller closes the connection."""
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError):
        while True:
            connection.send_bytes(_answer(msgpack.unpackb(connection.recv_bytes())))


def _answer(request: dict[str, Any]) -> bytes:
    """Return the reply to a request, packed."""
    try:
        path = os.fsdecode(request["path"])
        _limit(os.path.getsize(path) if os.path.exists(path) else 0)
        return _pack({"value": FUNCTIONS[request["function"]](path, **request["arguments"])})
    except MemoryError:
        return _pack({"error": "expected content of a size that fits the file, found more"})
    except Exception as error:  # each library has its own exceptions, and values that cannot be packed
        return _pack({"error": (str(error) or type(error).__name__)[:500]})


def _pack(answer: dict[str, Any]) -> bytes:
    data: bytes = msgpack.packb(answer, unicode_errors="surrogateescape")
    return data


@cache
def _used_bytes() -> int:
    """Return the memory in use before the first call; 0 where the system does not tell."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
    except (OSError, StopIteration):
        return 0


def _limit(size: int) -> None:
    """Set the limits of the next call on a file of `size` bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + CALL_S)
    if _used_bytes():
        _set_limit(resource.RLIMIT_DATA, _used_bytes() + BASE_BYTES + 4 * size)


def _set_limit(kind: int, value: int | None) -> None:
    """Set a limit to a value, or as high as the system allows."""
    _, hard = resource.getrlimit(kind)
    is_allowed = value is not None and (hard == resource.RLIM_INFINITY or value <= hard)
    resource.setrlimit(kind, (value if value is not None and is_allowed else hard, hard))


class _NoPandas:
    """Hides pandas, which pyarrow would import where it is installed, for nothing and with much memory."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def import_module(path: str) -> None:
    """Import the module named `path`, before memory is limited by what it takes itself."""
    _set_limit(resource.RLIMIT_DATA, None)
    sys.meta_path.insert(0, _NoPandas())
    __import__(path)
    if path == "pyarrow":
        import pyarrow
        import pyarrow.parquet

        pyarrow.set_cpu_count(1)
        pyarrow.set_io_thread_count(1)
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    _used_bytes.cache_clear()


class _Rows:
    """Rows of a Parquet file from a given one."""

    def __init__(self, path: str, columns: list[str] | None, first: int) -> None:
        from pyarrow.parquet import ParquetFile

        self.file = ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False)
        names = self.file.schema_arrow.names
        absent = [name for name in columns or () if name not in names]
        if absent:
            raise CallError(f"expected the column {absent[0]!r}, found {', '.join(names)[:300]}")
        self.next_row, self._batches, self._rest = first, self._read(columns, first), None

    def _read(self, columns: list[str] | None, first: int) -> Iterator[Any]:
        metadata = self.file.metadata
        groups: list[int] = []
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            if first >= rows and not groups:
                first -= rows
            else:
                groups.append(group)
        for batch in self.file.iter_batches(BATCH_ROWS, groups, columns, use_threads=False):
            if first < batch.num_rows:
                yield batch.slice(first)
            first = max(first - batch.num_rows, 0)

    def next(self, count: int) -> Any:
        """Return the next rows, at most `count`; None at the end."""
        batch = self._rest if self._rest is not None else next(self._batches, None)
        if batch is None:
            return None
        self._rest = batch.slice(count) if batch.num_rows > count else None
        batch = batch.slice(0, count)
        self.next_row += batch.num_rows
        return batch


_open_rows: dict[tuple[Any, ...], _Rows] = {}


def read_rows(path: str, columns: list[str], first: int, count: int) -> dict[str, list[Any]]:
    """Return up to `count` rows of columns from the row `first`, lists by column; empty lists at the end."""
    key = (path, *columns)
    rows = _open_rows.pop(key, None)
    if rows is None or rows.next_row != first:
        rows = _Rows(path, columns, first)
    batch = rows.next(count)
    if batch is None:
        return {name: [] for name in columns}
    if len(_open_rows) >= MAX_OPEN:
        _open_rows.pop(next(iter(_open_rows)))
    _open_rows[key] = rows
    return {name: batch.column(name).to_pylist() for name in columns}


def list_columns(path: str) -> list[str]:
    """Return the names of the columns."""
    from pyarrow.parquet import ParquetFile

    return list(ParquetFile(path).schema_arrow.names)


def _copy(path: str, target: str) -> Generator[int, dict[str, list[Any]], None]:
    """Write a Parquet file anew. Yield the number of rows of each batch, 0 at the end; take its additional columns."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    rows, writer = _Rows(path, None, 0), None
    while (batch := rows.next(BATCH_ROWS)) is not None:
        added = yield batch.num_rows
        table = _add_columns(pyarrow.Table.from_batches([batch]), added)
        writer = writer or ParquetWriter(target, table.schema, compression="snappy")
        writer.write_table(table)
    if writer is None:
        raise CallError("expected rows, found none")
    writer.close()
    yield 0


def _add_columns(table: Any, added: dict[str, list[Any]]) -> Any:
    import pyarrow

    image_type = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    images = [name for name, values in added.items() if isinstance(values[0], dict)]
    for name, values in added.items():
        array = pyarrow.array(values, image_type if name in images else None)
        at = table.schema.get_field_index(name)
        table = table.append_column(name, array) if at < 0 else table.set_column(at, name, array)
    return table.replace_schema_metadata(_describe_images(table.schema.metadata, images))


def _describe_images(metadata: dict[bytes, bytes] | None, names: list[str]) -> dict[bytes, bytes]:
    """Return the schema's metadata with these columns as images, which the `datasets` package reads there."""
    described = dict(metadata or {})
    described.pop(b"pandas", None)  # lists the columns
    if names:
        known = json.loads(described.get(b"huggingface", b"{}"))
        features = known.setdefault("info", {}).setdefault("features", {})
        features.update({name: {"_type": "Image"} for name in names})
        described[b"huggingface"] = json.dumps(known).encode()
    return described


_copies: dict[str, Generator[int, dict[str, list[Any]], None]] = {}


def begin_copy(path: str, target: str) -> int:
    """Begin a copy of a file with more columns; return the number of rows of its first batch."""
    _copies[path] = _copy(path, target)
    return next(_copies[path])


def append_copy(path: str, added: dict[str, list[Any]]) -> int:
    """Write the batch with its additional values; return the number of rows of the next, 0 at the end."""
    return _copies[path].send(added)


def list_hdf5(path: str) -> dict[str, Any]:
    """Return the attributes of the file and its groups, and shape, type and chunks of each dataset, by their paths."""
    import h5py

    attributes: dict[str, dict[str, Any]] = {}
    datasets: dict[str, dict[str, Any]] = {}

    def visit(name: str, item: Any) -> None:
        if len(attributes) + len(datasets) >= MAX_ITEMS:
            raise CallError(f"expected at most {MAX_ITEMS} groups and datasets, found more")
        if not isinstance(name, str):
            return  # no Unicode, so it is not a name that the caller looks for
        if isinstance(item, h5py.Dataset):
            variable = h5py.check_vlen_dtype(item.dtype)
            datasets[name] = {
                "shape": list(item.shape or ()),
                "type": f"list of {variable}" if variable else str(item.dtype),
                "item_bytes": item.dtype.itemsize,
                "stored_bytes": item.id.get_storage_size(),
            }
        else:
            attributes[name] = _list_attributes(item)

    with h5py.File(path, "r") as file:
        attributes[""] = _list_attributes(file)
        file.visititems(visit)  # follows no soft and no external links
    return {"attributes": attributes, "datasets": datasets}


def _list_attributes(item: Any) -> dict[str, Any]:
    listed = {}
    for name in list(item.attrs)[:100]:
        value = item.attrs[name]
        if hasattr(value, "item") and getattr(value, "size", 0) == 1:
            value = value.item()
        if isinstance(value, str | bytes | int | float | bool):
            listed[name] = value.decode(errors="replace") if isinstance(value, bytes) else value
    return listed


def read_hdf5(path: str, name: str, first: int, count: int) -> list[bytes]:
    """Return the bytes of up to `count` rows of a dataset, fewer if they are large."""
    import h5py

    with h5py.File(path, "r") as file:
        dataset = file[name]
        if dataset.external or dataset.is_virtual:
            raise CallError(f"{name}: expected data in the file itself, found a reference to others")
        chunk = dataset.dtype.itemsize
        for length in dataset.chunks or dataset.shape[1:]:
            chunk *= length
        if chunk > MAX_CHUNK_BYTES:
            raise CallError(f"{name}: expected chunks of at most {MAX_CHUNK_BYTES} bytes, found {chunk}")
        rows, total = [], 0
        for row in range(first, min(first + count, dataset.shape[0])):
            value = dataset[row]
            rows.append(value if isinstance(value, bytes) else value.tobytes())
            total += len(rows[-1])
            if total > REPLY_BYTES:
                break
        return rows


FUNCTIONS = {
    function.__name__: function
    for function in (
        import_module, read_rows, list_columns, begin_copy, append_copy, list_hdf5, read_hdf5,
    )
}  # fmt: skip

if __name__ == "__main__":
    main()
