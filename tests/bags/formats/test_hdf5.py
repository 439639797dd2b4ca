"""HDF5 episodes in the layouts of ALOHA and robomimic; damaged ones, and LeRobot datasets; their child processes."""

import os
import random
import signal
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest

from sam3_node.bags import open_bag
from sam3_node.bags.isolated import IsolatedCalls
from sam3_node.bags.pairing import TimeSpan
from sam3_node.errors import BagError, MissingExtraError
from sam3_node.types import NANOSECONDS
from sam3_node.wire import decode_image
from tests.support.damaged_recordings import damaged
from tests.support.hdf5_files import HEIGHT, WIDTH, make_pictures, write_aloha, write_robomimic
from tests.support.hostility import damage
from tests.support.node_rig import until
from tests.support.paths import ROOT
from tests.support.refuses import mentions, refuses
from tests.support.repeats import repetitions


@pytest.mark.verifies(
    "recording", "HDF5 episodes of ALOHA", "layout", "h5py writes the published layout", "an episode of ALOHA"
)
def test_an_aloha_episode_has_all_cameras_at_the_given_rate(tmp_path: Path) -> None:
    pictures = {"cam_high": make_pictures(40), "cam_left_wrist": make_pictures(40, 1)}
    path = write_aloha(tmp_path / "episode_0.hdf5", pictures)
    with refuses(BagError, field=("episode_0.hdf5", "50")):
        open_bag(path)
    with open_bag(Path(f"{path}#fps=50")) as bag:
        assert bag.cameras == ("cam_high", "cam_left_wrist")
        frames = list(bag)
        assert bag.lost is None
    assert [frame.capture_ns for frame in frames[::2]] == [row * NANOSECONDS // 50 for row in range(40)]
    for frame in frames:
        assert (frame.width, frame.height, frame.encoding) == (WIDTH, HEIGHT, "rgb8")
        assert np.array_equal(decode_image(frame)[..., ::-1], pictures[frame.camera][frame.seq])


def test_padded_jpeg_rows_and_a_rate_in_an_attribute(tmp_path: Path) -> None:
    pictures = {"cam_high": make_pictures(5), "cam_low": make_pictures(5, 1)}
    with open_bag(write_aloha(tmp_path / "episode_0.hdf5", pictures, compress=True, fps=25)) as bag:
        frames = list(bag)
    first = [("cam_high", 0), ("cam_low", 0), ("cam_high", 1)]
    assert [(frame.camera, frame.seq) for frame in frames[:3]] == first
    assert frames[2].capture_ns == NANOSECONDS // 25
    for frame in frames:
        assert frame.encoding == "jpeg"
        expected = pictures[frame.camera][frame.seq].astype(int)
        assert np.abs(decode_image(frame)[..., ::-1] - expected).mean() < 4
        assert bytes(frame.colour).endswith(b"\xff\xd9")


def test_images_in_variable_and_fixed_byte_strings(tmp_path: Path) -> None:
    import cv2

    encoded = [cv2.imencode(".png", image[..., ::-1])[1].ravel() for image in make_pictures(3)]
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file.attrs["fps"] = 10
        listed = file.create_dataset("observations/images/listed", 3, h5py.vlen_dtype(np.uint8))
        for row, data in enumerate(encoded):
            listed[row] = data
        file["observations/images/fixed"] = np.array([data.tobytes() for data in encoded])
    with open_bag(tmp_path / "a.hdf5") as bag:
        frames = list(bag)
    assert len(frames) == 6
    for frame in frames:
        assert np.array_equal(decode_image(frame)[..., ::-1], make_pictures(3)[frame.seq])


@pytest.mark.verifies(
    "recording",
    "HDF5 demonstrations of robomimic",
    "layout",
    "h5py writes the published layout",
    "a dataset of robomimic",
)
def test_demonstrations_of_robomimic_are_episodes(tmp_path: Path) -> None:
    demos = {0: make_pictures(3), 2: make_pictures(4, 2), 10: make_pictures(5, 10)}
    path = write_robomimic(tmp_path / "image.hdf5", demos)
    with open_bag(path) as bag:
        assert (bag.cameras, bag.episode_starts) == (("agentview",), (0, 3, 7))
        frames = list(bag)
    assert [frame.seq for frame in frames] == list(range(12))
    assert frames[-1].capture_ns == 11 * NANOSECONDS // 20
    assert np.array_equal(decode_image(frames[7])[..., ::-1], demos[10][0])
    with open_bag(Path(f"{path}#episode=2-10&fps=10")) as bag:
        assert [frame.capture_ns // 10**8 for frame in bag] == list(range(3, 12))
    with open_bag(path, span=TimeSpan(3 * NANOSECONDS // 20, 5 * NANOSECONDS // 20)) as bag:
        assert [frame.seq for frame in bag] == [3, 4]


@pytest.mark.parametrize("name", ["image.hdf5#episode=5", "image.hdf5#episode=x", "image.hdf5#rate=3"])
def test_wrong_selections_are_refused(tmp_path: Path, name: str) -> None:
    write_robomimic(tmp_path / "image.hdf5", {0: make_pictures(3)})
    with pytest.raises(BagError, match=r"expected (these episodes|#episode=3)"):
        open_bag(tmp_path / name)


def test_another_layout_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["points"] = np.zeros((5, 3))
    with refuses(BagError, field=("ALOHA", "float64", "5", "3")):
        open_bag(tmp_path / "a.h5")


def test_names_that_are_no_unicode_are_passed_over(tmp_path: Path) -> None:
    path = write_aloha(tmp_path / "a.h5", {"high": make_pictures(3)}, fps=10)
    path.write_bytes(path.read_bytes().replace(b"qpos", b"qp\xfcs"))
    with open_bag(path) as bag:
        assert len(list(bag)) == 3


def test_data_in_other_files_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(range(256)) * 36)
    shape = (3, HEIGHT, WIDTH, 3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["fps"] = 10
        outside = [(str(tmp_path / "secret"), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("observations/images/outside", shape, np.uint8, external=outside)
        file["observations/images/inside"] = make_pictures(3)
        file["observations/images/linked"] = h5py.ExternalLink("other.h5", "/data")
    with open_bag(tmp_path / "a.h5") as bag:
        assert {frame.camera for frame in bag} == {"inside"}
        assert mentions(str(bag.lost), "reference")


def test_rows_that_were_never_written_are_not_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["fps"] = 10
        shape = (10**9, HEIGHT, WIDTH, 3)
        file.create_dataset("observations/images/empty", shape, np.uint8, chunks=(1, HEIGHT, WIDTH, 3))
    with refuses(BagError, field="images"):
        open_bag(tmp_path / "a.h5")


def test_large_chunks_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["fps"] = 10
        shape = (30, 1000, 1000, 3)
        data = file.create_dataset(
            "observations/images/cam", shape, np.uint8, chunks=shape, compression="gzip"
        )
        data[0] = 1
    assert (tmp_path / "a.h5").stat().st_size < 2 << 20
    with open_bag(tmp_path / "a.h5") as bag:
        assert not list(bag)
        assert mentions(str(bag.lost), "67108864", "90000000")


DATA = ROOT / "tests" / "data" / "lerobot"
CASES = repetitions(10, 20)
"""Of each dataset."""


def read_damaged(path: Path) -> str:
    """Return what a damaged recording gave: frames, told or refused."""
    try:
        with open_bag(path) as bag:
            count = sum(1 for _ in bag)
            return f"{count} frames, {'told' if bag.lost else 'whole'}"
    except BagError:
        return "refused"


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_damaged_lerobot_datasets(version: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    outcomes = {read_damaged(damaged(DATA / version, tmp_path / str(case), case)) for case in range(CASES)}
    assert outcomes - {"30 frames, whole"}


@pytest.mark.parametrize("layout", ["aloha", "jpeg", "robomimic"])
def test_damaged_hdf5_episodes(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    path = tmp_path / "a.hdf5"
    if layout == "robomimic":
        write_robomimic(path, {0: make_pictures(4), 1: make_pictures(4)})
    else:
        write_aloha(path, {"high": make_pictures(8), "low": make_pictures(8)}, layout == "jpeg", fps=50)
    data = path.read_bytes()
    outcomes = set()
    for case in range(CASES):
        path.write_bytes(damage(data, random.Random(case)))
        outcomes.add(read_damaged(path))
    assert len(outcomes) > 1


@pytest.fixture
def aloha(tmp_path: Path) -> Path:
    return write_aloha(tmp_path / "a.hdf5", {"high": make_pictures(3)})


def new_children(before: set[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that this one has started since."""
    return [child for child in psutil.Process().children() if child not in before]


def test_a_child_that_ends_is_replaced_for_other_files(aloha: Path, tmp_path: Path) -> None:
    other = write_aloha(tmp_path / "b.hdf5", {"low": make_pictures(3)})
    before = set(psutil.Process().children())
    with IsolatedCalls("h5py", "hdf5") as calls:
        assert "observations/images/high" in calls.call("list_hdf5", aloha)["datasets"]
        (child,) = new_children(before)
        child.send_signal(signal.SIGSEGV)
        until(lambda: child.status() == psutil.STATUS_ZOMBIE, "the child's end")
        with refuses(BagError, field=("a.hdf5", "h5py")):
            calls.call("list_hdf5", aloha)
        assert "observations/images/low" in calls.call("list_hdf5", other)["datasets"]
        with refuses(BagError, field=("within", "limits")):
            calls.call("list_hdf5", aloha)  # would end the next child, too


def test_an_interrupt_of_the_terminal_does_not_reach_the_child(aloha: Path) -> None:
    before = set(psutil.Process().children())
    with IsolatedCalls("h5py", "hdf5") as calls:
        calls.call("list_hdf5", aloha)
        (child,) = new_children(before)
        assert os.getpgid(child.pid) != os.getpgid(0)


def test_a_closed_one_can_be_used_again(aloha: Path) -> None:
    calls = IsolatedCalls("h5py", "hdf5")
    calls.close()
    assert calls.call("list_hdf5", aloha)
    calls.close()
    calls.close()
    assert calls.call("list_hdf5", aloha)
    calls.close()


def test_a_missing_library_names_the_extra(aloha: Path) -> None:
    with (
        IsolatedCalls("no_such_library", "hdf5") as calls,
        refuses(MissingExtraError, field=("no_such_library", "hdf5")),
    ):
        calls.call("list_hdf5", aloha)
