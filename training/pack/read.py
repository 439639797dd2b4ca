"""Unpack training data that came in one file."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from sam3_node.errors import CameraError, OutputError

STAMP = "unpacked.txt"  # size and time of the file that was unpacked


def unpack(pack: Path, folder: Path) -> None:
    """Unpack into `folder`, which is replaced whole, unless it holds this very file's content.

    Raises CameraError for a file that is absent, damaged or no pack, OutputError where the folder cannot be written.
    """
    if not pack.is_file():
        raise CameraError(f"no pack {pack}: make one, python -m training.pack")
    held = pack.stat()
    stamp = f"{held.st_size} {held.st_mtime_ns}\n"
    if (folder / STAMP).is_file() and (folder / STAMP).read_text() == stamp:
        return
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        _extract(pack, aside)
        (aside / STAMP).write_text(stamp)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        raise OutputError(f"{pack} cannot be unpacked into {folder}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _extract(pack: Path, folder: Path) -> None:
    try:
        with ZipFile(pack) as archive:
            archive.extractall(folder)
    except (BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise CameraError(
            f"expected a zip file of python -m training.pack, found {pack} damaged: {error}; copy it again"
        ) from error
    if not (folder / "train" / "JPEGImages").is_dir():
        raise CameraError(f"expected training clips in {pack}, found none: make it, python -m training.pack")
