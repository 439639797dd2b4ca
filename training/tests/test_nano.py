"""The training as a whole: steps, a kill and a new start, export, the command."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from sam3_node.errors import ModelError
from sam3_node.models import load_tracker
from sam3_node.models.weight_files import check_digest
from tests.support.rectangles import write_rectangles
from tests.support.refuses import refuses
from tools.command import read_json_lines
from training.nano.__main__ import main
from training.nano.data import Recipe, Sources
from training.nano.export import MAX_BYTES, export
from training.nano.network import nano_config
from training.nano.train import Progress, Stage, Trainer, easiness, schedule, stages

CPU = torch.device("cpu")
ONE_STEP = 1e-6  # s: a stage of this length is over after its first step
FRAMES = Stage("frames", ONE_STEP, 1e-3, Recipe(clips=2, frames=1, objects=2), new=True)
CLIPS = Stage("clips", ONE_STEP, 1e-3, Recipe(clips=1, frames=3, objects=2))
FROZEN = Stage("frozen", ONE_STEP, 1e-3, Recipe(clips=1, frames=2, objects=2, encoder=False))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scenes")
    write_rectangles(root / "train")
    return root


@pytest.fixture(scope="module")
def sources(scenes: Path) -> Sources:
    return Sources(scenes / "train", scenes / "cache")


@pytest.fixture(scope="module")
def trained(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """One step on frames, one on clips. Not to be trained further."""
    trainer = Trainer(tmp_path_factory.mktemp("train_nano"), CPU)
    trainer.run([FRAMES, CLIPS], sources, workers=0)
    return trainer


@pytest.fixture(scope="module")
def weights(trained: Trainer) -> Path:
    return export(trained.path, trained.folder / "export")


def run_command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int | str | None:
    """The exit status of `python -m training.nano` WORDS."""
    monkeypatch.setattr(sys, "argv", ["train_nano", *map(str, words)])
    try:
        main()
    except SystemExit as left:
        return left.code
    return 0


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def test_stages_end_by_time_and_leave_a_checkpoint_and_a_log(trained: Trainer) -> None:
    progress = trained.progress
    assert (progress.stage, progress.seconds, progress.step) == (2, 0.0, 2)
    assert progress.total > 0
    assert trained.path.is_file()
    frames, clips = read_json_lines(trained.folder / "log.jsonl")
    assert (frames["stage"], frames["step"]) == ("frames", 1)
    assert (clips["stage"], clips["step"]) == ("clips", 2)
    assert {"box", "point", "mask", "loss", "presence", "rate", "total"} <= frames.keys()
    assert {"followed", "last"} <= clips.keys()


def test_a_step_changes_the_weights_and_their_average(trained: Trainer, tmp_path: Path) -> None:
    fresh = Trainer(tmp_path, CPU)
    now = trained.net.source.state_dict()
    begun = fresh.net.source.state_dict()
    name = "mask_decoder.mask_tokens.weight"
    assert not torch.equal(now[name], begun[name])
    between = (trained.average[name] - begun[name]).abs() <= (now[name] - begun[name]).abs().max()
    assert bool(between.all())
    assert not torch.equal(trained.average[name], begun[name])


def test_the_position_matrices_stay_tied(trained: Trainer) -> None:
    source = trained.net.source
    tied = (source.shared_image_embedding, source.prompt_encoder.shared_embedding)
    assert torch.equal(*(part.positional_embedding for part in tied))


def test_a_new_start_goes_on_where_the_last_ended(trained: Trainer, sources: Sources) -> None:
    again = Trainer(trained.folder, CPU)
    assert again.progress == trained.progress
    assert same(again.net.source.state_dict(), trained.net.source.state_dict())
    assert same(again.average, trained.average)
    both = zip(again.optimisers, trained.optimisers, ("momentum", "exp_avg_sq"), strict=True)
    for mine, other, moment in both:
        moments, held = (optimiser.state_dict()["state"] for optimiser in (mine, other))
        assert moments.keys() == held.keys()
        assert all(torch.equal(moments[i][moment], held[i][moment]) for i in held)
    again.run([FRAMES, CLIPS], sources, workers=0)
    assert again.progress.step == 2, "stages that are over are not begun again"


def test_a_stage_without_the_encoder_leaves_it_as_it_is(
    trained: Trainer, sources: Sources, tmp_path: Path
) -> None:
    """Although the optimiser holds moments of it."""
    (tmp_path / "last.pt").write_bytes(trained.path.read_bytes())
    again = Trainer(tmp_path, CPU)
    again.run([FRAMES, CLIPS, FROZEN], sources, workers=0)
    assert again.progress.step == 3
    for name, value in trained.net.source.vision_encoder.state_dict().items():
        assert torch.equal(again.net.source.vision_encoder.state_dict()[name], value)
    memory = again.net.source.memory_encoder.projection.weight
    assert not torch.equal(memory, trained.net.source.memory_encoder.projection.weight)


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert read_json_lines(log) == [{"step": 1}, {"step": 2}]
    assert read_json_lines(tmp_path / "absent.jsonl") == []


def test_what_is_exported_is_a_tracker(trained: Trainer, weights: Path) -> None:
    assert weights.name == "model.safetensors"
    assert weights.stat().st_size < MAX_BYTES == 12_000_000
    check_digest(weights)
    held = load_file(weights)
    assert {value.dtype for value in held.values()} == {torch.float16}
    assert same(held, {name: value.half() for name, value in trained.average.items()})
    model = load_tracker(weights.parent)
    assert model.can_track
    assert (model.image_size, model.mask_size) == (256, (64, 64))


def test_the_exported_configuration_is_the_one_that_was_trained(weights: Path) -> None:
    told = AutoConfig.from_pretrained(weights.parent).to_dict()
    own = nano_config().to_dict()
    incidental = {"transformers_version", "dtype", "_name_or_path"}
    assert {key for key in own if told[key] != own[key]} <= incidental


def test_training_can_begin_from_exported_weights(weights: Path, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, CPU, init=weights)
    held = {name: value.float() for name, value in load_file(weights).items()}
    assert same(trainer.net.source.state_dict(), held)
    assert same(trainer.average, held)
    assert trainer.progress == Progress()


def test_positions_are_those_of_the_weights_that_training_begins_from(weights: Path, tmp_path: Path) -> None:
    other = {name: value.clone() for name, value in load_file(weights).items()}
    for name in (n for n in other if n.endswith("positional_embedding")):
        other[name] = other[name].flip(1)
    save_file(other, tmp_path / "other.safetensors")
    net = Trainer(tmp_path / "first", CPU, init=tmp_path / "other.safetensors").net
    assert torch.equal(net.position, net.source.get_image_wide_positional_embeddings())
    assert not torch.equal(net.position, Trainer(tmp_path / "second", CPU, init=weights).net.position)


def test_weights_to_begin_from_are_checked(tmp_path: Path) -> None:
    with refuses(ModelError, field="weights"):
        Trainer(tmp_path, CPU, init=tmp_path / "absent.safetensors")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"not weights")
    with pytest.raises(ModelError, match="damage"):
        Trainer(tmp_path, CPU, init=damaged)


def test_an_absent_or_damaged_checkpoint_is_told(trained: Trainer, tmp_path: Path) -> None:
    with refuses(ModelError, field=("train", "first")):
        export(tmp_path / "last.pt", tmp_path / "export")
    (tmp_path / "last.pt").write_bytes(trained.path.read_bytes()[:5000])
    with pytest.raises(ModelError, match="damaged"):
        export(tmp_path / "last.pt", tmp_path / "export")
    with pytest.raises(ModelError, match="damaged"):
        Trainer(tmp_path, CPU)
    torch.save({"model": {}}, tmp_path / "last.pt")
    with refuses(ModelError, field="tracker"):
        Trainer(tmp_path, CPU)


def test_the_plan_is_frames_and_then_longer_and_longer_clips_at_falling_rates() -> None:
    plan = stages(frame_minutes=60, clip_minutes=240)
    frames, rates = zip(*((stage.recipe.frames, stage.rate) for stage in plan), strict=True)
    assert frames[0] == 1
    assert list(frames) == sorted(frames)
    assert list(rates) == sorted(rates, reverse=True)
    assert sum(stage.seconds for stage in plan) == pytest.approx(300 * 60)


def test_on_a_cpu_only_the_time_counts_that_training_had(trained: Trainer) -> None:
    begun = trained._clock()
    waited = time.monotonic()
    time.sleep(0.2)
    assert trained._clock() - begun < 0.1 < time.monotonic() - waited


def test_the_rate_rises_and_falls_and_the_outside_weighs_more_later() -> None:
    rates = [schedule(seconds, of=1000) for seconds in (0, 30, 60, 500, 1000, 2000)]
    assert rates[0] == 0.01
    assert rates[1] == pytest.approx(0.5)
    assert rates[2] == pytest.approx(1.0)
    assert rates[2] > rates[3] > rates[4]
    assert min(rates) > 0
    ease = [easiness(share) for share in (0, 0.25, 0.4, 0.6, 1)]
    assert ease == sorted(ease, reverse=True)
    assert ease[0] == 1


def test_the_command_exports_what_is_trained(
    trained: Trainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "export", "-o", trained.folder) == 0
    assert "model.safetensors: 7." in capsys.readouterr().out


def test_the_mean_of_runs_is_exported(trained: Trainer, tmp_path: Path) -> None:
    held = torch.load(trained.path, weights_only=True)
    for folder, factor in (("a", 1.0), ("b", 3.0)):
        (tmp_path / folder).mkdir()
        average = {name: factor * value for name, value in held["average"].items()}
        torch.save({**held, "average": average}, tmp_path / folder / "last.pt")
    path = export(tmp_path / "a" / "last.pt", tmp_path / "mean", [tmp_path / "b" / "last.pt"])
    assert same(load_file(path), {name: (2 * value).half() for name, value in held["average"].items()})
    torch.save({**held, "average": {"other": torch.zeros(1)}}, tmp_path / "b" / "last.pt")
    with refuses(ModelError, field="tracker"):
        export(tmp_path / "a" / "last.pt", tmp_path / "mean", [tmp_path / "b" / "last.pt"])


def test_what_lies_halfway_from_the_start_is_exported(
    trained: Trainer, weights: Path, tmp_path: Path
) -> None:
    average = {name: 3 * value for name, value in trained.average.items()}
    torch.save({"average": average}, tmp_path / "last.pt")
    path = export(tmp_path / "last.pt", tmp_path / "halfway", start=weights)
    half = {name: value.half().float() for name, value in trained.average.items()}
    expected = {name: ((3 * trained.average[name] + value) / 2).half() for name, value in half.items()}
    assert same(load_file(path), expected)
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with refuses(ModelError, field="tracker"):
        export(tmp_path / "last.pt", tmp_path / "halfway", start=tmp_path / "other.safetensors")


@pytest.mark.parametrize("words", [("pictures", "--beside", "x"), ("export", "--halfway")])
def test_an_option_of_another_command_is_refused(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, *words) == 2
    assert f"{words[1]} is of `" in capsys.readouterr().err


def test_the_command_tells_errors_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = run_command(monkeypatch, "export", "-o", tmp_path)
    assert told.startswith("error: no checkpoint")
    assert run_command(monkeypatch, "nonsense") == 2
