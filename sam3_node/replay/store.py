"""Stores the results of a replay in a folder or at a URL (s3://, gs:// and other protocols of fsspec), and counts them.

A store keeps named values, each complete or absent. An object store does so by itself, but has no locks. There the
process that came last writes, and the one before it fails at its next write. Recordings at URLs are copied to this
machine. `ReplayCounts` are kept with each shard, the `Summary` is written at the end.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self, TypedDict
from urllib.parse import unquote

from ..errors import BagError, MissingExtraError, OutputError, ReplayError, Sam3NodeError, WireError, require
from ..files import (
    UNFINISHED,
    check_inside,
    child_path,
    explain_os_error,
    open_lock,
    read_regular,
    remove_inside,
    temp_dir,
    write_atomically,
)
from ..schema.fields import Natural, NotNegative, convert, decode_json
from ..types import MaskFrame

if TYPE_CHECKING:
    from .job import Job

_log = logging.getLogger(__name__)

WORK = ".replay"
"""Folder of everything that is no result: the lock, the job's identity, shards and segments."""
MAX_VALUE_BYTES = 16 << 30
"""Size of the largest value that is read from a folder. A larger one could not be held in memory."""
LOCK = f"{WORK}/lock"
"""Name of the file that a process locks, or writes its token into, while it writes a store."""
LOCAL_PROTOCOLS = ("file", "local")
"""Protocols of URLs that name a local path."""
WITH_DEPTH = "with_depth"
"""Prefix of the counts of frames with depth or URDF. The camera follows."""
NO_3D = "no_3d"
"""Prefix of the counts of frames without 3-D. Camera and reason follow."""
MAX_FETCHED_BYTES = 4 << 30
"""Bytes of the largest value that is read from a URL into memory: a state of many cameras. A larger one is refused."""
MAX_TOKEN_BYTES = 64
"""Bytes that are read of the token of a URL's holder. A longer one is no token of ours, and so another holder's."""
ANSWER_S = 10.0
"""Time after which a line says that a server has not answered."""
FIRST_ANSWER_S = 60.0
"""Time after which a server that has never answered is given up. Libraries try for some minutes, which helps a job that
runs through an outage, and hides a wrong address."""
KEPT_FREE_BYTES = 256 << 20
"""Bytes that a recording from a URL leaves free where it is copied to. A larger one is refused or given up."""

_CHECK_SERVER = "check the network and the address of the server (of S3: AWS_ENDPOINT_URL)"
_answered: set[str] = set()
"""Buckets and hosts whose server has answered this process."""


class StoredCounts(TypedDict, total=False):
    """`ReplayCounts` as they are stored with a shard. Those of the first versions lack some."""

    counts: dict[str, int]
    frames: dict[str, int]
    objects: dict[str, dict[str, str]]
    work_s: float
    notes: list[str]


@dataclass(slots=True)
class ReplayCounts:
    """Counts of a replay so far, over all its runs."""

    counts: Counter[str] = field(default_factory=Counter)
    """The counts of a Player."""
    frames: Counter[str] = field(default_factory=Counter)
    """Frames with masks, by camera."""
    objects: dict[str, dict[str, str]] = field(default_factory=dict)
    """Labels, by camera and id."""
    work_s: float = 0.0
    """Time spent, without loading the model."""
    notes: list[str] = field(default_factory=list)
    """The notes of a Player."""

    @classmethod
    def from_totals(cls, totals: StoredCounts) -> Self:
        """Return the counts that were stored with a shard."""
        return cls(
            Counter(totals.get("counts", {})),
            Counter(totals.get("frames", {})),
            totals.get("objects", {}),
            totals.get("work_s", 0.0),
            totals.get("notes", []),
        )

    def add(self, masks: MaskFrame) -> None:
        """Count one frame's masks."""
        self.frames[masks.camera] += 1
        # ids as text, because the counts become JSON
        labels = self.objects.setdefault(masks.camera, {})
        for instance in masks.instances:
            labels[str(instance.id)] = instance.label

    def describe_missing_3d(self) -> list[str]:
        """Return why frames have no 3-D fields or not all of them, a line for each camera and reason."""
        # the name of such a count is NO_3D, the camera and the reason
        lines = []
        for name, count in self.counts.items():
            kind, _, rest = name.partition(" ")
            if kind == NO_3D:
                camera, _, reason = rest.partition(" ")
                total = self.counts[f"{WITH_DEPTH} {camera}"]
                lines.append(
                    f"{camera}: no 3-D, or not in the base, on {count} of {total} frames with depth or URDF: {reason}"
                )
        return lines

    def to_totals(self) -> StoredCounts:
        """Return the counts as `from_totals` takes them."""
        return {
            "counts": dict(self.counts),
            "frames": dict(self.frames),
            "objects": self.objects,
            "work_s": round(self.work_s, 3),
            "notes": self.notes,
        }

    @property
    def labels(self) -> set[str]:
        """Labels of all objects."""
        return {label for labels in self.objects.values() for label in labels.values()}

    def describe_unfound(self, status: Mapping[str, Any]) -> dict[str, str]:
        """Return a line for each prompt in the status of a node or Perception that began no object, by prompt."""
        scores = status.get("prompt_scores", {})
        limits = status["prompt_limits"]["scores"]
        names = [name for name in status["prompts"] if name not in self.labels]
        return {name: _describe_unfound(name, scores.get(name, 0.0), limits[name]) for name in names}


def _describe_unfound(name: str, score: float, limit: float) -> str:
    """Say that nothing was found for a prompt, with the best score of its detections and the limit, and what to do."""
    if score >= limit:
        return (
            f"nothing was found for {name!r}: its best detection had the score {score:.2f}, above {limit:g}, but was "
            "not confirmed, or all slots were taken (tracker.max_objects)"
        )
    # detections below half of the limit are not counted
    best = f"no detection had the score {limit / 2:g}"
    if score:
        best = f"its best detection had the score {score:.2f}"
    return (
        f"nothing was found for {name!r}: {best}, and {limit:g} begins an object; use another name, or lower "
        "detector.score"
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of one recording's replay."""

    bag: str
    mode: str
    strategy: str
    model: str
    device: str
    frames: Natural
    """Frames that were stepped."""
    failed: Natural
    """Frames whose step raised an exception."""
    refused: Natural
    """Edits that were not possible."""
    cameras: dict[str, Natural]
    """Frames with masks, by camera."""
    objects: dict[str, Natural]
    """Number of objects, by camera."""
    seconds: NotNegative
    """Time of all runs together, without loading the model."""
    frames_per_s: NotNegative
    resumed_from: Natural = 0
    """Frames that earlier runs had done when the last run began."""
    lost: str | None = None
    """Parts of the recording that could not be read."""
    notes: list[str] = field(default_factory=list)
    unfound: dict[str, str] = field(default_factory=dict)
    """Prompts that began no object, each with a line that says why."""
    stages_ms: dict[str, NotNegative] = field(default_factory=dict)
    """Mean time of each stage in the last run."""
    outputs: list[str] = field(default_factory=list)
    output_notes: dict[str, str] = field(default_factory=dict)
    """What there is to say about these outputs, by their kind: what is in them and what was left out."""
    doubtful: str = "marked"
    """Treatment of doubtful objects in these outputs, as in the job."""
    redone: str = ""
    """Name of the last redo whose masks these outputs have; empty before the first."""
    complete: bool = True
    """False if the replay was stopped. Outputs hold the frames until then. The same command resumes it."""

    @classmethod
    def from_counts(cls, totals: ReplayCounts, job: Job, **others: Any) -> Self:
        """Build the summary of a job from counts. `others` are the fields that neither has."""
        frames = totals.counts["frames"]
        frames_per_s = round(frames / totals.work_s, 2) if totals.work_s else 0.0
        return cls(
            bag=job.bags[0],
            mode=job.mode,
            strategy=job.strategy,
            frames=frames,
            failed=totals.counts["failed"],
            refused=totals.counts["refused"],
            cameras=dict(totals.frames),
            objects={camera: len(labels) for camera, labels in totals.objects.items()},
            seconds=round(totals.work_s, 3),
            frames_per_s=frames_per_s,
            **others,
        )

    def to_json(self) -> str:
        """Return the summary as indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read the JSON of `to_json`. Raises ReplayError for anything else."""
        try:
            return convert(decode_json(text, "summary"), cls, "summary")
        except WireError as error:
            raise ReplayError(
                f"summary.json: expected the summary of a replay, found {error}; use --again"
            ) from error

    def lines(self) -> list[str]:
        """Return the summary as lines of text."""
        objects = sum(self.objects.values())
        cameras = ", ".join(self.cameras) or "none"
        lines = [
            f"{self.bag}: {self.frames} frames of {len(self.cameras)} cameras ({cameras}), {objects} objects, "
            f"{self.frames_per_s:.1f} frames/s, {self.seconds:.1f} s, {self.model} on {self.device}"
        ]
        if self.failed:
            lines.append(f"{self.failed} frames failed")
        if self.refused:
            lines.append(f"{self.refused} edits were refused")
        if self.lost:
            lines.append(f"lost: {self.lost}")
        return [*lines, *self.notes, *self.unfound.values(), *self.output_notes.values()]


class HeldError(OutputError):
    """Raised when another process writes to the same store."""


def open_store(location: str) -> Store:
    """Open the store of a folder or URL.

    Raises OutputError, or MissingExtraError if the package for the URL's protocol is not installed.
    """
    path = local_path(location)
    return UrlStore(location) if path is None else FolderStore(path)


@contextmanager
def local_bag(bag: str) -> Iterator[Path]:
    """Provide the path of a recording. One at a URL is copied, and the copy is removed at the end of the block.

    Raises BagError if there is no recording, or if it cannot be fetched.
    """
    path = local_path(bag)
    if path is not None:
        yield path
        return
    # readers seek, so a recording is copied as a whole
    system, remote = _open_file_system(bag, BagError)
    with temp_dir() as folder:
        copy = child_path(folder, PurePosixPath(remote).name)
        try:
            limit = _limit_fetch(folder)
            # one key for each file: a key may have the letters of a pattern, which a library would expand
            with _tell_wait(bag):
                found = _list_files(system, remote, copy)
            system.get(
                [remote_file for remote_file, _ in found], [str(file) for _, file in found], callback=limit
            )
        except FileNotFoundError as error:
            raise BagError(f"expected a recording, found nothing at {bag}") from error
        except Exception as error:  # each protocol has its own exceptions
            raise BagError(f"cannot fetch {bag}: {error}") from error
        yield copy


def _list_files(system: Any, remote: str, copy: Path) -> list[tuple[str, Path]]:
    """Return the key and the local path of each file of a recording. Raises BagError for a key that leads elsewhere."""
    if not system.isdir(remote):
        return [(remote, copy)]
    files = []
    for key in sorted(system.find(remote)):
        name = key.removeprefix(f"{remote}/")
        parts = name.split("/")
        if name == key or any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise BagError(f"expected keys of files below {remote}, found {key!r:.200}; rename it")
        path = copy.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.append((key, path))
    return files


def _limit_fetch(folder: Path) -> Any:
    """Return a callback of fsspec that raises BagError before a fetch fills the disk of a folder."""
    left_bytes = max(0, shutil.disk_usage(folder).free - KEPT_FREE_BYTES)

    def check(size: int | None, fetched: int, **_: object) -> None:
        # the size of a file that begins, and the bytes of all files so far: a server may send more than it has said
        if max(size or 0, fetched) > left_bytes:
            raise BagError(
                f"it is larger than the {left_bytes} bytes that {folder} has space for; set TMPDIR"
            )

    limit = require("fsspec.callbacks", "cloud").Callback(hooks={"check": check})
    # one count for all files of a folder
    limit.branched = lambda *_, **__: limit
    return limit


def local_path(location: str) -> Path | None:
    """Return the path of a local file or folder, also of a file:// URL; None for other URLs."""
    protocol, mark, rest = location.partition("://")
    if not mark:
        return Path(location)
    if protocol not in LOCAL_PROTOCOLS:
        return None
    return Path(unquote(rest))


class FolderStore:
    """Named values as files in a folder, which is created if it is missing. Names are relative paths with `/`.

    Every method raises OutputError if the storage fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """A folder on this machine for temporary files, and for files to `keep`."""
        with explain_os_error(OutputError, str(folder)):
            folder.mkdir(parents=True, exist_ok=True)

    def keep(self, paths: Sequence[Path]) -> None:
        """Store files and folders that were made in `folder` as values, named by their paths in it."""
        # they are in the folder already

    def write(self, name: str, data: bytes) -> None:
        """Store a value, or replace it. After a crash, either the old or the new value is complete."""
        with explain_os_error(OutputError, str(self.folder / name)):
            write_atomically(check_inside(self.folder, self.folder / name), data)

    def read(self, name: str) -> bytes:
        """Return an existing value."""
        with explain_os_error(OutputError, str(self.folder / name)):
            return read_regular(self.folder / name, MAX_VALUE_BYTES)

    def exists(self, name: str) -> bool:
        """Return True if there is a value of this name."""
        return (self.folder / name).is_file()

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names that begin with `folder` and a `/`; all names without a folder."""
        root = self.folder / folder
        with explain_os_error(OutputError, str(root)):
            files = sorted(path for path in root.rglob("*") if path.is_file())
        return [
            path.relative_to(self.folder).as_posix()
            for path in files
            if path.suffix != UNFINISHED and path != self.folder / LOCK
        ]

    def delete(self, name: str) -> None:
        """Delete a value if it exists."""
        with explain_os_error(OutputError, str(self.folder / name)):
            remove_inside(self.folder, self.folder / name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing during a `with` block. Raises HeldError if another one holds the lock."""
        # errors of the block are no errors of this store
        with explain_os_error(OutputError, str(self.folder)):
            check_inside(self.folder, self.folder / WORK).mkdir(exist_ok=True)
            # the lock belongs to the open file, so it ends with the process, however that ends
            file = open_lock(self.folder, self.folder / LOCK)
        with file:
            with explain_os_error(OutputError, str(self.folder)):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise HeldError(
                        f"another replay writes to {self.folder}; wait for it, or choose another folder"
                    ) from error
            yield


class UrlStore:
    """Values below a URL, with the methods of a FolderStore.

    Raises MissingExtraError if the package for its protocol is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._system, self._root = _open_file_system(url, OutputError)
        self._token: bytes | None = None
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """A temporary folder of this machine, which exists while the store is held."""
        if self._folder is None:
            raise OutputError(f"{self.url}: expected the store to be held while files are made for it")
        return self._folder

    def write(self, name: str, data: bytes) -> None:
        self._check_token()
        self._put(name, data)

    def read(self, name: str) -> bytes:
        with self._translate_errors(name):
            data = self._fetch(name, MAX_FETCHED_BYTES)
        if len(data) > MAX_FETCHED_BYTES:
            raise OutputError(
                f"{self.url}/{name}: expected at most {MAX_FETCHED_BYTES} bytes, found more; start over with --again"
            )
        return data

    def exists(self, name: str) -> bool:
        with self._translate_errors(name):
            self._system.invalidate_cache()
            return bool(self._system.isfile(self._path(name)))

    def names(self, folder: str = "") -> list[str]:
        # another process may have written since the last look
        with self._translate_errors(folder):
            self._system.invalidate_cache()
            paths = sorted(self._system.find(self._path(folder)))
        names = [path.removeprefix(self._root).lstrip("/") for path in paths]
        return [name for name in names if name != LOCK]

    def delete(self, name: str) -> None:
        self._check_token()
        with self._translate_errors(name), suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def keep(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._check_token()
            name = path.relative_to(self.folder).as_posix()
            with self._translate_errors(name):
                # the new folder may have fewer files than the old one
                if path.is_dir():
                    with suppress(FileNotFoundError):
                        self._system.rm(self._path(name), recursive=True)
                self._system.put(str(path), self._path(name), recursive=path.is_dir())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Take over the store. The previous holder gets an OutputError at its next write."""
        # an object store has no locks: the last token that was written names the holder
        token = uuid.uuid4().bytes
        self._put(LOCK, token)
        self._token = token
        try:
            with temp_dir() as self._folder:
                yield
            # a later holder's token must stay
            if self._read_token() == token:
                self.delete(LOCK)
        finally:
            self._token = None
            self._folder = None

    def _check_token(self) -> None:
        """Raise OutputError if another process has taken the store over."""
        if self._token is not None and self._read_token() != self._token:
            raise OutputError(f"{self.url}: another replay writes here now; this one ends")

    def _read_token(self) -> bytes | None:
        """Read the token of the process that holds the store now."""
        with self._translate_errors(LOCK), suppress(FileNotFoundError):
            return self._fetch(LOCK, MAX_TOKEN_BYTES)
        return None

    def _put(self, name: str, data: bytes) -> None:
        """Store a value, whoever holds the store."""
        # folders of an object store come with their values, its buckets do not
        with self._translate_errors(name, "expected a bucket that exists, found none; create it"):
            self._system.pipe_file(self._path(name), data)

    def _fetch(self, name: str, max_bytes: int) -> bytes:
        """Read a value, or of a longer one its first `max_bytes` and one more."""
        # another process may have replaced the value, and with it its size
        self._system.invalidate_cache()
        with self._system.open(self._path(name), "rb") as file:
            data: bytes = file.read(max_bytes + 1)
        return data

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _translate_errors(self, name: str, missing: str | None = None) -> Iterator[None]:
        """Turn the exceptions of the file system into OutputError. `missing` says what it means if nothing is there."""
        try:
            with _tell_wait(f"{self.url}/{name}"):
                yield
        except FileNotFoundError as error:
            raise OutputError(f"{self.url}: {missing or f'expected {name}, found nothing'}") from error
        except Exception as error:  # each protocol has its own exceptions
            raise OutputError(f"{self.url}/{name}: {error}") from error


Store = FolderStore | UrlStore


def check_protocol(location: str) -> None:
    """Raise MissingExtraError for a URL whose protocol has no package here, ReplayError for an unknown protocol.

    Nothing is connected. Paths are not looked at.
    """
    if local_path(location) is not None:
        return
    fsspec = require("fsspec", "cloud")
    with _explain_protocol(location):
        # of a chain of protocols, such as simplecache::s3, the last one is that of the store
        fsspec.get_filesystem_class(location.partition("://")[0].rpartition("::")[2])


@contextmanager
def _tell_wait(url: str) -> Iterator[None]:
    """Log a line if a request takes longer than ANSWER_S. Its library gives up much later."""
    text = f"%s: waits for an answer of the server for more than %g s; if it goes on, {_CHECK_SERVER}"
    timer = threading.Timer(ANSWER_S, _log.warning, (text, url, ANSWER_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _open_file_system(url: str, error: type[Sam3NodeError]) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it. Raises `error` if its server does not answer at all."""
    fsspec = require("fsspec", "cloud")
    with _explain_protocol(url):
        system, path = fsspec.url_to_fs(url)
    path = path.rstrip("/")
    protocol, _, rest = url.partition("://")
    place = f"{protocol}://{rest.partition('/')[0]}"
    if place not in _answered:
        with _tell_wait(url):
            if not _answers(system, path):
                raise error(
                    f"{url}: expected an answer of the server within {FIRST_ANSWER_S:g} s, found none; {_CHECK_SERVER}"
                )
        _answered.add(place)
    return system, path


def _answers(system: Any, path: str) -> bool:
    """Return True if the server of a path answers in time, whatever it says."""
    has_answered = threading.Event()

    def ask() -> None:
        # the request that follows meets the same error, and tells it
        with suppress(Exception):
            system.exists(path)
        has_answered.set()

    # a request cannot be interrupted: its thread is left behind, and does not hold the process
    threading.Thread(target=ask, daemon=True).start()
    return has_answered.wait(FIRST_ANSWER_S)


@contextmanager
def _explain_protocol(url: str) -> Iterator[None]:
    """Turn what fsspec raises for a protocol without a package, or an unknown one, into errors of this package."""
    try:
        yield
    except ImportError as error:  # names the package that has the protocol
        raise MissingExtraError(f"{url}: {error}, beside this package's extra 'cloud'") from error
    except ValueError as error:
        raise ReplayError(f"{url}: expected a path or a URL that fsspec knows: {error}") from error
