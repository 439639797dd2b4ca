"""One home of objects: what is kept for an object is forgotten, saved and restored with it; stages know no other."""

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from sam3_node.errors import CapacityError, UnknownObjectError
from sam3_node.geometry import Array
from sam3_node.models import TrackerModel
from sam3_node.perception.objects import Objects
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.stage import PerObject
from sam3_node.schema.state import SavedPart, SavedState
from sam3_node.settings import TrackerSettings
from sam3_node.types import Mask
from tests.support.paths import ROOT
from tests.support.saving import reload
from tests.support.tables import each_row

STAGES = sorted((ROOT / "sam3_node/perception/stages").glob("*.py"))


class Point(NamedTuple):
    x: float
    name: str | None = None


@dataclass(slots=True)
class Note:
    points: list[Point]
    place: Array
    mask: Mask | None = None
    sizes: tuple[int, ...] = ()
    counts: dict[Point, int] = field(default_factory=dict)
    tensor: torch.Tensor | None = None
    total: int = field(init=False, default=0)


def make_note() -> Note:
    mask = Mask.from_full(np.eye(3, dtype=np.bool_))
    points = [Point(0.1), Point(2.5, "corner")]
    return Note(points, np.array([[1.0, 0.1]]), mask, (1, 2, 3), {Point(1.0): 4}, torch.arange(3.0))


def test_a_removed_object_is_forgotten_everywhere() -> None:
    objects = Objects(2)
    notes = objects.register(PerObject("notes", Note))
    gone: list[int] = []
    objects.on_remove(gone.append)
    for number in (1, 2):
        objects.add(objects.reserve(), "cup")
        notes[number] = make_note()
    with pytest.raises(CapacityError):
        objects.reserve()
    objects.remove(1)
    assert ([status.id for status in objects], list(notes), gone) == ([2], [2], [1])
    with pytest.raises(UnknownObjectError):
        objects.remove(1)
    assert gone == [1]
    assert objects.reserve() == 3


def test_values_are_restored_without_loss_and_others_are_emptied() -> None:
    objects = Objects(2)
    others = Objects(2)
    kept, volatile = (objects.register(PerObject(name, Note, name == "kept")) for name in ("kept", "not"))
    restored, emptied = (others.register(PerObject(name, Note, name == "kept")) for name in ("kept", "not"))
    objects.add(1, "cup", "low")
    kept[1] = volatile[1] = emptied[7] = restored[7] = make_note()
    others.restore(reload(objects.state()))
    assert list(others) == list(objects)
    assert (list(restored), list(emptied)) == ([1], [])
    found = restored[1]
    expected = kept[1]
    assert (found.points, found.sizes, found.counts) == (expected.points, expected.sizes, expected.counts)
    assert isinstance(found.points[1], Point)
    assert np.array_equal(found.place, expected.place)
    assert found.mask is not None
    assert np.array_equal(found.mask.full(), np.eye(3, dtype=np.bool_))
    assert found.tensor is not None
    assert found.tensor.equal(torch.arange(3.0))


def test_a_value_that_the_state_does_not_know_begins_empty() -> None:
    objects = Objects(2)
    later = Objects(2)
    objects.add(1, "cup")
    added = later.register(PerObject("added", Note))
    added[1] = make_note()
    later.restore(reload(objects.state()))
    assert not added


def test_declared_attributes_are_saved_by_their_types() -> None:
    class CounterState(SavedState):
        count: int
        seen: dict[int, Point]
        last: Point | None

    @dataclass
    class Counter(SavedPart[CounterState]):
        STATE = CounterState
        _seen: dict[int, Point]
        last: Point | None

        @property
        def count(self) -> int:
            return len(self._seen)

    one = Counter({3: Point(0.5)}, None)
    other = Counter({}, Point(1.0))
    assert other.state().count == 0
    other.restore(reload(one.state()))
    assert other == one
    # what has no setter follows from the rest
    assert one.state().count == other.state().count == 1


@each_row("path", STAGES, ids=lambda path: path.stem)
def test_no_stage_imports_another(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    beside = [node.module for node in imports if node.level == 1]
    above = [node.module for node in imports if node.level == 2 and (node.module or "").startswith("stages")]
    assert not beside + above


def test_the_stages_of_a_pipeline_have_names_of_their_own(nano: TrackerModel) -> None:
    names = [stage.name for stage in Pipeline(nano, TrackerSettings(), "cam0").stages]
    assert len(set(names)) == len(names)
    assert names[0] == "decode"
    assert names[-1] == "remember"
