"""Compare SAM 3.1's stages with another implementation on the same random weights, stage by stage.

The other implementation is muggled_sam (https://github.com/heyoeyo/muggled_sam, Apache-2.0), of which --oracle names a
clone. Where its bookkeeping differs from Meta's, it is driven so that it computes what Meta's code does:

- A frame's place in time and a pointer's age are given to its read as they are; its own order is another.
- Free slots may be anywhere: the embeddings of used and free slots are mixed before each call.
- Pointers of free slots are zeros, and all are attended to.
- A predicted IoU is its head's output. It takes a sigmoid of it, so ours takes one before they are compared.
- The pointer of a prompted object out of view is projected, as in video.
- A mask prompt's pointer belongs to the mask that does not compete.
- Masks become probabilities at the image's size, and are resized then. It resizes logits, so it is given the logits
  of the resized probabilities.

In float64, its tables of positions are replaced by ours, because both compute theirs in float32; the comparison in
float32 covers them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sam3_node.errors import ModelError
from sam3_node.models.sam31.checkpoint import build_source
from sam3_node.models.sam31.loading import build_model
from sam3_node.models.sam31.model import Sam31Model
from sam3_node.models.sam31.random_weights import random_tensors, small_sizes

GROUPS = 2
FRAMES = 7
POINTERS = 16
PROMPTED_SHARE = 0.3
LOGIT_SIGMA = 6.0
PRESENCE_SIGMA = 4.0
FREE_PRESENCE = -10.0


class Compared(NamedTuple):
    """One comparison."""

    what: str
    error: float
    """|ours - theirs| / |theirs|, by the largest of all values."""
    ours: Tensor
    theirs: Tensor


class StageInputs:
    """Seeded inputs of every stage, drawn in float32 so that each dtype gets the same."""

    def __init__(self, model: Sam31Model, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.model = model
        self.dtype = model.dtype
        size = model.image_size
        self.pixels = self.normal(1, 3, size, size)
        self.points = torch.rand(3, 2, generator=self.generator) * size
        self.mask_hint = self.normal(*model.mask_size) * LOGIT_SIGMA
        self.mask = torch.zeros(1, 1, size, size, dtype=self.dtype)
        self.mask[..., size // 4 : size // 2, size // 3 : 2 * size // 3] = 1

    def normal(self, *shape: int) -> Tensor:
        """Draw values of unit variance."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def slots(self, count: int) -> Tensor:
        """Draw a group's used slots, bool [16]."""
        used = torch.zeros(self.model.slots, dtype=torch.bool)
        used[torch.randperm(self.model.slots, generator=self.generator)[:count]] = True
        return used

    def masks(self, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw logits, presence and prompts of groups with these slots, bool [G, 16]."""
        logits = self.normal(*used.shape, *self.model.mask_size) * LOGIT_SIGMA
        presence = self.normal(*used.shape) * PRESENCE_SIGMA
        prompted = (torch.rand(used.shape, generator=self.generator) < PROMPTED_SHARE) & used
        return (
            logits.masked_fill(~used[..., None, None], 0),
            presence.masked_fill(~used, FREE_PRESENCE),
            prompted,
        )


def build_pair(oracle: Path, dtype: torch.dtype, seed: int = 0) -> tuple[Sam31Model, Oracle]:
    """Build both implementations with the same random weights."""
    sizes = small_sizes()
    tensors = random_tensors(sizes, seed)
    model = build_model(build_source(tensors, sizes, "random"), "random", torch.device("cpu"), dtype)
    return model, Oracle(oracle, tensors, model)


class Oracle:
    """The other implementation, driven stage by stage."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor], model: Sam31Model) -> None:
        if not (folder / "muggled_sam" / "v3p1_sam").is_dir():
            raise ModelError(f"--oracle {folder}: expected a clone of muggled_sam with v3p1_sam")
        sys.path.insert(0, str(folder))
        package = "muggled_sam.v3p1_sam"
        make_sam_v3p1 = importlib.import_module(f"{package}.make_sam_v3p1")
        conversion = f"{package}.state_dict_conversion"
        sizes = importlib.import_module(f"{conversion}.config_from_original_state_dict")
        keys = importlib.import_module(f"{conversion}.convert_original_state_dict_keys")

        # only the detector's sizes lack in a tracker's file
        none = {"features_per_detection_token": model.hidden}
        readers = {name: getattr(sizes, name) for name in dir(sizes) if name.startswith("get_")}
        config = {
            "features_per_prompt_token": readers["get_features_per_prompt_token"](tensors),
            "features_per_decoder_token": readers["get_mask_decoder_features_per_token"](tensors),
            "features_per_memory_token": readers["get_features_per_memory_token"](tensors),
            "imgencoder_features": readers["get_image_encoder_features_per_token"](tensors),
            "imgencoder_num_blocks": readers["get_image_encoder_block_count"](tensors),
            "imgencoder_num_heads": readers["get_image_encoder_features_per_token"](tensors) // 64,
            "imgencoder_posenc_tile_hw": readers["get_image_encoder_posembed_hw"](tensors),
            "maskdecoder_num_blocks": readers["get_mask_decoder_block_count"](tensors),
            "memimgfusion_num_fusion_layers": readers["get_memory_image_fusion_layer_count"](tensors),
            "txtencoder_features": 64,
            "txtencoder_num_blocks": 1,
            "txtencoder_num_heads": 1,
            "txtencoder_vocab_size": 8,
        }
        config["imgencoder_num_stages"], config["imgencoder_window_size"] = readers[
            "get_image_encoder_freqs_data"
        ](tensors)
        self.core: Any = make_sam_v3p1.make_sam_v3p1(**config, **none)
        converted, _ = keys.convert_state_dict_keys(config, tensors)
        for name, state in converted.items():
            part = getattr(self.core, name)
            lacking, unknown = part.load_state_dict(state, strict=False)
            lacking = [key for key in lacking if "detect" not in key]
            if lacking or unknown:
                raise ModelError(f"--oracle: {name} lacks {lacking[:3]}, and does not know {unknown[:3]}")
        self.core.requires_grad_(False).eval()
        self.model = model
        video = self.core.multiplex_video_masking.mask_decoder.multiplex_encoder
        self.embeds = (video.embed_inactive.detach().clone(), video.embed_active.detach().clone())
        if model.dtype == torch.float64:
            self._take_tables()

    def _take_tables(self) -> None:
        """Compute in float64, with our tables of positions."""
        core = self.core.double()
        model: Any = self.model
        self.embeds = (self.embeds[0].double(), self.embeds[1].double())
        grid = model.grid[0]
        fusion = core.memory_image_fusion
        for module in (fusion.fusion_transformer.img_posenc, fusion.memconcat.memposenc.posenc):
            module.forward = lambda h, w: _map(model.memory_attention.position.double() / 0.1, grid)
        for layer in fusion.fusion_transformer.layers:
            for attention in (layer.image_selfattn.attn, layer.image_crossattn.attn):
                attention.rotposenc = _Rotary(model.memory_attention.rotation)
        stages = core.image_encoder.stages
        blocks = [
            block for stage in stages for block in (*stage.windowed_attn_blocks, stage.global_attn_block)
        ]
        for block, layer in zip(blocks, model.encode_stage.backbone.layers, strict=True):
            rotation = layer.rotation[:, 0].double()
            if layer.span == grid * grid:
                rotation = rotation[model.encode_stage.backbone.inverse]
            block.attn.rope_encoder = _Rotary(rotation)
        core.coordinate_encoder.get_grid_position_encoding = lambda _size: model.decode_stage.position
        core.multiplex_video_masking.coordinate_encoder.get_grid_position_encoding = lambda _size: _map(
            model.video_stage.position.T, grid
        )
        half = model.hidden // 2
        pairs = torch.arange(half, dtype=torch.float64) // 2
        fusion.memconcat.ptrposenc.posenc_scale_factor = 10000.0 ** (-2 * pairs / half)

    def encode(self, pixels: Tensor) -> list[Tensor]:
        """Return fine, middle and top of tracking, the trunk, then those of prompts."""
        trunk = self.core.image_encoder(pixels)
        video = self.core.image_projection.v2_projection(trunk)
        prompt = self.core.image_projection.v1_projection(trunk)
        return [*video[::-1], trunk, *prompt[::-1]]

    def decode_prompt(
        self, features: Any, points: Tensor, labels: Tensor, hint: Tensor | None, sparse: Tensor
    ) -> tuple[Tensor, ...]:
        """Return logits [4, 4h, 4w], IoU [4], pointers [4, C] and presence [1] of one prompt."""
        core = self.core
        if self.model.dtype == torch.float32:
            sparse = self._embed_points(points, labels)
        features = features.for_prompts()
        top = features.top + core.memory_image_fusion.no_mem_embed_bchw
        masks, iou, pointers, presence = core.mask_decoder(
            [top, features.middle, features.fine],
            sparse,
            core.coordinate_encoder.get_grid_position_encoding(self.model.grid),
            mask_hint=hint,
            blank_promptless_output=False,
        )
        if presence <= 0:
            pointers = core.multiplex_video_masking.mask_decoder.objptrgen.no_ptr_proj(pointers)
        return masks[0], iou[0], pointers[0], presence

    def _embed_points(self, points: Tensor, labels: Tensor) -> Tensor:
        encoder = self.core.prompt_encoder
        kinds = [
            encoder.point_encoder.bg_embed,
            encoder.point_encoder.fg_embed,
            encoder.box_encoder.tl_embed,
            encoder.box_encoder.br_embed,
        ]
        none = encoder.point_encoder.not_a_point_embed
        if not len(labels):
            return none.expand(1, 2, -1)
        places = self.core.coordinate_encoder((points + 0.5) / self.model.image_size)
        embedded = places + torch.cat([kinds[label] for label in labels.tolist()])
        return torch.cat([embedded, none])[None]

    def decode_video(self, top: Tensor, features: Any, used: Tensor) -> tuple[Tensor, ...]:
        """Return the best masks, IoU, presence and pointers of one group with top [1, C, h, w], used bool [16]."""
        masking = self.core.multiplex_video_masking
        encoder = masking.mask_decoder.multiplex_encoder
        free, active = self.embeds
        encoder.embed_active.data = torch.where(used[None, :, None, None], active, free)
        results = masking(top, [features.middle, features.fine], len(used), True)
        masks, iou, pointers, presence = results
        _, mask, best, pointer = masking.get_best_decoder_results(masks, iou, pointers)
        return mask[:, 0], best[:, 0], presence, pointer[:, 0]

    def remember(self, top: Tensor, logits: Tensor, presence: Tensor, prompted: Tensor) -> Tensor:
        """Return the memory [hw, 2C] of one group with logits [16, 4h, 4w]."""
        size = (self.model.image_size,) * 2
        masks = nn.functional.interpolate(logits[None], size, mode="bilinear").sigmoid()
        size = (16 * self.model.grid[0],) * 2
        masks = nn.functional.interpolate(masks, size, mode="bilinear")[0].logit()
        image, memory, _ = self.core.memory_encoder(top, masks[:, None], None, presence, prompted)
        return torch.cat([memory, image], dim=1)[0].flatten(1).T

    def read(self, top: Tensor, memory: Tensor, offset: Tensor, pointers: Tensor, age: Tensor) -> Tensor:
        """Return the conditioned map [1, C, h, w] of one group with memory [M, T, 2C], pointers [P, 16 * C]."""
        fusion = self.core.memory_image_fusion
        concat = fusion.memconcat
        hidden = self.model.hidden
        # its conversion turns all rows but the last around
        rows = concat.memposenc.base_memposenc_offsets[:, 0, 0]
        rows = torch.cat([rows[:-1].flip(0), rows[-1:]])
        sine = concat.memposenc.posenc(*self.model.grid)[0].flatten(1).T
        place = (sine + rows[offset][:, None]).flatten(0, 1)
        slots = self.model.slots
        time = concat.ptrposenc._encode_normalized_position(age[:, None].to(sine.dtype) / (POINTERS - 1))
        tokens = pointers.unflatten(-1, (slots, hidden)).flatten(0, 1)
        masks, images = memory.flatten(0, 1).split(hidden, dim=-1)
        fused: Tensor = fusion.fusion_transformer(
            top,
            torch.cat([images, torch.zeros_like(tokens)])[None],
            torch.cat([masks, tokens])[None],
            torch.cat([place, time.repeat_interleave(slots, dim=0)])[None],
            len(tokens),
        )
        return fused


class _Rotary(nn.Module):
    """Rotates queries and keys [B, H, T, D] by a table [hw, D / 2, (cos, sin)], in float64."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.rotors = torch.view_as_complex(table.double().contiguous())

    def forward(self, query: Tensor, key: Tensor, _size: Any) -> tuple[Tensor, Tensor]:
        return self._turn(query), self._turn(key)

    def _turn(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        rotors = self.rotors.repeat(x.shape[2] // len(self.rotors), 1)
        return torch.view_as_real(pairs * rotors).flatten(-2)


def _map(rows: Tensor, grid: int) -> Tensor:
    """Turn rows [hw, C] into a map [1, C, h, w]."""
    return rows.T.unflatten(1, (grid, grid))[None]


def _compare(what: str, ours: Tensor, theirs: Tensor) -> Compared:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    return Compared(what, error.item(), ours, theirs)


@torch.inference_mode()
def compare(model: Sam31Model, oracle: Oracle, seed: int = 1) -> Iterator[Compared]:
    """Compare all stages on seeded inputs; each gets ours of the stage before."""
    inputs = StageInputs(model, seed)
    features = model.encode(inputs.pixels)
    model.shares_trunk = True
    names = ("fine", "middle", "top", "trunk", "prompt_fine", "prompt_middle", "prompt_top")
    pairs = zip(names, model.encode(inputs.pixels), oracle.encode(inputs.pixels), strict=True)
    for name, ours, theirs in pairs:
        assert ours is not None
        yield _compare(f"encode {name}", ours, theirs)
    yield from _compare_prompts(model, oracle, inputs, features)
    for count in (1, 2, 5, model.slots):
        used = torch.stack([inputs.slots(count) for _ in range(GROUPS)])
        top = features.top + inputs.normal(GROUPS, *features.top.shape[1:])
        decoded = model.stages.decode(top, features.fine, features.middle, used)
        yield from _compare_decoded(f"decode {count} of {model.slots}", oracle, top, features, used, decoded)
    yield from _compare_memories(model, oracle, inputs, features)


def _compare_prompts(
    model: Sam31Model, oracle: Oracle, inputs: StageInputs, features: Any
) -> Iterator[Compared]:
    prompts = {
        "point": ([1], None),
        "points": ([1, 0, 1], None),
        "box": ([2, 3], None),
        "point with mask": ([1], inputs.mask_hint),
    }
    for name, (kinds, hint) in prompts.items():
        labels = torch.tensor(kinds)
        points = inputs.points[: len(kinds)].sort(dim=0).values
        embedded = model.decode_stage.embed(features, points, labels, hint)
        # without its axis of images, the other norms along the wrong axis
        given = None if hint is None else hint[None, None]
        masks, iou, pointers, presence = oracle.decode_prompt(features, points, labels, given, embedded[3])
        single = model.decode_stage(*embedded, False)
        several = model.decode_stage.candidates(features, points, labels, hint)
        order = iou[1:].argsort(descending=True) + 1
        in_view = bool(presence > 0)
        shown = "" if in_view else ", out of view"
        yield _compare(f"{name}{shown}: presence", single.presence, presence)
        yield _compare(f"{name}{shown}: one mask's IoU", single.iou.sigmoid(), iou[:1])
        yield _compare(f"{name}{shown}: three IoU", several.iou.sigmoid(), iou[order])
        yield _compare(f"{name}{shown}: one pointer", single.pointer, pointers[:1])
        yield _compare(f"{name}{shown}: three pointers", several.pointer, pointers[order])
        if in_view:
            yield _compare(f"{name}: one mask", single.logits, masks[:1])
            yield _compare(f"{name}: three masks", several.logits, masks[order])
    found = model.decode_stage.encode_mask_pointer(features, inputs.mask)
    decoder = oracle.core.mask_decoder
    hint = decoder.mask_to_ptr_hint_downsampler(inputs.mask)
    hint = nn.functional.interpolate(
        hint, model.mask_size, mode="bilinear", align_corners=False, antialias=True
    )
    nothing = oracle.core.prompt_encoder.point_encoder.not_a_point_embed.expand(1, 2, -1)
    _, _, pointers, _ = oracle.decode_prompt(features, *_no_point(), hint, nothing)
    yield _compare("mask: pointer", found, pointers[:1])


def _no_point() -> tuple[Tensor, Tensor]:
    """Return no points; the other implementation embeds a place without a point itself."""
    return torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)


def _compare_decoded(
    what: str, oracle: Oracle, top: Tensor, features: Any, used: Tensor, decoded: Any
) -> Iterator[Compared]:
    groups = [oracle.decode_video(top[index : index + 1], features, row) for index, row in enumerate(used)]
    masks, iou, presence, pointers = (torch.stack(part)[used] for part in zip(*groups, strict=True))
    shown = presence > 0
    if shown.any():
        yield _compare(f"{what}: masks", decoded.logits[used][shown], masks[shown])
    yield _compare(f"{what}: IoU", decoded.iou[used].sigmoid(), iou)
    yield _compare(f"{what}: presence", decoded.presence[used], presence)
    yield _compare(f"{what}: pointers", decoded.pointer[used], pointers)


def _compare_memories(
    model: Sam31Model, oracle: Oracle, inputs: StageInputs, features: Any
) -> Iterator[Compared]:
    used = torch.stack([inputs.slots(3), inputs.slots(model.slots)])
    memories = []
    for frame in range(FRAMES):
        logits, presence, prompted = inputs.masks(used)
        top = features.top + inputs.normal(*features.top.shape)
        memory = model.stages.remember(top, logits, presence, prompted)
        memories.append(memory)
        theirs = [oracle.remember(top, *rows) for rows in zip(logits, presence, prompted, strict=True)]
        if frame == 0:
            yield _compare("remember", memory, torch.stack(theirs))
    bank = torch.stack(memories, dim=1)
    for frames in (1, 2, FRAMES):
        memory = bank[:, :frames]
        # the first is a prompted frame, far in the past for one group and near for the other
        offset = torch.tensor([[6, *range(FRAMES - 1)], [3, *range(FRAMES - 1)]])[:, :frames]
        count = min(POINTERS, 2 * frames)
        pointers = inputs.normal(GROUPS, count, model.slots, model.hidden) * used[:, None, :, None]
        pointers = pointers.flatten(2)
        age = torch.stack([torch.arange(count), torch.arange(count) + 20]).float()
        found = model.stages.read(features.top, memory, offset, pointers, age, None)
        theirs = [
            oracle.read(features.top, *rows) for rows in zip(memory, offset, pointers, age, strict=True)
        ]
        yield _compare(f"read {frames} frames, {count} pointers", found, torch.cat(theirs))


SAMPLES = 40
"""Values of each stage's output that are recorded."""


class OwnStages:
    """Our stages, called group by group as `Oracle` is."""

    def __init__(self, model: Sam31Model) -> None:
        self.model = model

    def encode(self, pixels: Tensor) -> list[Tensor]:
        """See `Oracle.encode`."""
        return list(self.model.stages.encode(pixels))

    def decode_video(self, top: Tensor, features: Any, used: Tensor) -> tuple[Tensor, ...]:
        """See `Oracle.decode_video`."""
        decoded = self.model.stages.decode(top, features.fine, features.middle, used[None])
        return decoded.logits[0], decoded.iou[0].sigmoid(), decoded.presence[0], decoded.pointer[0]

    def remember(self, top: Tensor, logits: Tensor, presence: Tensor, prompted: Tensor) -> Tensor:
        """See `Oracle.remember`."""
        memory: Tensor = self.model.stages.remember(top, logits[None], presence[None], prompted[None])
        return memory[0]

    def read(self, top: Tensor, memory: Tensor, offset: Tensor, pointers: Tensor, age: Tensor) -> Tensor:
        """See `Oracle.read`."""
        found: Tensor = self.model.stages.read(
            top, memory[None], offset[None], pointers[None], age[None], None
        )
        return found


@torch.inference_mode()
def record(model: Sam31Model, stages: OwnStages | Oracle, seed: int = 2) -> dict[str, list[float]]:
    """Run all stages on seeded inputs, each on the output of the stage before, and return some values of each."""
    inputs = StageInputs(model, seed)
    encoded = stages.encode(inputs.pixels)
    features = model.encode(inputs.pixels)
    used = inputs.slots(5)
    logits, presence, prompted = (part[0] for part in inputs.masks(used[None]))
    memory = stages.remember(encoded[2], logits, presence, prompted)
    pointers = (inputs.normal(3, model.slots, model.hidden) * used[None, :, None]).flatten(1)
    bank = memory[None].expand(3, -1, -1)
    top = stages.read(encoded[2], bank, torch.tensor([6, 0, 1]), pointers, torch.tensor([9.0, 1.0, 2.0]))
    masks, iou, seen, pointer = stages.decode_video(top, features, used)
    in_view = used & (seen > 0)
    names = ("fine", "middle", "top", "trunk", "prompt_fine", "prompt_middle", "prompt_top")
    found = dict(zip(names, encoded, strict=True))
    found |= {
        "memory": memory,
        "read": top,
        "masks": masks[in_view],
        "iou": iou[used],
        "presence": seen[used],
    }
    found["pointers"] = pointer[used]
    return {name: _sample(values) for name, values in found.items()}


def _sample(values: Tensor) -> list[float]:
    flat = values.flatten()
    return [round(value, 5) for value in flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].tolist()]
