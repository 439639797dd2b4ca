"""LeRobot datasets whose times are lost: each row has its own picture, or it is refused and told."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import pytest

from sam3_node.bags import open_bag
from sam3_node.types import NANOSECONDS
from sam3_node.wire import decode_image
from tests.support.paths import ROOT
from tests.support.recordings import read_bag
from tests.support.refuses import mentions

DATA = ROOT / "tests" / "data" / "lerobot"
ROWS = 15
FRONT = "videos/observation.images.front"

Shown = dict[tuple[str, int], tuple[int, npt.NDArray[np.uint8]]]


@pytest.fixture(params=["v2.1", "v3.0"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dataset(version: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / version, tmp_path / "dataset"))


def copy_v3(folder: Path) -> Path:
    return Path(shutil.copytree(DATA / "v3.0", folder / "dataset"))


def show(dataset: Path) -> tuple[Shown, str]:
    """Return stamp and picture by camera and row, and what is told."""
    frames, lost = read_bag(dataset)
    return {(frame.camera, frame.seq): (frame.capture_ns, decode_image(frame)) for frame in frames}, str(lost)


@cache
def show_whole(version: str) -> Shown:
    """Return what a dataset shows whose times are right."""
    shown, told = show(DATA / version)
    assert told == "None"
    return shown


def require_same(found: Shown, expected: Shown) -> None:
    assert found.keys() == expected.keys()
    for key, (stamp_ns, image) in expected.items():
        assert abs(found[key][0] - stamp_ns) < 1000
        assert (found[key][1] == image).all()


def change(path: Path, name: str, values: Callable[[pyarrow.Table], list[float]]) -> None:
    """Replace a column of a table."""
    table = pyarrow.parquet.read_table(path)
    at = table.schema.get_field_index(name)
    column = pyarrow.array(values(table), table.schema.field(name).type)
    pyarrow.parquet.write_table(table.set_column(at, name, column), path)


@pytest.mark.parametrize(
    "stamp",
    [
        lambda row, _: 7.5,
        lambda row, _: row / 10,  # over all episodes
        lambda row, index: min(index, 2) / 10,  # a clock that stands still
    ],
)
def test_lost_timestamps_follow_the_order_of_rows(
    version: str, dataset: Path, stamp: Callable[[int, int], float]
) -> None:
    expected = show_whole(version)
    for path in (dataset / "data").rglob("*.parquet"):
        change(
            path,
            "timestamp",
            lambda table: [
                stamp(row, index)
                for row, index in zip(
                    table["index"].to_pylist(), table["frame_index"].to_pylist(), strict=True
                )
            ],
        )
    found, told = show(dataset)
    require_same(found, expected)
    assert mentions(told, "timestamp", "order")
    with open_bag(dataset) as bag:
        stamps = [message.stamp_ns for message in bag.robot()]
    np.testing.assert_allclose(stamps, np.arange(ROWS) * NANOSECONDS / 10, atol=1000)


def test_lost_offsets_follow_the_order_of_rows(tmp_path: Path) -> None:
    dataset = copy_v3(tmp_path)
    expected = show_whole("v3.0")
    (table,) = (dataset / "meta/episodes").rglob("*.parquet")
    change(table, f"{FRONT}/from_timestamp", lambda _: [0.0, 0.0, 0.0])
    found, told = show(dataset)
    require_same(found, expected)
    assert mentions(told, "from_timestamp", "order")
    # one of the episodes alone has the same pictures
    alone, told = show(Path(f"{dataset}#episode=1"))
    require_same(alone, {key: value for key, value in expected.items() if 4 <= key[1] < 9})
    assert mentions(told, "from_timestamp")


def test_offsets_that_cannot_be_put_right_cost_their_pictures(tmp_path: Path) -> None:
    dataset = copy_v3(tmp_path)
    expected = show_whole("v3.0")
    (path,) = (dataset / "meta/episodes").rglob("*.parquet")
    # the video has the pictures of a third episode, too
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).slice(0, 2), path)
    change(path, f"{FRONT}/from_timestamp", lambda _: [0.0, 0.2])
    found, told = show(dataset)
    require_same(found, {key: value for key, value in expected.items() if key[0] == "wrist" and key[1] < 9})
    assert mentions(told, "from_timestamp", "15 pictures", "9 rows")


def test_rows_cut_off_at_the_beginning_keep_their_pictures(tmp_path: Path) -> None:
    dataset = Path(shutil.copytree(DATA / "v2.1", tmp_path / "dataset"))
    expected = show_whole("v2.1")
    lines = [json.loads(line) for line in (dataset / "meta/episodes.jsonl").read_text().splitlines()]
    lines[0]["length"] -= 2
    (dataset / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    table = dataset / "data/chunk-000/episode_000000.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(table).slice(2), table)
    found, told = show(dataset)
    assert mentions(told, "timestamp", "0.2")
    # rows are numbered anew
    require_same(
        found,
        {
            (camera, seq - 2): (stamp - NANOSECONDS // 5, image)
            for (camera, seq), (stamp, image) in expected.items()
            if seq >= 2
        },
    )


def test_times_that_fit_no_video_cost_the_episode(version: str, dataset: Path) -> None:
    expected = show_whole(version)
    # a row too few in the video's place: its rows are those of the next episode
    tables = sorted((dataset / "data").rglob("*.parquet"))
    change(tables[0], "timestamp", lambda table: [3.0] * table.num_rows)
    if len(tables) > 1:
        (short,) = (dataset / "videos").rglob("*.front/episode_000001.mp4")
        shutil.copy(short, short.with_name("episode_000000.mp4"))
        lost = range(4)
    else:
        (path,) = (dataset / "meta/episodes").rglob("*.parquet")
        change(path, f"{FRONT}/to_timestamp", lambda _: [0.2, 0.9, 1.5])
        lost = range(4)
    found, told = show(dataset)
    assert not {seq for _, seq in found} & set(lost)
    assert mentions(told, "episode 0", "3 s", "timestamps")
    require_same(found, {key: value for key, value in expected.items() if key[1] not in lost})
