"""Clip folders, and rendered scenes where MuJoCo and a way to render are installed.

A clip folder's clip becomes a recording that plays and is judged by its own labels.
"""

import ctypes.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.bags import LabelledClip, RecordingReader
from sam3_node.errors import CameraError, MissingExtraError, OutputError
from sam3_node.palette_png import colours
from sam3_node.wire import decode_depth, decode_image
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row
from tools.scenes import nameless
from tools.scenes.__main__ import main
from tools.scenes.camera import WALK, draw_view, film
from tools.scenes.clips import Clip, list_clips, read_clip, write_clip
from tools.scenes.generate import Rendered, generate
from tools.scenes.layout import draw_similar
from tools.scenes.objects import (
    MAKERS,
    SPLITS,
    TEST_KINDS,
    Split,
    draw_identity,
    get_split,
    list_kinds,
    make_object,
)
from tools.scenes.plan import ClipSettings, make_plan
from tools.scenes.recording import write_recording
from tools.scenes.render import Renderer, load_mujoco
from tools.scenes.stage import frames, minimum_jerk, quaternions, rotated

WEIGHTS = {"free": 1.0}
TWO_SMALL_FRAMES = ("--frames", "2", "--size", "64x48", "--scenario", "free")
SMALL = ClipSettings("train", 3, 64, 48, 12.0, WEIGHTS, depth=True)


def drawn(count: int = 2) -> Clip:
    rng = np.random.default_rng(0)
    frames = [np.full((20, 30, 3), 40 * index, np.uint8) for index in range(count)]
    labels = [rng.integers(0, 256, (20, 30), np.uint8) for _ in range(count)]
    depths = [rng.integers(0, 65536, (20, 30), np.uint16) for _ in range(count)]
    return Clip("a", frames, labels, depths, {"fps": 12, "objects": [{"id": 1, "name": "red mug"}]})


def test_a_clip_is_read_as_it_was_written(tmp_path: Path) -> None:
    clip = drawn()
    write_clip(tmp_path, "a", clip)
    read = read_clip(tmp_path, "a")
    assert list_clips(tmp_path) == ["a"]
    assert (len(read), read.meta) == (2, clip.meta)
    for index in range(2):
        assert np.array_equal(read.labels(index), clip.labels(index))
        depth = read.depth(index)
        assert np.array_equal(depth, np.asarray(clip.depths[index]))
        assert np.abs(read.image(index).astype(int) - clip.image(index)).max() <= 1


def test_annotations_are_palette_images_in_davis_colours(tmp_path: Path) -> None:
    labels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    write_clip(tmp_path, "a", Clip("a", [np.zeros((16, 16, 3), np.uint8)], [labels]))
    bgr = cv2.imread(str(tmp_path / "Annotations/a/00000.png"))
    assert np.array_equal(bgr[..., ::-1].reshape(-1, 3), colours())
    assert colours()[[1, 2, 3, 4]].tolist() == [[128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128]]


def test_a_clip_without_its_json_is_unfinished(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_clip(tmp_path, name, drawn())
    (tmp_path / "Clips/a.json").unlink()
    assert list_clips(tmp_path) == ["b"]


def test_a_clip_is_replaced_whole(tmp_path: Path) -> None:
    write_clip(tmp_path, "a", drawn(3))
    write_clip(tmp_path, "a", replace(drawn(1), depths=()))
    read = read_clip(tmp_path, "a")
    assert (len(read), read.depth(0)) == (1, None)
    assert not [item for item in tmp_path.iterdir() if item.name.startswith(".")]


def test_davis_folders_are_read(tmp_path: Path) -> None:
    for kind in ("JPEGImages", "Annotations"):
        (tmp_path / kind / "480p" / "dog").mkdir(parents=True)
    cv2.imwrite(str(tmp_path / "JPEGImages/480p/dog/00000.jpg"), np.zeros((4, 4, 3), np.uint8))
    cv2.imwrite(str(tmp_path / "JPEGImages/480p/dog/00001.jpg"), np.zeros((4, 4, 3), np.uint8))
    cv2.imwrite(str(tmp_path / "Annotations/480p/dog/00000.png"), np.eye(4, dtype=np.uint8) * 255)
    clip = read_clip(tmp_path, "dog")
    assert list_clips(tmp_path) == ["dog"]
    assert np.array_equal(clip.labels(0), np.eye(4))
    with refuses(CameraError, field=("1", "frame")):
        clip.labels(1)


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CameraError, match="JPEGImages"):
        list_clips(tmp_path)
    with refuses(CameraError, field="frames"):
        read_clip(tmp_path, "a")
    write_clip(tmp_path, "a", drawn())
    (tmp_path / "JPEGImages/a/00000.jpg").write_bytes(b"no image")
    with refuses(CameraError, field="image"):
        read_clip(tmp_path, "a").image(0)
    (tmp_path / "Clips/a.json").write_text("{")
    with refuses(CameraError, field="JSON"):
        read_clip(tmp_path, "a")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(OutputError, field=("clip", "written")):
        write_clip(tmp_path / "file", "a", drawn())


def test_splits_share_nothing() -> None:
    rng = np.random.default_rng(0)
    for split in SPLITS:
        assert {get_split(draw_identity(rng, split)) for _ in range(50)} == {split}
    assert not set(list_kinds("train")) & set(TEST_KINDS)
    assert set(list_kinds("test")) == set(MAKERS)


@each_row("kind", MAKERS)
def test_objects_stand_on_their_base_and_are_closed_in_by_their_radius(kind: str) -> None:
    for identity in (0, 8, 9):
        model = make_object(identity, (kind,))
        points = np.concatenate([part.mesh.vertices for part in model.parts])
        assert points[:, 2].min() == pytest.approx(0, abs=1e-9)
        assert np.linalg.norm(points[:, :2], axis=1).max() <= model.radius + 1e-9
        assert 0.01 < model.extent < 0.45
        assert model.name == f"{model.color} {kind}"
        assert sum(len(part.mesh.faces) for part in model.parts) < 2000


@pytest.mark.parametrize("split", SPLITS)
def test_arms_take_the_colour_of_what_they_hide_on_training_clips_alone(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (0.123, 0.456, 0.789)
    monkeypatch.setattr("tools.scenes.scenarios.ALIKE", 1.0)
    monkeypatch.setattr("tools.scenes.scenarios.shade", lambda rng, name: own)
    settings = replace(SMALL, split=split, frames=20)
    plans = [make_plan(np.random.default_rng(seed), settings, "occlusion") for seed in range(12)]
    assert any(limb.color == own for plan in plans for limb in plan.limbs) == (split == "train")


def test_similar_objects_share_a_kind_a_colour_or_both() -> None:
    for seed in range(3):
        models, _ = draw_similar(np.random.default_rng(seed), "val", {})
        names = [(model.kind, model.color) for model in models]
        assert len(names) > 2
        assert any(a != b and (a[0] == b[0] or a[1] == b[1]) for a in names for b in names)
        again, _ = draw_similar(np.random.default_rng(seed), "val", {})
        assert [model.identity for model in again] == [model.identity for model in models]
        assert {get_split(model.identity) for model in models} == {"val"}


def test_quaternions_turn_as_their_matrices_do() -> None:
    rng = np.random.default_rng(0)
    matrices = frames(rng.normal(size=(40, 3)), rng.normal(size=(40, 3)))
    vector = np.array([0.3, -0.2, 0.9])
    assert np.linalg.det(matrices) == pytest.approx(np.ones(40))
    assert rotated(quaternions(matrices), vector) == pytest.approx(matrices @ vector)


def test_minimum_jerk_starts_and_ends_at_rest() -> None:
    eased = minimum_jerk(np.array([-1, 0, 0.001, 0.5, 0.999, 1, 2]))
    assert eased == pytest.approx([0, 0, 0, 0.5, 1, 1, 1], abs=1e-7)


def test_a_missing_renderer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with refuses(MissingExtraError, field="scenes"):
        load_mujoco()


def test_a_missing_system_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with pytest.raises(MissingExtraError, match="libosmesa6"):
        load_mujoco()


@pytest.mark.parametrize(
    "arguments", [["--size", "64"], ["--scenario", "party"], ["--clips", "0"], ["--split", "x"]]
)
def test_a_wrong_option_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, "-o", "nowhere"])
    assert "expected" in capsys.readouterr().err or "x" in arguments


@each_row("kind", nameless.MAKERS)
def test_nameless_solids_become_training_objects(kind: str) -> None:
    models = [make_object(10 * number + 1, (kind,), nameless.MAKERS) for number in range(20)]
    assert all(0.03 < model.extent < 0.4 for model in models)
    assert len({round(model.extent, 4) for model in models}) > 15
    assert kind not in {make_object(identity, more=nameless.MAKERS).kind for identity in range(9, 400, 10)}


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    try:
        made = Renderer(128, 96)
    except MissingExtraError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture(scope="module")
def rendered(renderer: Renderer) -> Rendered:
    return generate(renderer, SMALL, seed=1, index=0)


def test_labels_agree_with_the_objects_named(rendered: Rendered) -> None:
    clip = rendered.clip
    ids = [item["id"] for item in clip.meta["objects"]]
    seen = set(np.unique(np.stack([clip.labels(index) for index in range(3)])))
    assert seen == {0, *ids}
    assert ids == list(range(1, len(ids) + 1))
    assert {get_split(item["identity"]) for item in clip.meta["objects"]} == {"train"}


def test_a_clip_is_complete(rendered: Rendered) -> None:
    clip = rendered.clip
    for index in range(3):
        assert clip.image(index).shape == (48, 64, 3)
        assert clip.image(index).std() > 5
        depth = clip.depth(index)
        assert depth.shape == (48, 64)
    poses = np.array(clip.meta["camera_poses"])
    assert poses.shape == (3, 4, 4)
    assert np.linalg.det(poses[:, :3, :3]) == pytest.approx(np.ones(3), abs=1e-4)
    json.dumps(clip.meta)


def test_depth_and_poses_put_the_objects_on_the_table(rendered: Rendered) -> None:
    clip = rendered.clip
    index = 0
    depth = clip.depth(index)
    k = clip.meta["intrinsics"]
    rows, columns = np.nonzero(clip.labels(index))
    z = depth[rows, columns] / 1000
    rays = np.stack(
        [(columns + 0.5 - k["cx"]) / k["fx"], (rows + 0.5 - k["cy"]) / k["fy"], np.ones(len(z))], -1
    )
    pose = np.array(clip.meta["camera_poses"][index])
    world = (rays * z[:, None]) @ pose[:3, :3].T + pose[:3, 3]
    assert (world[:, 2] > -0.03).mean() > 0.98
    assert np.percentile(world[:, 2], 95) < 0.6


def test_a_seed_gives_the_same_clip_again(renderer: Renderer, rendered: Rendered) -> None:
    again, other = (generate(renderer, SMALL, seed=1, index=index).clip for index in (0, 1))
    for index in range(3):
        assert np.array_equal(again.image(index), rendered.clip.image(index))
        assert np.array_equal(again.labels(index), rendered.clip.labels(index))
    assert not np.array_equal(other.image(0), again.image(0))


@pytest.mark.parametrize("scenario", ["occlusion", "leave"])
def test_the_target_leaves_the_view_and_returns(renderer: Renderer, scenario: str) -> None:
    settings = replace(SMALL, frames=12, depth=False, weights={scenario: 1.0})
    clip = generate(renderer, settings, seed=0, index=0).clip
    seen = [bool((clip.labels(index) == clip.meta["target"]).any()) for index in range(12)]
    assert seen[0]
    assert seen[-1]
    assert seen.count(False) >= 4


def test_finished_clips_are_left_alone(
    renderer: Renderer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TWO_SMALL_FRAMES, "-o", str(tmp_path)]
    assert main(["--clips", "1", *arguments]) == 0
    before = (tmp_path / "Clips/train-0-00000.json").stat().st_mtime_ns
    assert main(["--clips", "2", *arguments]) == 0
    assert mentions(capsys.readouterr().out, "1 of 2")
    assert list_clips(tmp_path) == ["train-0-00000", "train-0-00001"]
    assert (tmp_path / "Clips/train-0-00000.json").stat().st_mtime_ns == before


@pytest.mark.usefixtures("renderer")
def test_processes_render_beside_each_other(tmp_path: Path) -> None:
    arguments = "--workers 2 --clips 2 --frames 2 --size 64x48 --scenario free -o"
    command = [sys.executable, "-m", "tools.scenes", *arguments.split(), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert list_clips(tmp_path) == ["train-0-00000", "train-0-00001"]


INTRINSICS = {"fx": 50.0, "fy": 51.0, "cx": 32.0, "cy": 24.0}
OBJECTS = [{"id": 1, "name": "red mug"}, {"id": 3, "name": "grey wrench"}]


def clip(**meta: Any) -> Clip:
    """Two objects on a ramp of depth; the second leaves after the first two frames."""
    images = [np.full((48, 64, 3), 40 * n, np.uint8) for n in range(4)]
    labels = [np.zeros((48, 64), np.uint8) for _ in range(4)]
    for n, frame in enumerate(labels):
        frame[10:20, 5 + n : 30 + n] = 1
        frame[30:40, 5:30] = 3 if n < 2 else 0
    depth = np.tile(np.arange(64, dtype=np.uint16) * 13, (48, 1))
    return Clip("table", images, labels, [depth] * 4, meta)


def full_clip() -> Clip:
    poses = [np.eye(4).tolist()] * 3 + [np.diag([1.0, -1.0, -1.0, 1.0]).tolist()]
    return clip(fps=15, intrinsics=INTRINSICS, objects=OBJECTS, camera_poses=poses)


def test_everything_that_the_clip_knows_is_recorded(tmp_path: Path) -> None:
    write_recording(full_clip(), tmp_path / "table.mcap")
    recording = LabelledClip.load(tmp_path / "table.mcap")
    assert (len(recording), round(recording.fps, 3)) == (4, 15.0)
    frame = recording.frames[2]
    assert (frame.encoding, frame.clock, frame.width, frame.height) == ("jpeg", "device", 64, 48)
    assert decode_image(frame).mean() == pytest.approx(80, abs=2)
    assert (frame.intrinsics.fx, frame.intrinsics.cy) == (50.0, 23.5)
    assert recording.labels == {1: "red mug", 3: "grey wrench"}
    assert sorted(recording.truth(1)) == [1, 3]
    assert sorted(recording.truth(2)) == [1]
    assert np.array_equal(recording.truth(2)[1], full_clip().labels(2) == 1)
    assert list(RecordingReader([tmp_path / "table.mcap"]).poses())[3].camera_to_world[1, 1] == -1


def test_objects_out_of_view_stay_in_the_truth(tmp_path: Path) -> None:
    write_recording(full_clip(), tmp_path / "table.mcap")
    second = [masks.instances[1] for masks in RecordingReader([tmp_path / "table.mcap"]).truth()]
    assert [found.state for found in second] == ["tracked"] * 2 + ["occluded"] * 2
    assert [found.frames_since_seen for found in second] == [0, 0, 1, 2]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_depth_keeps_its_size_whatever_the_step(tmp_path: Path, step: int) -> None:
    write_recording(full_clip(), tmp_path / "table.mcap", depth_step=step)
    depth = LabelledClip.load(tmp_path / "table.mcap").frames[0].depth
    assert (depth.scale_m, depth.aligned) == (0.001, True)
    true = full_clip().depth(0)
    expected = true[np.ix_(np.arange(48) // step * step, np.arange(64) // step * step)]
    assert np.array_equal(decode_depth(depth), expected)


def test_a_clip_with_labels_alone_numbers_its_objects(tmp_path: Path) -> None:
    bare = Clip("table", clip().frames, clip().annotations)
    write_recording(bare, tmp_path / "table.mcap")
    recording = LabelledClip.load(tmp_path / "table.mcap")
    assert recording.labels == {1: "object 1", 3: "object 3"}
    assert recording.frames[0].depth is None
    assert recording.frames[0].intrinsics is None


def test_the_command_writes_the_same_file_every_time(tmp_path: Path) -> None:
    write_clip(tmp_path / "clips", "table", full_clip())
    command = [sys.executable, "-m", "tools.scenes.recording", str(tmp_path / "clips")]
    for name in ("a.mcap", "b.mcap"):
        done = subprocess.run([*command, "table", "-o", str(tmp_path / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "4 frames" in done.stdout
    assert (tmp_path / "a.mcap").read_bytes() == (tmp_path / "b.mcap").read_bytes()
    done = subprocess.run([*command, "none", "-o", str(tmp_path / "c")], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: expected a clip none")


def test_a_walking_camera_comes_several_times_nearer_or_goes_away() -> None:
    times = np.arange(16) / 6
    ratios = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        view = draw_view(rng, 0.6)
        camera = film(rng, view, times, (320, 240), WALK)
        distance = np.linalg.norm(camera.positions - view.centre, axis=1)
        ratios.append(distance[-1] / distance[0])
    growth = np.maximum(ratios, 1 / np.array(ratios))
    assert 1.3 < growth.min() < 2
    assert 3 < growth.max() < 5
    assert 8 < sum(ratio < 1 for ratio in ratios) < 32
