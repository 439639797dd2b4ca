"""The child process of `isolated`: calls pyarrow and h5py on files that may be damaged.

It is run as a file, and imports nothing of this package, so that it starts fast. A request through the connection that
its argument numbers is a msgpack map {function, path, arguments}; the reply is {value} or {error}.
"""

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, TypedDict

import msgpack

BASE_BYTES = 160 << 20
"""Memory that a call may take, in addition to four times the size of its file."""
CALL_S = 10
"""Processor time that one call may take, in seconds."""
MAX_CHUNK_BYTES = 64 << 20
"""Size of the largest HDF5 chunk that is read. HDF5 unpacks a chunk whole, whatever part of it is asked for."""
MAX_ITEMS = 20_000
"""Number of groups and datasets in an HDF5 file above which listing it fails."""
BUFFER_BYTES = 1 << 16
"""Read buffer of each column of a Parquet file. It is small because tables of episodes have hundreds of columns."""
MAX_ATTRIBUTES = 100
"""Number of attributes of a group that are listed."""
REPLY_BYTES = 16 << 20
"""Size of HDF5 rows after which a reply ends early. The caller asks for the rest."""
BATCH_ROWS = 32
"""Rows of a Parquet file in memory at once. Each may hold images."""
MAX_OPEN = 8
"""Number of Parquet files that stay open for their next rows. A dataset's cameras may be read side by side."""


class CallRequest(TypedDict):
    """A call: the name of a function, the bytes of the path, and further arguments."""

    function: str
    path: bytes
    arguments: dict[str, object]


class HdfDataset(TypedDict):
    """What is known of a dataset of HDF5."""

    shape: list[int]
    type: str
    item_bytes: int
    stored_bytes: int


HdfAttributes = dict[str, str | int | float | bool]
"""The attributes of a group that are single numbers or texts."""


class HdfContent(TypedDict):
    """Groups and datasets of an HDF5 file, by their paths."""

    attributes: dict[str, HdfAttributes]
    datasets: dict[str, HdfDataset]


class CallError(Exception):
    """Raised when a file does not have what the call expects."""


def main() -> None:
    """Answer requests until the caller closes the connection."""
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError):
        while True:
            connection.send_bytes(_answer(msgpack.unpackb(connection.recv_bytes())))


def _answer(request: CallRequest) -> bytes:
    """Return the reply to a request, packed."""
    # whatever a library raises, the caller gets a reply, and this process answers the next request
    try:
        path = os.fsdecode(request["path"])
        _limit(os.path.getsize(path) if os.path.exists(path) else 0)
        return _pack({"value": FUNCTIONS[request["function"]](path, **request["arguments"])})
    except MemoryError:
        return _pack({"error": "expected content of a size that fits the file, found more"})
    except Exception as error:  # each library has its own exceptions, and values that cannot be packed
        return _pack({"error": (str(error) or type(error).__name__)[:500]})


def _pack(answer: dict[str, object]) -> bytes:
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
    # the limit of processor time counts from the start of the process: add what earlier calls took
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + CALL_S)
    if _used_bytes():
        _set_limit(resource.RLIMIT_DATA, _used_bytes() + BASE_BYTES + 4 * size)


def _set_limit(kind: int, value: int | None) -> None:
    """Set a limit to a value, or as high as the system allows."""
    _, hard = resource.getrlimit(kind)
    soft = hard
    if value is not None and (hard == resource.RLIM_INFINITY or value <= hard):
        soft = value
    resource.setrlimit(kind, (soft, hard))


class _NoPandas:
    """Hides pandas, which pyarrow would import where it is installed, for nothing and with much memory."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def import_module(path: str) -> None:
    """Import the module named `path`, before memory is limited by what it takes itself."""
    # the module itself may need more than a call may
    _set_limit(resource.RLIMIT_DATA, None)
    sys.meta_path.insert(0, _NoPandas())
    __import__(path)
    # threads and memory pools of pyarrow would take memory that no call asked for
    if path == "pyarrow":
        import pyarrow
        import pyarrow.parquet

        pyarrow.set_cpu_count(1)
        pyarrow.set_io_thread_count(1)
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    _used_bytes.cache_clear()


class _Rows:
    """The rows of a Parquet file, read in order from a given row."""

    def __init__(self, path: str, columns: list[str] | None, first: int) -> None:
        from pyarrow.parquet import ParquetFile

        self.file = ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False)
        names = self.file.schema_arrow.names
        absent = [name for name in columns or () if name not in names]
        if absent:
            self.close()
            raise CallError(f"expected the column {absent[0]!r}, found {', '.join(names)[:300]}")
        self.next_row = first
        self._batches = self._read(columns, first)
        self._rest: Any = None

    def close(self) -> None:
        """Close the file. Idempotent."""
        self.file.close()

    def _read(self, columns: list[str] | None, first: int) -> Iterator[Any]:
        metadata = self.file.metadata
        groups: list[int] = []
        # row groups that end before `first` are not decoded at all
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
        batch = self._rest
        if batch is None:
            batch = next(self._batches, None)
        if batch is None:
            return None
        self._rest = None
        if batch.num_rows > count:
            self._rest = batch.slice(count)
            batch = batch.slice(0, count)
        self.next_row += batch.num_rows
        return batch


_open_rows: dict[tuple[Any, ...], _Rows] = {}


def read_rows(path: str, columns: list[str], first: int, count: int) -> dict[str, list[Any]]:
    """Return up to `count` rows of columns from the row `first`, lists by column; empty lists at the end."""
    # a file that was left at this row goes on; any other position needs a new reader
    key = (path, *columns)
    rows = _open_rows.pop(key, None)
    if rows is not None and rows.next_row != first:
        rows.close()
        rows = None
    if rows is None:
        rows = _Rows(path, columns, first)

    batch = rows.next(count)
    if batch is None:
        rows.close()
        return {name: [] for name in columns}

    # the file that was read longest ago makes room
    if len(_open_rows) >= MAX_OPEN:
        oldest = next(iter(_open_rows))
        _open_rows.pop(oldest).close()
    _open_rows[key] = rows
    return {name: batch.column(name).to_pylist() for name in columns}


def list_columns(path: str) -> list[str]:
    """Return the names of the columns."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        return list(file.schema_arrow.names)


class _Copy:
    """A copy of a Parquet file with more columns, and without those that are `dropped`, written batch by batch.

    Added columns of `vectors` have lists of one length, of 32-bit floats. `close` releases the source and the target.
    Without it, each copied table would leave a descriptor open.
    """

    def __init__(self, path: str, target: str, dropped: list[str], vectors: list[str]) -> None:
        self._target = target
        self._dropped = dropped
        self._vectors = vectors
        self._rows = _Rows(path, None, 0)
        self._batch: Any = None
        # the schema of the target is known with the first batch's added columns
        self._writer: Any = None

    def read(self) -> int:
        """Read the next batch and return its number of rows; 0 at the end of the file."""
        self._batch = self._rows.next(BATCH_ROWS)
        return 0 if self._batch is None else int(self._batch.num_rows)

    def append(self, added: dict[str, list[Any]]) -> None:
        """Write the batch that was read last, with these values as additional columns."""
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        kinds = {
            name: pyarrow.list_(pyarrow.float32(), len(added[name][0]))
            for name in self._vectors
            if name in added
        }
        table = _add_columns(pyarrow.Table.from_batches([self._batch]), added, self._dropped, kinds)
        if self._writer is None:
            self._writer = ParquetWriter(self._target, table.schema, compression="snappy")
        self._writer.write_table(table)

    def close(self) -> None:
        """Close the source, and finish the target if it has rows."""
        self._rows.close()
        if self._writer is not None:
            self._writer.close()


def _add_columns(table: Any, added: dict[str, list[Any]], dropped: list[str], kinds: dict[str, Any]) -> Any:
    import pyarrow

    table = table.drop_columns([name for name in dropped if name in table.schema.names])
    image_type = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    images = [name for name, values in added.items() if isinstance(values[0], dict)]
    for name, values in added.items():
        # a dataset that has masks already gets the new ones in their place, and its other columns keep their types
        at = table.schema.get_field_index(name)
        kind = image_type if name in images else kinds.get(name)
        if at < 0:
            table = table.append_column(name, pyarrow.array(values, kind))
        else:
            array = pyarrow.array(values, image_type if name in images else table.schema.field(at).type)
            table = table.set_column(at, name, array)
    return table.replace_schema_metadata(_describe_columns(table.schema.metadata, images, dropped))


def _describe_columns(
    metadata: dict[bytes, bytes] | None, images: list[str], dropped: list[str]
) -> dict[bytes, bytes]:
    """Return the schema's metadata with columns as images, and without others, as the `datasets` package reads it."""
    described = dict(metadata or {})
    # pandas' own description lists the columns, and would be wrong now
    described.pop(b"pandas", None)
    if images or b"huggingface" in described:
        known = json.loads(described.get(b"huggingface", b"{}"))
        features = known.setdefault("info", {}).setdefault("features", {})
        features.update({name: {"_type": "Image"} for name in images})
        for name in dropped:
            features.pop(name, None)
        described[b"huggingface"] = json.dumps(known).encode()
    return described


_copies: dict[str, _Copy] = {}
"""Copies that are being written, by the path of their source."""


def begin_copy(path: str, target: str, dropped: list[str], vectors: list[str]) -> int:
    """Begin a copy of a file with other columns. Return the number of rows of its first batch."""
    copy = _Copy(path, target, dropped, vectors)
    with _closed_on_error(path, copy):
        count = copy.read()
        if not count:
            raise CallError("expected rows, found none")
    _copies[path] = copy
    return count


def append_copy(path: str, added: dict[str, list[Any]]) -> int:
    """Write the batch with its additional values. Return the number of rows of the next, 0 at the end."""
    copy = _copies[path]
    with _closed_on_error(path, copy):
        copy.append(added)
        count = copy.read()
    # the end of the source is the end of the copy: the caller makes no further call for it
    if not count:
        del _copies[path]
        copy.close()
    return count


@contextmanager
def _closed_on_error(path: str, copy: _Copy) -> Iterator[None]:
    """Forget and close a copy if the block fails."""
    try:
        yield
    except BaseException:
        _copies.pop(path, None)
        copy.close()
        raise


def list_hdf5(path: str) -> HdfContent:
    """Return the attributes of the file and its groups, and shape, type and chunks of each dataset, by their paths."""
    import h5py

    attributes: dict[str, HdfAttributes] = {}
    datasets: dict[str, HdfDataset] = {}

    def visit(name: str, item: Any) -> None:
        # a small file can declare very many groups
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


def _list_attributes(item: Any) -> HdfAttributes:
    listed: HdfAttributes = {}
    for name in list(item.attrs)[:MAX_ATTRIBUTES]:
        value = item.attrs[name]
        # numpy's scalars and arrays of one element are numbers
        if hasattr(value, "item") and getattr(value, "size", 0) == 1:
            value = value.item()
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        if isinstance(value, str | int | float | bool):
            listed[name] = value
    return listed


def read_hdf5(path: str, name: str, first: int, count: int) -> list[bytes]:
    """Return the bytes of up to `count` rows of a dataset, fewer if they are large."""
    import h5py

    with h5py.File(path, "r") as file:
        dataset = file[name]
        if dataset.external or dataset.is_virtual:
            raise CallError(f"{name}: expected data in the file itself, found a reference to others")
        # a chunk is unpacked whole, and its size is the file's own claim: check it before HDF5 allocates
        chunk = dataset.dtype.itemsize
        for length in dataset.chunks or dataset.shape[1:]:
            chunk *= length
        if chunk > MAX_CHUNK_BYTES:
            raise CallError(f"{name}: expected chunks of at most {MAX_CHUNK_BYTES} bytes, found {chunk}")

        rows = []
        total = 0
        for row in range(first, min(first + count, dataset.shape[0])):
            value = dataset[row]
            if not isinstance(value, bytes):
                value = value.tobytes()
            rows.append(value)
            total += len(value)
            if total > REPLY_BYTES:
                break
        return rows


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "import_module": import_module,
    "read_rows": read_rows,
    "list_columns": list_columns,
    "begin_copy": begin_copy,
    "append_copy": append_copy,
    "list_hdf5": list_hdf5,
    "read_hdf5": read_hdf5,
}
"""Functions that a request may name."""

if __name__ == "__main__":
    main()
