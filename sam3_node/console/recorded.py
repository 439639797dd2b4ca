"""Play a recording as views, and compare its masks with another result."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from ..bags.marks import MarkFile, name_marks
from ..bags.native.reader import RecordedMasks, RecordingReader
from ..bags.pairing import TimeSpan
from ..bags.review import QueueEntry, Reviewer
from ..errors import BagError, RequestError
from ..geometry import mask_iou
from ..resources import Closeable
from ..schema.marks import Mark
from ..types import NANOSECONDS, Frame, FrameKey, MaskFrame
from ..wire import masks_topic, pack_masks, unpack_masks
from .views import FrameView, Listener

READ_AHEAD_NS = NANOSECONDS // 2
"""Nanoseconds of the recording that are read at once: a player asks for one frame after the other."""
MAX_CACHED_BYTES = 64 << 20
"""Maximum size of the pictures of one read that are kept, in bytes."""
CHUNK = 64
"""Frames that are compared between two notices to the page."""
MASKS_FILE = "masks.mcap"
"""Name of the masks in a replay's folder of outputs."""


class Entry(NamedTuple):
    """A frame of the recording: its key, and the time at which it was recorded."""

    key: FrameKey
    logged_ns: int


class ComparedFrame(msgspec.Struct, frozen=True):
    """What the timeline shows of a frame."""

    camera: str
    seq: int
    s: float
    """since the first frame, in seconds"""
    doubtful: int
    """doubtful masks of both results"""
    iou: float | None
    """mean IoU of the objects of both results; None if one has no masks of the frame"""


class Review(msgspec.Struct, frozen=True):
    """What people have said of a recording, and what they should look at next."""

    revision: int
    """It counts up with every change."""
    marks: tuple[Mark, ...] = ()
    queue: tuple[QueueEntry, ...] = ()


class Results:
    """The masks of a recording by frame, packed; the ground truth if it `is_truth`, or has no masks of a node."""

    def __init__(self, reader: RecordingReader, is_truth: bool = False) -> None:
        self.kind = "masks"
        self._bodies: dict[FrameKey, bytes] = {}
        if not is_truth:
            for action in reader.actions():
                if isinstance(action, RecordedMasks):
                    self._bodies[action.masks.key] = action.body
        # a recording without a node's masks may have the truth
        if not self._bodies:
            self.kind = "truth"
            self._bodies = {masks.key: pack_masks(masks)[1] for masks in reader.truth()}

    def __len__(self) -> int:
        return len(self._bodies)

    def find_highest_id(self, camera: str) -> int:
        """Return the highest id of a camera's objects; 0 without objects. Reads all masks."""
        frames = (self.find(key) for key in self._bodies if key.camera == camera)
        return max((one.id for masks in frames if masks for one in masks.instances), default=0)

    def find(self, key: FrameKey) -> MaskFrame | None:
        """Return the masks of a frame, None if there are none."""
        body = self._bodies.get(key)
        if body is None:
            return None
        return unpack_masks([masks_topic(key.camera), body])


class RecordedViews(Closeable):
    """Views of a recording by index, and the comparison of each in a background thread. A context manager.

    The masks come from `results`, else from the recording, or from `against` if it has none. Without `against`, they
    are compared with the recording's own ground truth, if it has any. People mark the masks of a node or a replay.
    Raises BagError for a file that is no recording, for one without frames, for a result that has no masks of these
    frames, and for a file of marks that cannot be read.
    """

    mode = "recording"

    def __init__(
        self, recording: Path, against: Path | None, on_change: Listener, results: Path | None = None
    ) -> None:
        self.name = recording.name
        self.marks = MarkFile(name_marks(recording))
        self.other_name: str | None = None
        if against is not None:
            self.other_name = against.name
        self._on_change = on_change
        self._reader = RecordingReader([recording])
        self.entries = [Entry(*found) for found in self._reader.frame_keys()]
        if not self.entries:
            raise BagError(
                f"{recording}: expected recorded frames, found none; --recording names the file with the pictures, "
                "--against one with other masks of them"
            )
        # the masks to look at, and what they are compared with: another result, or the recording's truth
        self._masks = Results(self._reader) if results is None else _open_results(results)
        self._check_frames(self._masks, results)
        self._other: Results | None = None
        if against is not None:
            self._other = _open_results(against)
        elif self._masks.kind == "masks":
            truth = Results(self._reader, is_truth=True)
            if len(truth):
                self._other = truth
                self.other_name = self.name
        self._check_frames(self._other, against)
        # a recording without masks shows those of the other result, and compares nothing
        if self._other is not None and not len(self._masks):
            self._masks = self._other
            self._other = None
        self._frames: dict[FrameKey, Frame] = {}
        self._reading = threading.Lock()
        self._compared: list[ComparedFrame] = []
        self._places = {(entry.key.camera, entry.key.seq) for entry in self.entries}
        self._reviewer = Reviewer()
        self._reviewing = threading.Lock()
        self._review = Review(0)
        self._revision = 1
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._compare_all, name="console compare", daemon=True)
        self._thread.start()

    def view(self, index: int) -> FrameView:
        """Return the view of an index, clipped to the recording."""
        index = min(max(index, 0), len(self.entries) - 1)
        entry = self.entries[index]
        masks = self._masks.find(entry.key)
        other = self._find_other(entry.key)
        # a frame without masks of its own still shows those of the other result
        if masks is None and other is not None:
            masks = MaskFrame(*entry.key, width=other.width, height=other.height)
        return FrameView(self._read_frame(entry), masks, other, index)

    def state(self) -> Mapping[str, object]:
        """Return names and sizes of what is played."""
        return {
            "connected": True,
            "problem": self._reader.lost or "",
            "recording": self.name,
            "against": self.other_name,
            "kind": self._masks.kind,
            "other_kind": None if self._other is None else self._other.kind,
            "frames": len(self.entries),
            "compared": len(self._compared),
        }

    def timeline(self, start: int) -> Sequence[ComparedFrame]:
        """Return what the timeline shows of the frames from `start` on that are compared already."""
        return self._compared[start:]

    @property
    def can_mark(self) -> bool:
        """True for masks of a node or a replay: the truth needs no correction."""
        return self._masks.kind == "masks"

    @property
    def revision(self) -> int:
        """The revision of the review: a page that has this one needs no other."""
        return self._revision

    def review(self) -> Review:
        """Return the marks, and the queue of the frames that are compared already."""
        with self._reviewing:
            if self._review.revision != self._revision:
                marks = self.marks.marks
                self._review = Review(self._revision, marks, tuple(self._reviewer.queue(marks)))
            return self._review

    def add_mark(self, mark: Mark) -> Mark:
        """Keep a mark, and return it. A prompt without an id gets that of a new object.

        Raises RequestError for a mark of a frame that the recording lacks, and what `MarkFile.add` raises.
        """
        if (mark.camera, mark.seq) not in self._places:
            raise RequestError(
                f"mark: expected a frame of {self.name}, found camera {mark.camera!r:.60}, {mark.seq}"
            )
        if mark.has_prompt and mark.id is None:
            mark = msgspec.structs.replace(mark, id=self._find_free_id(mark.camera))
        self.marks.add(mark)
        self._revise()
        self._on_change()
        return mark

    def undo_mark(self) -> Mark | None:
        """Take back the last mark, and return it; None if there is none."""
        mark = self.marks.undo()
        self._revise()
        self._on_change()
        return mark

    def _find_free_id(self, camera: str) -> int:
        """Return an id that neither the masks nor the marks of a camera have."""
        marked = [mark.id or 0 for mark in self.marks.marks if mark.camera == camera]
        return max([self._masks.find_highest_id(camera), *marked]) + 1

    def _revise(self) -> None:
        with self._reviewing:
            self._revision += 1

    def close(self) -> None:
        """Stop comparing. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _find_other(self, key: FrameKey) -> MaskFrame | None:
        if self._other is None:
            return None
        return self._other.find(key)

    def _check_frames(self, results: Results | None, path: Path | None) -> None:
        keys = {entry.key for entry in self.entries}
        # one common frame is enough: a result may cover a part of the recording
        if path is not None and results is not None and not any(results.find(key) for key in keys):
            first = self.entries[0].key
            raise BagError(
                f"{path}: expected masks of frames of {self.name}, such as camera {first.camera}, seq {first.seq}, "
                "found none; compare results of the same recording"
            )

    def _read_frame(self, entry: Entry) -> Frame | None:
        """Return a frame. The following half second is read with it and kept until another is read."""
        with self._reading:
            if entry.key not in self._frames:
                self._frames = {}
                size = 0
                for frame in self._reader.frames(TimeSpan(entry.logged_ns, entry.logged_ns + READ_AHEAD_NS)):
                    self._frames[frame.key] = frame
                    size += memoryview(frame.colour).nbytes
                    # large pictures: no more than fit, but always the one that was asked for
                    if size > MAX_CACHED_BYTES and entry.key in self._frames:
                        break
            return self._frames.get(entry.key)

    def _compare_all(self) -> None:
        reviewed = CHUNK
        for number, entry in enumerate(self.entries, 1):
            # a long recording takes minutes: its timeline grows meanwhile, and the page is told now and then
            if self._closing.is_set():
                return
            masks = self._masks.find(entry.key)
            if masks is not None and self.can_mark:
                with self._reviewing:
                    self._reviewer.add(number - 1, masks)
            other = self._find_other(entry.key)
            doubtful = 0
            for found in (masks, other):
                if found is not None:
                    doubtful += sum(item.doubtful for item in found.instances)
            iou = compare(masks, other)
            self._compared.append(
                ComparedFrame(
                    entry.key.camera,
                    entry.key.seq,
                    round((entry.logged_ns - self.entries[0].logged_ns) / NANOSECONDS, 3),
                    doubtful,
                    None if iou is None else round(iou, 3),
                )
            )
            # the queue takes as long as there are frames: it is made anew when they are twice as many
            if number >= 2 * reviewed or number == len(self.entries):
                reviewed = number
                self._revise()
            if number % CHUNK == 0 or number == len(self.entries):
                self._on_change()


def _open_results(path: Path) -> Results:
    """Return the masks of a file, or of a replay's folder."""
    return Results(RecordingReader([path / MASKS_FILE if path.is_dir() else path]))


def compare(masks: MaskFrame | None, other: MaskFrame | None) -> float | None:
    """Return the mean IoU of two results of a frame; None without masks of one, or without objects in view.

    Ids of two results need not agree. Masks are paired greedily, the highest IoU first; a mask without partner counts
    as 0.
    """
    if masks is None or other is None:
        return None
    left = [instance.mask for instance in masks.instances if instance.mask.crop.size]
    right = [instance.mask for instance in other.instances if instance.mask.crop.size]
    if not left and not right:
        return None
    # the IoU of each mask of one result with each of the other; masks of different sizes have none
    ious = np.zeros((len(left), len(right)))
    for row, mask in enumerate(left):
        for column, other_mask in enumerate(right):
            if mask.size == other_mask.size:
                ious[row, column] = mask_iou(mask, other_mask)
    # greedily: the best pair, then the best of the rest
    total = 0.0
    while ious.any():
        best_row, best_column = np.unravel_index(ious.argmax(), ious.shape)
        total += float(ious[best_row, best_column])
        ious[best_row] = 0
        ious[:, best_column] = 0
    return total / max(len(left), len(right))
