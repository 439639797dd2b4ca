"""The frame step: track many objects with one model, in batches, with a bounded memory for each object."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import RequestError, SettingsError
from ..models import Features, TrackerModel
from ..models.sam.stages import Decoded
from ..schema.state import Count, SavedPart, SavedState
from .following import BankState, FollowingLimits, choose_following
from .memory import SelectionRule, get_rule
from .propagation import Prompted, WarmUp
from .tracks import (
    Cover,
    ObjectPrompt,
    PromptTensors,
    RowsState,
    Track,
    Tracks,
    catching_key,
    combine_scores,
    decode_boxes,
    decode_clicks,
    split_tracks,
)

AnyPrompt = ObjectPrompt | PromptTensors


class TrackerState(SavedState):
    """What `Tracker` keeps."""

    frame_number: Count
    rows: RowsState
    bank: BankState


class Tracker(SavedPart[TrackerState]):
    """Tracks objects from prompts, frame by frame, with the memory of SAM 2 and SAM 3 (arXiv 2408.00714, 2511.16719).

    A prompted frame becomes a conditioning frame of its object only; other objects are not affected. A correction of a
    frame on which the object was tracked already does not: it is decoded with the memory before that frame, and
    replaces what was tracked there. Instead, a prompt on an earlier frame can begin to catch up (`begin_catch_up`). The
    constructor allocates memory for `max_objects` objects with `bank_size` frames each, for the `history` newest frames
    that can be corrected at once, and for `corrections` tracked objects that catch up at the same time. Nothing grows
    afterwards.

    Weights without memory modules follow the last masks (`LastMasks`); there, a prompt on a past frame replaces the
    last mask. A state fits a tracker of the same model with the same bank `layout`.
    """

    STATE = TrackerState

    def __init__(
        self,
        model: TrackerModel,
        max_objects: int = 16,
        bank_size: int = 7,
        selection: str | SelectionRule = "recent",
        history: int = 4,
        corrections: int = 0,
    ) -> None:
        if max_objects < 1 or bank_size < 2 or min(history, corrections) < 0:
            raise SettingsError(
                "expected max_objects >= 1, bank_size >= 2, history >= 0 and corrections >= 0, "
                f"found {max_objects}, {bank_size}, {history} and {corrections}"
            )
        self.model = model
        self.frame_number = 0
        rule = selection if isinstance(selection, SelectionRule) else get_rule(selection)
        limits = FollowingLimits(max_objects, corrections, bank_size, rule, history)
        self._rows, self.bank, self._propagation = choose_following(model, limits)

    @property
    def ids(self) -> list[int]:
        """Ids of the objects that each step tracks, in the order in which they were added or joined."""
        return [key for key in self._rows if key >= 0]

    @property
    def capacity(self) -> int:
        """Greatest number of objects."""
        return self._rows.capacity

    @torch.inference_mode()
    def step(self, pixels: Tensor, prompts: Sequence[AnyPrompt] = ()) -> Tracks:
        """Track all objects on the next frame. Each prompt adds an object, or corrects the tracked object of its id.

        pixels: float [1, 3, S, S], as `TrackerModel.preprocess` returns them. Raises RequestError, CapacityError or
        ModelError for a bad prompt; the tracker is unchanged then.
        """
        return self.step_features(self.model.encode(pixels), prompts)

    @torch.inference_mode()
    def step_features(
        self,
        features: Features,
        prompts: Sequence[AnyPrompt] = (),
        held: Collection[int] = (),
        cover: Cover | None = None,
    ) -> Tracks:
        """Do the same as `step`, from features = model.encode(pixels).

        The objects `held` are not tracked on this frame, and are not among the result. They remember nothing of it.
        Nor do the objects that `cover` hides: they are not visible. Masks and memories leave out its pixels.
        """
        checked = self._check(prompts)
        frame = self.frame_number
        following = [
            object_id for object_id in self.ids if object_id not in checked and object_id not in held
        ]
        results = dict(zip(following, self._follow(features, following, frame, cover), strict=True))
        for object_id in cover.ids & results.keys() if cover else ():
            track = results[object_id]
            results[object_id] = track._replace(visible=torch.zeros_like(track.visible))
        for object_id, prompt in checked.items():
            results[object_id] = self._condition(features, frame, object_id, prompt)
        self._propagation.end_step(frame)
        self.frame_number += 1
        return self._tracks(results)

    @torch.inference_mode()
    def prompt_at(self, features: Features, frame_number: int, prompt: AnyPrompt) -> tuple[Tensor, Tensor]:
        """Add or correct an object on an earlier frame; return its logits [h, w] and score [].

        `features` belong to that frame. `frame_number` is the value of the attribute `frame_number` before that
        frame was stepped. The next step starts to track a new object. The correction of a frame that was tracked
        uses the memory before that frame, which is complete for the `history` newest frames.
        """
        self._check_past(frame_number)
        checked = self._check([prompt])[prompt.object_id]
        tracked = prompt.object_id in self._rows
        if tracked and self._propagation.has_tracked(self._rows[prompt.object_id], frame_number):
            result = self._correct(features, frame_number, prompt.object_id, checked)
        else:
            result = self._condition(features, frame_number, prompt.object_id, checked)
        return result.logits, result.score

    @torch.inference_mode()
    def begin_catch_up(
        self, features: Features, frame_number: int, prompt: AnyPrompt
    ) -> tuple[Tensor, Tensor]:
        """Add or correct an object on an earlier frame, from which it catches up; return logits [h, w] and score [].

        See `prompt_at` for the arguments. The frame becomes a conditioning frame. Until `join`, steps do not track a
        new object, and track a corrected one as before. Pass the frames after this one to `catch_up`. A second prompt
        begins again on its own frame, and keeps the first as a conditioning frame. Raises the errors of `prompt_at`,
        and CapacityError if too many corrections catch up.
        """
        self._check_past(frame_number)
        checked = self._check([prompt])[prompt.object_id]
        key = catching_key(prompt.object_id)
        # checked before anything changes
        if prompt.object_id in self._rows:
            self._rows.check_spare(key)
        result = self._condition(features, frame_number, key, checked)
        # the recent frames belong to an earlier catch-up, which this prompt restarts
        self.bank.forget_recent(self._rows[key])
        return result.logits, result.score

    @torch.inference_mode()
    def catch_up(self, object_id: int, features: Features, frame_number: int) -> Track | None:
        """Track an object that catches up on the next frame on its way; None for a conditioning frame.

        The result depends on the object's prompts and on these frames alone, not on the steps in between.
        """
        key = catching_key(object_id)
        # a prompted frame has its memory already
        if self.bank.is_conditioning(self._rows[key], frame_number):
            return None
        return self._follow_batch(features, [key], frame_number)[0]

    def join(self, object_id: int) -> None:
        """Let steps track an object that has caught up, with the memory of its way."""
        freed = self._rows.rename(catching_key(object_id), object_id)
        if freed is not None:
            self.bank.clear(freed)

    def give_up(self, object_id: int) -> None:
        """Let an object no longer catch up. A new one is unknown then, a corrected one is tracked as before."""
        self.bank.clear(self._rows.remove(catching_key(object_id)))

    @torch.inference_mode()
    def segment(self, features: Features, prompt: AnyPrompt) -> tuple[Tensor, Tensor]:
        """Segment one frame from a prompt without tracking; return logits [h, w] and score []."""
        decoded = self._decode_prompt(features, self._to_tensors(prompt))
        return decoded.logits[0], combine_scores(decoded.presence, decoded.iou)[0]

    @torch.inference_mode()
    def segment_candidates(self, features: Features, prompt: AnyPrompt) -> tuple[Tensor, Tensor]:
        """Segment one frame as `segment` does; return the K masks to choose from, [K, h, w], by falling scores [K].

        K is `TrackerModel.candidates`. `PromptTensors.choice` counts them.
        """
        decoded = self._decode_candidates(features, self._to_tensors(prompt))
        return decoded.logits, combine_scores(decoded.presence, decoded.iou)

    @torch.inference_mode()
    def propose(self, features: Features, boxes: Tensor) -> Decoded:
        """Segment one frame from D boxes in one batch, without tracking.

        boxes: float [D, 4] (x0, y0, x1, y1) in model pixels. The caller may keep the returned tensors.
        """
        corners = boxes.to(self.model.device, torch.float32).reshape(len(boxes), 2, 2)
        return decode_boxes(self.model, features, corners)

    @torch.inference_mode()
    def propose_clicks(self, features: Features, points: Tensor) -> Decoded:
        """Segment one frame from each of N clicks in one batch, without tracking, to all masks that may be meant.

        points: float [N, 2] in model pixels. The masks of a click are neighbours in the result.
        """
        clicks = points.to(self.model.device, torch.float32)[:, None]
        return decode_clicks(self.model, features, clicks)

    @torch.inference_mode()
    def adopt(
        self,
        features: Features,
        frame_number: int,
        object_id: int,
        proposals: Decoded,
        index: int,
        is_back: bool = False,
    ) -> Track:
        """Add or correct an object with one of the results of `propose`; the frame becomes a conditioning frame.

        `features` and `frame_number` belong to the frame that was passed to `propose`. `is_back`: the object was out of
        view, or another thing was taken for it. The last frames, which would say that it is not there, are forgotten.
        """
        self._rows.check_capacity(object_id not in self._rows)
        if is_back and object_id in self._rows:
            self.forget_recent(object_id)
        return self._start(features, frame_number, object_id, Prompted(proposals.pick(index)))

    def appearance(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the object pointers of the prompted frames of N objects, [N, P, C], and bool [N, P]: True if valid."""
        return self.bank.conditioning_pointers(np.array([self._rows[i] for i in ids], dtype=np.int64))

    def forget_recent(self, object_id: int) -> None:
        """Forget what an object was on the last frames; its prompted frames stay.

        Objects that share a memory keep it.
        """
        self._propagation.forget_absence(self._rows[object_id])

    def was_prompted(self, object_id: int, frame_number: int) -> bool:
        """Return True if an object's mask was given or detected on a frame: it is a conditioning frame."""
        return self.bank.is_conditioning(self._rows[object_id], frame_number)

    def take_moved(self) -> list[int]:
        """Return the ids of objects that share their memory with others than before, since the last call."""
        return self._propagation.take_moved()

    def remove(self, object_id: int) -> None:
        """Remove an object; UnknownObjectError if the id is not known. Other objects are not affected."""
        # an object may hold a row that steps track, one that catches up, or both
        catches_up = catching_key(object_id) in self._rows
        if catches_up:
            self.give_up(object_id)
        if object_id in self._rows or not catches_up:
            self.bank.clear(self._rows.remove(object_id))

    def reset(self) -> None:
        """Remove all objects and restart the frame count."""
        for key in list(self._rows):
            self.bank.clear(self._rows.remove(key))
        self.frame_number = 0

    def _check_past(self, frame_number: int) -> None:
        if not 0 <= frame_number < self.frame_number:
            raise RequestError(f"frame_number: expected 0 to {self.frame_number - 1}, found {frame_number}")

    def _check(self, prompts: Sequence[AnyPrompt]) -> dict[int, PromptTensors]:
        """Check all prompts before anything changes; return them as tensors, by object id."""
        ids = {prompt.object_id for prompt in prompts}
        if len(ids) != len(prompts):
            raise RequestError("expected at most one prompt an object a frame, found several for one")
        if ids and min(ids) < 0:
            raise RequestError(f"object_id: expected 0 or greater, found {min(ids)}")
        # an object that catches up holds a row already
        self._rows.check_capacity(len({i for i in ids if not {i, catching_key(i)} & set(self._rows)}))
        size = self.model.image_size
        device = self.model.device
        return {prompt.object_id: prompt.to_tensors(size, device) for prompt in prompts}

    def _follow(
        self, features: Features, ids: list[int], frame: int, cover: Cover | None = None
    ) -> list[Track]:
        """Track objects in batches that suit the device. Where its memory runs out, halve them from now on.

        A batch writes the bank last, so one that failed can run again.
        """
        tracks: dict[int, Track] = {}
        rest = list(ids)
        while rest:
            rows = np.array([self._rows[object_id] for object_id in rest], dtype=np.int64)
            positions = self._propagation.take_batch(rows, self.model.batch_size)
            batch = [rest[position] for position in positions]
            try:
                tracks.update(zip(batch, self._follow_batch(features, batch, frame, cover), strict=True))
                rest = [object_id for object_id in rest if object_id not in tracks]
                continue
            except torch.OutOfMemoryError:
                reads = self._propagation.count_reads(rows[positions])
                if reads == 1:
                    raise
            # here the traceback, which holds the failed batch's memory, is released
            self.model.limit_batch(reads // 2)
        return [tracks[object_id] for object_id in ids]

    def _follow_batch(
        self, features: Features, ids: list[int], frame: int, cover: Cover | None = None
    ) -> list[Track]:
        """Track one batch of objects that the device can run at once."""
        rows = np.array([self._rows[object_id] for object_id in ids], dtype=np.int64)
        hidden = np.array([cover is not None and object_id in cover.ids for object_id in ids])
        return split_tracks(self._propagation.follow(features, rows, frame, hidden, cover), len(ids))

    def warm_up_reads(self) -> None:
        """Run the read in every shape that needs a compiler, a plan or a graph, so that no frame waits for it."""
        self._propagation.warm_up_reads(self.capacity)

    def plan_warm_up(self, most: int) -> WarmUp:
        """Return with which numbers of objects, of at most `most`, the stages run other code."""
        return self._propagation.plan_warm_up(most)

    def _correct(self, features: Features, frame: int, object_id: int, prompt: PromptTensors) -> Track:
        """Decode a prompt on a tracked frame with the memories before it, and replace what was tracked there."""
        row = self._rows[object_id]
        if prompt.mask is not None:
            prompted = self._propagation.decode_mask(features, prompt.mask)
        else:
            remembered, prompt = self._propagation.prepare_correction(features, row, frame, prompt)
            prompted = Prompted(self._decode_prompt(features, prompt, remembered))
        self._propagation.correct(features, row, frame, self.frame_number, prompted)
        return split_tracks(prompted.decoded, 1)[0]

    def _condition(self, features: Features, frame: int, object_id: int, prompt: PromptTensors) -> Track:
        """Decode a prompted object without memory, then store the frame as a conditioning frame."""
        if prompt.mask is not None:
            prompted = self._propagation.decode_mask(features, prompt.mask)
        else:
            prompted = Prompted(self._decode_prompt(features, prompt))
        return self._start(features, frame, object_id, prompted)

    def _start(self, features: Features, frame: int, object_id: int, prompted: Prompted) -> Track:
        """Store a prompted frame."""
        row = self._row(object_id, frame)
        self._propagation.start(features, row, frame, self.frame_number, prompted)
        return split_tracks(prompted.decoded, 1)[0]

    def _row(self, key: int, frame: int) -> int:
        """Return the row of an object's id, or of its key while it catches up; one that begins on `frame` if new."""
        if key in self._rows:
            return self._rows[key]
        self._propagation.make_room(key, self.frame_number)
        row = self._rows.add(key, self._propagation.begins_apart(frame, self.frame_number))
        self.bank.clear(row)
        if catching_key(key) in self._rows:
            self.bank.copy_conditioning(self._rows[catching_key(key)], row)
        return row

    def _to_tensors(self, prompt: AnyPrompt) -> PromptTensors:
        if prompt.mask is not None:
            raise RequestError("segment: expected points or a box, found a mask")
        return prompt.to_tensors(self.model.image_size, self.model.device)

    def _decode_candidates(self, features: Features, prompt: PromptTensors) -> Decoded:
        """Decode points and a box on one frame without memory, to all masks that may be meant."""
        return self.model.decode_candidates(features, prompt.points, prompt.labels, prompt.logits)

    def _decode_prompt(
        self, features: Features, prompt: PromptTensors, remembered: Tensor | None = None
    ) -> Decoded:
        """Decode points and a box on one frame, on image tokens [1, C, h, w] with memory, or without for None."""
        if prompt.choice is not None:
            return self._decode_candidates(features, prompt).pick(prompt.choice)
        decoder = self.model.decode_stage
        top, *others = decoder.embed(features, prompt.points, prompt.labels, prompt.logits)
        multimask = self.model.competes(len(prompt.points), remembered is None)
        return decoder(top if remembered is None else remembered, *others, multimask)

    def updated(self, tracks: Tracks, changed: Mapping[int, Track]) -> Tracks:
        """Update the tracks of a frame: apply the `changed` tracks, and drop objects that are no longer tracked."""
        columns = (tracks.logits, tracks.scores, tracks.visible, tracks.presence, tracks.pointers)
        kept = zip(tracks.ids, map(Track, *columns), strict=True)
        return self._tracks({**dict(kept), **changed})

    def _tracks(self, results: Mapping[int, Track]) -> Tracks:
        ids = [object_id for object_id in self.ids if object_id in results]
        if not ids:
            nothing = torch.zeros(0, device=self.model.device)
            sizes = self.model.mask_size, (self.model.hidden,)
            logits, pointers = (nothing.new_zeros(0, *size) for size in sizes)
            return Tracks([], logits, nothing, nothing.bool(), nothing, pointers)
        columns = zip(*(results[object_id] for object_id in ids), strict=True)
        return Tracks(ids, *(torch.stack(column) for column in columns))
