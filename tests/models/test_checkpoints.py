"""Loading weights, and the encoder's rearrangements."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Sam3ViTModel

from sam3_node.engines.engine_store import checkpoint_digest
from sam3_node.errors import EngineError, ModelError
from sam3_node.models import checkpoints, load_tracker
from sam3_node.models.sam.vit import WindowedViT
from sam3_node.models.weight_files import check_digest, digest_path, write_digest
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support.refuses import refuses
from tests.support.tiny import noise_clip, random_composite, random_source, sam3_config, stages_of, tiny_model

PROMPT = ObjectPrompt(1, points=[[30.0, 40.0]])


def logits(model, frames: int = 4) -> torch.Tensor:
    tracker = Tracker(model)
    clip = noise_clip(model.image_size, frames)
    steps = (tracker.step(pixels, [PROMPT] if i == 0 else []) for i, pixels in enumerate(clip))
    return torch.stack([tracks.logits[0] for tracks in steps])


@pytest.mark.parametrize(("device", "chosen"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
def test_streams_and_events_belong_to_the_gpu_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, device: str, chosen: list[str]
) -> None:
    """torch makes them on the current device, which is the first one until it is set."""
    calls: list[str] = []
    monkeypatch.setattr(checkpoints.weight_files, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr(checkpoints.weight_files, "cast_source", lambda source, *_: source)
    monkeypatch.setattr(checkpoints.TrackerModel, "to", lambda model, device: model)
    load_tracker("nano", device=device, dtype="float32")
    assert calls == chosen


@pytest.mark.parametrize("family", ["sam3", "sam2", "edgetam"])
def test_a_local_folder_loads(tmp_path: Path, family: str) -> None:
    source = random_source(family)
    source.save_pretrained(tmp_path / "weights")
    model = load_tracker(tmp_path / "weights")
    assert model.name == "weights"
    assert model.can_track
    assert (logits(model) - logits(stages_of(source))).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["sam3", "sam2", "edgetam"])
def test_prompts_and_pixels_keep_their_places_in_bfloat16(tmp_path: Path, family: str) -> None:
    """Regression: coordinates in bfloat16 rounded a click to a 256th of the image, and moved pixels' phases by 0.06."""
    random_source(family).save_pretrained(tmp_path)
    exact, half = (load_tracker(tmp_path, dtype=dtype).decode_stage for dtype in ("float32", "bfloat16"))
    size = exact.prompt_encoder.input_image_size
    points = torch.tensor([[0.7, 0.3], [30.3, 44.9], [61.1, 55.6]]) / 64 * size
    labels = torch.tensor([1, 2, 3], dtype=torch.int32)
    with torch.inference_mode():
        pairs = [(half.position, exact.position), (half.nothing, exact.nothing)]
        pairs.append((half.prompt(points, labels)[0], exact.prompt(points, labels)[0]))
    for rounded, whole in pairs:
        assert rounded.dtype == torch.bfloat16
        assert (rounded - whole).abs().max() < 0.012 * whole.abs().max()


def test_the_tracker_of_a_composite_checkpoint_loads(tmp_path: Path) -> None:
    """facebook/sam3's layout: the detector owns the ViT, the tracker has a neck of its own."""
    composite = random_composite()
    composite.save_pretrained(tmp_path)
    model = load_tracker(tmp_path)
    assert model.can_track
    pixels = noise_clip(model.image_size, 1)[0]
    with torch.inference_mode():
        vision = composite.detector_model.vision_encoder(pixels)
        maps, _ = composite.get_vision_features_for_tracker(vision)
        ours = model.encode(pixels)
    for mine, theirs in zip(ours[:3], maps, strict=True):
        assert (mine.flatten(2).permute(2, 0, 1) - theirs).abs().max() < 1e-5


def test_weights_without_memory_modules_load(tmp_path: Path) -> None:
    source = random_source("sam2")
    absent = ("memory_", "object_pointer_proj")
    state = {k: v for k, v in source.state_dict().items() if not k.startswith(absent)}
    source.save_pretrained(tmp_path, state_dict=state)
    model = load_tracker(tmp_path)
    assert model.can_track
    assert not model.has_memory
    assert torch.equal(logits(model), logits(load_tracker(tmp_path)))


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    source = random_source("sam3")
    state = {k: v for k, v in source.state_dict().items() if "mask_decoder.iou_token" not in k}
    source.save_pretrained(tmp_path, state_dict=state)
    with refuses(ModelError, field="1"):
        load_tracker(tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "garbage", "no config", "another model"])
def test_damaged_folders_are_clear_errors(tmp_path: Path, damage: str) -> None:
    random_source("sam3").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    config = tmp_path / "config.json"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "garbage":
        weights.write_bytes(b"\xff" * 1000)
    elif damage == "no config":
        config.unlink()
    else:
        config.write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tracker(tmp_path)


def test_a_missing_folder_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    for absent in (
        tmp_path / "absent",
        *["./none", "../none", "a/b/../c", "a/b/c", "~/none", "weights/none"],
    ):
        with refuses(ModelError, field="folder"):
            load_tracker(absent)


def test_a_name_of_two_parts_is_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refuses(ModelError, field="nobody-is/none"):
        load_tracker("nobody-is/none")


def test_nano_is_the_same_every_time() -> None:
    first = load_tracker("nano")
    second = load_tracker("nano")
    assert sum(p.numel() for p in first.parameters()) < 6e6
    assert (logits(first, 2) - logits(second, 2)).abs().max() == 0


def bundle(folder: Path, family: str) -> Path:
    """Small weights as nano's are kept: float16, with their digest."""
    random_source(family).half().save_pretrained(folder)
    write_digest(folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("family", ["sam3", "sam2"])
def test_bundled_weights_of_either_class_load_as_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    bundle(tmp_path, family)
    monkeypatch.setattr(checkpoints, "NANO", tmp_path)
    model = load_tracker("nano")
    assert (model.name, model.can_track) == ("nano", True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    rounded = random_source(family)
    rounded.load_state_dict({name: value.half().float() for name, value in rounded.state_dict().items()})
    assert (logits(model) - logits(stages_of(rounded))).abs().max() < 1e-4
    assert {p.dtype for p in load_tracker("nano", dtype="bfloat16").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("damage", ["one bit", "cut", "exchanged", "no digest"])
def test_damaged_bundled_weights_are_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    weights = bundle(tmp_path, "sam3")
    data = weights.read_bytes()
    if damage == "one bit":
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        weights.write_bytes(data[:-1])
    elif damage == "exchanged":
        random_source("sam2").half().save_pretrained(tmp_path)
    else:
        digest_path(weights).unlink()
    monkeypatch.setattr(checkpoints, "NANO", tmp_path)
    with refuses(ModelError, field="package"):
        load_tracker("nano")


def test_a_device_that_is_not_there_is_a_clear_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with refuses(ModelError, field="CUDA"):
        load_tracker("nano", device="cuda")
    with pytest.raises(ModelError, match="dtype"):
        load_tracker("nano", dtype="float7")


@pytest.mark.parametrize(
    ("size", "window"),
    [(112, 4), (126, 4), (70, 4), (42, 4), (126, 3), (112, 5)],  # 8, 9, 5, 3, 9 and 8 tokens a side
)
def test_the_window_ordered_vit_equals_the_reference(size: int, window: int) -> None:
    config = sam3_config(size=size).vision_config.backbone_config
    config.window_size = window
    torch.manual_seed(0)
    source = Sam3ViTModel(config).eval()
    with torch.no_grad():
        for value in source.parameters():
            value.normal_(0, 0.2)
    pixels = torch.cat(noise_clip(size, 2))
    with torch.inference_mode():
        expected = source(pixels).last_hidden_state
        found = WindowedViT(source)(pixels).flatten(2).transpose(1, 2)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_sizes_given_for_both_axes() -> None:
    source = random_source("sam3")
    config = source.vision_encoder.config.backbone_config
    config.image_size = [112, 112]
    config.patch_size = [14, 14]
    assert isinstance(stages_of(source).encode_stage.backbone, WindowedViT)
    config.image_size = [112, 126]
    with pytest.raises(ModelError, match="squares"):
        stages_of(source)


def test_preprocess_squashes_to_the_models_square_in_rgb() -> None:
    model = tiny_model()
    image = np.zeros((40, 60, 3), dtype=np.uint8)
    image[..., 2] = 255  # red in BGR
    image.flags.writeable = False
    pixels = model.preprocess(image)
    assert pixels.shape == (1, 3, 112, 112)
    assert torch.allclose(pixels[0, :, 5, 5], torch.tensor([1.0, -1.0, -1.0]))


def test_a_misspelt_name_is_answered_with_the_nearest_and_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "robot-weights").mkdir()
    for name, nearest in (("nanoo", "nano"), ("robot-weigths", "robot-weights")):
        with refuses(ModelError, field=str(nearest)):
            load_tracker(name)


def shard(folder: Path, family: str = "sam3") -> Path:
    """Write small weights in several files, and return the index."""
    random_source(family).save_pretrained(folder, max_shard_size="200KB")
    return folder / "model.safetensors.index.json"


def test_weights_in_shards_load_and_have_one_digest(tmp_path: Path) -> None:
    index = shard(tmp_path / "a")
    random_source("sam3").save_pretrained(tmp_path / "b")
    shards = load_tracker(tmp_path / "a")
    whole = load_tracker(tmp_path / "b")
    assert (logits(shards, 2) - logits(whole, 2)).abs().max() == 0
    before = checkpoint_digest(str(tmp_path / "a"))
    last = max((tmp_path / "a").glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1] + b"\1")
    changed = checkpoint_digest(str(tmp_path / "a"))
    index.write_text(index.read_text() + " ")
    assert len({before, changed, checkpoint_digest(str(tmp_path / "a"))}) == 3


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/outside.safetensors", "a/b.safetensors", "model.bin"]
)
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    index = shard(tmp_path / "weights")
    content = json.loads(index.read_text())
    first = sorted(set(content["weight_map"].values()))[0]
    path = tmp_path / "weights" / name.removeprefix("/")
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "weights" / first).rename(path)
    renamed = f"{path}" if name.startswith("/") else name
    places = content["weight_map"].items()
    content["weight_map"] = {key: renamed if value == first else value for key, value in places}
    index.write_text(json.dumps(content))
    with refuses(ModelError, field="model.safetensors.index.json"):
        load_tracker(tmp_path / "weights")
    with refuses(EngineError, field=("their", "folder")):
        checkpoint_digest(str(tmp_path / "weights"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    random_source("sam3").save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / name).rename(tmp_path / name)
    (tmp_path / "weights" / name).symlink_to(tmp_path / name)
    with refuses(ModelError, field=str(name)):
        load_tracker(tmp_path / "weights")


def test_the_cache_of_the_hub_is_loaded_by_its_links(tmp_path: Path) -> None:
    root = tmp_path / "models--somebody--tracker"
    snapshot = root / "snapshots" / "0123abcd"
    blobs = root / "blobs"
    random_source("sam3").save_pretrained(tmp_path / "plain")
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in sorted((tmp_path / "plain").iterdir()):
        (blobs / f"hash-of-{path.name}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"hash-of-{path.name}")
    assert load_tracker(snapshot).can_track
    assert checkpoint_digest(str(snapshot)) == checkpoint_digest(str(tmp_path / "plain"))
    (tmp_path / "other").write_bytes((snapshot / "model.safetensors").read_bytes())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "other")
    with refuses(ModelError, field="model.safetensors"):
        load_tracker(snapshot)


def test_pickles_and_other_models_are_never_loaded(tmp_path: Path) -> None:
    source = random_source("sam3")
    source.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    with refuses(ModelError, field="load"):
        load_tracker(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    with refuses(ModelError, field="adapter_config.json"):
        load_tracker(tmp_path)


def test_code_in_a_folder_never_runs(tmp_path: Path) -> None:
    random_source("sam3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "mine"
    config["auto_map"] = {"AutoConfig": "code.Config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with refuses(ModelError, field=("mine", "model")):
        load_tracker(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_configuration_cannot_choose_the_file_of_weights(tmp_path: Path) -> None:
    random_source("sam3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "a/b.safetensors"}))
    with refuses(ModelError, field=("a/b.safetensors", "transformers_weights")):
        load_tracker(tmp_path)


ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc": FIPS 180-2, appendix B.1


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    return path


def test_a_file_passes_its_own_digest(weights: Path) -> None:
    assert write_digest(weights) == digest_path(weights)
    assert digest_path(weights).read_text() == f"{ABC}  model.safetensors\n"
    check_digest(weights)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_agrees(weights: Path) -> None:
    def sha256sum(*arguments: str) -> bytes:
        command = ["sha256sum", *arguments]
        return subprocess.run(command, cwd=weights.parent, check=True, capture_output=True).stdout

    write_digest(weights)
    sha256sum("-c", digest_path(weights).name)
    for option in ("--text", "--binary"):
        digest_path(weights).write_bytes(sha256sum(option, weights.name))
        check_digest(weights)


def test_another_file_is_refused_with_both_digests(weights: Path) -> None:
    write_digest(weights)
    weights.write_bytes(b"abd")
    with refuses(ModelError, field=str(ABC)):
        check_digest(weights)


@pytest.mark.parametrize(
    "text", ["", "abc", ABC, f"{ABC}  other.safetensors", f"{ABC.upper()}  model.safetensors"]
)
def test_a_digest_that_is_none_is_refused(weights: Path, text: str) -> None:
    digest_path(weights).write_text(text)
    with refuses(ModelError, field="sha256sum"):
        check_digest(weights)


def test_a_missing_file_or_digest_is_named(weights: Path) -> None:
    with refuses(ModelError, field="check"):
        check_digest(weights)
    write_digest(weights)
    weights.unlink()
    with refuses(ModelError, field="check"):
        check_digest(weights)
