"""Names instead of clicks, with each kind of detector, also changed while the node runs; all are processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.errors import RequestError
from sam3_node.models.yolo.network import save_yolo_world
from tests.support.node_rig import Rig, ids, masks_where
from tests.support.refuses import refuses
from tests.support.tiny_detectors import write_tiny_grounding_dino, write_tiny_sam3
from tests.support.tiny_yolo import phrases, tiny_yolo

KNOWN = ("red mug", "bottle", "spoon")


def write_tiny_yolo(folder: Path) -> None:
    save_yolo_world(tiny_yolo(), folder)
    Vocabulary(KNOWN, phrases(len(KNOWN)).numpy(), "tiny").save(folder / "vocabulary.safetensors")


DETECTORS: dict[str, Callable[[Path], object]] = {
    "yolo-world": write_tiny_yolo,
    "sam3-concept": write_tiny_sam3,
    "grounding-dino": write_tiny_grounding_dino,
}


@pytest.fixture(scope="module", params=DETECTORS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Start a camera, and a node that detects bottles from the start."""
    with Rig(tmp_path_factory.mktemp("names")) as rig:
        weights = rig.folder / "detector"
        DETECTORS[request.param](weights)
        rig.environment |= {
            "SAM3_DETECTOR__KIND": request.param,
            "SAM3_DETECTOR__NAME": str(weights),
            "SAM3_DETECTOR__PROMPTS": "bottle",
            "SAM3_DETECTOR__EVERY": "2",
            "SAM3_DETECTOR__SCORE": "0.02",
        }
        rig.node()
        rig.camera()
        yield rig


@pytest.fixture
def client(rig: Rig) -> Iterator[PerceptionClient]:
    with rig.client() as client:
        yield client


def test_what_is_looked_for_is_in_the_masks_and_found(client: PerceptionClient) -> None:
    masks = masks_where(client, lambda masks: masks.prompts == ("bottle",), "the prompt of the start")
    assert masks_where(client, lambda masks: "detect" in masks.stages_us, "a detection").camera == "cam0"
    found = masks_where(client, lambda masks: masks.instances, "an object of random weights")
    assert {instance.label for instance in found.instances} == {"bottle"}
    assert client.status()["prompts"] == list(masks.prompts)


def test_names_change_live_and_others_keep_their_ids(client: PerceptionClient) -> None:
    client.set_prompts([])
    masks_where(client, lambda masks: masks.prompts == () and not masks.instances, "nothing looked for")
    by_hand = client.add_object(points=[(160, 120)], label="mine").id
    client.set_prompts(["Red  mug", "bottle"], scores={"bottle": 0.99}, most={"red mug": 1})
    masks = masks_where(client, lambda masks: len(masks.prompts) == 2 and by_hand in ids(masks), "names")
    assert masks.prompts == ("Red mug", "bottle")
    client.set_prompts([])
    masks_where(client, lambda masks: ids(masks) == [by_hand] and masks.prompts == (), "the one by hand")
    client.remove_object(by_hand)


@pytest.mark.parametrize(
    ("prompts", "limits", "said"),
    [
        ([""], {}, "found an empty one"),
        (["mug"] * 1000, {}, "at most 256 phrases"),
        (["x" * 10_000], {}, "at most 200 characters"),
        (["bottle"], {"most": {"spoon": 1}}, "'spoon'"),
        (["bottle"], {"most": {"bottle": 0}}, "'bottle'"),
        (["bottle"], {"scores": {"bottle": 7.0}}, "'bottle'"),
    ],
)
def test_names_that_are_refused_change_nothing(
    client: PerceptionClient, prompts: list[str], limits: dict, said: str
) -> None:
    client.set_prompts(["spoon"])
    with pytest.raises(RequestError) as caught:
        client.set_prompts(prompts, **limits)
    assert said in str(caught.value)
    assert client.status()["prompts"] == ["spoon"]
    masks_where(client, lambda masks: masks.prompts == ("spoon",), "masks as before")


def test_the_names_that_a_detector_knows_are_listed(rig: Rig, client: PerceptionClient) -> None:
    found = client.list_names()
    assert found.detector
    if rig.environment["SAM3_DETECTOR__KIND"] != "yolo-world":
        assert (found.names, found.is_open) == ((), True)
        return
    assert (found.names, found.count, found.is_open) == (KNOWN, len(KNOWN), False)
    part = client.list_names("MUG", most=1)
    mugs = [name for name in KNOWN if "mug" in name.lower()]
    assert (part.names, part.count) == (tuple(mugs[:1]), len(mugs))
    with refuses(RequestError, field="most"):
        client.list_names(most=0)


def test_unknown_names_tell_the_nearest(rig: Rig, client: PerceptionClient) -> None:
    if rig.environment["SAM3_DETECTOR__KIND"] != "yolo-world":
        pytest.skip("text encoders know any phrase")
    client.set_prompts(["spoon"])
    with refuses(RequestError, field=("nearest", "red mug")):
        client.set_prompts(["red mugs"])
    assert client.status()["prompts"] == ["spoon"]
