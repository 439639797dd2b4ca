"""The frame step: many objects through one model, in one batch, with a bounded memory each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import ModelError, RequestError, SettingsError
from ..models import Features, TrackerModel
from ..models.sam.stages import Decoded
from ..types import State
from .memory import MemoryBank, confidence
from .selection import rule
from .slots import BOX_LABELS, ObjectPrompt, ObjectRows

PRESENT_LOGIT = 10.0  # presence of an object that was given as a mask


@dataclass(frozen=True, slots=True, eq=False)
class Tracks:
    """All objects on one frame, N of them in the order in which they were added.

    logits [N, h, w] at low resolution (4 times the feature grid; inside where > 0), scores [N] in 0..1 (presence
    probability times predicted IoU), visible bool [N]. Tensors are on the model's device.
    """

    ids: list[int]
    logits: Tensor
    scores: Tensor
    visible: Tensor


class Track(NamedTuple):
    """One object on one frame: logits [h, w], score [] and visible []."""

    logits: Tensor
    score: Tensor
    visible: Tensor


class Tracker:
    """Tracks objects from prompts, frame by frame, with the memory of SAM 2 and SAM 3 (arXiv 2408.00714, 2511.16719).

    A prompted frame becomes a conditioning frame of its object alone; the other objects never notice. Memory is
    taken at birth for `max_objects` objects and `bank_size` frames each; nothing grows afterwards.
    """

    def __init__(
        self, model: TrackerModel, max_objects: int = 16, bank_size: int = 7, selection: str = "recent"
    ) -> None:
        if max_objects < 1 or bank_size < 2:
            raise SettingsError(
                f"expected max_objects >= 1 and bank_size >= 2, found {max_objects} and {bank_size}"
            )
        self.model = model
        self.frame_number = 0
        self.bank = MemoryBank(model, max_objects, bank_size, rule(selection))
        self._rows = ObjectRows(max_objects)

    @property
    def ids(self) -> list[int]:
        """Tracked object ids, in the order in which they were added."""
        return list(self._rows)

    @property
    def capacity(self) -> int:
        return self._rows.capacity

    @torch.inference_mode()
    def step(self, pixels: Tensor, prompts: Sequence[ObjectPrompt] = ()) -> Tracks:
        """Track all objects on the next frame; `prompts` add objects, or correct those whose id is tracked.

        pixels float [1, 3, S, S] as the model expects them. Raises RequestError, CapacityError or ModelError for a
        bad prompt before anything has changed.
        """
        return self.step_features(self.model.encode(pixels), prompts)

    @torch.inference_mode()
    def step_features(self, features: Features, prompts: Sequence[ObjectPrompt] = ()) -> Tracks:
        """As `step`, from features = model.encode(pixels)."""
        checked = self._check(prompts)
        frame = self.frame_number
        following = [object_id for object_id in self._rows if object_id not in checked]
        results = dict(zip(following, self._follow(features, following, frame), strict=True))
        for prompt in prompts:
            results[prompt.object_id] = self._condition(features, frame, prompt)
        self.frame_number += 1
        return self._tracks(results)

    @torch.inference_mode()
    def prompt_at(self, features: Features, frame_number: int, prompt: ObjectPrompt) -> tuple[Tensor, Tensor]:
        """Add or correct an object on an earlier frame whose features were kept -> logits [h, w] and score [].

        `frame_number` is what this attribute was when that frame was stepped. The object is followed from the next
        step on.
        """
        if not 0 <= frame_number < self.frame_number:
            raise RequestError(f"frame_number: expected 0 to {self.frame_number - 1}, found {frame_number}")
        self._check([prompt])
        result = self._condition(features, frame_number, prompt)
        return result.logits, result.score

    @torch.inference_mode()
    def segment(self, features: Features, prompt: ObjectPrompt) -> tuple[Tensor, Tensor]:
        """The mask that a prompt gives on one frame, tracking nothing -> logits [h, w] and score []."""
        if prompt.mask is not None:
            raise RequestError("segment: expected points or a box, found a mask")
        decoded = self._answer(features, prompt)
        return decoded.logits[0], _score(decoded.presence, decoded.iou)[0]

    @torch.inference_mode()
    def propose(self, features: Features, boxes: Tensor) -> Decoded:
        """What each of D boxes, float [D, 4] (x0, y0, x1, y1) in model pixels, gives on one frame, tracking nothing.

        All in one batch; the values are the caller's to keep.
        """
        model, count = self.model, len(boxes)
        corners = boxes.to(model.device, torch.float32).reshape(count, 2, 2)
        if model.static_shapes:
            corners = corners[_padded(np.arange(count))]
        labels = torch.tensor([BOX_LABELS], dtype=torch.int32, device=model.device).expand(len(corners), -1)
        sparse, dense = model.decode_stage.prompt(corners, labels)
        top = (features.top + model.decode_stage.no_memory.reshape(1, -1, 1, 1)).expand(
            len(corners), -1, -1, -1
        )
        decoded = model.decode_stage(
            top, features.fine, features.middle, sparse, dense, self.model.competes(len(BOX_LABELS), True)
        )
        return Decoded(*(values[:count].clone() for values in decoded))

    @torch.inference_mode()
    def adopt(
        self, features: Features, frame_number: int, object_id: int, proposals: Decoded, index: int
    ) -> Track:
        """Add or correct an object by one of `propose`'s answers.

        As `prompt_at` with that box; `features` and `frame_number` are those of the frame it was made on.
        """
        self._rows.check_room(object_id not in self._rows)
        decoded = Decoded(*(values[index : index + 1] for values in proposals))
        masks = self.model.remember_stage.upsample(decoded.logits)
        return self._remember(features, frame_number, object_id, decoded, masks)

    def appearance(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Pointers of the frames that each of N objects was prompted on: [N, P, C], and which hold one [N, P]."""
        return self.bank.conditioning_pointers(np.array([self._rows[i] for i in ids], dtype=np.int64))

    def remove(self, object_id: int) -> None:
        """Forget an object; the others are untouched. UnknownObjectError if there is none of this id."""
        self.bank.clear(self._rows.remove(object_id))

    def reset(self) -> None:
        """Forget all objects and start counting frames again."""
        for object_id in self.ids:
            self.remove(object_id)
        self.frame_number = 0

    def state(self) -> State:
        """What `restore` takes: all that the next steps depend on, besides the model."""
        return {
            "frame_number": self.frame_number,
            "rows": self._rows.state(),
            "bank": self.bank.state(),
        }

    def restore(self, state: State) -> None:
        """Go on from the step after which `state` was asked for, of a tracker whose bank has this `layout`."""
        self.frame_number = state["frame_number"]
        self._rows.restore(state["rows"])
        self.bank.restore(state["bank"])

    def _check(self, prompts: Sequence[ObjectPrompt]) -> set[int]:
        """Refuse what cannot be done before anything is done; -> the prompted ids."""
        if prompts and not self.model.can_track:
            raise ModelError(
                f"{self.model.name} has no memory modules: it can segment a frame, but not track objects"
            )
        ids = {prompt.object_id for prompt in prompts}
        if len(ids) != len(prompts):
            raise RequestError("expected at most one prompt an object a frame, found several for one")
        self._rows.check_room(len(ids - set(self._rows)))
        for prompt in prompts:
            if prompt.mask is not None:
                prompt.as_mask(self.model.image_size, self.model.device)
            else:
                prompt.as_points(self.model.device)
        return ids

    def _follow(self, features: Features, ids: list[int], frame: int) -> list[Track]:
        """Unprompted objects, in batches as large as the device likes them."""
        size = self.model.batch_size
        batches = (ids[start : start + size] for start in range(0, len(ids), size))
        return [result for batch in batches for result in self._follow_batch(features, batch, frame)]

    def _follow_batch(self, features: Features, ids: list[int], frame: int) -> list[Track]:
        """Read the bank, decode, write the bank."""
        model, static = self.model, self.model.static_shapes
        rows = np.array([self._rows[object_id] for object_id in ids], dtype=np.int64)
        memories = self.bank.read(_padded(rows) if static else rows, frame, static)
        top = model.stages.read(features.top, *memories)
        decoded = Decoded(*model.stages.decode(top, features.fine, features.middle))
        memory = model.stages.remember(features.top, decoded.logits, decoded.presence)
        count = len(ids)
        sure = confidence(decoded.presence, decoded.iou)
        self.bank.write(rows, frame, memory[:count], decoded.pointer[:count], sure[:count])
        return _results(decoded, count)

    def _condition(self, features: Features, frame: int, prompt: ObjectPrompt) -> Track:
        """A prompted object: decode without memory, then remember the frame for good."""
        model = self.model
        if prompt.mask is not None:
            decoded, masks = self._take_mask(features, prompt)
        else:
            decoded = self._answer(features, prompt)
            masks = model.remember_stage.upsample(decoded.logits)
        return self._remember(features, frame, prompt.object_id, decoded, masks)

    def _remember(
        self, features: Features, frame: int, object_id: int, decoded: Decoded, masks: Tensor
    ) -> Track:
        memory = self.model.remember_stage(features.top, masks, True, decoded.presence)
        row = self._row(object_id)
        self.bank.write_conditioning(row, frame, self.frame_number, memory, decoded.pointer)
        return _results(decoded, 1)[0]

    def _row(self, object_id: int) -> int:
        if object_id in self._rows:
            return self._rows[object_id]
        row = self._rows.add(object_id)
        self.bank.clear(row)
        return row

    def _answer(self, features: Features, prompt: ObjectPrompt) -> Decoded:
        """Decode points and a box on one frame, without memory."""
        decoder = self.model.decode_stage
        points, labels = prompt.as_points(self.model.device)
        sparse, dense = decoder.prompt(points, labels, prompt.logits)
        top = features.top + decoder.no_memory.reshape(1, -1, 1, 1)
        return decoder(
            top, features.fine, features.middle, sparse, dense, self.model.competes(len(points), True)
        )

    def _take_mask(self, features: Features, prompt: ObjectPrompt) -> tuple[Decoded, Tensor]:
        """A mask given as prompt is the answer itself; only its object pointer is decoded."""
        model = self.model
        mask = prompt.as_mask(model.image_size, model.device).to(model.dtype)
        logits, masks = model.remember_stage.from_mask(mask)
        pointer = model.decode_stage.pointer_of_mask(features, mask)
        presence = torch.where(mask.any(), PRESENT_LOGIT, -PRESENT_LOGIT).reshape(1)
        return Decoded(logits.to(model.dtype), torch.ones_like(presence), presence, pointer), masks

    def updated(self, tracks: Tracks, changed: Mapping[int, Track]) -> Tracks:
        """The tracks of a frame once objects were adopted on it, which `changed` gives, and others removed."""
        kept = zip(tracks.ids, map(Track, tracks.logits, tracks.scores, tracks.visible), strict=True)
        return self._tracks({**dict(kept), **changed})

    def _tracks(self, results: Mapping[int, Track]) -> Tracks:
        ids = self.ids
        if not ids:
            nothing = torch.zeros(0, device=self.model.device)
            return Tracks([], nothing.new_zeros(0, *self.model.mask_size), nothing, nothing.bool())
        logits, scores, visible = zip(*(results[object_id] for object_id in ids), strict=True)
        return Tracks(ids, torch.stack(logits), torch.stack(scores), torch.stack(visible))


def _score(presence: Tensor, iou: Tensor) -> Tensor:
    return presence.float().sigmoid() * iou.float()


def _results(decoded: Decoded, count: int) -> list[Track]:
    scores, visible = _score(decoded.presence, decoded.iou), decoded.presence > 0
    return [Track(decoded.logits[i], scores[i], visible[i]) for i in range(count)]


def _padded(rows: np.ndarray) -> np.ndarray:
    """Rows repeated up to the next bucket: 1, 2, 4, 8, …"""
    bucket = 1 << (len(rows) - 1).bit_length()
    return np.concatenate([rows, np.repeat(rows[:1], bucket - len(rows))])
