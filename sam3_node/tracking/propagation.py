"""Carry objects from frame to frame: the interface of the tracker's two ways, and the way by a memory bank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..models import Features, TrackerModel
from ..models.sam.stages import Decoded, find_limits
from .host_copy import copy_to_device
from .memory import Bools, Ints, MemoryBank
from .tracks import BATCHES, Cover, PromptTensors, pad_to_batch

PRESENT_LOGIT = 10.0
"""Presence logit of an object whose prompt is a mask; its negative stands for an empty mask."""


class Prompted(NamedTuple):
    """What a prompt gives on its frame."""

    decoded: Decoded
    """of one object"""
    masks: Tensor | None = None
    """[1, 1, 16h, 16w], the memory encoder's input; None: the upsampled logits of `decoded`"""


class WarmUp(NamedTuple):
    """What to track, so that every code has run that real objects may need."""

    counts: tuple[int, ...]
    """numbers of objects to track, the last one the greatest"""
    refills: bool = False
    """True if an object that takes the place of another may run other code, too"""


class Propagation:
    """One way to follow objects. Each object has a row."""

    def follow(
        self, features: Features, rows: Ints, frame: int, hidden: Bools, cover: Cover | None
    ) -> Decoded:
        """Decode the objects of N rows on step `frame`, and keep what the next frames need.

        Nothing is kept of rows that are `hidden`, bool [N]. The masks leave out the pixels of `cover`. Return the
        decoder's output of N objects or more: with static shapes, those after N are padding.
        """
        raise NotImplementedError

    def decode_mask(self, features: Features, mask: Tensor) -> Prompted:
        """Return a mask prompt [1, 1, S, S] in 0..1 itself as the result, with the pointer of its object."""
        raise NotImplementedError

    def start(self, features: Features, row: int, frame: int, now: int, prompted: Prompted) -> None:
        """Begin to follow the object in `row` from a prompt on step `frame`, which is at most step `now`."""
        raise NotImplementedError

    def has_tracked(self, row: int, frame: int) -> bool:
        """Return True if `frame` was tracked without a prompt, and can be corrected by `read` and `correct`."""
        return False

    def prepare_correction(
        self, features: Features, row: int, frame: int, prompt: PromptTensors
    ) -> tuple[Tensor | None, PromptTensors]:
        """Return what a tracked frame is corrected with: image tokens [1, C, h, w], or None, and the prompt.

        The tokens know the object as it was before step `frame`. Without them, the prompt is decoded without memory.
        """
        raise NotImplementedError("only frames for which has_tracked is True can be corrected")

    def correct(self, features: Features, row: int, frame: int, now: int, prompted: Prompted) -> None:
        """Replace what was tracked on step `frame` of one row."""
        raise NotImplementedError("only frames for which has_tracked is True can be corrected")

    def take_batch(self, rows: Ints, most: int) -> Ints:
        """Return the positions in `rows` of the objects to follow first, with at most `most` reads."""
        return np.arange(min(len(rows), most))

    def count_reads(self, rows: Ints) -> int:
        """Return how many reads following the objects in `rows` takes."""
        return len(rows)

    def begins_apart(self, frame: int, now: int) -> bool:
        """Return True if an object that is prompted on step `frame` must not share a group: the frame is too old."""
        return False

    def make_room(self, key: int, now: int) -> None:
        """Do what is needed for one more object to have a row."""

    def take_moved(self) -> list[int]:
        """Return the ids of objects that share their memory with others than before, since the last call."""
        return []

    def end_step(self, frame: int) -> None:
        """Tidy up after step `frame`, when all objects are tracked and all prompts are stored."""

    def forget_absence(self, row: int) -> None:
        """Forget the last frames of an object that was out of view on them, where they concern no other object."""

    def plan_warm_up(self, most: int) -> WarmUp:
        """Return what to track on blank frames, with at most `most` objects."""
        return WarmUp((most,))

    def warm_up_reads(self, capacity: int) -> None:
        """Run what needs a compiler, a plan or a graph for up to `capacity` objects, so that no frame waits for it."""


class MemoryPropagation(Propagation):
    """Follows objects by their memories in a bank (SAM 2, arXiv 2408.00714)."""

    def __init__(self, model: TrackerModel, bank: MemoryBank) -> None:
        self._model = model
        self._bank = bank

    def follow(
        self, features: Features, rows: Ints, frame: int, hidden: Bools, cover: Cover | None
    ) -> Decoded:
        """Attend to the bank, decode, and encode the memories of the objects that nothing covers."""
        model = self._model
        top = self.read_to_decode(features.top, rows, frame)
        decoded = Decoded(*model.stages.decode(top, features.fine, features.middle))
        if cover is not None:
            decoded = cover.cut(decoded)
        memory = model.stages.remember(features.top, decoded.logits, decoded.presence)
        # with static shapes, the rows after those of the objects are padding
        if not hidden.any():
            self._bank.write(rows, frame, memory[: len(rows)], decoded)
        elif not hidden.all():
            seen = copy_to_device(np.flatnonzero(~hidden), memory.device)
            self._bank.write(rows[~hidden], frame, memory[seen], Decoded(*(part[seen] for part in decoded)))
        return decoded

    def decode_mask(self, features: Features, mask: Tensor) -> Prompted:
        """See `Propagation`. Only the object pointer is decoded."""
        model = self._model
        mask = mask.to(model.dtype)
        logits, masks = model.memory_encoder.from_mask(mask)
        pointer = model.decode_stage.encode_mask_pointer(features, mask)
        # decided on the device, so that the host does not wait for it
        presence = torch.where(mask.any(), PRESENT_LOGIT, -PRESENT_LOGIT).reshape(1)
        decoded = Decoded(logits.to(model.dtype), torch.ones_like(presence), presence, pointer)
        return Prompted(decoded, masks)

    def start(self, features: Features, row: int, frame: int, now: int, prompted: Prompted) -> None:
        """Store a prompted frame as a conditioning frame."""
        memory = self._encode_memory(features, prompted)
        self._bank.write_conditioning(row, frame, now, memory, prompted.decoded.pointer)

    def has_tracked(self, row: int, frame: int) -> bool:
        """See `Propagation`; the bank knows as far as its ring goes back."""
        return self._bank.has_tracked(row, frame)

    def forget_absence(self, row: int) -> None:
        """See `Propagation`; all frames but the prompted ones are forgotten."""
        self._bank.forget_recent(row)

    def correct(self, features: Features, row: int, frame: int, now: int, prompted: Prompted) -> None:
        """Replace the memory of a tracked frame, which stays a tracked frame."""
        memory = self._encode_memory(features, prompted)
        self._bank.correct(row, frame, now, memory, prompted.decoded.pointer)

    def _encode_memory(self, features: Features, prompted: Prompted) -> Tensor:
        """Encode the memory [1, T, 64] of a prompt."""
        write = self._model.memory_encoder
        decoded, masks = prompted
        if masks is None:
            masks = write.upsample(decoded.logits)
        memory: Tensor = write(features.top, masks, True, decoded.presence)
        return memory

    def prepare_correction(
        self, features: Features, row: int, frame: int, prompt: PromptTensors
    ) -> tuple[Tensor | None, PromptTensors]:
        """Return image tokens [1, C, h, w] that have attended to the memories before step `frame`, and the prompt."""
        return self.read(features.top, np.array([row], dtype=np.int64), frame), prompt

    def pad(self, rows: Ints) -> Ints:
        """Return rows as the stages get them: with static shapes, the first is repeated up to the next batch size."""
        return pad_to_batch(rows) if self._model.static_shapes else rows

    def read_to_decode(self, top: Tensor, rows: Ints, frame: int) -> Tensor:
        """Return what `read` does, in the order of values in memory for which the decoder of `stages` is made."""
        tokens = self.read(top, rows, frame)
        # a compiled decoder is made for one order
        return tokens.contiguous() if self._model.is_compiled else tokens

    def read(self, top: Tensor, rows: Ints, frame: int) -> Tensor:
        """Return the image tokens of N objects, [N, C, h, w], which have attended to the memories before `frame`.

        With static shapes, the objects are padded to the next batch size.
        """
        model = self._model
        read = model.stages.read
        static = model.static_shapes
        limits = find_limits(read)
        # of a CUDA graph, whose inputs have addresses of their own
        find_buffer = getattr(read, "find_buffer", None)
        if not limits.any_width and limits.max_objects is None:
            # it reads what is valid, in one call for all objects
            padded = self.pad(rows)
            static = static or model.is_compiled
            full_apart = limits.full_from is not None and len(padded) >= limits.full_from
            out: Tensor = read(top, *self._bank.read(padded, frame, static, find_buffer, full_apart))
            return out

        engine_objects = None if limits.any_width else limits.max_objects
        groups = self._bank.read_groups(rows, frame, static, engine_objects, model.is_compiled)
        if len(groups) == 1:
            out = read(top, *groups[0].gather(find_buffer))
            return out
        tokens = [  # [1, hw, C] each
            row
            for group in groups
            for row in read(top, *group.gather(find_buffer))[: len(group.positions)].flatten(2).mT.split(1)
        ]
        # groups are ordered by their numbers of memories; the result is ordered by `rows`
        order = np.argsort(np.concatenate([group.positions for group in groups]))
        joined: Tensor = torch.cat([tokens[row] for row in self.pad(order)])
        return joined.mT.reshape(len(joined), -1, *model.grid)

    def plan_warm_up(self, most: int) -> WarmUp:
        """See `Propagation`. With static shapes, each batch size runs other code; compiled, 1 object and 2 or more."""
        return self.plan_rows_warm_up(most, 1)

    def plan_rows_warm_up(self, most: int, objects: int) -> WarmUp:
        """Plan the warm-up where up to so many objects share a row.

        The slot of an object that left such a row is not given again, so one more row may be needed.
        """
        model = self._model
        sizes: tuple[int, ...] = BATCHES
        if not model.static_shapes:
            # two rows
            most = min(most, 1 + objects * model.is_compiled)
            sizes = (1, 2)
        counts = {size for size in sizes if size <= most} | {most}
        return WarmUp(tuple(sorted(counts)), refills=model.static_shapes and objects > 1)

    @torch.inference_mode()
    def warm_up_reads(self, capacity: int) -> None:
        """Run the read in every shape that needs a compiler, a plan or a graph, so that no frame waits for it.

        A compiled read has one graph for one object, and one for more. With static shapes, each shape counts.
        """
        model = self._model
        read = model.stages.read
        limits = find_limits(read)
        if not (model.static_shapes or model.is_compiled):
            return
        # of the encoder itself, because a compiled read is made for the order of its values in memory
        top = model.encode(torch.zeros(1, 3, model.image_size, model.image_size)).top
        if not model.static_shapes:
            for objects in range(1, min(capacity, 2) + 1):
                read(top, *next(self._bank.examples(objects, limits)))
            return
        most = min(capacity, model.batch_size, limits.max_objects or capacity)
        for objects in BATCHES:
            for memories in self._bank.examples(objects, limits):
                read(top, *memories)
            if objects >= most:
                break
