"""Files that are written completely or not at all, and folders that other users of the machine cannot change.

Temporary folders lie in one that all users may write to, so no path there is followed through a symbolic link.
"""

import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from .errors import ModelError, OutputError, Sam3NodeError, WireError, did_you_mean
from .schema.fields import MAX_LEVELS, count_levels, decode_json
from .types import Buffer

_log = logging.getLogger(__name__)

CHECKPOINT_SUFFIXES = (".safetensors", ".pt", ".pth")
"""How names of weights in a single file end."""
KNOWN_WEIGHTS = (
    "nano",
    "facebook/sam3",
    "facebook/sam3.1",
    *(f"facebook/sam2.1-hiera-{size}" for size in ("tiny", "small", "base-plus", "large")),
    "yonigozlan/EdgeTAM-hf",
)
"""Names of weights that an error message may suggest."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Names of what is no regular file, by the bits of its mode."""

ANY_SIZE = (1 << 63) - 1
"""Bound for `open_regular` of files that may be of any size, such as recordings: they are read in pieces."""

UNFINISHED = ".unfinished"
"""Suffix of a file that is still being written."""

UNSAFE = re.compile(r"[^A-Za-z0-9_.-]|^\.+$")
"""What a file name from outside may not have: other characters than these, and dots alone."""

FOLDER_PREFIX = "work-"
"""Prefix of the names of temporary folders."""

GUARD = "guard"
"""Name of a file. The process that holds its lock may create temporary folders and remove abandoned ones."""

# first bytes of the pointers of Git LFS
_LFS_POINTERS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")
# bytes that show a pointer
_POINTER_BYTES = 64


def safe_file_name(name: str) -> str:
    """Return a name that stays inside its folder. `_` replaces other characters than letters, digits, _ . and -."""
    return UNSAFE.sub("_", name) or "_"


@contextmanager
def explain_os_error(kind: type[Sam3NodeError], what: str, remedy: str = "") -> Iterator[None]:
    """Raise an error of this kind for an OSError in the block: `what` failed, why, and the remedy."""
    try:
        yield
    except OSError as error:
        explained = kind(f"{what}: {error.strerror or error}{remedy}")
        explained.may_pass = is_full(error)
        raise explained from error


def is_full(error: OSError) -> bool:
    """Return True if a disk or a quota is full, which somebody may free."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist. Raises OutputError that names the folder."""
    with explain_os_error(OutputError, f"cannot create the folder {path}", "; choose another"):
        path.mkdir(parents=True, exist_ok=True)


def prepare_output(path: Path, overwrite: bool = True) -> None:
    """Create the folder of a file that will be written later, and check that the file can be written.

    Raises OutputError if the folder cannot be created, if the file cannot be written, or, without `overwrite`, if it
    exists.
    """
    make_folder(path.parent)
    is_new = not path.exists()
    if not is_new and not overwrite:
        raise OutputError(f"{path} exists already: choose another name, or delete it")
    # an existing file keeps its content, a new one is not left behind
    with explain_os_error(OutputError, f"cannot write {path}", "; choose another file"):
        path.open("ab").close()
        if is_new:
            path.unlink()


def describe_stand_in(path: Path) -> str | None:
    """Return what stands in the place of a file whose content is elsewhere, and what to do; None for any other file.

    Pointers of Git LFS and git-annex, links to absent files, and empty files are stand-ins.
    """
    if path.is_symlink() and not path.exists():
        target = os.readlink(path)
        if "annex/objects" in target:
            return "a link of git-annex whose content is not here; run `git annex get` in its folder"
        return f"a link to {target}, which is absent; download or copy the file itself"
    # a pipe or a device would block, and is no stand-in
    try:
        with open_regular(path, ANY_SIZE) as file:
            head = file.read(_POINTER_BYTES)
    except OSError:
        return None
    if not head:
        return "an empty file; if a cloud drive or a broken copy left it in the file's place, download the file again"
    if head.startswith(_LFS_POINTERS):
        return "a pointer of Git LFS in the place of the file; run `git lfs pull` in its folder"
    if head.startswith(b"/annex/objects/"):
        return "a pointer of git-annex in the place of the file; run `git annex get` in its folder"
    return None


def open_regular(path: Path, max_bytes: int) -> BufferedReader:
    """Open a regular file of at most `max_bytes` for reading, without waiting for whatever else has this name.

    A link is followed. Raises OSError; it is an IrregularFileError for a pipe, a socket, a device or a folder, which
    may block or never end, and for a larger file.
    """
    # without waiting: the open of a pipe blocks until somebody writes to it
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # the opened file, because the path may name another one by now
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            found = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            raise IrregularFileError(f"expected a regular file, found {found}; name a file")
        if status.st_size > max_bytes:
            raise IrregularFileError(
                f"expected a file of at most {max_bytes} bytes, found {status.st_size}; name another one"
            )
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a whole regular file of at most `max_bytes`. Raises OSError as `open_regular` does."""
    with open_regular(path, max_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        # one byte more shows that the file has grown since; `read` reserves what it is asked for
        data = file.read(size + 1)
    if len(data) > size:
        raise IrregularFileError("expected a file that stays as it is, found one that grows; try again")
    return data


def parse_json(data: bytes | str) -> Any:
    """Return what JSON holds, without NaN, which is no JSON. Raises ValueError, as `decode_json` does WireError."""
    try:
        return decode_json(data, "the text", has_nan=False)
    except WireError as error:
        raise ValueError(str(error)) from None


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return what TOML holds, of at most MAX_LEVELS levels. Raises ValueError for anything else."""
    import tomllib  # here, because it slows the start of a client

    try:
        content = tomllib.loads(data.decode())
    except RecursionError:
        content = None
    if content is None or count_levels(content) > MAX_LEVELS:
        raise ValueError(f"more than {MAX_LEVELS} levels")
    return content


def read_json(path: Path, max_bytes: int, error: type[Sam3NodeError], expected: str) -> dict[str, Any]:
    """Return the map in a JSON file. Raises an error of this kind, which names the file and what was expected of it."""
    try:
        content = parse_json(read_regular(path, max_bytes))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as found:
        reason = found.strerror if isinstance(found, OSError) else found
        raise error(f"cannot read {path}: expected {expected}, found {reason}") from found
    if not isinstance(content, dict):
        raise error(f"cannot read {path}: expected {expected}, found a {type(content).__name__}")
    return content


def check_regular(path: Path, max_bytes: int) -> None:
    """Raise OSError as `open_regular` does, for a file that a library opens by its path."""
    open_regular(path, max_bytes).close()


class IrregularFileError(OSError):
    """A path names something that must not be read whole: what was expected, what was found, what to do."""

    def __init__(self, message: str) -> None:
        # `strerror` is what messages show of an OSError
        super().__init__(errno.EINVAL, message)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves either the old or the new content. Raises OSError."""
    with atomic_file(path) as file:
        file.write(data)


def write_output(path: Path, data: bytes) -> None:
    """Write a file as `write_atomically` does. Raises OutputError that names the file."""
    with explain_os_error(OutputError, f"cannot write {path}", "; choose another file"):
        write_atomically(path, data)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces `path` at the end of the block, once it is on disk.

    An exception in the block leaves `path` as it was. Missing parent folders are created. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f"{path.name}{UNFINISHED}"
    unfinished.unlink(missing_ok=True)  # left by a killed process
    try:
        with unfinished.open("xb") as file:  # a symbolic link in its place is never followed
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def child_path(folder: Path, name: str) -> Path:
    """Return `folder`/`name` for a name from a message or a recording, such as a camera's name.

    Raises OutputError for a name that would lead out of the folder.
    """
    # one component of a path, which is neither this folder nor its parent
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise OutputError(f"expected a name that can name a file in {folder}, found {name!r:.80}")
    return folder / name


def check_inside(folder: Path, path: Path) -> Path:
    """Return `path` in a folder that others may have made, to be written or removed.

    Raises OutputError if it leads out of the folder, also by a symbolic link below it. Links that lead to the folder
    itself are the user's, and are followed.
    """
    if not path.is_relative_to(folder) or ".." in path.relative_to(folder).parts:
        raise OutputError(f"expected a file in {folder}, found {str(path)!r:.200}; name another folder")
    place = folder
    for part in path.relative_to(folder).parts:
        place = place / part
        if place.is_symlink():
            raise OutputError(
                f"expected files of {folder} itself, found a symbolic link at {place}; remove it, or name "
                "another folder"
            )
    return path


def write_new(path: Path, data: Buffer | str) -> None:
    """Write a new file, text in UTF-8. Raises OSError, also if there is anything of its name, such as a link."""
    with path.open("xb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def link_or_copy(source: Path, target: Path) -> None:
    """Make a new file with the content of another, as a hard link where the file system has them. Raises OSError."""
    import shutil  # here, because it slows the start of a client

    # behind the links of a download cache
    real = source.resolve()
    try:
        os.link(real, target)
    except FileExistsError:
        raise
    except OSError:
        with real.open("rb") as read, target.open("xb") as written:
            shutil.copyfileobj(read, written)


def remove_inside(folder: Path, path: Path) -> None:
    """Remove a file of a folder that others may have made, if it is there. Raises OutputError, as `check_inside`."""
    check_inside(folder, path.parent)
    # of a link, the link itself
    path.unlink(missing_ok=True)


def remove_folder_inside(folder: Path, path: Path) -> None:
    """Remove a folder, with all in it, of a folder that others may have made. A link in its place is removed itself."""
    import shutil  # here, because it slows the start of a client

    check_inside(folder, path.parent)
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def move_inside(folder: Path, path: Path, target: Path) -> Path:
    """Give a file or folder another name in a folder that others may have made, and return it. What has it is replaced.

    Raises OutputError, as `check_inside` does, and OSError.
    """
    # a link in the place of the target is replaced, not followed
    check_inside(folder, target.parent)
    return path.replace(target)


def open_lock(folder: Path, path: Path) -> IO[bytes]:
    """Open a file to be locked, which is created if it is absent, in a folder that others may have made.

    Its content stays. Raises OutputError, as `check_inside` does, and OSError.
    """
    check_inside(folder, path)
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "rb")


def has_home(folder: Path, path: Path) -> bool:
    """Return True if a file, behind its links, lies in its folder, or in the blobs of the hub's cache beside it."""
    real = folder.resolve()
    homes = [real]
    # the hub's cache consists of links from `snapshots/REVISION` to `blobs`
    if real.parent.name == "snapshots":
        homes.append(real.parents[1] / "blobs")
    target = path.resolve()
    return any(target.is_relative_to(home) for home in homes)


def make_private_dir(path: Path) -> None:
    """Create a folder of mode 0700, unless it exists, and its parents. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, data: bytes) -> None:
    """Write a new file of mode 0600. Raises OSError, also if it exists."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def write_private_atomically(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 in the place of an earlier one, completely or not at all. Raises OSError."""
    import tempfile  # here, because it slows the start of a client

    # a private folder beside the target: nobody else can take the new file's name, and a rename suffices
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        new = Path(folder) / path.name
        write_private(new, data)
        new.replace(path)


def read_private(path: Path, max_bytes: int = -1) -> bytes:
    """Read a file, or its first `max_bytes`.

    Raises OSError; it is a PermissionError if others can change the file, as `describe_exposure` says.
    """
    # look at the opened file, not at the path, which may be exchanged meanwhile
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if reason := _describe_status(path, os.fstat(descriptor), stat.S_ISREG):
            raise PermissionError(None, reason, str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)
    finally:
        os.close(descriptor)  # open() leaves a folder's descriptor open


def keep(path: Path, data: bytes, loss: str) -> bool:
    """Write a private file that a program keeps for its next start, in a folder that is also made private.

    If that fails, log a warning and return False. `loss` says what the failure costs.
    """
    try:
        make_private_dir(path.parent)
        write_private_atomically(path, data)
    except OSError as error:
        _log.warning("%s: cannot write %s: %s", loss, path, error.strerror)
        return False
    return True


def read_kept(path: Path, loss: str) -> bytes | None:
    """Read what `keep` wrote; None if it is absent, and, with a warning, if it cannot be read or trusted."""
    try:
        return read_private(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("%s: cannot read %s: %s", loss, path, error.strerror)
        return None


def describe_exposure(folder: Path) -> str | None:
    """Return why users other than this one and root can change a folder, and what to do; None if they cannot.

    A symbolic link is such a reason, and so is anything that is no folder. Raises OSError if there is nothing.
    """
    return _describe_status(folder, folder.lstat(), stat.S_ISDIR)


def _describe_status(path: Path, status: os.stat_result, is_expected: Callable[[int], bool]) -> str | None:
    # a link, the kind, the owner, and who may write
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link, which is not followed; name {path.resolve()} itself"
    if not is_expected(status.st_mode):
        return f"{path} is of another kind ({stat.filemode(status.st_mode)}); remove it"
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {status.st_uid}; if it can be trusted: chown -R {os.geteuid()} {path}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        return (
            f"{path} can be written by others (mode {mode:04o}); if it can be trusted: chmod -R go-w {path}"
        )
    return None


def _sync_folder(folder: Path) -> None:
    """Put the folder's entries on disk. Without this, a crash may lose a new file name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def temp_dir() -> Iterator[Path]:
    """Create a folder below the system's temporary folder (`TMPDIR`), and remove it at the end of the block.

    The next call removes the folders of processes that were killed. Raises OutputError if the folder cannot be created,
    or if another user can change its parent.
    """
    import shutil  # here, because both slow the start of a client
    import tempfile

    root = Path(tempfile.gettempdir()) / f"sam3-node-{os.getuid()}"
    with explain_os_error(OutputError, f"cannot create temporary files in {root}", "; set TMPDIR"):
        root.mkdir(mode=0o700, exist_ok=True)
        if reason := describe_exposure(root):
            raise OutputError(f"no temporary files are created: {reason}, or set TMPDIR")
        with open(os.open(root / GUARD, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            # a folder whose lock is free belongs to a process that was killed
            for path in root.glob(f"{FOLDER_PREFIX}*"):
                abandoned = _try_lock(path)
                if abandoned is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(abandoned)
            # the guard is held until the new folder is locked, so that no other process takes it for abandoned
            folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=root))
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Return a descriptor that holds the lock of a folder; None if its process runs, or has just removed it."""
    # the process of the folder may remove it at any moment
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def check_weights_name(name: str) -> None:
    """Raise ModelError if the name looks like a folder and there is no such folder, or is no name of any weights."""
    # these are bundled, and a file may hold all that is needed
    if name == "nano" or (name.endswith(CHECKPOINT_SUFFIXES) and os.path.isfile(name)):
        return
    # a hub name has at most one slash, and its first part is no folder here
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.isdir(os.path.dirname(name))
    if name.endswith(CHECKPOINT_SUFFIXES) and not os.path.isdir(name) and (is_path or "/" not in name):
        raise ModelError(
            f"no file {name}: expected SAM 3.1's checkpoint, a folder with config.json and weights, or a hub name"
        )
    if is_path and not os.path.isdir(name):
        raise ModelError(f"no folder {name}: expected a folder with config.json and weights, or a hub name")
    if "/" not in name and not os.path.isdir(name):
        # a misspelt name may mean a folder of the working directory
        folders = [path.name for path in Path().glob("*/")]
        raise ModelError(
            f"no weights {name!r}: expected nano (bundled), a folder with config.json and weights, or a hub name such "
            f"as facebook/sam3{did_you_mean(name, [*folders, *KNOWN_WEIGHTS])}"
        )
