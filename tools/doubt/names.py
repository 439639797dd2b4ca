"""Record names on rendered clips, so that their confidence can be fitted and measured.

Each clip is played with several sets of prompts: all names in it, all kinds, some of the names, single names, and
names that nothing in it has, alone and beside the names in it. One file is written for each clip; a file that exists is
kept. A name is right if the object that has most of the mask's pixels has it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.publish import frame_from
from sam3_node.detection.detectors import Detector, prepare_prompts
from sam3_node.detection.loading import load_detector
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.perception.pipeline import Pipeline
from sam3_node.replay.name_calibration import knows
from sam3_node.settings import CameraSettings, DetectorSettings, TrackerSettings
from sam3_node.tracking.names import BUNDLED, FEATURES
from sam3_node.types import NANOSECONDS, Instance
from tools.scenes.clips import Clip, list_clips, read_clip
from tools.scenes.objects import MAKERS
from tools.scenes.textures import NAMED

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

CAMERA = CameraSettings(name="cam0")
MIN_SHARE = 0.5  # of a mask's pixels that lie on the object
ABSENT = {"colour": 4, "kind": 2, "neither": 2}
"""Number of absent names by what they share with a thing of the clip."""
SINGLE = 3
"""Number of absent names that are also asked for alone."""
PRESENT = "name"
SHARED = (PRESENT, *ABSENT)
"""What a label shares with a thing of the clip that is most like it."""


class NameRecords(NamedTuple):
    """All masks that are sure and not tentative, N of them."""

    features: Floats
    """[N, F], see `names.FEATURES`"""
    right: Bools
    """[N]"""
    track: Ints
    """[N], a number for each track of each run"""
    prompts: Ints
    """[N], number of prompts of the run"""
    shared: Ints
    """[N], index in SHARED"""

    @property
    def confidence(self) -> Floats:
        """[N], by the package's weights"""
        return np.array([BUNDLED.estimate(row.tolist()) for row in self.features])


def choose_prompts(clip: Clip, detector: Detector) -> list[list[str]]:
    """Return the sets of prompts to play a clip with."""
    objects = clip.meta["objects"]
    kinds = sorted({item["kind"] for item in objects if knows(detector, item["kind"])})
    names = sorted({item["name"] for item in objects if knows(detector, item["name"])})
    rng = np.random.default_rng(int(clip.name.split("-")[-1]))
    drawn = [str(name) for name in rng.permutation(names)]
    absent = choose_absent(objects, detector, rng)
    single = [str(name) for name in rng.permutation(absent)[:SINGLE]]
    sets = [names, kinds, *([name] for name in drawn[:3]), sorted(drawn[:2])]
    sets += [absent, sorted([*names, *absent]), *([name] for name in single)]
    return [list(each) for each in dict.fromkeys(tuple(each) for each in sets) if each]


def choose_absent(
    objects: Sequence[dict[str, Any]], detector: Detector, rng: np.random.Generator
) -> list[str]:
    """Return names of a colour and a kind that no thing of a clip has, ABSENT of each sort."""
    known = [f"{colour} {kind}" for colour in NAMED for kind in MAKERS]
    drawn = [str(name) for name in rng.permutation([name for name in known if knows(detector, name)])]
    found = list[str]()
    for shared, count in ABSENT.items():
        found += [name for name in drawn if compare_label(name, objects) == shared][:count]
    return sorted(found)


def compare_label(label: str, objects: Sequence[dict[str, Any]]) -> str:
    """Return what a label shares with the thing of a clip that is most like it, one of SHARED."""
    if any(label in (item["name"], item["kind"]) for item in objects):
        return PRESENT
    colour, _, kind = label.partition(" ")
    # a colour that is shared is the harder case, because the detector goes by it
    if any(colour == item["color"] for item in objects):
        return "colour"
    return "kind" if any(kind == item["kind"] for item in objects) else "neither"


def record(clip: Clip, model: TrackerModel, detector: Detector, step: int, every: int) -> NameRecords:
    """Play a clip with each set of prompts."""
    rows: list[tuple[list[float], bool, int, int, int]] = []
    objects = clip.meta["objects"]
    for run, prompts in enumerate(choose_prompts(clip, detector)):
        settings = DetectorSettings(every=every)
        pipeline = Pipeline(model, TrackerSettings(), "cam0", detector, settings)
        pipeline.set_prompts(prepare_prompts(detector, prompts, settings.score))
        for index in range(0, len(clip), step):
            labels = clip.labels(index)
            image = CapturedImage(clip.image(index), round(index * NANOSECONDS / clip.meta["fps"]))
            frame = frame_from(image, index, CAMERA)
            for instance in pipeline.step(frame).instances:
                features = pipeline.name_features(instance.id)
                sure = (instance.confidence or 0.0) >= TrackerSettings().min_confidence
                if features and sure and instance.state == "tracked":
                    right = is_right(instance, labels, objects)
                    shared = SHARED.index(compare_label(instance.label, objects))
                    rows.append((features, right, 1000 * run + instance.id, len(prompts), shared))
    return NameRecords(
        np.array([row[0] for row in rows], np.float64).reshape(-1, len(FEATURES)),
        np.array([row[1] for row in rows], np.bool_),
        np.array([row[2] for row in rows], np.int64),
        np.array([row[3] for row in rows], np.int64),
        np.array([row[4] for row in rows], np.int64),
    )


def is_right(instance: Instance, labels: npt.NDArray[np.uint8], objects: Sequence[dict[str, object]]) -> bool:
    """Return True if the object with most of the mask's pixels has the instance's label as name or kind."""
    inside = labels[instance.mask.full()]
    counts = np.bincount(inside, minlength=256)
    owner = int(counts[1:].argmax()) + 1
    truth = next((item for item in objects if item["id"] == owner), None)
    on_object = counts[owner] >= MIN_SHARE * len(inside)
    return bool(truth and on_object and instance.label in (truth["name"], truth["kind"]))


def record_folder(folder: Path, out: Path, step: int, every: int) -> Iterator[Path]:
    """Record the clips of a folder that have no file yet; yield the files."""
    model = load_tracker("nano")
    detector = load_detector("yolo-world", "nano")
    out.mkdir(parents=True, exist_ok=True)
    for name in list_clips(folder):
        path = out / f"{name}.npz"
        if not path.is_file():
            part = path.with_suffix(".part.npz")
            np.savez_compressed(
                part, **record(read_clip(folder, name), model, detector, step, every)._asdict()
            )
            part.rename(path)
        yield path


def load(paths: Sequence[Path]) -> tuple[NameRecords, Ints]:
    """Return all records, and the number of the file of each."""
    found = []
    for path in paths:
        with np.load(path) as stored:
            found.append(NameRecords(*(stored[key] for key in NameRecords._fields)))
    clip = np.repeat(np.arange(len(found)), [len(each.right) for each in found])
    joined = NameRecords(*(np.concatenate(column) for column in zip(*found, strict=True)))
    return joined._replace(track=joined.track + 100_000 * clip), clip
