"""The calibration file gives intrinsics and poses, and errors name every wrong field."""

from pathlib import Path

import numpy as np
import pytest

from sam3_node.calibration import Calibration, load_calibration, save_calibration
from sam3_node.errors import OutputError, SettingsError
from tests.support.paths import ROOT
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row

EXAMPLE = ROOT / "calibration" / "example.toml"
INTRINSICS = (
    "[intrinsics]\nwidth_px = 640\nheight_px = 480\nfx_px = 500\nfy_px = 501\ncx_px = 320\ncy_px = 240\n"
)


def load(folder: Path, text: str) -> Calibration:
    path = folder / "camera.toml"
    path.write_text(text, encoding="utf-8")
    return load_calibration(path)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(folder, text)
    assert str(folder / "camera.toml") in str(caught.value)
    return str(caught.value)


def test_the_example_is_valid_and_complete() -> None:
    calibration = load_calibration(EXAMPLE)
    intrinsics = calibration.intrinsics_for((480, 640))
    assert (intrinsics.fx, intrinsics.cx, intrinsics.model) == (535.92, 342.28, "brown_conrady")
    assert len(intrinsics.coeffs) == 5
    assert calibration.depth is not None
    assert calibration.hand_eye.kind == "eye_in_hand"


def test_only_intrinsics_are_required(tmp_path: Path) -> None:
    calibration = load(tmp_path, INTRINSICS)
    assert calibration.intrinsics_for((480, 640)).model == "none"
    assert calibration.depth is None
    assert calibration.hand_eye is None


def test_depth_may_state_its_alignment_alone(tmp_path: Path) -> None:
    depth = load(tmp_path, f"{INTRINSICS}\n[depth]\naligned = true\n").depth
    assert (depth.aligned, depth.scale_m) == (True, None)


def test_intrinsics_are_scaled_to_the_images(tmp_path: Path) -> None:
    half = load(tmp_path, INTRINSICS).intrinsics_for((240, 320))
    assert (half.fx, half.fy, half.cx, half.cy) == (250, 250.5, 159.75, 119.75)


def test_another_aspect_ratio_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"640x480, found 1280x720"):
        load(tmp_path, INTRINSICS).intrinsics_for((720, 1280))


@pytest.mark.parametrize(
    "rotation",
    ["rotation_quaternion_xyzw = [0, 0, 0.70710678, 0.70710678]", "rotation_vector_rad = [0, 0, 1.57079633]"],
)
def test_hand_eye_is_a_transform(tmp_path: Path, rotation: str) -> None:
    text = f'{INTRINSICS}[hand_eye]\nkind = "eye_to_hand"\ntranslation_m = [1, 2, 3]\n{rotation}\n'
    hand_eye = load(tmp_path, text).hand_eye
    expected = [[0, -1, 0, 1], [1, 0, 0, 2], [0, 0, 1, 3], [0, 0, 0, 1]]
    np.testing.assert_allclose(hand_eye.parent_from_camera, expected, atol=1e-7)


@each_row(
    ("old", "new", "named"),
    [
        ("fx_px = 500", "fx_px = 0", "intrinsics.fx_px"),
        ("fx_px = 500", "fx_px = nan", "intrinsics.fx_px"),
        ("fy_px = 501", "fy_px = 'wide'", "intrinsics.fy_px"),
        ("cx_px = 320", "cx_px = 640", "inside the image"),
        ("cy_px = 240", "cy_px = -1", "intrinsics.cy_px"),
        ("width_px = 640", "width_px = 0", "intrinsics.width_px"),
        ("cx_px = 320", "", "intrinsics.cx_px: Field required"),
        ("cx_px = 320", "cx_px = 320\nskew = 0", "intrinsics.skew"),
        ("[intrinsics]", "fx = 1\n[intrinsics]", "fx: Extra inputs"),
    ],
)
def test_wrong_intrinsics_are_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    assert named in refusal(tmp_path, INTRINSICS.replace(old, new))


@pytest.mark.parametrize(
    ("model", "count", "expected"), [("none", 1, "0"), ("brown_conrady", 4, "5 or 8"), ("fisheye", 5, "4")]
)
def test_the_number_of_coefficients_fits_the_model(
    tmp_path: Path, model: str, count: int, expected: str
) -> None:
    text = f'{INTRINSICS}[intrinsics.distortion]\nmodel = "{model}"\ncoeffs = {[0.1] * count}\n'
    assert f"expected {expected} coefficients for {model}, found {count}" in refusal(tmp_path, text)


def test_a_model_needs_its_coefficients(tmp_path: Path) -> None:
    text = f'{INTRINSICS}[intrinsics.distortion]\nmodel = "fisheye"\n'
    assert mentions(refusal(tmp_path, text), "4", "fisheye", "0")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ("rotation_quaternion_xyzw = [0, 0, 0, 2]", "unit quaternion, found length 2"),
        ("", "one of rotation_quaternion_xyzw and rotation_vector_rad"),
        ("rotation_quaternion_xyzw = [0, 0, 0, 1]\nrotation_vector_rad = [0, 0, 0]", "one of rotation"),
        ("rotation_vector_rad = [0, 0]", "rotation_vector_rad"),
        ("rotation_vector_rad = [0, 0, inf]", "rotation_vector_rad"),
    ],
)
def test_wrong_rotations_are_named(tmp_path: Path, fields: str, named: str) -> None:
    text = f'{INTRINSICS}[hand_eye]\nkind = "eye_in_hand"\ntranslation_m = [0, 0, 0]\n{fields}\n'
    assert named in refusal(tmp_path, text)


def test_all_wrong_fields_are_listed_at_once(tmp_path: Path) -> None:
    text = INTRINSICS.replace("fx_px = 500", "fx_px = -1").replace("cx_px = 320", "cx_px = 900")
    message = refusal(tmp_path, text + '[depth]\nscale_m = 0\n[hand_eye]\nkind = "on_the_table"\n')
    wrong = "intrinsics.fx_px intrinsics.cx_px depth.scale_m hand_eye.kind hand_eye.translation_m"
    assert all(named in message for named in wrong.split())


@pytest.mark.parametrize("text", ["[intrinsics", "\x00", "intrinsics = 3"])
def test_files_that_are_not_a_calibration_are_refused(tmp_path: Path, text: str) -> None:
    refusal(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refuses(SettingsError, field="nowhere.toml"):
        load_calibration(tmp_path / "nowhere.toml")


MEASURED = {
    "date": "2026-11-22T10:00:00+00:00",
    "method": 'bundle "adjustment"',
    "board": "chessboard:9x6:25mm",
}
MEASURED |= {"views": 12, "rejected": {"left 01.png": "error 3.00 px"}, "inputs": {"left02.png": "0" * 64}}


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    errors = ("leave_one_out_mm", "leave_one_out_deg", "position_95_mm", "rotation_95_deg")
    found = MEASURED | dict.fromkeys(errors, 0.5) | {"covariance": np.eye(6).tolist()}
    hand_eye = {"kind": "eye_to_hand", "translation_m": [1e-7, -2, 3], "measured": found}
    hand_eye["rotation_quaternion_xyzw"] = [0, 0, 0, 1]
    intrinsics = load(tmp_path, INTRINSICS).intrinsics.model_dump(exclude={"measured", "distortion"})
    measured = MEASURED | {"rms_px": 0.1, "held_out_px": 0.2, "coverage": 0.5}
    parts = {"camera": "wrist-1", "hand_eye": hand_eye, "depth": {"scale_m": 1e-3}}
    calibration = Calibration.model_validate(parts | {"intrinsics": intrinsics | {"measured": measured}})
    path = tmp_path / "saved.toml"
    save_calibration(path, calibration)
    assert load_calibration(path) == calibration
    assert path.read_text().startswith('version = 1\ncamera = "wrist-1"\n')


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(OutputError, field="camera.toml"):
        save_calibration(tmp_path / "file" / "camera.toml", load(tmp_path, INTRINSICS))


def test_another_version_is_refused(tmp_path: Path) -> None:
    assert "version" in refusal(tmp_path, f"version = 2\n{INTRINSICS}")


def test_the_camera_is_placed_in_the_base(tmp_path: Path) -> None:
    text = '[hand_eye]\nkind = "{}"\ntranslation_m = [0, 0, 1]\nrotation_vector_rad = [0, 0, 0]\n'
    fixed = load(tmp_path, INTRINSICS + text.format("eye_to_hand"))
    moving = load(tmp_path, INTRINSICS + text.format("eye_in_hand"))
    assert (fixed.parent, moving.parent, load(tmp_path, INTRINSICS).parent) == ("base", "gripper", None)
    gripper = np.eye(4)
    gripper[:3, 3] = 1, 2, 3
    assert fixed.base_from_camera()[2, 3] == 1
    assert moving.base_from_camera(gripper)[:3, 3].tolist() == [1, 2, 4]
    with refuses(SettingsError, field="base_from_gripper"):
        moving.base_from_camera()
    with refuses(SettingsError, field="calibration"):
        load(tmp_path, INTRINSICS).base_from_camera()
