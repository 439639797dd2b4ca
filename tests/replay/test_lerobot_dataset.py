"""Masks in a copy of a LeRobot dataset; that lerobot's own loader opens it is shown by tools/lerobot_roundtrip."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import pyarrow.parquet
import pytest

from sam3_node.errors import BagError, ReplayError
from sam3_node.recording.lerobot.masks import NAMES
from sam3_node.replay.completion import StoppedError
from sam3_node.replay.event_log import Notes, Step
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.outputs import lerobot as lerobot_dataset
from sam3_node.replay.outputs.output import Dataset, Sources
from sam3_node.replay.outputs.write import write_outputs
from sam3_node.replay.run import PerceptionCache, run_job
from sam3_node.replay.schedule import step_all_frames
from sam3_node.replay.second_pass import find_bidirectional_spans
from sam3_node.replay.shards import ShardLimits, Shards
from sam3_node.replay.store import FolderStore
from sam3_node.schema.operations import Reset, SetPrompts
from sam3_node.types import Instance, Mask, MaskFrame
from tests.replay.test_outputs import digests
from tests.support.live import stop_after, tiny_settings
from tests.support.paths import ROOT
from tests.support.refuses import refuses
from tests.support.replay_logs import make_frame

DATA = ROOT / "tests" / "data" / "lerobot"
SIZES = {"front": (160, 120), "wrist": (96, 72)}
STARTS = (0, 4, 9)
MUG = {0: 1, 1: 2, 2: 4}
"""Ids of the mug by episode; in the last one, a bowl came before."""


def masks_in(camera: str, row: int) -> MaskFrame:
    width, height = SIZES[camera]
    episode = sum(start <= row for start in STARTS) - 1
    instances = []
    for object_id, label, x0 in ((MUG[episode], "mug", 5), (3, "bowl", 15)):
        full = np.zeros((height, width), np.bool_)
        full[10:30, x0 + row : x0 + row + 20] = True
        score = 0.8 if label == "mug" else 0.4
        instances.append(Instance(object_id, label, score, "tracked", 1, 0, Mask.from_full(full)))
    shown = instances[::-1] if episode == 2 else instances[:1]
    return MaskFrame(camera, row, row * 10**8, width, height, instances=tuple(shown))


def all_masks() -> Iterator[MaskFrame]:
    for row in range(15):
        yield masks_in("front", row)
        if row != 5:  # could not be read
            yield masks_in("wrist", row)


def write(out: Path, version: str) -> Path:
    return write_masks(out, Dataset(DATA / version, ("cup", "mug")))


def write_masks(out: Path, dataset: Dataset) -> Path:
    sources = Sources(all_masks, lambda: iter(()), dataset=dataset)
    (written,) = write_outputs(out, ["lerobot"], sources, lambda *_: None).paths
    return written


def read_rows(dataset: Path) -> list[dict[str, Any]]:
    tables = sorted((dataset / "data").rglob("*.parquet"))
    return [row for table in tables for row in pyarrow.parquet.read_table(table).to_pylist()]


@pytest.mark.verifies(
    "results",
    "LeRobot datasets 2.1 and 3.0 with masks",
    "own package",
    "lerobot 0.3.3 and 0.4.4 opened them, by `python -m tools.lerobot_roundtrip`",
)
@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_masks_are_exact_and_everything_else_stays(version: str, tmp_path: Path) -> None:
    written = write(tmp_path, version)
    before = read_rows(DATA / version)
    after = read_rows(written)
    for camera in SIZES:
        for row, masks in enumerate(after):
            data = masks.pop(f"observation.masks.{camera}")["bytes"]
            image = cv2.imdecode(np.frombuffer(data, np.uint8), -1)
            labels, objects, scores = np.moveaxis(image[..., ::-1], -1, 0)
            expected = masks_in(camera, row)
            numbers = np.array(masks.pop(f"observation.objects.{camera}"), np.float32).reshape(8, 4)
            is_valid = (camera, row) != ("wrist", 5)
            assert masks.pop(f"observation.masks_valid.{camera}") == is_valid
            assert np.count_nonzero(numbers[:, 0]) == (len(expected.instances) if is_valid else 0)
            if not is_valid:
                assert not image.any()
                continue
            mug = next(item for item in expected.instances if item.label == "mug")
            assert (set(labels[mug.mask.full()]), set(scores[mug.mask.full()])) == ({2}, {204})
            assert set(objects[mug.mask.full()]) == {2 if row >= 9 else 1}
            shown = {(0, 0), (2, 2), (3, 1)} if row >= 9 else {(0, 0), (2, 1)}
            assert set(zip(labels.ravel(), objects.ravel(), strict=True)) == shown
    assert after == before
    names = json.loads((written / NAMES).read_text())
    assert names["labels"] == {"1": "cup", "2": "mug", "3": "bowl"}
    assert {"episode": 2, "camera": "wrist", "index": 2, "id": 4, "label": "mug"} in names["objects"]
    assert names["frames_without_masks"] == {"1": 1}
    source = {path.relative_to(DATA / version) for path in (DATA / version).rglob("*") if path.is_file()}
    files = {path.relative_to(written) for path in written.rglob("*") if path.is_file()}
    for_groot = [path for path in files if path.parts[0] == "masks" or path.name == "modality.json"]
    assert files == source | {Path(NAMES), *for_groot}
    assert len(for_groot) == (7 if version == "v2.1" else 0)


def test_a_copy_of_version_2_has_its_masks_as_groot_reads_them(tmp_path: Path) -> None:
    written = write(tmp_path, "v2.1")
    info = json.loads((written / "meta/info.json").read_text())
    modality = json.loads((written / "meta/modality.json").read_text())
    assert modality["state"] == {"arm": {"start": 0, "end": 2}, "gripper": {"start": 2, "end": 3}}
    assert list(modality["mask"]) == ["front", "wrist"]
    for camera, view in modality["mask"].items():
        for episode, first in enumerate(STARTS):
            place = info["mask_path"].format(
                episode_chunk=0, episode_index=episode, mask_key=view["original_key"]
            )
            with np.load(written / place) as found:
                regions = found["arr_0"]
                valid = found["valid"]
            rows = range(first, (*STARTS, 15)[episode + 1])
            width, height = SIZES[camera]
            assert (regions.shape, regions.dtype) == ((len(rows), height, width), np.uint8)
            assert valid.tolist() == [(camera, row) != ("wrist", 5) for row in rows]
            for row, picture, is_valid in zip(rows, regions, valid, strict=True):
                expected = np.zeros((height, width), np.uint8)
                for instance in sorted(masks_in(camera, row).instances, key=lambda item: item.paint_order):
                    instance.mask.paint(expected, {"mug": 2, "bowl": 3}[instance.label])
                assert (picture == expected * is_valid).all()


def test_a_copy_keeps_the_groups_and_views_that_the_dataset_has(tmp_path: Path) -> None:
    dataset = Path(shutil.copytree(DATA / "v2.1", tmp_path / "dataset"))
    modality = {
        "state": {"left": {"start": 0, "end": 3}},
        "video": {"ego_view": {"original_key": "observation.images.front"}},
    }
    (dataset / "meta/modality.json").write_text(json.dumps(modality))
    written = write_masks(tmp_path / "out", Dataset(dataset))
    found = json.loads((written / "meta/modality.json").read_text())
    masks = found.pop("mask")
    assert found == modality
    assert masks == {
        "ego_view": {"original_key": "observation.images.front"},
        "wrist": {"original_key": "observation.images.wrist"},
    }


def test_the_names_list_the_frames_with_doubtful_objects(tmp_path: Path) -> None:
    def masks() -> Iterator[MaskFrame]:
        for found in all_masks():
            doubted = (replace(item, doubtful=found.seq in (5, 6, 8, 10)) for item in found.instances)
            yield replace(found, instances=tuple(doubted))

    dataset = Dataset(DATA / "v3.0", ("cup", "mug"))
    for doubtful, runs, score in (("marked", [[1, 2], [4, 4]], 204), ("left-out", None, 0)):
        sources = Sources(masks, lambda: iter(()), dataset=dataset, doubtful=doubtful)  # type: ignore[arg-type]
        (written,) = write_outputs(tmp_path, ["lerobot"], sources, lambda *_: None).paths
        names = json.loads((written / NAMES).read_text())
        found = {(row["episode"], row["camera"], row["id"]): row.get("doubtful") for row in names["objects"]}
        # the second episode begins with row 4
        assert found[1, "front", MUG[1]] == runs
        assert found[0, "front", MUG[0]] is None
        data = read_rows(written)[6]["observation.masks.front"]["bytes"]
        image = cv2.imdecode(np.frombuffer(data, np.uint8), -1)
        assert image[..., 0].max() == score


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_the_description_names_the_features_and_their_statistics(version: str, tmp_path: Path) -> None:
    written = write(tmp_path, version)
    info = json.loads((written / "meta/info.json").read_text())
    feature = {"dtype": "image", "shape": [72, 96, 3], "names": ["height", "width", "channels"]}
    assert info["features"]["observation.masks.wrist"] == feature
    table = pyarrow.parquet.read_schema(next((written / "data").rglob("*.parquet")))
    described = json.loads(table.metadata[b"huggingface"])["info"]["features"]
    assert described["observation.masks.front"] == {"_type": "Image"}
    covered = 20 * 20 / (120 * 160)
    if version == "v2.1":
        lines = (written / "meta/episodes_stats.jsonl").read_text().splitlines()
        stats = json.loads(lines[1])["stats"]["observation.masks.front"]
    else:
        path = next((written / "meta/episodes").rglob("*.parquet"))
        row = pyarrow.parquet.read_table(path).to_pylist()[1]
        prefix = "stats/observation.masks.front/"
        stats = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
        whole = json.loads((written / "meta/stats.json").read_text())["observation.masks.front"]
        assert (whole["count"], whole["max"][0]) == ([15], [[3 / 255]])
        assert (stats["q90"], stats["q99"][0]) == ([[[0.0]]] * 3, [[2 / 255]])
    assert (stats["count"], stats["min"], stats["max"][2]) == ([5], [[[0.0]]] * 3, [[204 / 255]])
    np.testing.assert_allclose(np.ravel(stats["mean"]), [covered * value / 255 for value in (2, 1, 204)])
    deviation = np.sqrt(covered * (1 - covered))
    np.testing.assert_allclose(np.ravel(stats["std"]), [deviation * value / 255 for value in (2, 1, 204)])


def test_the_copy_is_repeatable_and_replaces_an_older_one(tmp_path: Path) -> None:
    before = digests(write(tmp_path, "v3.0"))
    (tmp_path / "lerobot" / "data" / "stale").touch()
    assert digests(write(tmp_path, "v3.0")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["lerobot"]


def make_many_tables(root: Path, count: int) -> Path:
    """Write a dataset of `count` episodes: each has a table of its own, of one row."""
    shutil.copytree(DATA / "v2.1", root)
    template = root / "data/chunk-000/episode_{:06d}.parquet"
    first = pyarrow.parquet.read_table(str(template).format(0)).slice(0, 1)
    lines = []
    for number in range(count):
        numbers = pyarrow.array([number], first.schema.field("episode_index").type)
        table = first.set_column(first.schema.get_field_index("episode_index"), "episode_index", numbers)
        pyarrow.parquet.write_table(table, str(template).format(number))
        lines.append(json.dumps({"episode_index": number, "tasks": [], "length": 1}))
    (root / "meta/episodes.jsonl").write_text("\n".join(lines))
    return root


def test_copied_tables_leave_no_descriptor_open(tmp_path: Path) -> None:
    dataset = make_many_tables(tmp_path / "dataset", 200)
    width, height = SIZES["front"]
    masks = [MaskFrame("front", row, row * 10**8, width, height) for row in range(200)]
    open_files = []

    def count_descriptors(done: int) -> None:
        """Count those of this process and of the child that calls pyarrow."""
        processes = [psutil.Process(), *psutil.Process().children()]
        open_files.append(sum(process.num_fds() for process in processes))

    lerobot_dataset.write_lerobot(tmp_path / "out", dataset, lambda: iter(masks), count_descriptors, ())
    assert len(open_files) == 200
    assert max(open_files[1:]) <= open_files[1] + 2


@pytest.mark.parametrize(
    ("version", "name", "text"),
    [
        ("v2.1", "meta/episodes_stats.jsonl", '{"episode_index": 0}'),
        ("v2.1", "meta/episodes_stats.jsonl", "{"),
        ("v3.0", "meta/stats.json", "[" * 100_000),
        ("v3.0", "meta/stats.json", "[]"),
    ],
)
def test_damaged_statistics_are_an_error(version: str, name: str, text: str, tmp_path: Path) -> None:
    dataset = Path(shutil.copytree(DATA / version, tmp_path / "dataset"))
    (dataset / name).write_text(text)
    with refuses(BagError, field=("writes", "them")):
        write_masks(tmp_path / "out", Dataset(dataset))
    assert not list((tmp_path / "out").iterdir())


def test_only_whole_datasets_can_have_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bag, named in (
        (ROOT / "sam3_node/assets/tabletop.mcap", ("meta/info.json", "coco")),
        (f"{DATA}/v3.0#episode=1", "all episodes"),
    ):
        with refuses(ReplayError, field=named):
            run_job(Job((str(bag),), str(tmp_path / "out"), outputs=("lerobot",)))
    monkeypatch.setattr(lerobot_dataset, "find_version", lambda package: None)
    with refuses(ReplayError, field=("meta/info.json", "all episodes", "lerobot-datasets", "davis")):
        lerobot_dataset.check_lerobot(tmp_path / "aloha.hdf5#episode=1")


def test_objects_end_with_their_episode() -> None:
    frames = [make_frame(row, camera) for row in range(4) for camera in "ab"]
    notes = Notes(False)
    episodes = {"episode_starts": (0, 2), "prompts": ("mug",)}
    actions = list(step_all_frames(frames, notes, everything=True, **episodes))
    assert actions[4:6] == [Reset(), SetPrompts(prompts=("mug",))]
    assert [len(action.edits) for action in actions if isinstance(action, Step)] == [1, 1, 0, 0, 1, 1, 0, 0]
    assert [action.frame for action in step_all_frames(frames, notes, prompts=("mug",))] == frames


def test_objects_are_tracked_backward_to_the_beginning_of_their_episode() -> None:
    masks = [masks for masks in all_masks() if masks.camera == "front"]
    masks = [replace(item, instances=() if item.seq in (0, 4) else item.instances) for item in masks]
    spans = list(find_bidirectional_spans(masks, 0.5, STARTS))
    assert [(span.id, span.first, span.last) for span in spans] == [(1, 0, 1), (2, 4, 5)]


def test_a_replay_of_all_episodes_goes_on_after_a_stop(tmp_path: Path) -> None:
    dataset = Path(shutil.copytree(DATA / "v3.0", tmp_path / "dataset"))
    box = (20, 20, 60, 50)
    objects = tuple(ObjectOnFrame(camera="wrist", seq=row, box=box, label=f"row {row}") for row in (0, 9))
    settings = {"model": tiny_settings(tmp_path).model.model_dump(mode="json", exclude_unset=True)}
    bags = (str(dataset),)
    out = str(tmp_path / "out")
    job = Job(bags, out, topics=("wrist",), objects=objects, settings=settings, outputs=("lerobot",))
    load = PerceptionCache()
    with pytest.raises(StoppedError):
        run_job(job, load, *stop_after(6, "replaying"), limits=ShardLimits(frames=5))
    names = json.loads((tmp_path / "out/lerobot" / NAMES).read_text())
    assert names["frames_without_masks"] == {"1": 3, "2": 6}
    summary = run_job(job, load, limits=ShardLimits(frames=5))
    assert (summary.complete, summary.resumed_from, summary.frames) == (True, 6, 15)
    shards = Shards(FolderStore(tmp_path / "out"))
    ids = {masks.seq: {item.id for item in masks.instances} for masks in shards.masks()}
    assert [ids[row] for row in (0, 3, 4, 8, 9, 14)] == [{1}, {1}, set(), set(), {2}, {2}]
    whole = replace(job, out=str(tmp_path / "whole"))
    run_job(whole, load)
    assert digests(tmp_path / "out/lerobot") == digests(tmp_path / "whole/lerobot")


def test_labels_that_are_written_anew_keep_their_numbers(tmp_path: Path) -> None:
    """A name that the detector lacks was skipped: it has no number, also when a finished job writes its labels."""
    dataset = Path(shutil.copytree(DATA / "v3.0", tmp_path / "dataset"))
    settings = {"model": tiny_settings(tmp_path).model.model_dump(mode="json", exclude_unset=True)}
    job = Job((str(dataset),), str(tmp_path / "out"), names=("gizmozz", "mug"), settings=settings)
    job = replace(job, topics=("wrist",), outputs=("lerobot",))
    load = PerceptionCache()
    run_job(job, load)
    first = json.loads((tmp_path / "out/lerobot" / NAMES).read_text())["labels"]
    run_job(replace(job, doubtful="left-out"), load)
    assert json.loads((tmp_path / "out/lerobot" / NAMES).read_text())["labels"] == first
    assert "mug" in str(first)
    assert "gizmozz" not in str(first)


def test_a_damaged_description_of_groups_is_told(tmp_path: Path) -> None:
    dataset = Path(shutil.copytree(DATA / "v2.1", tmp_path / "dataset"))
    (dataset / "meta/modality.json").write_text('{"video": ["front"]}')
    with pytest.raises(BagError, match=r"modality\.json.*expected"):
        write_masks(tmp_path / "out", Dataset(dataset))
