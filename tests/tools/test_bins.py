"""Bins with heaps: the truth of their pictures, where MuJoCo and a way to render are installed."""

from collections.abc import Iterator

import numpy as np
import pytest

from sam3_node.errors import MissingExtraError
from sam3_node.geometry import RayMap, transform_points
from tests.support.tables import each_row
from tools.scenes.bins import INSIDE_M, LENS, SIZE, BinScene, Thing, intersect


@pytest.fixture(scope="module")
def scene() -> Iterator[BinScene]:
    try:
        made = BinScene(3, 8)
    except MissingExtraError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def test_a_heap_lies_in_its_bin_and_its_truth_agrees_with_its_picture(scene: BinScene) -> None:
    picture = scene.render()
    seen = set(np.unique(picture.labels).tolist()) - {0}
    assert seen <= set(scene.labels)
    assert len(seen) >= 5
    x, y = RayMap().rays(LENS, SIZE) * picture.depth_m
    points = transform_points(scene.base_from_camera, np.stack([x, y, picture.depth_m], axis=-1))
    things = points[picture.labels > 0]
    assert (np.abs(things[:, :2]) < np.array(INSIDE_M[:2]) / 2 + 0.01).all()
    assert things[:, 2].min() > 0
    # the upper surface that is traced is where the picture has it
    label = max(seen, key=lambda one: int(np.count_nonzero(picture.labels == one)))
    own = points[picture.labels == label]
    assert own[:, 2].max() == pytest.approx(scene.list_top(label)[:, 2].max(), abs=0.004)
    # whatever is seen alone is at least what is seen among others
    assert scene.count_alone(label) >= np.count_nonzero(picture.labels == label)
    assert label not in np.unique(scene.render(without=[label]).labels)
    assert scene.render().labels.tolist() == picture.labels.tolist()


def test_something_in_a_heap_is_free_and_all_things_are_told_of(scene: BinScene) -> None:
    assert scene.covered.keys() == scene.resting.keys() == set(scene.labels)
    assert any(not above for above in scene.covered.values())
    for above in scene.covered.values():
        assert all(0 < share <= 1 for share in above.values())


@each_row(
    ("kind", "expected"),
    [("box", (-0.03, 0.03)), ("can", (-0.03, 0.03)), ("bag", (-0.03, 0.03))],
)
def test_a_vertical_line_meets_a_thing_where_its_shape_says(kind: str, expected: tuple[float, float]) -> None:
    thing = Thing(kind, np.array([0.02, 0.02, 0.03]), np.zeros(3))
    starts = np.array([[0.0, 0.0, 0.0], [0.1, 0.0, 0.0]])
    low, high = intersect(thing, starts, np.array([0.0, 0.0, 1.0]))
    assert (low[0], high[0]) == pytest.approx(expected)
    assert np.isinf(high[1])
    # lying, it is as high as it was wide
    low, high = intersect(thing, np.zeros((1, 3)), np.array([1.0, 0.0, 0.0]))
    assert (low[0], high[0]) == pytest.approx((-0.02, 0.02))
