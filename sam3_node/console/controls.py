"""Requests of the page: operations of the node, a recording on this machine, and names that a detector knows."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from ..detection.phrases import nearest_phrases, phrase_key
from ..errors import RequestError, Sam3NodeError
from ..resources import Closeable
from ..schema.operations import IN_CONSOLE, Operation
from ..schema.values import MaskMap
from ..settings import Settings
from ..transport import ControlClient, Security
from ..wire.masks import open_mask
from ..wire.requests import read_operation
from .views import pack_bits

TIMEOUT_MS = 5000
"""Longest time that a request of the page waits for the node."""
PREVIEW = "segment"
"""Operation whose result the page shows while the pointer moves."""
UPLOADS = frozenset({"mask", "photo"})
"""Arguments of operations that a page may not send."""
MAX_WORDS = 8
"""Phrases that are suggested for a typed text."""
MAX_LISTED = 2000
"""Phrases that are listed without a typed text."""
STOP_S = 10.0
"""Longest time that the end of the console waits for the end of a recording."""
RESULT = "recorded "
"""Beginning of the recorder's line about a finished file."""
MAX_LINE = 500
"""Characters of a recorder's line that are shown. A longer line is shown without its beginning."""
MAX_BEGUN = 8_000
"""Characters of a line without its end that are kept. What comes after them is lost."""


class Controls(Closeable):
    """Sends the page's requests to the node. Previews have a connection of their own, and never delay a click.

    `detector` returns the settings of the node's detector. `on_change` is called when a recording begins or ends.
    """

    def __init__(
        self, settings: Settings, detector: Callable[[], Mapping[str, Any]], on_change: Callable[[], None]
    ) -> None:
        endpoint = settings.transport.control
        security = Security.from_settings(settings.transport)
        # a request waits for the one before it on the same connection, so previews have their own
        self._clients = {
            "": ControlClient(endpoint, TIMEOUT_MS, security),
            PREVIEW: ControlClient(endpoint, TIMEOUT_MS, security),
        }
        self._detector = detector
        self.recording = RecordingThread(settings, on_change)

    def call(self, op: str, args: Mapping[str, object]) -> Mapping[str, object]:
        """Carry out an operation and return its reply as JSON values. Raises Sam3NodeError if that fails."""
        # the recorder runs in this process, not in the node
        if op == "record":
            self.recording.switch(bool(args.get("on")))
            return {}
        # the table of operations says which of them a page may request
        if op not in IN_CONSOLE:
            raise RequestError(f"expected one of {', '.join(IN_CONSOLE)}, record, found {op!r:.40}")
        for name in UPLOADS.intersection(args):
            raise RequestError(
                f"{op}: expected points or a box, found a {name}; the console takes no uploads"
            )
        operation: Operation[Any] = read_operation(op, args)
        client = self._clients[PREVIEW if op == PREVIEW else ""]
        return _to_map(client.ask(operation))

    def suggest(self, typed: str) -> list[str]:
        """Return phrases of the node's vocabulary that begin with `typed`, then similar ones; all for an empty text.

        Return none if the vocabulary is not on this machine.
        """
        path = find_vocabulary(self._detector())
        phrases: tuple[str, ...] = ()
        if path:
            phrases = _read_phrases(path)
        key = phrase_key(typed.strip())
        if not key:
            return sorted(phrases, key=lambda phrase: (phrase.count(" "), phrase))[:MAX_LISTED]
        # phrases that begin so, then those with such a word, then those that are merely similar; each once
        begin = sorted((phrase for phrase in phrases if phrase_key(phrase).startswith(key)), key=len)
        words = [phrase for phrase in phrases if f" {key}" in phrase_key(phrase)]
        return list(dict.fromkeys([*begin, *words, *nearest_phrases(typed, phrases)]))[:MAX_WORDS]

    def close(self) -> None:
        """End a recording, and close the connections."""
        # the recording ends first: it needs no connection of ours, but its file must be finished
        self.recording.switch(False)
        self.recording.join()
        for client in self._clients.values():
            client.close()


def find_vocabulary(detector: Mapping[str, Any]) -> Path | None:
    """Return the vocabulary file of a detector by its settings; None if it has none on this machine."""
    from ..detection.detectors import NANO, VOCABULARY

    if detector.get("kind") != "yolo-world":
        return None
    # the file that the node's detector reads: named by a setting, or beside its weights
    name = str(detector.get("name"))
    folder = Path(name)
    if name == "nano":
        folder = NANO
    path = folder / VOCABULARY
    if detector.get("vocabulary"):
        path = Path(detector["vocabulary"])
    # the node may run on another machine
    if not path.is_file():
        return None
    return path


@lru_cache(maxsize=1)
def _read_phrases(path: Path) -> tuple[str, ...]:
    """Return the phrases of a vocabulary; none if the package that reads it is missing, or the file is damaged."""
    with suppress(Sam3NodeError, ImportError):
        from ..detection.vocabulary import Vocabulary

        return Vocabulary.load(path).phrases
    return ()


def _to_map(value: msgspec.Struct) -> dict[str, object]:
    """Return the fields of a reply that it has: masks as box, size and bits in base64, pictures in base64."""
    fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
    return {name: _to_json(part) for name, part in fields if part is not None}


def _to_json(value: object) -> object:
    if isinstance(value, MaskMap):
        mask = open_mask(value, "mask")
        bits = base64.b64encode(pack_bits(mask)).decode()
        return {"size": mask.size, "box": mask.box, "area": mask.area, "bits": bits}
    if isinstance(value, msgspec.Struct):
        return _to_map(value)
    if isinstance(value, tuple):
        return [_to_json(part) for part in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


class RecorderLines(io.StringIO):
    """The output of a recorder, of which it keeps only the line that the page shows.

    A recording may run for days and print a line every few seconds: all of it would fill the memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun = ""
        self._last = ""
        self._result = ""

    def write(self, text: str, /) -> int:
        """Take a part of the output, which may end within a line. Return its length."""
        # the line that has not ended yet is kept until the rest of it comes
        *lines, begun = (self._begun + text).split("\n")
        self._begun = begun[:MAX_BEGUN]
        for line in lines:
            if line.strip():
                self._last = line[-MAX_LINE:]
            if line.startswith(RESULT):
                self._result = line[-MAX_LINE:]
        return len(text)

    @property
    def shown(self) -> str:
        """The line that says what was recorded, else the last line; empty before the first."""
        return self._result or self._last


class RecordingThread:
    """A recording on the console's machine, as `sam3-node record` makes it, in a thread."""

    def __init__(self, settings: Settings, on_change: Callable[[], None]) -> None:
        self._settings = settings
        self._on_change = on_change
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._out = RecorderLines()
        self._lock = threading.Lock()

    def switch(self, on: bool) -> None:
        """Start a recording to `record.out`, or stop it. Do nothing if that is done already."""
        with self._lock:
            if on and not self.is_running:
                # an event and an output of its own for each recording: the last one may still be ending
                self._stop = threading.Event()
                self._out = RecorderLines()
                self._thread = threading.Thread(target=self._run, args=(self._stop, self._out), daemon=True)
                self._thread.start()
            elif not on:
                self._stop.set()

    def join(self) -> None:
        """Wait until the file is finished."""
        if self._thread is not None:
            self._thread.join(STOP_S)

    @property
    def is_running(self) -> bool:
        """True while messages are recorded."""
        return self._thread is not None and self._thread.is_alive()

    def state(self) -> Mapping[str, object]:
        """Return whether it runs, and the recorder's last line; after the end, the line about the file."""
        return {"on": self.is_running and not self._stop.is_set(), "line": self._out.shown}

    def _run(self, stop: threading.Event, out: RecorderLines) -> None:
        # imported when a recording begins: it needs the extra `bags`
        from ..recording.recorder import run_record

        try:
            run_record(self._settings, stop, out)
        except Sam3NodeError as error:
            out.write(f"recording failed: {error}\n")
        finally:
            self._on_change()
