"""Compare memory selections where look-alikes are in view: J, masks beside their object, and masks of hidden objects.

    python -m research.distractors [--model FOLDER] [--selections recent,distractor] [CLIPS ...]

It tracks the blue can of the bundled recording, which the blue arm hides, from 24 prompts with boxes that differ a
little, twelve on each of two ways to drop frames. `runs taken` counts the prompts whose hidden can has a mask on more
than five frames. Each folder of CLIPS (`python -m tools.scenes --split val --scenario lookalike --seed 51 --clips 14
--frames 80 --size 320x240 --fps 15 -o FOLDER`) is tracked once, from the true boxes. `beside` is the share of masks of
objects in view that lie on the object with less than 30 % of their area.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sam3_node.cameras.playback import TABLETOP
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.perception.output_masks import rasterize
from sam3_node.perception.prompts import to_model
from sam3_node.tracking import Tracker
from sam3_node.types import Mask
from sam3_node.wire.frame_prompt import FramePrompt
from tools.vos.followers import encode_frame
from tools.vos.sequences import LabelledSequence, TrueFrame, open_sequences

CAN = 4
COPIES = 12
FRAMES = 100
WAYS = ((3, 0.0), (7, 0.3))  # seed, and share of dropped frames
VISIBLE = 0.0005  # of the image


def follow(
    model: TrackerModel, frames: Iterable[TrueFrame], ids: list[int], selection: str, min_area: float, jitter: float, seed: int
) -> dict[int, list[tuple[float, float, float, float]]]:
    """Return J, the shares of the image of truth and mask, and the share of the mask on the truth, by object and frame.

    Ids beyond 100 are further prompts of the object of id % 100.
    """
    rng = np.random.default_rng(seed)
    tracker = Tracker(model, len(ids), selection=selection)
    rows: dict[int, list[tuple[float, float, float, float]]] = {}
    for frame in frames:
        view = encode_frame(model, frame.image)
        tracks = tracker.step_features(view.features)
        for key, logits in zip(tracks.ids, tracks.logits.float().cpu().numpy(), strict=True):
            mask = rasterize(logits, view.scaling.frame_size).full()
            truth = frame.truth(key % 100)
            common = np.count_nonzero(mask & truth)
            either = np.count_nonzero(mask | truth)
            area = np.count_nonzero(mask)
            rows[key].append((common / either if either else 1.0, truth.mean(), mask.mean(), common / max(area, 1)))
        for key in ids:
            truth = frame.truth(key % 100)
            if key not in rows and truth.mean() >= min_area and truth.any():
                box = np.array(Mask.from_full(truth).box, float)
                sides = np.tile(box[2:] - box[:2], 2)
                size = np.tile(truth.shape[::-1], 2)
                box = np.clip(box + jitter * sides * rng.uniform(-1, 1, 4), 0, size)
                prompt = to_model(FramePrompt(box=tuple(box.tolist())), key, view.scaling)
                tracker.prompt_at(view.features, tracker.frame_number - 1, prompt)
                rows[key] = []
    return rows


def dropped(sequence: LabelledSequence, seed: int, share: float) -> Iterable[TrueFrame]:
    """Yield the frames from one of the first eight on, without a random share of them."""
    rng = np.random.default_rng(seed)
    first = int(rng.integers(0, 8))
    for index, frame in enumerate(sequence.frames()):
        if index == first or (index > first and rng.random() >= share):
            yield frame


def report(name: str, selection: str, tracks: list[list[tuple[float, float, float, float]]]) -> None:
    """Print the figures of all tracks."""
    means = [np.mean([row[0] for row in track]) for track in tracks if track]
    rows = np.array([row for track in tracks for row in track])
    seen = rows[:, 1] > VISIBLE
    masked = rows[:, 2] > VISIBLE
    hidden = rows[:, 1] == 0
    beside = (seen & masked & (rows[:, 3] < 0.3)).sum() / max(seen.sum(), 1)
    taken = sum(sum(truth == 0 and mask > 0 for _, truth, mask, _ in track) > 5 for track in tracks)
    print(
        f"{name}, {selection}: J {np.mean(means):.4f}, beside {beside:.2%}, missing {(seen & ~masked).sum() / max(seen.sum(), 1):.2%}, "
        f"masks of hidden objects {(hidden & masked).sum() / max(hidden.sum(), 1):.1%}, runs taken {taken} of {len(tracks)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("clips", nargs="*", type=Path, help="folders of clips")
    parser.add_argument("--model", default="nano", help="as model.name of the node")
    parser.add_argument("--selections", default="recent,distractor")
    args = parser.parse_args()
    model = load_tracker(args.model)
    [scene] = open_sequences(TABLETOP, max_frames=FRAMES)
    ids = [CAN + 100 * copy for copy in range(COPIES)]
    for selection in args.selections.split(","):
        tracks = [
            track
            for seed, share in WAYS
            for track in follow(model, dropped(scene, seed, share), ids, selection, scene.min_area, 0.05, seed).values()
        ]
        report("the can", selection, tracks)
    for folder in args.clips:
        for selection in args.selections.split(","):
            tracks = []
            for clip in open_sequences(folder):
                found = follow(model, clip.frames(), list(clip.ids), selection, clip.min_area, 0.0, 0)
                tracks += list(found.values())
            report(folder.name, selection, tracks)


if __name__ == "__main__":
    main()
