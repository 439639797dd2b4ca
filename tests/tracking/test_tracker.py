"""The tracker's promises: objects do not disturb one another, memory is bounded, bad prompts change nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sam3_node.errors import CapacityError, RequestError, SettingsError, UnknownObjectError
from sam3_node.models.sam.stages import Decoded, ReadLimits, find_limits
from sam3_node.models.sam.tracker_model import TrackerModel
from sam3_node.tracking import ObjectPrompt, Tracker, Tracks, memory
from sam3_node.tracking.host_copy import HostCopy, copy_to_device
from sam3_node.tracking.memory import CONFIDENT_SCORE, get_rule
from sam3_node.tracking.tracks import BATCHES
from tests.support.refuses import refuses
from tests.support.tiny import noise_clip, random_source, stages_of, tiny_model

CLOSE = 2e-4  # float32 in batches of another size
A = ObjectPrompt(1, points=[[30.0, 40.0]])
B = ObjectPrompt(2, box=[20.0, 30.0, 70.0, 90.0])


@pytest.fixture(scope="module")
def model() -> TrackerModel:
    return tiny_model()


@pytest.fixture(scope="module")
def clip(model: TrackerModel) -> list[torch.Tensor]:
    return noise_clip(model.image_size, 24)


def run(
    tracker: Tracker, clip: list[torch.Tensor], prompts: dict[int, list[ObjectPrompt]]
) -> list[torch.Tensor]:
    """Logits of object 1 on each frame."""
    found = []
    for frame, pixels in enumerate(clip):
        tracks = tracker.step(pixels, prompts.get(frame, []))
        found.append(tracks.logits[tracks.ids.index(1)])
    return found


def steps(tracker: Tracker, clip: list[torch.Tensor]) -> list[Tracks]:
    """Object 1 alone, from the first frame on."""
    return [tracker.step(pixels, [A] if frame == 0 else []) for frame, pixels in enumerate(clip)]


def largest_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def test_others_added_corrected_and_removed_do_not_disturb_an_object(model: TrackerModel, clip: list) -> None:
    alone = run(Tracker(model), clip, {0: [A]})
    tracker = Tracker(model)
    beside = []
    for frame, pixels in enumerate(clip):
        prompts = {
            0: [A],
            4: [B],
            9: [ObjectPrompt(2, points=[[60.0, 60.0]])],
            11: [ObjectPrompt(3, points=[[9, 9]])],
        }
        if frame == 15:
            tracker.remove(2)
        beside.append(tracker.step(pixels, prompts.get(frame, [])).logits[0])
    assert largest_difference(alone, beside) < CLOSE
    assert tracker.ids == [1, 3]


def test_a_row_used_again_remembers_nothing(model: TrackerModel, clip: list) -> None:
    tracker = Tracker(model, max_objects=1)
    for pixels in clip[:12]:
        tracker.step(pixels, [] if 7 in tracker.ids else [ObjectPrompt(7, box=[5.0, 5.0, 90.0, 50.0])])
    tracker.remove(7)
    again = run(tracker, clip, {0: [A]})
    assert largest_difference(again, run(Tracker(model), clip, {0: [A]})) < CLOSE


def test_reset_forgets_all(model: TrackerModel, clip: list) -> None:
    tracker = Tracker(model)
    first = run(tracker, clip[:8], {0: [A, B]})
    tracker.reset()
    assert tracker.ids == []
    assert tracker.frame_number == 0
    assert largest_difference(first, run(tracker, clip[:8], {0: [A, B]})) == 0


@pytest.mark.parametrize("bank_size", [7, 15, 30, 60])
def test_a_larger_pool_does_not_change_the_reference_rule(
    model: TrackerModel, clip: list, bank_size: int
) -> None:
    tracker = Tracker(model, max_objects=2, bank_size=bank_size)
    before = tracker.bank.nbytes
    found = run(tracker, clip, {0: [A], 3: [B]})
    assert largest_difference(found, run(Tracker(model, max_objects=2), clip, {0: [A], 3: [B]})) == 0
    assert tracker.bank.nbytes == before


@pytest.mark.parametrize("bank_size", [7, 15, 30, 60])
def test_confident_passes_over_frames_out_of_view(clip: list, bank_size: int) -> None:
    model = stages_of(random_source("sam3", presence=7.0))  # here the object is out of view now and then
    seen = [bool(tracks.visible[0]) for tracks in steps(Tracker(model), clip)]
    first_absent = seen.index(False)
    recent = [tracks.logits[0] for tracks in steps(Tracker(model), clip)]
    tracker = Tracker(model, bank_size=bank_size, selection="confident")
    confident = [tracks.logits[0] for tracks in steps(tracker, clip)]
    # the last frame always counts, so the rules differ two frames after the first absence at the earliest
    assert largest_difference(confident[: first_absent + 2], recent[: first_absent + 2]) == 0
    assert largest_difference(confident, recent) > 0


def test_the_memory_of_the_newest_prompted_frame_comes_first(model: TrackerModel, clip: list) -> None:
    tracker = Tracker(model, max_objects=1)
    row = np.zeros(1, dtype=np.int64)
    firsts = []
    for frame, pixels in enumerate(clip[:8]):
        tracker.step(pixels, [A] if frame in (0, 4) else [])
        memories = tracker.bank.read(row, tracker.frame_number, static=False)
        prompted = memories.offset[0] == model.num_maskmem - 1
        assert prompted.nonzero().flatten().tolist() == ([0, 1] if frame >= 4 else [0])
        firsts.append(memories.memory[0, 0].clone())
    assert all(torch.equal(first, firsts[0]) for first in firsts[:4])
    assert all(torch.equal(first, firsts[4]) for first in firsts[4:])
    assert not torch.equal(firsts[0], firsts[4])
    assert torch.equal(memories.memory[0, 1], firsts[0])


def test_the_anchor_is_attended_to_until_a_prompt_or_a_correction(model: TrackerModel) -> None:
    rows = np.zeros(1, dtype=np.int64)
    side = model.mask_size[0]
    bank = memory.MemoryBank(model, 1, 7, get_rule("distractor"), history=4)
    alone = torch.full((1, side, side), -9.0)
    alone[:, 2:6, 2:6] = 9
    beside = alone.clone()
    beside[:, -4:, -4:] = -0.5
    grown = beside.clone()
    grown[:, 2:6, 2:8] = 9
    pointer = torch.zeros(1, model.hidden)
    content = torch.ones_like(bank.features[:1, 0])

    def attended(frame: int) -> list[float]:
        return bank.read(rows, frame, static=False).memory[0, :, 0, 0].tolist()

    def track(first: int, last: int) -> None:
        for frame in range(first, last + 1):
            logits = grown if frame == 15 else beside if frame in (2, 4, 9, 16, 17) else alone
            iou = torch.tensor([0.5 if frame == 16 else 1.0])
            presence = torch.full((1,), 9.0)
            bank.write(rows, frame, frame * content, Decoded(logits, iou, presence, pointer))

    bank.write_conditioning(0, 0, 0, 0 * content, pointer)
    track(1, 12)
    assert attended(13) == [0, 9, 12, 11, 10, 8, 7]  # 2 was the anchor before, 4 came too soon after it
    assert attended(9) == [0, 8, 7, 6, 5, 4, 3]  # without the anchor, which is this frame
    track(13, 20)
    assert attended(21) == [0, 17, 20, 19, 18, 16, 15]  # the masks of 15 and 16 are not sure
    bank.correct(0, 20, 21, 20 * content, pointer)
    assert attended(21) == [0, 20, 19, 18, 17, 16, 15]
    track(21, 21)
    bank.write_conditioning(0, 22, 22, 22 * content, pointer)
    assert attended(23) == [22, 0, 21, 20, 19, 18, 17]
    bank.clear(0)
    assert not bank.read(rows, 24, static=True).valid.any()


def test_a_small_bank_attends_to_less(model: TrackerModel, clip: list) -> None:
    small, reference = (run(Tracker(model, bank_size=size), clip, {0: [A]}) for size in (3, 7))
    assert largest_difference(small[:3], reference[:3]) == 0
    assert largest_difference(small, reference) > 0


@pytest.mark.parametrize(
    "read",
    ["static", *(pytest.param(read, marks=pytest.mark.engines) for read in ("exact", "pooled"))],
)
def test_static_shapes_and_compiled_stages_give_the_same_masks(read: str, clip: list) -> None:
    source = random_source("sam3")
    changed = stages_of(source)
    plain = stages_of(source)
    if read == "static":
        changed.static_shapes = True
    else:
        for model in (changed, plain):
            model.use_read(read)  # type: ignore[arg-type]
        torch._dynamo.reset()
        changed.compile("aot_eager")
    prompts = {0: [A, B], 5: [ObjectPrompt(3, points=[[80.0, 20.0]])]}
    masks = [run(Tracker(model), clip, prompts) for model in (changed, plain)]
    assert largest_difference(*masks) < CLOSE


def test_more_objects_than_one_batch(model: TrackerModel, clip: list) -> None:
    many = [ObjectPrompt(i, points=[[6.0 * i, 50.0]]) for i in range(1, 11)]
    together = run(Tracker(model), clip[:8], {0: many})
    assert largest_difference(together, run(Tracker(model), clip[:8], {0: many[:1]})) < CLOSE


def test_memory_that_runs_out_makes_batches_smaller_and_loses_no_frame(
    clip: list, caplog: pytest.LogCaptureFixture
) -> None:
    small = tiny_model()
    plain = tiny_model()
    inner = small.stages.remember
    calls = []

    def remember(top: torch.Tensor, logits: torch.Tensor, presence: torch.Tensor) -> torch.Tensor:
        calls.append(len(logits))
        if len(logits) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return inner(top, logits, presence)

    small.stages = small.stages._replace(remember=remember)
    many = [ObjectPrompt(i, points=[[6.0 * i, 50.0]]) for i in range(1, 11)]
    found, expected = (run(Tracker(model), clip[:6], {0: many}) for model in (small, plain))
    assert largest_difference(found, expected) < CLOSE
    assert calls[:7] == [10, 5, 2, 2, 2, 2, 2]
    assert set(calls[3:]) == {2}, "the smaller batch stays"
    assert "2 objects" in caplog.text


def test_memory_that_runs_out_for_one_object_is_an_error(clip: list) -> None:
    model = tiny_model()

    def read(*inputs: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    read.limits = ReadLimits(any_width=True)  # type: ignore[attr-defined]
    model.stages = model.stages._replace(read=read)
    tracker = Tracker(model)
    tracker.step(clip[0], [A])
    with pytest.raises(torch.OutOfMemoryError):
        tracker.step(clip[1])
    assert tracker.frame_number == 1


def test_tracks_say_what_is_there(model: TrackerModel, clip: list) -> None:
    tracker = Tracker(model)
    assert tracker.step(clip[0]).logits.shape == (0, *model.mask_size)
    tracks = tracker.step(clip[1], [B, A])
    assert tracks.ids == [2, 1]
    assert tracks.logits.shape == (2, *model.mask_size)
    assert tracks.visible.dtype == torch.bool
    assert bool(((tracks.scores >= 0) & (tracks.scores <= 1)).all())


def test_capacity_is_a_clear_error_and_changes_nothing(model: TrackerModel, clip: list) -> None:
    tracker = Tracker(model, max_objects=2)
    tracker.step(clip[0], [A, B])
    with refuses(CapacityError, field=("0", "2", "free")):
        tracker.step(clip[1], [ObjectPrompt(3, points=[[1.0, 1.0]])])
    assert tracker.ids == [1, 2]
    assert tracker.frame_number == 1


BAD = {
    "found none of them": ObjectPrompt(9),
    "finite": ObjectPrompt(9, points=[[float("nan"), 1.0]]),
    "pairs": ObjectPrompt(9, points=[1.0, 2.0]),
    "1 to 64": ObjectPrompt(9, points=[[1.0, 1.0]] * 65),
    "1 of 1 .inside. or 0": ObjectPrompt(9, points=[[1.0, 1.0]], labels=[2]),
    "2 of 1": ObjectPrompt(9, points=[[1.0, 1.0], [2.0, 2.0]], labels=[1]),
    "x0 < x1": ObjectPrompt(9, box=[10.0, 10.0, 5.0, 20.0]),
    "numbers": ObjectPrompt(9, points="here"),
    "model pixels": ObjectPrompt(9, mask=torch.zeros(3, 3)),
    "alone": ObjectPrompt(9, mask=torch.zeros(112, 112), points=[[1.0, 1.0]]),
}


@pytest.mark.parametrize("said", BAD)
def test_a_bad_prompt_is_refused_before_anything_changes(model: TrackerModel, clip: list, said: str) -> None:
    tracker = Tracker(model)
    tracker.step(clip[0], [A])
    with pytest.raises(RequestError, match=said):
        tracker.step(clip[1], [BAD[said]])
    assert tracker.ids == [1]
    assert tracker.frame_number == 1


def test_two_prompts_for_one_object_are_refused(model: TrackerModel, clip: list) -> None:
    with refuses(RequestError, field="prompt"):
        Tracker(model).step(clip[0], [A, A])


def test_unknown_objects_and_frames(model: TrackerModel, clip: list) -> None:
    tracker = Tracker(model)
    tracker.step(clip[0], [A])
    with refuses(UnknownObjectError, field=("4", "1", "tracked")):
        tracker.remove(4)
    with refuses(RequestError, field=("0", "1")):
        tracker.prompt_at(model.encode(clip[0]), 1, B)
    with pytest.raises(SettingsError):
        Tracker(model, max_objects=0)


def test_segment_leaves_no_trace(model: TrackerModel, clip: list) -> None:
    tracker = Tracker(model)
    found = []
    for frame, pixels in enumerate(clip[:8]):
        features = model.encode(pixels)
        tracker.segment(features, B)
        found.append(tracker.step_features(features, [A] if frame == 0 else []).logits[0])
    assert largest_difference(found, run(Tracker(model), clip[:8], {0: [A]})) == 0


def watch_reads(model: TrackerModel) -> list[tuple]:
    """Return a list that gets the shapes of all inputs of each read from now on; () for no mask."""
    inner = model.stages.read
    calls = list[tuple]()

    def read(*inputs: torch.Tensor | None) -> torch.Tensor:
        calls.append(tuple(() if tensor is None else tensor.shape for tensor in inputs))
        return inner(*inputs)

    read.limits = find_limits(inner)  # type: ignore[attr-defined]
    model.stages = model.stages._replace(read=read)
    return calls


def attended(model: TrackerModel, tracker: Tracker, clip: list, prompts: dict) -> list[tuple[int, int, int]]:
    """Step through the clip; return objects, memories and masked columns of each call of the read."""
    calls = watch_reads(model)
    for frame, pixels in enumerate(clip):
        tracker.step(pixels, prompts.get(frame, []))
    return [(*memory[:2], valid[1] if valid else 0) for _, memory, *_, valid in calls]


def test_a_static_read_takes_no_more_memories_than_a_dynamic_one() -> None:
    model = tiny_model()
    clip = noise_clip(model.image_size, 18)
    prompts = {0: [A], 1: [B], 9: [ObjectPrompt(2, points=[[60.0, 60.0]])]}
    dynamic = attended(model, Tracker(model, 2), clip, prompts)
    model.static_shapes = True
    static = attended(model, Tracker(model, 2), clip, prompts)
    assert [call[:2] for call in static[-2:]] == [call[:2] for call in dynamic[-2:]] == [(1, 7), (1, 8)]
    slots, pointers = Tracker(model, 2).bank.widths
    assert {columns for _, memories, columns in static if memories < slots} == {pointers}, (
        "memories are masked"
    )
    assert all(columns <= pointers for *_, columns in dynamic), "memories are masked"


def test_static_reads_have_only_the_shapes_of_the_warm_up() -> None:
    model = tiny_model()
    model.static_shapes = True
    clip = noise_clip(model.image_size, 16)
    warm = watch_reads(model)
    tracker = Tracker(model, 3)
    tracker.warm_up_reads()
    expected = set(warm)
    assert len(expected) == len(warm) == 3 * 4
    for frame, pixels in enumerate(clip):
        again = [ObjectPrompt(2, points=[[60.0, 60.0]])] if frame in (3, 5, 7, 9, 11) else []
        tracker.step(pixels, {0: [A, B], 2: [ObjectPrompt(3, points=[[9, 9]])]}.get(frame, again))
    assert set(warm) == expected


@pytest.mark.parametrize(
    "limits",
    [ReadLimits(any_width=True), ReadLimits(full_from=2), ReadLimits()],
    ids=["torch", "kernels", "mask"],
)
def test_a_growing_number_of_objects_has_few_shapes(limits: ReadLimits) -> None:
    """cuDNN plans each new shape, for up to 150 ms: sixteen objects are added one by one, one of them is corrected."""
    model = tiny_model(hidden=64, size=56)
    model.static_shapes = True
    calls = watch_reads(model)
    model.stages.read.limits = limits
    tracker = Tracker(model, 16)
    for frame, pixels in enumerate(noise_clip(model.image_size, 40)):
        new = [ObjectPrompt(frame, points=[[5.0 + 3 * frame, 20.0]])] if frame < 16 else []
        again = [ObjectPrompt(3, points=[[20.0, 20.0]])] if frame in (24, 30) else []
        tracker.step(pixels, new + again)
    lengths: dict[int, set[int]] = {}
    for _, memories, _, pointers, *_ in calls:
        keys = memories[1] * model.memory_tokens + pointers[1] * model.memory_attention.tokens.pointer_tokens
        lengths.setdefault(memories[0], set()).add(keys)
    assert set(lengths) <= set(BATCHES)
    assert {1, 16} <= set(lengths)
    assert max(map(len, lengths.values())) <= 4, lengths


def test_a_full_bank_is_read_without_a_mask_where_the_read_takes_it_so() -> None:
    model = tiny_model(hidden=64, size=56)
    model.static_shapes = True
    calls = watch_reads(model)
    model.stages.read.limits = ReadLimits(full_from=2)
    tracker = Tracker(model, 2)
    reference = Tracker(tiny_model(hidden=64, size=56), 2)
    for frame, pixels in enumerate(noise_clip(model.image_size, 22)):
        prompts = [A, B] if frame == 0 else []
        found = tracker.step(pixels, prompts)
        expected = reference.step(pixels, prompts)
        assert (found.logits - expected.logits).abs().max() < CLOSE
    masked = [valid != () for *_, valid in calls]
    assert masked == [True] * 15 + [False] * 6, "15 pointers of tracked frames make a bank full"


class Engine:
    """A read as an engine: with a mask, of few objects at once."""

    limits = ReadLimits(max_objects=2)

    def __init__(self, model: TrackerModel) -> None:
        self._read = model.stages.read
        self.calls: list[tuple[int, int]] = []

    def __call__(self, top: torch.Tensor, memory: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        assert others[-1].shape[1] == memory.shape[1] + others[1].shape[1], "expected a mask of all"
        self.calls.append((len(memory), memory.shape[1]))
        return self._read(top, memory, *others)


def test_an_engine_reads_no_more_than_torch() -> None:
    """Four objects read 7 memories of 10 with a mask, also while their rings fill up."""
    model = tiny_model()
    reference = tiny_model()
    engine = Engine(model)
    clip = noise_clip(model.image_size, 16)
    prompts = {0: [A, B, ObjectPrompt(3, points=[[9.0, 9.0]])], 9: [ObjectPrompt(4, points=[[60.0, 60.0]])]}
    model.stages = model.stages._replace(read=engine)
    model.static_shapes = True
    ours = Tracker(model, 4)
    theirs = Tracker(reference, 4)
    ours.warm_up_reads()
    warm = set(engine.calls)
    assert warm == {(objects, width) for objects in (1, 2) for width in ours.bank.read_widths}
    engine.calls.clear()
    for frame, pixels in enumerate(clip):
        actual, expected = (tracker.step(pixels, prompts.get(frame, [])) for tracker in (ours, theirs))
        assert (actual.logits - expected.logits).abs().max() < CLOSE
    assert set(engine.calls) == {(1, 7), (2, 7)} <= warm


SCORES = st.lists(st.sampled_from([0.0, CONFIDENT_SCORE, 0.5, 0.9]), min_size=1, max_size=20)


def choose(name: str, ages: list[int], scores: list[float], limit: int) -> list[tuple[int, int]]:
    """(age, offset) of each frame chosen for one object."""
    age = np.array([ages])
    score = np.array([scores], dtype=np.float32)
    order, offset, valid = get_rule(name).choose(age, score, np.ones_like(age, dtype=bool), limit)
    return [(int(age[0, i]), int(o)) for i, o, v in zip(order[0], offset[0], valid[0], strict=True) if v]


def sam3_frame_filter(ages: list[int], scores: list[float], limit: int) -> list[tuple[int, int]]:
    """SAM 3's rule as its authors write it: walk back from the last frame, which always counts."""
    kept = [
        age for age, score in sorted(zip(ages, scores, strict=True)) if score > CONFIDENT_SCORE or age == 1
    ]
    return [(age, rank) for rank, age in enumerate(kept[:limit], start=1)]


@given(SCORES, st.integers(1, 8), st.randoms())
def test_rules_equal_their_definitions(scores: list[float], limit: int, random) -> None:
    ages = list(range(1, len(scores) + 1))
    random.shuffle(ages)
    newest = [(age, age) for age in range(1, min(limit, len(ages)) + 1)]
    assert choose("recent", ages, scores, limit) == choose("distractor", ages, scores, limit) == newest
    assert choose("confident", ages, scores, limit) == sam3_frame_filter(ages, scores, limit)


def test_frames_not_held_are_never_chosen() -> None:
    ages = np.array([[1, 2, 3]])
    scores = np.ones((1, 3), dtype=np.float32)
    _, _, valid = get_rule("recent").choose(ages, scores, np.array([[True, False, True]]), 3)
    assert valid.sum() == 2


def test_an_unknown_rule_is_named() -> None:
    with refuses(SettingsError, field="confident"):
        get_rule("newest")


def test_a_copy_holds_the_values_at_its_time() -> None:
    """Graphs and engines may write to the same tensor again before the copy is read."""
    values = torch.tensor([0.25, 0.5])
    copied = HostCopy(values)
    values.zero_()
    assert copied.read().tolist() == [0.25, 0.5]


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_later_work() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = torch.tensor([0.25, 0.5], device="cuda")
    HostCopy(values).read()  # loads what the first use loads
    copied = HostCopy(values)
    torch.cuda._sleep(1 << 30)
    later = torch.cuda.Event()
    later.record()
    assert copied.read().tolist() == [0.25, 0.5]
    assert not later.query(), "the device is still busy"


def test_a_step_sends_the_indices_of_all_its_objects_at_once(
    model: TrackerModel, clip: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker(model, max_objects=2)
    sent = []
    run(tracker, clip[:12], {0: [A, B], 5: [A]})

    def send(values: np.ndarray, device: torch.device) -> torch.Tensor:
        sent.append(values.dtype)
        return copy_to_device(values, device)

    monkeypatch.setattr(memory, "copy_to_device", send)
    assert len(tracker.bank.read_groups(np.arange(2), 12, False)) == 2
    tracker.step(clip[12])
    assert sent == [np.int64] * 3  # twice for the reads, and the rows to write
