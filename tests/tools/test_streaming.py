"""Masks judged when they arrive: known delays of a square that moves, and a short run with a node."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sam3_node.bags.native.reader import TABLETOP
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from tools.bench.accuracy import streaming
from tools.bench.tiny_weights import save_tiny_checkpoint
from tools.vos.sequences import TrueFrame

STEP_PX = 4
SIDE = 20
FRAMES = 6
GAP_NS = 100_000_000


def square(index: int) -> np.ndarray:
    full = np.zeros((60, 80), np.bool_)
    full[20 : 20 + SIDE, 10 + STEP_PX * index : 10 + STEP_PX * index + SIDE] = True
    return full


def test_a_mask_counts_at_the_moments_after_its_arrival() -> None:
    """Each mask is right, and arrives when the next frame is captured."""
    frames = [Frame("cam0", i, i * GAP_NS, 80, 60, "bgr8", b"") for i in range(FRAMES)]
    found = [Instance(3, "", 1.0, "tracked", i, 0, Mask.from_full(square(i))) for i in range(FRAMES)]
    offline = [
        MaskFrame(*frame.key, 80, 60, instances=(one,)) for frame, one in zip(frames, found, strict=True)
    ]
    linked = offline[:1] + [replace(now, before=before) for before, now in pairwise(offline)]
    arrivals = [(masks.capture_ns + GAP_NS, masks) for masks in linked]
    scores = streaming.Scores()
    truth = (TrueFrame(np.zeros((60, 80, 3), np.uint8), {3: square(i)}) for i in range(FRAMES))
    scores.add(streaming.Played(frames, arrivals), offline, truth)
    late = (SIDE - STEP_PX) / (SIDE + STEP_PX)
    moved = (late + FRAMES - 2) / (FRAMES - 1)  # of the first masks, the motion is not known
    expected = {streaming.OFFLINE: 1.0, streaming.VOT: 1.0, streaming.STREAMING: late, streaming.MOVED: moved}
    assert {kind: found for kind, (found,) in scores.j.items()} == pytest.approx(expected)
    assert scores.ages_ms == [100.0] * (FRAMES - 1)


def test_a_short_run_with_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_checkpoint(tmp_path / "tiny")
    out = tmp_path / "figures.json"
    options = ["--model", model, "--objects", "1,9", "--frames", "4", "--runs", "1", "--json", out]
    monkeypatch.setattr("sys.argv", ["streaming", str(TABLETOP), *map(str, options)])
    streaming.main()
    values = {record["figure"]: record["value"] for record in json.loads(out.read_text())}
    for kind in streaming.KINDS:
        assert 0 <= values[f"J {kind}, tabletop, tiny at its own size, 1 object"] <= 1
