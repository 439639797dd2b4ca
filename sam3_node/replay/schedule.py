"""What a job does with a recording: its actions in order, and the settings that they are done with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..bags.bag import open_bag
from ..bags.natural_order import natural_order
from ..bags.record_writer import NODE
from ..bags.recorded import Recorded, RecordedMasks, is_recorded
from ..closing import Closing
from ..errors import ReplayError
from ..operations import CHANGES
from ..types import Frame, MaskFrame
from ..wire import Event
from .actions import Action, Edit, Notes
from .configure import settings_for
from .every import Edits, edits_of, every_frame, with_objects
from .extent import messages_on
from .job import Job
from .lookup import with_frames
from .plan import Planned, Stepped, planned


class Schedule(Closing):
    """A job on its one recording, which is at `path`, opened. Each call of `actions` or `frames` begins again. A
    context manager.

    Raises BagError for what is no recording, ReplayError where it cannot be replayed as it was recorded.
    """

    def __init__(self, job: Job, path: Path) -> None:
        self.job = job
        self.notes = Notes(job.allow_gaps)
        self._files = sorted(path.glob("*.mcap"), key=natural_order) if path.is_dir() else [path]
        self._recorded = _recorded(self._files)
        if job.mode == "as-recorded" and self._recorded is None:
            raise ReplayError(
                f"as-recorded: expected a recording that sam3-node record made, found another at {path}; "
                "use --every"
            )
        self.description = _description(self._recorded)
        self.settings = settings_for(job, self.description)
        self._bag = open_bag(path, job.topics)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Those that are replayed."""
        return self._bag.cameras

    @property
    def lost(self) -> str | None:
        """What of the recording could not be read, None where all was; so far."""
        return self._bag.lost or (self._recorded.lost if self._recorded else None)

    def actions(self) -> Iterator[Action]:
        """Steps and edits in their order."""
        if self.job.mode == "as-recorded":
            plan = planned(self._log(), self.description)
            yield from with_frames(_of_cameras(plan, self.cameras), self._bag, self.notes)
            return
        if self.job.names:
            yield Edit("set_prompts", {"prompts": list(self.job.names)})
        asked = bool(self.job.names or self.job.objects)
        edits = Edits() if asked or self._recorded is None else edits_of(self._recorded.actions())
        yield from with_objects(every_frame(self.frames(), edits), self.job.objects, self.notes)

    def count(self) -> int | None:
        """How many frames are about to be stepped, where the recording's index tells."""
        if self.job.stop is not None:
            return self.job.stop - self.job.start
        roots = ("masks/{}",) if self.job.mode == "as-recorded" else ("/{}/header", "frame/{}")
        topics = [root.format(camera) for root in roots for camera in self.cameras]
        return messages_on(self._files, topics) or None

    def frames(self) -> Iterator[Frame]:
        """Those of the job, in the order of the recording."""
        return islice(self._bag, self.job.start, self.job.stop)

    def recorded_masks(self) -> Iterator[MaskFrame]:
        """What the live node found on these cameras; nothing where that is not recorded."""
        for item in self._log():
            if isinstance(item, MaskFrame) and item.camera in self.cameras:
                yield item

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        self._bag.close()

    def _log(self) -> Iterator[MaskFrame | Event]:
        for item in self._recorded.actions() if self._recorded else ():
            yield item.masks if isinstance(item, RecordedMasks) else item


def _recorded(files: Sequence[Path]) -> Recorded | None:
    files = [file for file in files if is_recorded(file)]
    return Recorded(files) if files else None


def _description(recorded: Recorded | None) -> Mapping[str, Any] | None:
    """What the node told of itself first."""
    found = recorded.metadata().get(NODE) if recorded else None
    return found[0] if found else None


def _of_cameras(plan: Iterable[Planned], cameras: Collection[str]) -> Iterator[Planned]:
    """Without what is done on other cameras. They are served all the same: who is asked may depend on how many are."""
    for item in plan:
        if isinstance(item, Stepped):
            wanted = item.camera in cameras
        elif isinstance(item, Edit):
            wanted = item.op not in CHANGES or item.args.get("camera") in (None, *cameras)
        else:
            wanted = True
        if wanted:
            yield item
