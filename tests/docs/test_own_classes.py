"""Types the commands of the page about own classes, on three cuts of the bundled recording."""

import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mcap")

from tests.docs.test_first_hour import follow
from tests.support.repeats import if_pages_changed
from tests.support.tabletop import cut

CUTS = {"monday": 0, "tuesday": 80, "wednesday": 160}
"""First frame of each recording."""
LENGTH = 14
"""Frames of a recording."""
STAND_IN = '''
class RFDETRSegNano:
    """Finds the red mug of the bundled recording, as RF-DETR would answer."""

    class_names = ["red mug", "green bottle"]

    def __init__(self, pretrain_weights):
        assert pretrain_weights.endswith(".pth")

    def predict(self, image, threshold):
        assert image.shape == (480, 640, 3)
        from types import SimpleNamespace
        import numpy as np
        box = np.array([[211, 285, 346, 427.0]])
        return SimpleNamespace(xyxy=box, confidence=np.array([0.9]), data={"class_name": np.array(["red mug"])})
'''


@if_pages_changed()
def test_the_way_to_your_own_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, first in CUTS.items():
        cut(tmp_path / f"{name}.mcap", first, first + LENGTH)
    cut(tmp_path / "tabletop.mcap", 0, LENGTH)
    (tmp_path / "rfdetr.py").write_text(STAND_IN)
    # what `pip install` makes of the page's package
    about = tmp_path / "my_detector-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-detector\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[sam3_node.detectors]\nmy-rfdetr = my_detector:Detector\n")
    monkeypatch.syspath_prepend(tmp_path)
    printed = follow("own-classes.md", tmp_path)
    last = printed["sam3-node replay monday.mcap"].splitlines()[-1]
    numbers = re.fullmatch(
        r"out/yolo: (\d+) pictures to train on, (\d+) to validate, of 3 recordings; to validate: wednesday",
        last,
    )
    assert numbers is not None
    dataset = tmp_path / "out/yolo"
    assert 'names: ["red mug", "green bottle"]\n' in (dataset / "data.yaml").read_text()
    for part, number in zip(("train", "val"), numbers.groups(), strict=True):
        pictures = sorted(path.stem for path in (dataset / "images" / part).iterdir())
        labels = {path.stem: path.read_text() for path in (dataset / "labels" / part).iterdir()}
        assert sorted(labels) == pictures
        assert len(pictures) == int(number) > 0
        assert {text.split()[0] for text in labels.values() if text} <= {"0", "1"}
    assert any(text.startswith("0 ") for text in labels.values())
    assert (dataset / "contact.jpg").stat().st_size > 10_000
    assert re.fullmatch(r"red mug: object 1, [1-9]\d* pixels\n", printed["python see.py"])
    offered = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["entry-points"]
    assert offered == {"sam3_node.detectors": {"my-rfdetr": "my_detector:Detector"}}


def test_a_recording_named_like_the_common_dataset_keeps_its_results(tmp_path: Path) -> None:
    from sam3_node.replay.job import Job

    bags = ("a/yolo.mcap", "b.mcap")
    folders = [single.out for single in Job(bags, "out", outputs=("yolo",)).split_by_recording()]
    assert folders == ["out/yolo-2", "out/b"]
    folders = [single.out for single in Job(bags, "out").split_by_recording()]
    assert folders == ["out/yolo", "out/b"]
