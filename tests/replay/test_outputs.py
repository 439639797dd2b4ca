"""Outputs of a replay, read back with the usual libraries, also from a full disk."""

import contextlib
import hashlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from mcap.reader import make_reader
from mcap_protobuf.decoder import DecoderFactory
from pycocotools.coco import COCO

from sam3_node.bags import open_bag, read_masks
from sam3_node.bags.native import COLOUR
from sam3_node.bags.native.reader import RecordingReader
from sam3_node.errors import BagError, OutputError, ReplayError, WireError
from sam3_node.palette_png import colours, encode_labels
from sam3_node.replay import davis_png
from sam3_node.replay.davis_png import decode_labels
from sam3_node.replay.outputs import OUTPUTS as KINDS
from sam3_node.replay.outputs.output import Sources
from sam3_node.replay.outputs.pairs import join_frames
from sam3_node.replay.outputs.write import write_outputs
from sam3_node.types import NANOSECONDS, Frame, Instance, Mask, MaskFrame
from sam3_node.wire import decode_image, encode_image
from tests.support.console_rig import BROWSERS
from tests.support.patience import PATIENCE_S
from tests.support.processes import ForkedProcess
from tests.support.refuses import mentions, refuses

resource = pytest.importorskip("resource")

WIDTH = 96
HEIGHT = 64
STEP_NS = NANOSECONDS // 20
OF_ALL = tuple(kind for kind in KINDS if kind != "lerobot")
"""Outputs of any recording."""


def blob(object_id: int, seq: int, label: str = "mug", score: float = 0.75) -> Instance:
    full = np.zeros((HEIGHT, WIDTH), np.bool_)
    full[10 * object_id : 10 * object_id + 8 + seq % 3, 5 + seq : 25 + seq] = True
    return Instance(object_id, label, score, "tracked", seq, 0, Mask.from_full(full))


def masks_of(camera: str, seq: int) -> MaskFrame:
    hidden = Instance(3, "jar", 0.1, "occluded", seq, 2, Mask.empty((HEIGHT, WIDTH)))
    instances = (blob(1, seq), blob(2, seq, "bowl"), hidden)
    return MaskFrame(camera, seq, seq * STEP_NS, WIDTH, HEIGHT, instances=instances)


def frame_of(camera: str, seq: int) -> Frame:
    image = np.full((HEIGHT, WIDTH, 3), 10 + 5 * seq, np.uint8)
    return Frame(camera, seq, seq * STEP_NS, WIDTH, HEIGHT, "png", encode_image(image, "png"))


def all_masks() -> Iterator[MaskFrame]:
    for seq in range(12):
        yield masks_of("left", seq)
        if seq % 2:
            yield masks_of("right", seq)


def all_frames() -> Iterator[Frame]:
    for seq in range(12):
        yield frame_of("right", seq)
        yield frame_of("left", seq)


ALL = Sources(all_masks, all_frames)


def told(kind: str, count: int) -> None:
    pass


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_all_outputs_are_written_and_repeatable(tmp_path: Path) -> None:
    counts: dict[str, list[int]] = {kind: [] for kind in OF_ALL}
    written = write_outputs(tmp_path, OF_ALL, ALL, lambda kind, n: counts[kind].append(n)).paths
    names = ["masks.mcap", "masks.mcap", "masks.json", "yolo", "ytvis.json", "png"]
    names += ["overlay-left.mp4", "overlay-right.mp4", "images", "report.html"]
    assert written == [tmp_path / name for name in names]
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert all(found == list(range(1, 19)) for found in counts.values())
    before = digests(tmp_path)
    write_outputs(tmp_path, OF_ALL, ALL, told)
    assert digests(tmp_path) == before


def worse_masks() -> Iterator[MaskFrame]:
    """Yield the masks of the left camera, of which object 1 is moved by 4 pixels and object 2 is exact."""
    for masks in all_masks():
        moved = replace(masks.instances[0], mask=masks.instances[0].mask.shifted(4, 0))
        if masks.camera == "left":
            yield replace(masks, instances=(moved, *masks.instances[1:]))


def show_report(folder: Path) -> str:
    """Return what a browser makes of a report, as HTML."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command = [browser, *options, f"--user-data-dir={folder}/profile", f"file://{folder}/report.html"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def test_the_report_has_the_tracks_and_their_iou_and_opens_in_a_browser(tmp_path: Path) -> None:
    label = "</script><b>mug"

    def masks() -> Iterator[MaskFrame]:
        for found in all_masks():
            yield replace(found, instances=(replace(found.instances[0], label=label), *found.instances[1:]))

    write_outputs(tmp_path, ["report"], Sources(masks, all_frames, "a.mcap", recorded=worse_masks), told)
    page = (tmp_path / "report.html").read_text()
    text = page.split('id="data">')[1].split("</script>")[0]
    data = json.loads(text)
    assert "<" not in text
    assert (data["frames"], len(data["pictures"]), data["recording"]) == (18, 12, "a.mcap")
    left, right = (data["cameras"][name] for name in ("left", "right"))
    assert [seq for seq, _ in left["frames"]] == list(range(12))
    assert left["frames"][-1][1] == 11 * STEP_NS / NANOSECONDS
    assert left["objects"]["1"]["label"] == label
    ious = {key: {point[5] for point in track["points"]} for key, track in left["objects"].items()}
    assert ious["1"] == {round(16 / 24, 3)}
    assert ious["2"] == {1.0}
    # object 3 is hidden in both results: two empty masks agree
    assert ious["3"] == {1.0}
    assert {point[5] for point in right["objects"]["1"]["points"]} == {None}
    shown = show_report(tmp_path)
    assert shown.count("<svg") == 5  # timeline, score and IoU of left, and the first two of right
    assert shown.count("<figure>") == 12
    assert "<b>mug" not in shown.split("</h1>")[1].split("<script")[0]


@pytest.mark.parametrize(
    ("pause_s", "ticks", "unit"),
    [
        (20, ["0", "5", "10", "15", "20"], "(s)"),
        (600, ["0:00", "2:00", "4:00", "6:00", "8:00", "10:00"], "(min:s)"),
        (4 * 3600, ["0:00:00", "0:30:00", "1:00:00", "1:30:00", "2:00:00"], "(h:min:s)"),
    ],
)
def test_the_time_of_a_report_is_linear_and_a_pause_is_a_gap(
    tmp_path: Path, pause_s: int, ticks: list[str], unit: str
) -> None:
    """The camera is still for a while after its sixth frame."""

    def masks() -> Iterator[MaskFrame]:
        for seq in range(12):
            pause_ns = pause_s * NANOSECONDS * (seq > 5)
            yield replace(masks_of("left", seq), capture_ns=seq * STEP_NS + pause_ns)

    write_outputs(tmp_path, ["report"], Sources(masks, all_frames, "a.mcap"), told)
    timeline, score = re.findall(r"<svg.*?</svg>", show_report(tmp_path), re.DOTALL)
    for drawn in (timeline, score):
        found = re.findall(r'class="tick" x="([\d.]+)"[^>]*>([^<]+)<', drawn)
        assert [text for _, text in found][: len(ticks)] == ticks
        places = [float(x) for x, _ in found]
        assert np.ptp(np.diff(places)) < 1e-6
        assert unit in drawn.split('class="unit"')[1]
    # two bars for each object, and a line in two parts: nothing is drawn in the pause
    bars = [float(x) for x in re.findall(r'<rect x="([\d.]+)"', timeline)]
    middle = (places[0] + places[-1]) / 2
    assert sum(x < middle for x in bars) == sum(x > middle for x in bars) == 3
    assert all(path.count("M") == 2 for path in re.findall(r'<path d="([^"]+)"', score))


def test_the_bag_has_the_masks_in_their_order(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["mcap"], ALL, told)
    read = list(read_masks(tmp_path / "masks.mcap"))
    assert [(found.camera, found.seq) for found in read] == [(m.camera, m.seq) for m in all_masks()]
    for found, expected in zip(read, all_masks(), strict=True):
        assert np.array_equal(found.paint_indices(), expected.paint_indices())


def test_the_bag_shows_its_masks_in_foxglove(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["mcap"], ALL, told)
    with (tmp_path / "masks.mcap").open("rb") as file:
        reader = make_reader(file, decoder_factories=[DecoderFactory()])
        rows = list(reader.iter_decoded_messages(topics=["/right/annotations"]))
    assert [row.message.log_time for row in rows] == [seq * STEP_NS for seq in range(1, 12, 2)]
    assert [len(row.decoded_message.points) for row in rows] == [2] * 6


def read_coco(path: Path) -> COCO:
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(path))


@pytest.mark.verifies("results", "COCO with RLE masks", "own package", "pycocotools reads it")
def test_pycocotools_reads_every_image_of_the_json(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["coco"], ALL, told)
    coco = read_coco(tmp_path / "masks.json")
    cameras = {video["id"]: video["name"] for video in coco.dataset["videos"]}
    tracks = {track["id"]: (track["video_id"], track["instance_id"]) for track in coco.dataset["tracks"]}
    assert list(cameras.values()) == ["left", "right"]
    for image, expected in zip(coco.loadImgs(coco.getImgIds()), all_masks(), strict=True):
        assert (cameras[image["video_id"]], image["seq"]) == (expected.camera, expected.seq)
        found = coco.loadAnns(coco.getAnnIds(imgIds=image["id"]))
        assert [coco.loadCats(row["category_id"])[0]["name"] for row in found] == ["mug", "bowl"]
        for row, instance in zip(found, expected.instances, strict=False):
            assert np.array_equal(coco.annToMask(row), instance.mask.full())
            assert tracks[row["track_id"]] == (row["video_id"], instance.id)
            assert (row["score"], row["area"]) == (instance.score, instance.area)
            x, y, width, height = row["bbox"]
            assert (x, y, x + width, y + height) == instance.box


def raw_frames() -> Iterator[Frame]:
    """Yield the frames of the left camera raw, and of the right one as they were."""
    for frame in all_frames():
        raw = encode_image(decode_image(frame), "bgr8")
        yield replace(frame, encoding="bgr8", colour=raw) if frame.camera == "left" else frame


def restarted_masks() -> Iterator[MaskFrame]:
    """Yield masks whose numbers begin again, later."""
    yield from all_masks()
    for seq in range(3):
        yield replace(masks_of("left", seq), capture_ns=10**12 + seq)


def restarted_frames() -> Iterator[Frame]:
    yield from raw_frames()
    for seq in range(3):
        yield replace(frame_of("left", seq + 20), seq=seq, capture_ns=10**12 + seq)


def test_the_images_that_coco_names_exist_and_are_the_frames(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["coco", "images"], Sources(restarted_masks, restarted_frames), told)
    coco = read_coco(tmp_path / "masks.json")
    frames = {frame.key: frame for frame in restarted_frames()}
    rows = coco.loadImgs(coco.getImgIds())
    assert len({row["file_name"] for row in rows}) == len(rows) == len(list(restarted_masks()))
    for row, masks in zip(rows, restarted_masks(), strict=True):
        image = cv2.imread(str(tmp_path / row["file_name"]))
        assert image.shape == (row["height"], row["width"], 3)
        frame = frames[masks.key]
        if frame.encoding == "png":
            assert (tmp_path / row["file_name"]).read_bytes() == bytes(frame.colour)
        assert np.abs(image.astype(int) - decode_image(frame)).max() <= 3
    assert [row["file_name"] for row in rows[:2]] == ["images/left/00000.jpg", "images/left/00001.jpg"]
    assert [row["file_name"] for row in rows[-2:]] == ["images/left/00001-1.png", "images/left/00002-1.png"]


def test_without_images_coco_names_places_in_the_recording(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["coco"], Sources(all_masks, all_frames, recording="pick.mcap"), told)
    found = json.loads((tmp_path / "masks.json").read_text())
    assert found["images"][2]["file_name"] == "pick.mcap#right/1"
    write_outputs(tmp_path, ["images"], ALL, told)
    write_outputs(tmp_path, ["coco"], Sources(all_masks, all_frames, has_images=True), told)
    found = json.loads((tmp_path / "masks.json").read_text())
    assert (tmp_path / found["images"][2]["file_name"]).is_file()


def test_the_bag_may_hold_the_frames_beside_the_masks(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["mcap-images"], Sources(restarted_masks, restarted_frames), told)
    path = tmp_path / "masks.mcap"
    read = list(read_masks(path))
    expected = {frame.key: frame for frame in restarted_frames()}
    with open_bag(path) as bag:
        frames = list(bag)
        assert bag.lost is None
    assert [frame.key for frame in frames] == [masks.key for masks in read]
    for frame in frames:
        difference = decode_image(frame).astype(int) - decode_image(expected[frame.key])
        assert np.abs(difference).max() <= (3 if expected[frame.key].encoding == "bgr8" else 0)
    record = {"compression": "jpeg", "quality": 95, "exact": False}
    assert RecordingReader([path]).metadata()[COLOUR] == [record]


@pytest.mark.parametrize("camera", ["..", ".", "../other", "../../escaped", "/escaped"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, camera: str) -> None:
    out = tmp_path / "some" / "out"

    def masks() -> Iterator[MaskFrame]:
        return iter([masks_of(camera, 0)])

    def frames() -> Iterator[Frame]:
        return iter([frame_of(camera, 0)])

    for kind in (kind for kind in OF_ALL if not kind.startswith("mcap")):
        with contextlib.suppress(OutputError):  # refused, or written under another name
            write_outputs(out, [kind], Sources(masks, frames), told)
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert all(out in path.parents for path in files)
    assert {path.name for path in files if path.suffix == ".mp4"} <= {"overlay-..mp4", "overlay-...mp4"}
    assert {path.parent for path in files if path.suffix == ".mp4"} <= {out}
    assert not (out / "png").exists()
    assert not Path("/escaped").exists()


def test_json_of_no_masks_is_still_coco(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["coco"], Sources(lambda: iter(()), all_frames), told)
    found = json.loads((tmp_path / "masks.json").read_text())
    assert found == {"images": [], "annotations": [], "videos": [], "tracks": [], "categories": []}


@pytest.mark.verifies(
    "results", "DAVIS' palette PNG", "layout", "names and palette as published", "DAVIS' own evaluation"
)
def test_png_have_the_ids_in_davis_colours_and_a_table(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["png"], ALL, told)
    right = tmp_path / "png/right"
    assert sorted(path.name for path in right.glob("*.png")) == [f"{seq:05d}.png" for seq in range(1, 12, 2)]
    labels = decode_labels((right / "00003.png").read_bytes())
    for instance in masks_of("right", 3).instances:
        assert np.array_equal(labels == instance.id, instance.mask.full())
    bgr = cv2.imread(str(right / "00003.png"))
    assert np.array_equal(bgr[..., ::-1], colours()[labels])
    table = json.loads((right / "objects.json").read_text())
    assert table[1] == {"index": 2, "id": 2, "label": "bowl", "first_seq": 1}


def doubtful_masks() -> Iterator[MaskFrame]:
    """Yield the masks of the left camera. The bowl, object 2, is doubtful on the frames 3 to 5 and on 8."""
    for masks in all_masks():
        mug, bowl, hidden = masks.instances
        is_doubtful = masks.seq in (3, 4, 5, 8)
        bowl = replace(bowl, confidence=0.3 if is_doubtful else 0.9, doubtful=is_doubtful)
        if masks.camera == "left":
            yield replace(masks, instances=(mug, bowl, hidden))


@pytest.mark.verifies(
    "results",
    "COCO: `confidence` and `doubtful` of each annotation",
    "layout",
    "fields beside those of COCO",
    "a tool that reads them",
)
def test_coco_says_which_annotations_are_doubtful(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["coco"], Sources(doubtful_masks, all_frames), told)
    rows = json.loads((tmp_path / "masks.json").read_text())["annotations"]
    bowls = [row for row in rows if row["instance_id"] == 2]
    assert [seq for seq, row in enumerate(bowls) if row["doubtful"]] == [3, 4, 5, 8]
    assert {row["confidence"] for row in bowls if row["doubtful"]} == {0.3}
    assert {(row["confidence"], row["doubtful"]) for row in rows if row["instance_id"] == 1} == {
        (None, False)
    }


def test_labels_may_leave_doubtful_objects_out(tmp_path: Path) -> None:
    write_outputs(
        tmp_path, ["coco", "png", "mcap"], Sources(doubtful_masks, all_frames, doubtful="left-out"), told
    )
    found = json.loads((tmp_path / "masks.json").read_text())
    seq_of = {image["id"]: image["seq"] for image in found["images"]}
    assert len(seq_of) == 12
    shown = [seq_of[row["image_id"]] for row in found["annotations"] if row["instance_id"] == 2]
    assert shown == [0, 1, 2, 6, 7, 9, 10, 11]
    assert not any(row["doubtful"] for row in found["annotations"])
    assert painted_frames(tmp_path) == shown
    # the recording of the masks is complete
    assert sum(one.doubtful for masks in read_masks(tmp_path / "masks.mcap") for one in masks.instances) == 4


@pytest.mark.verifies(
    "results",
    "DAVIS' palette PNG",
    "layout",
    "doubtful objects only with `--with-doubtful`; `objects.json` lists their frames",
    "DAVIS' own evaluation",
)
@pytest.mark.parametrize("doubtful", ["marked", "drawn"])
def test_png_have_doubtful_objects_only_when_asked(doubtful: Any, tmp_path: Path) -> None:
    write_outputs(tmp_path, ["png"], Sources(doubtful_masks, all_frames, doubtful=doubtful), told)
    sure = [0, 1, 2, 6, 7, 9, 10, 11]
    assert painted_frames(tmp_path) == (sure if doubtful == "marked" else list(range(12)))
    table = json.loads((tmp_path / "png/left/objects.json").read_text())
    assert [row.get("doubtful") for row in table] == [None, [[3, 5], [8, 8]], None]


def painted_frames(out: Path) -> list[int]:
    """Return the frames of the left camera whose PNG has a pixel of object 2."""
    files = {int(path.stem): path for path in (out / "png/left").glob("*.png")}
    return [seq for seq, path in sorted(files.items()) if (decode_labels(path.read_bytes()) == 2).any()]


def test_masks_draw_themselves_in_notebooks_and_other_libraries_share_their_pixels() -> None:
    masks = MaskFrame("left", 0, 0, WIDTH, HEIGHT, instances=(blob(1, 0),))
    mask = masks.instances[0].mask
    assert np.array_equal(decode_labels(masks._repr_png_()), masks.paint_indices())
    assert np.array_equal(decode_labels(mask._repr_png_()), mask.full())
    full = mask.full()
    shared = torch.from_dlpack(full)
    full[0, 0] = not full[0, 0]
    assert np.array_equal(shared.numpy(), full)


def test_ids_above_the_palette_repeat_and_are_never_background() -> None:
    numbered = tuple(replace(blob(n - 253, 0), id=n) for n in (254, 255))
    labels = MaskFrame("left", 0, 0, WIDTH, HEIGHT, instances=numbered).paint_indices()
    # 255 is void to readers of DAVIS
    assert np.array_equal(labels == 254, numbered[0].mask.full())
    assert np.array_equal(labels == 1, numbered[1].mask.full())


def test_the_higher_score_is_on_top() -> None:
    low = blob(1, 0, score=0.4)
    high = blob(1, 1, score=0.8)
    pair_of = (Instance(7, "", 0.8, "tracked", 0, 0, high.mask), low)
    labels = MaskFrame("left", 0, 0, WIDTH, HEIGHT, instances=pair_of).paint_indices()
    assert np.array_equal(labels == 7, high.mask.full())


@pytest.mark.parametrize("case", ["palette", "grey", "binary"])
def test_labels_are_read_from_palette_and_grey_png(case: str) -> None:
    labels = np.random.default_rng(0).integers(0, 256, (20, 31), np.uint8)
    if case == "palette":
        assert np.array_equal(decode_labels(encode_labels(labels)), labels)
        return
    grey = labels if case == "grey" else np.where(labels > 99, 255, 0).astype(np.uint8)
    expected = labels if case == "grey" else (labels > 99).astype(np.uint8)
    assert np.array_equal(decode_labels(cv2.imencode(".png", grey)[1].tobytes()), expected)


@pytest.mark.parametrize("data", [b"", b"no image", encode_labels(np.ones((4, 4), np.uint8))[:50]])
def test_other_files_than_label_images_are_errors(data: bytes) -> None:
    with refuses(WireError, field=("8-bit", "PNG")):
        decode_labels(data)


def test_photographs_are_no_label_images() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    with refuses(WireError, field=("full", "colour")):
        decode_labels(cv2.imencode(".png", photo)[1].tobytes())
    opaque = np.dstack([photo, np.full((8, 8), 255, np.uint8)])
    with refuses(WireError, field=("full", "colour")):
        decode_labels(cv2.imencode(".png", opaque)[1].tobytes())


def test_overlays_are_drawn_at_the_cameras_rate(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["overlay"], ALL, told)
    for camera, rate, count in (("left", 20, 12), ("right", 10, 6)):
        film = cv2.VideoCapture(str(tmp_path / f"overlay-{camera}.mp4"))
        assert film.get(cv2.CAP_PROP_FPS) == pytest.approx(rate)
        images = [image for good, image in iter(film.read, (False, None)) if good]
        assert len(images) == count
        assert images[0].shape == (HEIGHT, WIDTH, 3)


def test_a_label_image_of_too_many_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(davis_png, "MAX_FRAME_PIXELS", 15)
    with refuses(WireError, field=("15", "4", "pixels")):
        decode_labels(encode_labels(np.zeros((4, 4), np.uint8)))


def test_masks_without_a_frame_or_on_a_broken_one_are_not_drawn(tmp_path: Path) -> None:
    def frames() -> Iterator[Frame]:
        for frame in all_frames():
            if frame.seq == 4:
                yield Frame(frame.camera, 4, frame.capture_ns, WIDTH, HEIGHT, "png", b"broken")
            elif frame.camera == "left" and frame.seq not in (0, 7, 11):
                yield frame

    write_outputs(tmp_path, ["overlay"], Sources(all_masks, frames), told)
    film = cv2.VideoCapture(str(tmp_path / "overlay-left.mp4"))
    assert int(film.get(cv2.CAP_PROP_FRAME_COUNT)) == 12 - 4
    assert not (tmp_path / "overlay-right.mp4").exists()


def test_frames_are_paired_after_a_camera_restart() -> None:
    times = {(0, 100): 0, (1, 100): 1, (2, 100): 2, (0, 200): 3, (1, 200): 4}
    frames = [Frame("left", seq, 1000 * start + seq, 1, 1, "bgr8", b"abc") for seq, start in times]
    masks = [MaskFrame("left", frames[n].seq, frames[n].capture_ns, 1, 1) for n in (1, 3, 4)]
    joined = join_frames(lambda: iter(masks), lambda: iter(frames))
    assert [frame for _, frame in joined] == [frames[n] for n in (1, 3, 4)]


def test_a_failed_run_keeps_the_old_outputs(tmp_path: Path) -> None:
    write_outputs(tmp_path, OF_ALL, ALL, told)
    before = digests(tmp_path)

    def broken() -> Iterator[MaskFrame]:
        yield masks_of("left", 40)
        raise BagError("the bag ends here")

    for kind in OF_ALL:
        with pytest.raises(BagError):
            write_outputs(tmp_path, [kind], Sources(broken, all_frames), told)
    assert digests(tmp_path) == before


def test_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".png.partial/new/png/left").mkdir(parents=True)
    (tmp_path / ".png.partial/new/png/left/00099.png").write_bytes(b"half")
    (tmp_path / "png/gone").mkdir(parents=True)
    write_outputs(tmp_path, ["png"], ALL, told)
    assert [path.name for path in tmp_path.iterdir()] == ["png"]
    assert sorted(path.name for path in (tmp_path / "png").iterdir()) == ["left", "right"]
    assert not (tmp_path / "png/left/00099.png").exists()


def test_an_unknown_kind_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with refuses(ReplayError, field="gif"):
        write_outputs(tmp_path, ["png", "gif"], ALL, told)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(OutputError, field=("write", "png")):
        write_outputs(tmp_path / "file", ["png"], ALL, told)


LIMIT_BYTES = 20_000
SMALL_LIMITS_BYTES = {"images": 100, "yolo": 100, "overlay": 2000}


def fill_disk(out: Path, kind: str, limit_bytes: int) -> None:
    """Write an output in a process whose files may not be larger: the main function of a process."""
    masks = lambda: (masks for _ in range(40) for masks in all_masks())  # noqa: E731
    frames = lambda: (frame for _ in range(40) for frame in all_frames())  # noqa: E731
    write_outputs(out, ["png"], ALL, told)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        write_outputs(out, [kind], Sources(masks, frames), told)
    except OutputError as error:
        print(f"OutputError: {error}")


@pytest.mark.parametrize("kind", ["mcap", "mcap-images", "coco", "ytvis", "yolo", "overlay", "images"])
def test_a_full_disk_is_an_error_that_spares_what_is_there(tmp_path: Path, kind: str) -> None:
    limit = SMALL_LIMITS_BYTES.get(kind, LIMIT_BYTES)
    process = ForkedProcess(fill_disk, [tmp_path, kind, limit])
    with process.stdout:
        printed = process.stdout.read()
    assert process.wait(PATIENCE_S) == 0
    assert mentions(printed, "OutputError")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["png"]
    assert json.loads((tmp_path / "png/left/objects.json").read_text())
