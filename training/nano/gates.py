"""Four gates, in this order; the training asks each before it spends the hours behind it.

overfit   eight images with box prompts can be overfitted: IoU well above a filled box's
parity    the training forward gives what transformers' streaming inference gives, on the same weights
bank      on held-out clips the bank beats no bank, and both beat copying the first mask
figures   on unseen scenes the exported weights reach what is asked of them
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Sam2VideoInferenceSession

from sam3_node.models import load_tracker
from tools.vos.evaluate import SequenceResult, evaluate
from tools.vos.followers import Setting, parse_settings
from tools.vos.sequences import open_sequences

from .data import Clips, Recipe, Sources
from .network import SIZE, Features, Memory, TrainingTracker, hide, nano_config, new_tracker
from .steps import frame_costs, normalise, total

OVERFIT_STEPS = 240
MARGIN = 0.1
PARITY_FRAMES = 10
CLOSE = 2e-3
ROUNDING = 1e-5
MIN_J = 0.80
CORNER_LABELS = torch.tensor([[2, 3]], dtype=torch.int32)


@dataclass(frozen=True)
class Finding:
    """Outcome of a gate: whether it opens, and one line with the reason."""

    passed: bool
    text: str


def pass_gate(name: str, folder: Path, scenes: Path) -> Finding:
    """Try a gate and keep the finding in `folder`/gates.json; the gates before it must have opened."""
    held = _held(folder)
    for earlier in list(GATES)[: list(GATES).index(name)]:
        if not has_passed(earlier, folder):
            return Finding(
                False, f"gate {earlier} has not been passed yet: python -m training.nano gate {earlier}"
            )
    finding = GATES[name](folder, scenes)
    held[name] = {"passed": finding.passed, "text": finding.text}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gates.json").write_text(json.dumps(held, indent=2) + "\n")
    return finding


def has_passed(name: str, folder: Path) -> bool:
    """Return True if a gate has opened before."""
    return bool(_held(folder).get(name, {}).get("passed"))


def _held(folder: Path) -> dict[str, Any]:
    """Earlier findings; a file that a kill has cut short holds none."""
    path = folder / "gates.json"
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        return {}


def overfit(folder: Path, scenes: Path) -> Finding:
    """Overfit eight images."""
    batch = Clips(Sources(scenes / "train", folder / "cache"), Recipe(8, 1, 6), 0).batch(
        np.random.default_rng(1)
    )
    net = TrainingTracker(new_tracker(nano_config())).train()
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3)
    figures: dict[str, float] = {}
    for step in range(OVERFIT_STEPS):
        features = net.encode(normalise(batch.images)).select(batch.clip)
        costs = frame_costs(net, features, batch, ("mask", "box"), ease=float(step < OVERFIT_STEPS // 2))
        loss, _ = total(costs["mask"] + costs["box"])
        figures = total(costs["box"][:1])[1]
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        if step % 20 == 0:
            print(f"step {step} of {OVERFIT_STEPS}: box IoU {figures['iou']:.3f}", flush=True)
    box = filled_box(batch.masks[:, 0])
    return Finding(
        figures["iou"] > box + MARGIN, f"IoU {figures['iou']:.3f} against {box:.3f} of a filled box"
    )


def filled_box(masks: Tensor) -> float:
    """The mean IoU that filling its bounding box has with a mask; masks [N, h, w] in 0..255."""
    found = []
    for mask in masks > 127:
        rows, columns = torch.nonzero(mask, as_tuple=True)
        if len(rows):
            sides = rows.max() - rows.min() + 1, columns.max() - columns.min() + 1
            found.append(len(rows) / float(sides[0] * sides[1]))
    return float(np.mean(found))


def parity(folder: Path, scenes: Path) -> Finding:
    """Follow a box through a moving pattern, by the training forward and by transformers."""
    source = new_tracker(nano_config()).eval()
    with torch.no_grad():
        # else random weights see nothing anywhere
        source.mask_decoder.pred_obj_score_head.proj_out.bias.fill_(4.0)
    tied = torch.equal(
        source.shared_image_embedding.positional_embedding,
        source.prompt_encoder.shared_embedding.positional_embedding,
    )
    frames = _moving_pattern(PARITY_FRAMES)
    corners = torch.tensor([[[60.0, 60.0], [150.0, 140.0]]])
    reference = _stream(source, frames, corners)
    net = TrainingTracker(source).eval()
    images = [_encode(source, frame[None]) for frame in frames]
    # on the same features: in bfloat16, as the reference stores memories, rounding makes much of any difference
    ours = follow(net, images, corners)
    worst = max(float((a - b).abs().max()) for a, b in zip(ours, reference, strict=True))
    with torch.no_grad():
        features = zip(net.encode(frames[:1]), images[0], strict=True)
        encoder = max(float((a - b).abs().max() / b.abs().max()) for a, b in features)
    scale = max(float(logits.abs().max()) for logits in reference)
    text = (
        f"encoder within {encoder:.1e}, largest difference {worst:.1e} of logits up to {scale:.1f} in {PARITY_FRAMES} "
        f"frames; position matrices {'tied' if tied else 'NOT tied'}"
    )
    return Finding(tied and encoder < ROUNDING and worst < CLOSE * max(1.0, scale), text)


@torch.no_grad()
def _encode(source: Any, pixels: Tensor) -> Features:
    """Pixels [1, 3, 256, 256] by transformers' encoder."""
    fine, middle, top = source.vision_encoder(pixels, return_dict=True).fpn_hidden_states
    return Features(source.mask_decoder.conv_s0(fine), source.mask_decoder.conv_s1(middle), top)


@torch.no_grad()
def follow(net: TrainingTracker, images: list[Features], corners: Tensor) -> list[Tensor]:
    """Logits [1, 64, 64] of each frame, given as its features; the first is prompted by a box's corners [1, 2, 2]."""
    memories: list[Memory] = []
    found = []
    for number, image in enumerate(images):
        prompted = number == 0
        if prompted:
            decoded = net.decode(net.without_memory(image), *net.prompt(corners, CORNER_LABELS))
        else:
            top = net.read(image.top, number, memories)
            decoded = net.decode(image._replace(top=top), *net.nothing(1))
        present = decoded.presence > 0
        logits = hide(decoded.logits[:, 0], present)
        # as the reference stores it
        memory = net.remember(image.top, logits, prompted, present).bfloat16().float()
        memories.append(Memory(number, prompted, memory, net.pointer(decoded, 0, present)))
        found.append(logits)
    return found


@torch.no_grad()
def _stream(source: Any, frames: Tensor, corners: Tensor) -> list[Tensor]:
    """Run transformers' streaming inference on the same frames."""
    session = Sam2VideoInferenceSession(video=None, video_height=SIZE, video_width=SIZE, dtype=torch.float32)
    prompt = {"point_coords": corners[None], "point_labels": CORNER_LABELS[None]}
    session.add_point_inputs(session.obj_id_to_idx(1), 0, prompt)
    session.obj_with_new_inputs.append(1)
    return [
        source(inference_session=session, frame=frames[i : i + 1], frame_idx=i).pred_masks[:, 0]
        for i in range(len(frames))
    ]


def _moving_pattern(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    pattern = torch.nn.functional.interpolate(
        torch.randn(1, 3, 24, 24, generator=generator), scale_factor=16, mode="bicubic"
    )
    return torch.cat([pattern[..., 2 * i : 2 * i + SIZE, 3 * i : 3 * i + SIZE] for i in range(count)])


def bank(folder: Path, scenes: Path) -> Finding:
    """On held-out clips: bank on, bank off, first mask copied."""
    means = measure(folder / "export", scenes / "val", "default,bank-off,copy-first", "mask")
    text = ", ".join(f"{name} J {value:.3f}" for name, value in means.items())
    return Finding(means["default"] > means["bank-off"] > means["copy-first"], text)


def figures(folder: Path, scenes: Path) -> Finding:
    """On unseen scenes, a box on the first frame."""
    means = measure(folder / "export", scenes / "test", "default", "box")
    return Finding(means["default"] >= MIN_J, f"mean J {means['default']:.3f}, asked {MIN_J}")


def measure(weights: Path, clips: Path, settings: str, prompt: str) -> dict[str, float]:
    """Mean J of settings, over the objects of all clips."""
    chosen = parse_settings(settings, Setting(prompt=prompt))
    models = {setting.model: load_tracker(weights) for setting in chosen}
    results: list[list[SequenceResult]] = []
    for sequence in open_sequences(clips, [], 0):
        results.append(evaluate(sequence, chosen, models, lambda *_: None))
        print(f"{sequence.name}: {len(results)}", flush=True)
    return {
        setting.name: float(np.mean([s.j for row in results for s in row[i].scores.values()]))
        for i, setting in enumerate(chosen)
    }


GATES: dict[str, Callable[[Path, Path], Finding]] = {
    "overfit": overfit,
    "parity": parity,
    "bank": bank,
    "figures": figures,
}
