"""Detectors of other packages: found by their entry point; what they do wrong costs detections, and no mask."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.detection.detectors import find_known_names
from sam3_node.detection.guarded import GuardedDetector
from sam3_node.detection.loading import load_detector
from sam3_node.errors import ModelError, RequestError, VocabularyError
from sam3_node.types import Detection
from tests.support.refuses import refuses

IMAGE = np.zeros((48, 64, 3), np.uint8)


class Scripted:
    """Answers with what it is told to: a value, or an error; waits for `go`."""

    def __init__(self, answer: Any = ()) -> None:
        self.answer = answer
        self.go = threading.Event()
        self.go.set()

    def prepare(self, phrases: Sequence[str]) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return list(phrases)

    def detect(self, image: np.ndarray, query: Any, threshold: float) -> Any:
        self.go.wait()
        image[:] = 0  # its own copy
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_names_that_a_detector_lists_are_those_that_it_knows() -> None:
    own = Scripted()
    guarded = GuardedDetector(own, "own:a")
    assert find_known_names(guarded) == ((), True)
    own.names = [" red  mug", "", 7, "bowl"]  # type: ignore[attr-defined]
    assert find_known_names(guarded) == (("red mug", "bowl"), False)
    own.names = 7  # type: ignore[attr-defined]
    with refuses(ModelError):
        find_known_names(guarded)
    assert find_known_names(None) == ((), False)


def test_answers_are_clipped_sorted_and_bounded() -> None:
    answer = [
        Detection("mug", 0.3, (1, 2, 30, 40)),
        ("mug", np.float32(0.9), np.array([-5, 2, 300, 40.5])),
        ("mug", 0.1, (1, 2, 3, 4)),
        ("mug", 0.8, (70, 2, 90, 40)),
    ]
    mine = GuardedDetector(Scripted(answer), "own:a")
    image = IMAGE.copy()
    image[:] = 7
    image.flags.writeable = False
    found = mine.detect(image, mine.prepare(["mug"]), 0.2)
    assert [one.box for one in found] == [(0, 2, 64, 40.5), (1, 2, 30, 40)]
    assert [one.score for one in found] == pytest.approx([0.9, 0.3])
    mine.detector.answer = [("mug", 0.5, (1, 2, 30, 40))] * 500
    assert len(mine.detect(image, mine.prepare(["mug"]), 0.2)) == 100


@pytest.mark.parametrize(
    "answer",
    [
        ValueError("no such file"),
        None,
        [None],
        ["mug"],
        [("mug", 0.5, (1, 2, 3))],
        [("mug", 0.5, (1, 2, 3, float("nan")))],
        [("mug", 1.5, (1, 2, 3, 4))],
        [("bowl", 0.5, (1, 2, 3, 4))],
        [(["mug"], 0.5, (1, 2, 3, 4))],
    ],
)
def test_a_wrong_answer_is_an_error_of_the_model(answer: Any) -> None:
    own = Scripted()
    mine = GuardedDetector(own, "own:a")
    query = mine.prepare(["mug"])
    own.answer = answer
    with refuses(ModelError, field="own:a"):
        mine.detect(IMAGE, query, 0.1)


def test_what_prepare_raises_is_an_error_that_a_request_is_answered_with() -> None:
    with refuses(ModelError, field=("own:a", "no such file")):
        GuardedDetector(Scripted(ValueError("no such file")), "own:a").prepare(["mug"])
    with refuses(RequestError, field="bowl"):
        GuardedDetector(Scripted(RequestError("expected mug, found bowl")), "own:a").prepare(["bowl"])


def test_a_late_answer_is_not_waited_for() -> None:
    own = Scripted([("mug", 0.5, (1, 2, 30, 40))])
    mine = GuardedDetector(own, "own:a")
    query = mine.prepare(["mug"])
    mine.limit_s = 60.0
    assert len(mine.detect(IMAGE, query, 0.1)) == 1
    own.go.clear()
    mine.limit_s = 0.001
    with refuses(ModelError, field=("own:a", "detector.max_ms")):
        mine.detect(IMAGE, query, 0.1)
    late = mine._running
    with refuses(ModelError, field="earlier frame"):
        mine.detect(IMAGE, query, 0.1)
    own.go.set()
    assert late is not None
    late.result()
    mine.limit_s = 60.0
    assert len(mine.detect(IMAGE, query, 0.1)) == 1
    # its own error of this kind is no late answer
    own.answer = TimeoutError("no camera")
    with refuses(ModelError, field="no camera"):
        mine.detect(IMAGE, query, 0.1)


PLUGIN = """
class Detector:
    def __init__(self, name, device):
        if name == "broken":
            raise OSError("no weights")
        self.name, self.device = name, device

    def prepare(self, phrases):
        return phrases

    def detect(self, image, query, threshold):
        return [(query[0], 0.9, (0, 0, image.shape[1], image.shape[0]))]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a detector `mine`, and one `useless`, as pip installs them."""
    (tmp_path / "my_detector.py").write_text(PLUGIN)
    about = tmp_path / "my_detector-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-detector\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[sam3_node.detectors]\nmine = my_detector:Detector\nuseless = my_detector:dict\nabsent = no_such:A\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_detector", raising=False)


@pytest.mark.usefixtures("package")
def test_a_detector_of_an_installed_package_is_found_by_its_kind() -> None:
    mine = load_detector("mine", "best.pth", device="cpu")
    assert (mine.detector.name, mine.detector.device) == ("best.pth", "cpu")
    found = mine.detect(IMAGE, mine.prepare(["red mug"]), 0.1)
    assert [(one.label, one.box) for one in found] == [("red mug", (0, 0, 64, 48))]
    # the names of the bundled weights have figures that are not of this detector
    assert load_detector("mine").name == "mine:nano"
    with refuses(ModelError, field=("mine", "useless", "onnx", "did you mean mine?")):
        load_detector("mien")
    with refuses(ModelError, field=("mine", "no weights")):
        load_detector("mine", "broken")
    for kind in ("useless", "absent"):
        with refuses(ModelError, field=kind):
            load_detector(kind)
    with refuses(VocabularyError, field="mine"):
        load_detector("mine", vocabulary="names.safetensors")
