"""Tests of overlays, contact sheets and videos, by pixels where they matter."""

from dataclasses import replace
from pathlib import Path

import av
import cv2
import numpy as np
import numpy.typing as npt
import pytest

from sam3_node import visualization
from sam3_node.errors import OutputError
from sam3_node.types import Box, Instance, Mask, MaskFrame
from sam3_node.visualization import VideoWriter, contact_sheet, overlay, pick_colour, status_text, write_image
from tests.support.refuses import mentions, refuses

SIZE = (240, 320)


def instance(object_id: int, box: Box, size: tuple[int, int] = SIZE, label: str = "mug") -> Instance:
    full = np.zeros(size, dtype=np.bool_)
    full[box[1] : box[3], box[0] : box[2]] = True
    return Instance(object_id, label, 0.9, "tracked", 1, 0, Mask.from_full(full))


def frame(*instances: Instance, published_ns: int = 0) -> MaskFrame:
    return MaskFrame("cam0", 5, 1_000_000, SIZE[1], SIZE[0], 0, published_ns, instances=instances)


def grey(height: int = SIZE[0], width: int = SIZE[1]) -> npt.NDArray[np.uint8]:
    return np.full((height, width, 3), 128, dtype=np.uint8)


def test_a_few_lines_of_the_id_s_colour_cross_the_inside_which_keeps_its_colours() -> None:
    image = grey()
    drawn = overlay(image, frame(instance(1, (100, 100, 200, 200))))
    inside = drawn[130:190, 110:190].reshape(-1, 3).astype(int) - 128
    lines = inside[inside.any(axis=1)]
    assert 0.03 < len(lines) / len(inside) < 0.12
    assert (np.sign(lines) == np.sign(np.array(pick_colour(1)) - 128)).all()
    assert (drawn[230, 20] == 128).all()
    assert (image == 128).all()


def test_the_robot_is_grey() -> None:
    robot = instance(1, (200, 100, 280, 200)).mask
    image = np.zeros((*SIZE, 3), np.uint8)
    drawn = overlay(image, replace(frame(instance(1, (100, 100, 200, 200))), robot_mask=robot))
    inside = drawn[120:190, 210:270].reshape(-1, 3)
    assert (inside == inside[:, :1]).all()
    assert 0.1 < inside.any(axis=1).mean() < 0.3
    assert not drawn[230, 20].any()


def test_a_contour_has_the_full_colour_at_the_edge_of_the_mask() -> None:
    drawn = overlay(grey(), frame(instance(6, (100, 100, 200, 200))))
    near = drawn[150, 97:104].astype(int)
    assert np.abs(near - np.array(pick_colour(6))).sum(axis=1).min() < 60


def test_a_hole_in_a_mask_stays_clear() -> None:
    full = np.zeros(SIZE, dtype=np.bool_)
    full[80:220, 80:220] = True
    full[110:190, 110:190] = False
    drawn = overlay(grey(), frame(Instance(1, "", 0.5, "tracked", 1, 0, Mask.from_full(full))))
    assert (drawn[150, 150] == 128).all()


def test_masks_of_another_size_are_scaled() -> None:
    drawn = overlay(grey(), frame(instance(2, (10, 10, 20, 20), size=(24, 32))))
    assert (drawn[110:190, 110:190] != 128).any()
    assert (drawn[230, 20] == 128).all()


def test_tags_of_objects_in_one_place_do_not_hide_each_other() -> None:
    both = overlay(grey(), frame(instance(1, (100, 100, 200, 200)), instance(4, (100, 100, 200, 200))))
    for object_id in (1, 4):
        assert (both == pick_colour(object_id)).all(axis=2).sum() > 400


def test_odd_masks_and_labels_can_be_drawn() -> None:
    odd = [
        Instance(1, "gone", 0.1, "occluded", 4, 3, Mask.empty(SIZE)),
        instance(2, (0, 0, 320, 240), label="größe ☕"),
        instance(3, (319, 239, 320, 240), label="x" * 200),
        instance(2**40, (0, 0, 1, 1), label=""),
    ]
    assert overlay(grey(), frame(*odd)).shape == (*SIZE, 3)
    assert overlay(grey(1, 1), frame(*odd)).shape == (1, 1, 3)


def test_the_status_line_shows_latency_and_unseen_objects() -> None:
    gone = Instance(9, "gone", 0.1, "occluded", 4, 3, Mask.empty(SIZE))
    assert status_text(frame(gone, published_ns=35_000_000)) == "cam0 #5  34 ms  unseen 9"


def test_colours_are_stable_and_differ() -> None:
    assert len({pick_colour(object_id) for object_id in range(15)}) == 15
    assert pick_colour(3) == pick_colour(18)


def test_a_contact_sheet_has_a_cell_for_each_image() -> None:
    sheet = contact_sheet([grey(), grey(120, 80), grey()], ["a", "b", "c"], columns=2)
    cell_height = sheet.shape[0] // 2
    cell_width = sheet.shape[1] // 2
    assert (cell_height > SIZE[0], cell_width > SIZE[1]) == (True, True)
    assert (sheet[cell_height - 100, cell_width + 100] == 128).all()
    assert sheet[cell_height + 100, cell_width + 100].max() < 40
    with refuses(ValueError, field="images"):
        contact_sheet([grey()], [], columns=2)


@pytest.mark.verifies(
    "results",
    "videos with masks: H.264 in MP4",
    "other implementation",
    "ffmpeg decodes them; yuv420p, the index first",
    "a browser",
)
@pytest.mark.parametrize("size", [SIZE, (47, 63)], ids=["even", "odd"])
def test_a_video_is_one_that_browsers_play(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "sub" / "v.mp4"
    with VideoWriter(path, fps=29.97) as video:
        for level in (0, 120, 240):
            video.write(np.full((*size, 3), level, dtype=np.uint8))
        video.write(grey(100, 100))
    with av.open(str(path)) as file:
        (stream,) = file.streams
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert float(stream.average_rate) == pytest.approx(29.97, abs=1e-3)
        images = [frame.to_ndarray(format="bgr24") for frame in file.decode(stream)]
    assert [round(float(image.mean()) / 60) for image in images] == [0, 2, 4, 2]
    # an odd side has one pixel more
    assert {image.shape for image in images} == {(size[0] + size[0] % 2, size[1] + size[1] % 2, 3)}
    # the index comes before the pictures
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


def test_the_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        with VideoWriter(tmp_path / f"{name}.mp4", fps=25.0) as video:
            for level in range(40):
                video.write(np.full((*SIZE, 3), 6 * level, dtype=np.uint8))
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_without_pyav_a_video_is_mpeg_4_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(visualization, "_find_h264", lambda: None)
    path = tmp_path / "v.mp4"
    with VideoWriter(path, fps=25.0) as video:
        for level in (0, 120, 240):
            video.write(np.full((*SIZE, 3), level, dtype=np.uint8))
        video.write(grey(100, 100))
    assert mentions(caplog.text, "v.mp4", "browsers", "sam3-node[bags]")
    capture = cv2.VideoCapture(str(path))
    images = [capture.read()[1] for _ in range(4)]
    assert [round(float(image.mean()) / 60) for image in images] == [0, 2, 4, 2]
    assert all(image.shape == (*SIZE, 3) for image in images)
    assert not capture.read()[0]


def test_a_video_without_a_frame_leaves_no_file(tmp_path: Path) -> None:
    with VideoWriter(tmp_path / "v.mp4", fps=25.0):
        pass
    assert not (tmp_path / "v.mp4").exists()


def test_paths_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        refuses(OutputError, field=("create", "folder")),
        VideoWriter(tmp_path / "file" / "v.mp4", fps=25.0) as video,
    ):
        video.write(grey())
    (tmp_path / "folder.png").mkdir()
    with refuses(OutputError, field="folder.png"):
        write_image(tmp_path / "folder.png", grey())
    with refuses(OutputError, field="what.xyz"):
        write_image(tmp_path / "what.xyz", grey())


def test_a_doubtful_mask_has_a_dashed_outline() -> None:
    sure = instance(6, (100, 100, 200, 200))
    edge = [
        np.abs(overlay(grey(), frame(shown))[100:200, 100].astype(int) - np.array(pick_colour(6))).sum(axis=1)
        < 60
        for shown in (sure, replace(sure, doubtful=True, confidence=0.1))
    ]
    assert edge[0].all()
    assert 0.2 < edge[1].mean() < 0.8
