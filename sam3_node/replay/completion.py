"""Merges the masks of a forward and a backward pass over the same frames to one stream.

Completion of a job: checks that a folder's results are of the same job, then writes outputs and the summary.

job.json identifies the job, its settings and its weights, so that results of different jobs are never mixed.
summary.json is written last: with `complete: true` it marks the results as complete. A replay that was stopped writes
the outputs of what is done, and a summary with `complete: false`; it can go on later.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import ReplayError
from ..geometry import mask_iou
from ..settings import Settings
from ..types import Instance, MaskFrame
from .job import SECTIONS, Job
from .outputs import write_outputs
from .schedule import Schedule
from .second_pass import is_confident
from .shards import FIRST_PASS, SECOND_PASS, Shards
from .store import Store, Summary

MIN_AGREEMENT_IOU = 0.5
"""Minimum IoU of both passes on the first frame of a span for them to agree."""


def read_results(store: Store, min_score: float) -> Iterator[MaskFrame]:
    """Yield the masks of a replay whose shards are complete, merged if there are two passes.

    `min_score` is the parameter of `merge`.
    """
    first, second = Shards(store), Shards(store, SECOND_PASS)
    if not len(second):
        return first.masks()
    return merge(first.masks(), reverse_shards(second.readers()), min_score)


def reverse_shards(readers: Sequence[Callable[[], Iterable[MaskFrame]]]) -> Iterator[MaskFrame]:
    """Yield the masks of a backward pass in the order of the frames, one shard in memory at a time.

    `readers` are those of `Shards.readers`. The shards, and the frames in them, are stored latest first.
    """
    for read in reversed(readers):
        yield from reversed(list(read()))


def merge(
    forward: Iterable[MaskFrame], backward: Iterable[MaskFrame], min_score: float
) -> Iterator[MaskFrame]:
    """Yield the forward pass's frames. An object in both passes has the mask with the higher score, forward on a tie.

    `backward` has some of these frames in the same order, which is the recording's over all cameras. Ids mean the same
    objects in both. A backward span is left out if the forward pass was confident (`min_score`) on the span's first
    frame and both masks there have an IoU below MIN_AGREEMENT_IOU: then the span follows another object.

    A frame keeps the forward pass's times. Its objects are in the forward pass's order, then those of the backward pass
    alone. `age` and `frames_since_seen` are counted again in frame order. Two frames are in memory. Raises ReplayError
    at the end if a frame of `backward` is not in `forward`.
    """
    ages, selector, remaining = _AgeCounter(), _PassSelector(min_score), iter(backward)
    behind = next(remaining, None)
    for masks in forward:
        if behind is not None and behind.key == masks.key:
            masks, behind = selector.select(masks, behind), next(remaining, None)
        yield ages.count(masks)
    if behind is not None:
        raise ReplayError(
            f"camera {behind.camera}: expected the second pass's frame {behind.seq} among those of the first, found "
            "that it is not; start over with --again"
        )


class _AgeCounter:
    """Counts for each object the frames that it was tracked on, and the frames since it was seen."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], tuple[int, int]] = {}

    def count(self, masks: MaskFrame) -> MaskFrame:
        """Return the frame with both counts updated."""
        instances = tuple(self._count_instance((masks.camera, item.id), item) for item in masks.instances)
        return replace(masks, instances=instances)

    def _count_instance(self, key: tuple[str, int], instance: Instance) -> Instance:
        # the age is 0 only on a first frame that the object was marked on
        age, since = self._counts.get(key, (min(instance.age, 1) - 1, 0))
        age, since = age + 1, since + 1 if instance.frames_since_seen else 0
        self._counts[key] = age, since
        return replace(instance, age=age, frames_since_seen=since)


class _PassSelector:
    """Selects masks of both passes, whose frames come in order. On the last frame of a span, an object has age 1."""

    def __init__(self, min_score: float) -> None:
        self._min_score = min_score
        self._spans: dict[tuple[str, int], tuple[int, bool]] = {}

    def select(self, forward: MaskFrame, backward: MaskFrame) -> MaskFrame:
        """Return one frame as `merge` describes it."""
        selected: dict[int, Instance] = {instance.id: instance for instance in forward.instances}
        for instance in backward.instances:
            before = selected.get(instance.id)
            agrees = self._check_span(forward.camera, before, instance)
            if agrees and (before is None or instance.score > before.score):
                selected[instance.id] = replace(instance, world_id=before.world_id if before else None)
        return replace(forward, instances=tuple(selected.values()))

    def _check_span(self, camera: str, before: Instance | None, instance: Instance) -> bool:
        """Return True if the instance belongs to a span that agrees with the forward pass on its first frame."""
        age, agrees = self._spans.get((camera, instance.id), (1, True))
        if age <= 1:
            agrees = (
                before is None
                or not is_confident(before, self._min_score)
                or mask_iou(before.mask, instance.mask) >= MIN_AGREEMENT_IOU
            )
        self._spans[camera, instance.id] = instance.age, agrees
        return agrees


log = logging.getLogger(__name__)

IDENTITY = "job.json"
SUMMARY = "summary.json"
FREE_FIELDS = ("out", "outputs", "allow_gaps")
"""Fields of a job that may change when it is continued."""
DIGESTS = ("model_digest", "detector_digest")

ProgressCallback = Callable[[str, int, int | None], None]
"""Called with the current task, the number of its completed frames, and their total (None if unknown)."""


class StoppedError(ReplayError):
    """Raised when a replay is stopped on request. Its results so far are kept."""

    def __init__(self, frames: int, then: str = "continues from there") -> None:
        super().__init__(
            f"stopped after {frames} frames, which are kept, also in the outputs; the same command {then}"
        )


def build_identity(job: Job, settings: Settings, path: Path) -> dict[str, Any]:
    """Collect what must be equal for masks to be equal, except the weights, as JSON values. `path`: the recording."""
    fixed = {name: value for name, value in asdict(job).items() if name not in FREE_FIELDS}
    if not job.depth_aligned:
        del fixed["depth_aligned"]  # earlier versions did not write it
    sections = {name: getattr(settings, name).model_dump(mode="json") for name in SECTIONS}
    size = path.stat().st_size if path.is_file() else None
    identity: dict[str, Any] = json.loads(json.dumps({"job": fixed, "settings": sections, "bytes": size}))
    return identity


def read_digests(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests of the weights in a Perception's description."""
    return {name: description.get(name, "") for name in DIGESTS}


def check_identity(store: Store, identity: Mapping[str, Any]) -> None:
    """Compare an identity with the stored one, and store entries that are new.

    Raises ReplayError with the differences.
    """
    stored = read_identity(store)
    if not all(name in stored for name in identity):
        store.write(IDENTITY, json.dumps({**stored, **identity}, indent=2).encode())
    expected = {name: stored.get(name, identity[name]) for name in identity}
    differences = _list_differences("", expected, identity)
    if differences:
        raise ReplayError(
            f"the folder holds results of another job: {'; '.join(differences[:4])}; choose another folder, or start "
            "over with --again"
        )


def read_identity(store: Store) -> dict[str, Any]:
    """Return the stored identity; an empty map if there is none."""
    if not store.exists(IDENTITY):
        return {}
    try:
        identity = json.loads(store.read(IDENTITY))
    except ValueError:
        identity = None
    if not isinstance(identity, dict):
        raise ReplayError(
            f"{IDENTITY}: expected the identity of a replay, found other bytes; start over with --again"
        )
    return identity


def _list_differences(name: str, stored: Any, current: Any) -> list[str]:
    if isinstance(stored, dict) and isinstance(current, dict):
        keys = dict.fromkeys([*stored, *current])
        nested = [_list_differences(f"{name}.{key}", stored.get(key), current.get(key)) for key in keys]
        return [line for lines in nested for line in lines]
    return [] if stored == current else [f"{name.strip('.')} was {stored!r:.80}, is {current!r:.80}"]


@dataclass(frozen=True, slots=True)
class Completion:
    """Writes the results of a job into `store`, whether it is done or was stopped."""

    schedule: Schedule
    store: Store
    progress: ProgressCallback
    stop: threading.Event

    def read_finished(self) -> Summary | None:
        """Return the summary if all frames are done."""
        return read_complete_summary(self.store)

    def write(self, summary: Summary) -> Summary:
        """Write the missing outputs, then the summary. A stop does not interrupt this.

        An incomplete summary counts as one without outputs: they are replaced when the job goes on.
        """
        missing: list[str] = [kind for kind in self.schedule.job.outputs if kind not in summary.outputs]
        if "images" in missing and "coco" in summary.outputs:
            missing.append("coco")  # it names the images
        if missing:
            if not summary.complete:
                log.warning(
                    "stopped: the outputs of what is done are written; another interrupt ends that, too"
                )
            min_score = self.schedule.settings.detector.min_track_score
            masks = partial(read_results, self.store, min_score)
            total = sum(summary.cameras.values())
            on_progress: Callable[[str, int], None] = lambda kind, done: self.progress(  # noqa: E731
                f"writing {kind}", done, total
            )
            self.store.keep(
                write_outputs(
                    self.store.folder,
                    missing,
                    masks,
                    self.schedule.frames,
                    on_progress,
                    recording=PurePosixPath(summary.bag).name,
                    has_images="images" in summary.outputs,
                    dataset=self.schedule.dataset,
                )
            )
        if missing or self.read_finished() is None:
            summary = replace(summary, outputs=list(dict.fromkeys([*summary.outputs, *missing])))
            self.store.write(SUMMARY, summary.to_json().encode())
        if summary.complete:
            for folder in (FIRST_PASS, SECOND_PASS):
                Shards(self.store, folder).finish()
        return summary


def read_complete_summary(store: Store) -> Summary | None:
    """Return the summary of results that are complete, None for others."""
    summary = Summary.from_json(store.read(SUMMARY)) if store.exists(SUMMARY) else None
    return summary if summary and summary.complete else None


def clear_results(store: Store) -> None:
    """Delete all results, the completion marker first. Outputs stay."""
    store.delete(SUMMARY)
    for folder in (SECOND_PASS, FIRST_PASS):
        Shards(store, folder).clear()
    store.delete(IDENTITY)
