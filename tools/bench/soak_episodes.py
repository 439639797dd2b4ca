"""Episodes of demonstrations for a long run: marked by a client, recorded to a LeRobot dataset, each accounted for.

A recorder is a member of the group, and is killed and stopped as the others are. Each episode has a task that no other
has, so that the dataset, or a line of the recorder or of `convert`, can name it. At the end `convert` appends what the
dataset lacks. An episode that is in neither was lost without a word.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet

from sam3_node.client import PerceptionClient
from sam3_node.errors import Sam3NodeError

NAME = "recorder"
READY = r"^record frames from"
"""Line of a recorder that has started."""
FPS = 10
"""Rows per second of the dataset, whatever the camera's pauses."""
MAX_GAP_S = 5.0
"""Seconds between two frames of an episode. Faults make longer gaps, after which an episode is left out by name."""
DISCARDED = 0.2
"""Share of the episodes that are discarded."""
LAST_S = 300.0
"""Seconds that the recorder has for its last episodes."""
_NAMED = re.compile(r"'(task \d+)'")


@dataclass
class Marked:
    """An episode that the node has begun, by its task. Times are seconds of `time.monotonic`."""

    task: str
    begin_s: float
    end_s: float | None = None
    """when the node ended it; None: it did not, because it was started again"""


class Marker(threading.Thread):
    """A thread that begins and ends episodes of some seconds. It begins at once."""

    def __init__(self, client: PerceptionClient, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._chance = chance
        self._over = threading.Event()
        self.marked: list[Marked] = []
        self.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._over.set()
        self.join()

    def run(self) -> None:
        """Mark one episode after the other until the end."""
        count = 0
        while not self._over.wait(self._chance.uniform(0.5, 3.0)):
            count += 1
            try:
                self._client.begin_episode(f"task {count}")
            except Sam3NodeError:  # a node that restarts
                continue
            episode = Marked(f"task {count}", time.monotonic())
            self.marked.append(episode)
            self._over.wait(self._chance.uniform(3.0, 10.0))
            try:
                self._client.end_episode(keep=self._chance.random() >= DISCARDED)
            except Sam3NodeError:
                continue
            episode.end_s = time.monotonic()


@dataclass
class Recorded:
    """The files and the lines of the recorder of a run."""

    folder: Path
    lines: list[str] = field(default_factory=list)
    """what recorder and `convert` said of episodes"""

    @property
    def words(self) -> tuple[str, ...]:
        """The recorder's arguments."""
        return ("record", str(self._recordings), *self._conversion)

    @property
    def environment(self) -> dict[str, str]:
        """The recorder's settings."""
        return {"SAM3_RECORD__CAMERAS": "cam0", "SAM3_RECORD__COLOUR": "jpeg"}

    @property
    def _recordings(self) -> Path:
        return self.folder / "recordings"

    @property
    def _conversion(self) -> tuple[str, ...]:
        gap = ("--lerobot.max_gap_s", f"{MAX_GAP_S:g}")
        return ("--lerobot", str(self.folder / "dataset"), "--fps", str(FPS), *gap)

    def note(self, line: str) -> None:
        """Keep a line of a member if it says what became of an episode."""
        if "lerobot:" in line:
            self.lines.append(line)

    def convert(self) -> None:
        """Append to the dataset what it lacks of the recordings."""
        command = [sys.executable, "-m", "sam3_node", "convert", str(self._recordings), *self._conversion]
        done = subprocess.run(command, capture_output=True, text=True)
        self.lines += [*done.stdout.splitlines(), *done.stderr.splitlines()]

    def list_tasks(self) -> set[str]:
        """Return the tasks of the dataset, by another reader of its tables."""
        tables = sorted((self.folder / "dataset/meta/episodes").rglob("*.parquet"))
        return {
            task
            for path in tables
            for episode in pyarrow.parquet.read_table(path, columns=["tasks"]).to_pylist()
            for task in episode["tasks"]
        }

    def account(self, marked: Iterable[Marked], unseen_s: Iterable[tuple[float, float]]) -> dict[str, Any]:
        """Return what became of each episode, as numbers, and the tasks of those that were lost.

        unseen_s: spans of time in which the recorder did not run. An episode that lies within one left no mark.
        """
        spans = list(unseen_s)
        stored = self.list_tasks()
        named = set(_NAMED.findall("\n".join(self.lines)))
        counts = {"stored": 0, "named": 0, "unseen": 0}
        lost = []
        for episode in marked:
            end_s = episode.end_s or episode.begin_s
            if episode.task in stored:
                counts["stored"] += 1
            elif episode.task in named:
                counts["named"] += 1
            elif any(begin <= episode.begin_s and end_s <= end for begin, end in spans):
                counts["unseen"] += 1
            else:
                lost.append(episode.task)
        return {"begun": sum(counts.values()) + len(lost), **counts, "lost": lost, "lines": self.lines}
