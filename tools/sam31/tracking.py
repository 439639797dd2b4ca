"""Compare whole clips of SAM 3.1's tracker with another implementation of the stages, and with plain lists as memory.

    python -m tools.sam31.tracking --oracle CLONE [--frames 40] [--objects 1 2 16 17 33] [--double]

The other implementation is the one of `tools.sam31.parity`. Here it follows objects by itself: `PlainTracker` keeps
every frame of every group in a list, and chooses what to attend to by Meta's rules. Nothing of our tracker, bank or
stages is in its loop. Prompts come on the first frame, live on the fifth and as corrections on the ninth; one object is
removed on the twelfth. Weights are random, and of a trained model's size. With --hidden, the presence of the video
decoder is lowered in both until half of the objects are out of view.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sam3_node.models import Features
from sam3_node.models.sam.stages import ABSENT_LOGIT
from sam3_node.models.sam31.model import Sam31Model
from sam3_node.tracking import ObjectPrompt, Tracker
from tools.command import new_parser
from tools.sam31.parity import FREE_PRESENCE, Oracle, build_pair

SLOTS = 16
MEMORIES = 6
"""Tracked frames that are attended to"""
CONDITIONING = 4
"""Prompted frames that are attended to, the newest"""
POINTER_AGES = 15
"""Age of the oldest tracked frame whose pointers are attended to"""
LAST_ROW = 6
"""Row of the temporal table for prompted frames that are older than all others"""
LIVE = 4
"""Frame on which the last object is added."""
CORRECTED = 8
"""Frame on which the first object is corrected."""
REMOVED = 11
"""Frame on which the first object is removed."""
MOST = 1e-3
"""Largest relative error that passes."""
MOST_DOUBLE = 1e-9
"""The same in float64."""


class Remembered(NamedTuple):
    """One frame of a group."""

    frame: int
    memory: Tensor
    """[hw, 2C]"""
    pointers: Tensor
    """[16 * C]"""
    conditioning: bool


@dataclass
class Group:
    """Up to 16 objects that share their memories."""

    ids: list[int | None] = field(default_factory=list)
    """Object of each slot; None: it has left"""
    frames: list[Remembered] = field(default_factory=list)


class Stages(Protocol):
    """Stages of one group, of any implementation. See `Oracle`."""

    model: Sam31Model

    def encode(self, pixels: Tensor) -> list[Tensor]: ...
    def decode_prompt(
        self, features: Any, points: Tensor, labels: Tensor, hint: Tensor | None, sparse: Tensor
    ) -> tuple[Tensor, ...]: ...
    def decode_video(self, top: Tensor, features: Any, used: Tensor) -> tuple[Tensor, ...]: ...
    def remember(self, top: Tensor, logits: Tensor, presence: Tensor, prompted: Tensor) -> Tensor: ...
    def read(self, top: Tensor, memory: Tensor, offset: Tensor, pointers: Tensor, age: Tensor) -> Tensor: ...


class PlainTracker:
    """Follows objects by the stages of any implementation, with lists of all frames."""

    def __init__(self, oracle: Stages) -> None:
        self._oracle = oracle
        self._model = oracle.model
        self._groups: list[Group] = []
        self._frame = 0

    def remove(self, object_id: int) -> None:
        """Remove an object; its slot is not given again."""
        for group in self._groups:
            group.ids = [None if held == object_id else held for held in group.ids]

    @torch.inference_mode()
    def step(self, pixels: Tensor, prompts: dict[int, Tensor]) -> dict[int, Tensor]:
        """Follow all objects, and decode prompts, a point [1, 2] each; return logits [4h, 4w] by object."""
        fine, middle, top, trunk, *prompt = self._oracle.encode(pixels)
        features = Features(fine, middle, top, trunk, *prompt)
        followed = {id(group): self._follow(group, features) for group in self._groups}
        for object_id in prompts:
            if not any(object_id in group.ids for group in self._groups):
                self._seat(object_id)
        results: dict[int, Tensor] = {}
        for group in self._groups:
            masks, presence, pointers = followed.get(id(group)) or self._empty()
            flags = torch.zeros(SLOTS, dtype=torch.bool)
            for slot, held in enumerate(group.ids):
                if held in prompts:
                    masks[slot], presence[slot], pointers[slot] = self._decode(features, prompts[held])
                    flags[slot] = True
                if held is not None:
                    results[held] = masks[slot].clone()
            memory = self._oracle.remember(top, masks, presence, flags)
            group.frames.append(Remembered(self._frame, memory, pointers.flatten(), bool(flags.any())))
        self._frame += 1
        return results

    def _seat(self, object_id: int) -> None:
        if not self._groups or len(self._groups[-1].ids) == SLOTS:
            self._groups.append(Group())
        self._groups[-1].ids.append(object_id)

    def _empty(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = self._model.dtype
        return (
            torch.zeros(SLOTS, *self._model.mask_size, dtype=dtype),
            torch.full((SLOTS,), FREE_PRESENCE, dtype=dtype),
            torch.zeros(SLOTS, self._model.hidden, dtype=dtype),
        )

    def _follow(self, group: Group, features: Features) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, presence and pointers of all slots of a group."""
        prompted = [frame for frame in group.frames if frame.conditioning][-CONDITIONING:]
        others = [frame for frame in group.frames if frame not in prompted]
        rows = []
        for frame in prompted:
            age = self._frame - frame.frame
            rows.append((frame, LAST_ROW - age if age <= LAST_ROW else LAST_ROW))
        rows += [
            (frame, self._frame - frame.frame - 1)
            for frame in others
            if self._frame - frame.frame <= MEMORIES
        ]
        with_pointers = prompted + [
            frame for frame in others if self._frame - frame.frame <= POINTER_AGES and not frame.conditioning
        ]
        top = self._oracle.read(
            features.top,
            torch.stack([frame.memory for frame, _ in rows]),
            torch.tensor([row for _, row in rows]),
            torch.stack([frame.pointers for frame in with_pointers]),
            torch.tensor([float(self._frame - frame.frame) for frame in with_pointers]),
        )
        used = torch.zeros(SLOTS, dtype=torch.bool)
        used[: len(group.ids)] = torch.tensor([held is not None for held in group.ids])
        masks, _, presence, pointers = self._oracle.decode_video(top, features, used)
        presence = presence.reshape(SLOTS)
        masks = torch.where((presence > 0)[:, None, None], masks, ABSENT_LOGIT)
        free = self._empty()
        return (
            torch.where(used[:, None, None], masks, free[0]),
            torch.where(used, presence, free[1]),
            torch.where(used[:, None], pointers, free[2]),
        )

    def _decode(self, features: Features, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decode a point without memory; return the best of three masks, its presence and its pointer."""
        labels = torch.ones(1, dtype=torch.int64)
        sparse = self._model.decode_stage.embed(features, point, labels, None)[3]
        masks, iou, pointers, presence = self._oracle.decode_prompt(features, point, labels, None, sparse)
        best = 1 + int(iou[1:].argmax())
        mask = masks[best] if bool(presence > 0) else torch.full_like(masks[best], ABSENT_LOGIT)
        return mask, presence.reshape(()), pointers[best]


def hide_half(oracle: Oracle) -> None:
    """Lower the presence of both video decoders by its median over a short clip."""
    model = oracle.model
    tracker = Tracker(model, max_objects=SLOTS)
    generator = torch.Generator().manual_seed(0)
    size = model.image_size
    found = []
    for number in range(6):
        picture = torch.randn(1, 3, size, size, generator=generator).to(model.dtype)
        points = torch.rand(SLOTS, 1, 2, generator=generator) * size
        prompts = [ObjectPrompt(n, points=points[n].numpy()) for n in range(SLOTS)] if number == 0 else []
        found.append(tracker.step(picture, prompts).presence)
    presence = torch.stack(found[1:]).flatten().sort().values
    # between two values, so that none of them is 0
    middle = presence[len(presence) // 2 - 1 : len(presence) // 2 + 1].mean()
    theirs = oracle.core.multiplex_video_masking.mask_decoder.objptrgen.score_mlp
    for head in (model.video_stage.presence_head, theirs):
        (last,) = (part for part in head.modules() if isinstance(part, nn.Linear) and part.out_features == 1)
        last.bias.sub_(middle)


def compare_clip(oracle: Stages, objects: int, frames: int) -> tuple[float, int]:
    """Follow a clip with both; return the largest relative error of visible logits, and how often one was hidden."""
    model = oracle.model
    ours = Tracker(model, max_objects=objects)
    theirs = PlainTracker(oracle)
    generator = torch.Generator().manual_seed(objects)
    size = model.image_size
    base = torch.randn(1, 3, size, size, generator=generator).to(model.dtype)
    points = torch.rand(objects + 1, 1, 2, generator=generator) * size
    late = objects > 1
    removed = objects in (2, 16)
    worst = 0.0
    hidden = 0
    for number in range(frames):
        picture = torch.roll(base, (number, 2 * number), (2, 3))
        chosen = list(range(objects - late)) if number == 0 else []
        if number == LIVE and late:
            chosen = [objects - 1]
        given = {object_id: points[object_id] for object_id in chosen}
        if number == CORRECTED:
            given = {0: points[-1]}
        if number == REMOVED and removed:
            ours.remove(0)
            theirs.remove(0)
        prompts = [ObjectPrompt(object_id, points=point.numpy()) for object_id, point in given.items()]
        tracks = ours.step(picture, prompts)
        expected = theirs.step(picture, given)
        assert sorted(tracks.ids) == sorted(expected), (tracks.ids, sorted(expected))
        reference = torch.stack([expected[object_id] for object_id in tracks.ids])
        absent = reference == ABSENT_LOGIT
        if not torch.equal(absent, tracks.logits == ABSENT_LOGIT):
            raise SystemExit(f"{objects} objects, frame {number}: other objects are out of view")
        hidden += int(absent.flatten(1).all(dim=1).sum())
        shown = reference[~absent]
        if shown.numel():
            error = (tracks.logits[~absent] - shown).abs().max() / shown.abs().max()
            worst = max(worst, float(error))
    return worst, hidden


def arguments() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--oracle", type=Path, required=True, help="clone of muggled_sam")
    parser.add_argument("--frames", type=int, default=40, help="frames of a clip [40]")
    parser.add_argument(
        "--objects", type=int, nargs="+", default=[1, 2, 16, 17, 33], help="objects of each clip"
    )
    parser.add_argument("--hidden", action="store_true", help="half of the objects are out of view")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    return parser.parse_args()


def main() -> int:
    """Compare all clips; return 1 if one differs by more than is due to rounding."""
    options = arguments()
    most = MOST_DOUBLE if options.double else MOST
    _, oracle = build_pair(options.oracle, torch.float64 if options.double else torch.float32)
    if options.hidden:
        hide_half(oracle)
    failed = False
    for objects in options.objects:
        error, hidden = compare_clip(oracle, objects, options.frames)
        failed |= not error < most
        print(
            f"{objects:3} objects, {options.frames} frames: relative error {error:.1e}, "
            f"{hidden} times out of view"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
