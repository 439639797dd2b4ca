"""Writes the outputs of a replay into its folder, each complete or absent.

File names from a recording never lead out of the folder of the outputs.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...errors import BagError, OutputError
from ...files import move_inside, remove_folder_inside
from . import find_output
from .output import Sources


class Written(NamedTuple):
    """The files and folders that were written, and what there is to say about each kind of output."""

    paths: list[Path]
    notes: dict[str, str]


def write_outputs(
    out: Path, kinds: Sequence[str], sources: Sources, progress: Callable[[str, int], None]
) -> Written:
    """Write outputs of these kinds into the folder `out`.

    An output replaces an older one when it is complete. The same masks and frames give the same bytes. `progress` is
    called with a kind and the number of masks written. COCO and YouTube-VIS name the files of `images` if they are
    among the kinds or were written before, and places in the recording otherwise. The report compares the masks with
    the recorded ones. Raises ReplayError for an unknown kind before anything is written, OutputError if `out` cannot be
    written, and the exceptions of the sources.
    """
    formats = {kind: find_output(kind) for kind in kinds}
    # images may be written in this call or an earlier one: COCO names them either way
    written = Written([], {})
    sources = sources._replace(has_images=sources.has_images or "images" in formats)
    for kind, output in formats.items():
        with _replace_when_complete(out, kind, written.paths) as folder:
            note = output.write(folder, sources, partial(progress, kind))
        if note is not None:
            written.notes[kind] = note
    return written


def join_outputs(out: Path, kind: str, parts: Sequence[Path]) -> str:
    """Join the outputs of a kind in the folders `parts`, of one recording each, in `out`. Return what there is to say.

    Raises OutputError if `out` cannot be written, or has nothing to join.
    """
    with _replace_when_complete(out, kind, []) as folder:
        return find_output(kind).join(folder, parts)


@contextmanager
def _replace_when_complete(out: Path, kind: str, written: list[Path]) -> Iterator[Path]:
    """Provide a folder whose content is moved to `out` at the end of the block, unless the block fails."""
    # the folder lies in `out`, so that moving its content is a rename; a link of its name is never followed
    partial_folder = out / f".{kind}.partial"
    try:
        remove_folder_inside(out, partial_folder)  # left by a killed run
        (partial_folder / "new").mkdir(parents=True)
        yield partial_folder / "new"
        items = sorted((partial_folder / "new").iterdir())
        written += [_move(out, item, partial_folder) for item in items]
    except OSError as error:
        # the block also reads the recording: an error outside `out` is not one of writing
        if error.filename and not Path(os.fsdecode(error.filename)).absolute().is_relative_to(out.absolute()):
            raise BagError(f"cannot read {error.filename}: {error.strerror}") from error
        raise OutputError(f"cannot write {kind} into {out}: {error.strerror or error}") from error
    finally:
        remove_folder_inside(out, partial_folder)


def _move(out: Path, item: Path, partial_folder: Path) -> Path:
    # a folder cannot be replaced in one step: move the old one away first
    target = out / item.name
    if target.is_dir():
        move_inside(out, target, partial_folder / f"old {target.name}")
    return move_inside(out, item, target)
