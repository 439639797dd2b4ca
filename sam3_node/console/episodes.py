"""The page that edits the episodes of a dataset: its list, its pictures, and its requests.

The work is in `recording.lerobot`: `PendingEdits` keeps the edits, and writes them as the command `episodes` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

import cv2
import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import RequestError
from ..recording.lerobot.editing import Piece
from ..recording.lerobot.layouts import LayoutV3
from ..recording.lerobot.listing import EpisodeSummary, draw_strip, summarise
from ..recording.lerobot.pending import EpisodeEdit, PendingDataset, PendingEdits, join_edits
from ..recording.lerobot.records import EpisodeRecord
from ..schema.fields import Name, Natural
from .marking import read_arguments

EDIT = "edit_episode"
"""Request that adds an edit. Its arguments are the fields of an EpisodeEdit."""
UNDO = "undo_edit"
"""Request that takes back the last edit."""
WRITE = "write_episodes"
"""Request that writes the copy."""
MAX_STRIPS = 400
"""Strips of pictures that are kept, about 30 KB each."""
MAX_DIGITS = 9
"""Digits of the number of an episode in a URL."""


class ShownEpisode(EpisodeSummary, frozen=True):
    """An episode with what becomes of it."""

    new_task: str
    pieces: list[tuple[float, float]]
    """seconds from its first row at which what stays begins and ends; none if it is dropped"""


class ShownCopy(msgspec.Struct, frozen=True):
    """The copy that was written last."""

    folder: str
    changes: Sequence[str]
    rows: str


class EpisodeList(msgspec.Struct, frozen=True):
    """All that the page shows."""

    name: str
    folder: str
    """folder of the dataset, in which the copy will be, too"""
    read_only: bool
    can_cut: bool
    """false for a version whose videos cannot be trimmed or split"""
    episodes: list[ShownEpisode]
    edits: int
    """number of edits that are pending"""
    last: EpisodeEdit | None
    """the one that is taken back first"""
    changed: int
    """number of episodes that they change"""
    new_name: str
    """a name for the copy"""
    written: ShownCopy | None


class _ShownEdits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of UNDO."""

    edits: Natural
    """number of edits that the page shows"""


class _CopyArguments(_ShownEdits, frozen=True, forbid_unknown_fields=True):
    """Arguments of WRITE."""

    name: Name


class EpisodeEditor:
    """The routes of the page, and its requests.

    Raises OutputError for a folder that is no dataset of this package, or a damaged one.
    """

    def __init__(self, dataset: Path, read_only: bool) -> None:
        self._pending = PendingEdits(dataset)
        self._read_only = read_only
        self._written: ShownCopy | None = None
        self._strips: dict[int, tuple[EpisodeRecord, bytes]] = {}
        self._drawing = Lock()
        self.routes = [
            Route("/api/episodes", self._show_list),
            Route("/api/strips/{episode}", self._show_strip),
        ]

    def call(self, op: str, args: Mapping[str, object]) -> Mapping[str, object]:
        """Carry out a request and return what the page shows then, as JSON values.

        Raises RequestError for another request and for wrong arguments, and what `PendingEdits` raises.
        """
        if op == EDIT:
            found = self._pending.add(read_arguments(args, EpisodeEdit, op))
        elif op == UNDO:
            found = self._pending.undo(read_arguments(args, _ShownEdits, op).edits)
        elif op == WRITE:
            copy = read_arguments(args, _CopyArguments, op)
            written = self._pending.write(copy.name, copy.edits)
            self._written = ShownCopy(str(written.folder), written.changes, written.rows)
            found = self._pending.read()
        else:
            raise RequestError(f"expected one of {EDIT}, {UNDO}, {WRITE}, found {op!r:.40}")
        plain: Mapping[str, object] = msgspec.to_builtins(self._describe(found))
        return plain

    def _describe(self, found: PendingDataset) -> EpisodeList:
        pieces: dict[int, list[Piece]] = {episode.number: [] for episode in found.episodes}
        for piece in found.pieces:
            pieces[piece.episode.number].append(piece)
        episodes = [_show(episode, pieces[episode.number]) for episode in found.episodes]
        dataset = self._pending.dataset
        return EpisodeList(
            name=dataset.name,
            folder=str(dataset.parent),
            read_only=self._read_only,
            can_cut=found.layout is LayoutV3,
            episodes=episodes,
            edits=len(found.edits),
            last=found.edits[-1] if found.edits else None,
            changed=len(join_edits(found.edits).episodes),
            new_name=self._pending.suggest_name(),
            written=self._written,
        )

    async def _show_list(self, request: Request) -> Response:
        # in a thread, because thousands of records take seconds
        shown = await run_in_threadpool(lambda: self._describe(self._pending.read()))
        return Response(msgspec.json.encode(shown), media_type="application/json")

    async def _show_strip(self, request: Request) -> Response:
        number = request.path_params["episode"]
        data = await run_in_threadpool(self._make_strip, number)
        return Response(data, media_type="image/jpeg")

    def _make_strip(self, number: str) -> bytes:
        """Return the pictures of an episode as JPEG. Raises RequestError for none, OutputError for damaged files."""
        episodes = self._pending.read().episodes
        if not number.isdecimal() or len(number) > MAX_DIGITS or int(number) >= len(episodes):
            raise RequestError(f"expected an episode below {len(episodes)}, found {number!r:.40}")
        episode = episodes[int(number)]
        kept = self._strips.get(episode.number)
        if kept is not None and kept[0] == episode:
            return kept[1]
        # one at a time: a page asks for many, and each decodes a video
        with self._drawing:
            data = cv2.imencode(".jpg", draw_strip(self._pending.dataset, episode))[1].tobytes()
            self._strips[episode.number] = (episode, data)
            if len(self._strips) > MAX_STRIPS:
                del self._strips[next(iter(self._strips))]
        return data


def _show(episode: EpisodeRecord, pieces: Sequence[Piece]) -> ShownEpisode:
    summary = msgspec.structs.asdict(summarise(episode))
    return ShownEpisode(
        **summary,
        new_task=pieces[0].task if pieces else episode.task,
        pieces=[(piece.begin / episode.fps, piece.end / episode.fps) for piece in pieces],
    )
