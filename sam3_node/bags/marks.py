"""Reads and writes the file of marks beside a recording, in the form that `replay --objects` reads.

The file is JSON: {"objects": [{camera, frame, label, points, labels, box}, …], "marks": [{camera, frame, id, object,
hidden, removed, state}, …]}. Each prompt is one of the `objects`, which a replay takes for objects to add. The `marks`
are in the order in which people made them; `object` is the number of a mark's prompt, counted from 0. An object that no
mark names adds an object. A file with `objects` alone, as people write it for `--objects`, is one of marks, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import msgspec

from ..errors import BagError, RequestError, WireError
from ..files import read_json, write_output
from ..schema.fields import Natural, Text, convert
from ..schema.marks import UNNAMED, Mark, MarkState
from ..schema.operations import Corners, Points
from ..schema.operations import Marks as PointLabels
from ..wire.frame_prompt import FramePrompt

SUFFIX = ".marks.json"
"""What the name of a recording gets for the file of its marks."""
MAX_BYTES = 4 << 20
"""Size of the largest file of marks. A larger one is refused."""
MAX_MARKS = 4096
"""Largest number of marks of one recording."""


class _Object(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A prompt as `replay --objects` reads it."""

    camera: Text
    frame: Natural
    label: Text = UNNAMED
    points: Points | None = None
    labels: PointLabels | None = None
    box: Corners | None = None


class _MarkEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A mark, with the number of its prompt."""

    camera: Text
    frame: Natural
    id: Natural | None = None
    object: Natural | None = None
    hidden: bool = False
    removed: bool = False
    state: MarkState | None = None


class _File(msgspec.Struct):
    """The content of a file of marks."""

    objects: list[_Object] = []
    marks: list[_MarkEntry] = []


def name_marks(recording: Path) -> Path:
    """Return the path of the file of marks beside a recording."""
    return recording.with_name(f"{recording.name}{SUFFIX}")


def read_marks(path: Path) -> tuple[Mark, ...]:
    """Return the marks of a file in their order; none if there is no file. Raises BagError for any other content."""
    try:
        content = read_json(path, MAX_BYTES, BagError, "marks as JSON")
    except FileNotFoundError:
        return ()
    try:
        found = convert(content, _File, str(path))
        return _join(found)
    except (WireError, RequestError) as error:
        raise BagError(f"cannot read {path}: {error}; correct it, or move it away") from error


def write_marks(path: Path, marks: Sequence[Mark]) -> None:
    """Write marks over the file. Raises OutputError."""
    objects: list[_Object] = []
    entries = []
    for mark in marks:
        number = None
        if mark.has_prompt:
            number = len(objects)
            objects.append(_Object(mark.camera, mark.seq, mark.label, mark.points, mark.labels, mark.box))
        entries.append(
            _MarkEntry(mark.camera, mark.seq, mark.id, number, mark.hidden, mark.removed, mark.state)
        )
    # one mark a line, so that people and version control can read what changed
    lists: dict[str, Sequence[msgspec.Struct]] = {"objects": objects, "marks": entries}
    texts = [f'"{name}": [{",".join(map(_write_line, items))}\n]' for name, items in lists.items()]
    write_output(path, f"{{{', '.join(texts)}}}\n".encode())


def _write_line(item: msgspec.Struct) -> str:
    return f"\n {json.dumps(msgspec.to_builtins(item), ensure_ascii=False)}"


def _join(found: _File) -> tuple[Mark, ...]:
    """Return the marks with their prompts, then the prompts without a mark. Raises RequestError."""
    if len(found.objects) + len(found.marks) > 2 * MAX_MARKS:
        raise RequestError(f"expected at most {MAX_MARKS} marks, found more")
    marks = []
    used = set()
    for place, entry in enumerate(found.marks):
        prompt = None
        if entry.object is not None:
            if entry.object >= len(found.objects) or entry.object in used:
                raise RequestError(
                    f"marks[{place}].object: expected the number of an object of its own, found {entry.object}"
                )
            used.add(entry.object)
            prompt = found.objects[entry.object]
            if (prompt.camera, prompt.frame) != (entry.camera, entry.frame):
                raise RequestError(f"marks[{place}].object: expected one on its own frame, found another")
        marks.append(_make_mark(entry, prompt))
    alone = [prompt for number, prompt in enumerate(found.objects) if number not in used]
    return (*marks, *(_make_mark(_MarkEntry(prompt.camera, prompt.frame), prompt) for prompt in alone))


def _make_mark(entry: _MarkEntry, prompt: _Object | None) -> Mark:
    mark = Mark(
        camera=entry.camera,
        seq=entry.frame,
        id=entry.id,
        hidden=entry.hidden,
        removed=entry.removed,
        state=entry.state,
    )
    if prompt is not None:
        mark = msgspec.structs.replace(
            mark, points=prompt.points, labels=prompt.labels, box=prompt.box, label=prompt.label
        )
    check_mark(mark)
    return mark


def check_mark(mark: Mark) -> None:
    """Raise RequestError for a mark that says nothing or too much, or whose prompt no frame can have."""
    mark.check()
    if mark.has_prompt or mark.labels is not None:
        FramePrompt(mark.points, mark.labels, mark.box)


class MarkFile:
    """The marks of one recording, in its file. Each change is on disk before it returns. Threads may share it."""

    def __init__(self, path: Path) -> None:
        """Read the file if there is one. Raises BagError for a file of anything else."""
        self._path = path
        self._marks = read_marks(path)
        self._lock = Lock()

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The marks in the order in which they were made."""
        return self._marks

    def add(self, mark: Mark) -> None:
        """Append a mark. Raises RequestError for a wrong one or one too many, BagError, and OutputError."""
        check_mark(mark)
        with self._lock:
            # another person may have gone on in another process
            marks = read_marks(self._path)
            if len(marks) >= MAX_MARKS:
                raise RequestError(f"expected at most {MAX_MARKS} marks of a recording, found as many")
            self._keep((*marks, mark))

    def undo(self) -> Mark | None:
        """Take back the last mark, and return it; None if there is none."""
        with self._lock:
            marks = read_marks(self._path)
            if not marks:
                return None
            self._keep(marks[:-1])
            return marks[-1]

    def _keep(self, marks: tuple[Mark, ...]) -> None:
        write_marks(self._path, marks)
        self._marks = marks
