"""Jobs as JSON, invalid jobs, and the settings that jobs run with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sam3_node.cli import replay as replay_verbs
from sam3_node.errors import ReplayError
from sam3_node.replay.job import OUTPUTS, Job, ObjectOnFrame, chosen_settings, settings_for
from sam3_node.replay.outputs import KINDS
from sam3_node.settings import load_settings
from tests.support.refuses import refuses

DESCRIPTION = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 3,
    "settings": {
        "model": {"name": "elsewhere", "device": "auto", "dtype": "auto", "threads": 0, "image_size": 0},
        "tracker": {"bank_size": 5},
        "detector": {"prompts": ["mug"], "every": 3},
        "engine": {"kind": "tensorrt"},
        "camera": {"fps": 3},
    },
}


def full_job() -> Job:
    return Job(
        ("a.mcap", "s3://b/c.mcap"),
        "out",
        names=("red mug",),
        objects=(
            ObjectOnFrame(camera="left", seq=3, box=(1, 2, 3.5, 4), label="box"),
            ObjectOnFrame(points=((1, 2), (3, 4)), labels=(1, 0)),
            ObjectOnFrame(mask="mask.png", value=3),
        ),
        topics=("left",),
        outputs=("mcap", "coco"),
        settings={"tracker": {"bank_size": 4}},
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mode": "some"}, ("mode", "some")),
        ({"strategy": "sideways"}, "strategy"),
        (
            {"outputs": ("avi",)},
            ("output", "avi"),
        ),
        ({"settings": {"camera": {}}}, "settings"),
        ({"bags": ()}, "bags"),
        ({"mode": "as-recorded"}, ("objects", "beside")),
    ],
)
def test_an_invalid_job_is_an_error(change: dict[str, Any], told: str | tuple[str, ...]) -> None:
    with refuses(ReplayError, field=told):
        replace(full_job(), **change)


def test_several_recordings_are_a_job_each_in_a_folder_of_its_own() -> None:
    job = replace(full_job(), bags=("x/a.mcap", "y/a.mcap", "s3://b/folder/", "a-2.mcap"), out="out/")
    assert [one.out for one in job.split_by_recording()] == ["out/a", "out/a-2", "out/folder", "out/a-2-2"]
    assert [one.bags for one in job.split_by_recording()] == [(bag,) for bag in job.bags]
    alone = replace(job, bags=("a.mcap",))
    assert alone.split_by_recording() == (alone,)


def test_the_command_offers_all_outputs_and_strategies() -> None:
    assert replay_verbs.OUTPUTS == OUTPUTS == KINDS


def test_a_job_has_only_settings_that_the_user_set(tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text("[tracker]\nbank_size = 7\n[camera]\nfps = 5\n")
    settings = load_settings(profile, {"model.device": "cpu"})
    assert chosen_settings(settings) == {"tracker": {"bank_size": 7}, "model": {"device": "cpu"}}


def test_as_recorded_is_done_with_the_recorded_settings_and_what_was_resolved() -> None:
    job = Job(("a",), "b", "as-recorded", settings={"model": {"name": "here"}})
    settings = settings_for(job, DESCRIPTION)
    assert settings.model.name == "here"
    assert (settings.model.device, settings.model.dtype, settings.model.threads) == ("cpu", "float32", 3)
    assert settings.tracker.bank_size == 5
    assert settings.detector.prompts == ("mug",)
    assert settings.engine.kind == "tensorrt"


def test_every_frame_is_done_with_the_recorded_model_on_this_machine() -> None:
    settings = settings_for(Job(("a",), "b"), DESCRIPTION)
    assert settings.model.name == "elsewhere"
    assert (settings.model.device, settings.model.threads) == ("auto", 0)
    assert settings.engine.kind == "torch"
    assert settings.detector.prompts == ("mug",)
    assert settings_for(Job(("a",), "b", names=("cup",)), DESCRIPTION).detector.prompts == ()
    assert settings_for(Job(("a",), "b"), None).tracker.bank_size == 7


def test_settings_of_another_version_are_an_error() -> None:
    strange = {"settings": {"tracker": {"speed": 3}}}
    with refuses(ReplayError, field=("fit", "version")):
        settings_for(Job(("a",), "b", "as-recorded"), strange)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"names": ("",)}, ("name", "object")),
        ({"names": (" ",)}, ("name", "object")),
        ({"names": ("mug", "")}, ("name", "object")),
        ({"names": "mug"}, ("list", "phrases")),
        ({"objects": (ObjectOnFrame(box=(80, 90, 40, 30)),)}, ("box", "x0", "x1", "y0")),
        ({"objects": (ObjectOnFrame(box=(80, 90, 80, 95)),)}, ("box", "x0", "x1", "y0")),
        ({"objects": (ObjectOnFrame(box=(float("nan"), 0, 4, 4)),)}, "box"),
        ({"objects": (ObjectOnFrame(box=(-9, -9, -1, 4)),)}, "box"),
        ({"objects": (ObjectOnFrame(points=((float("inf"), 0),)),)}, "points"),
    ],
)
def test_what_no_frame_can_have_is_refused_with_the_job(
    change: dict[str, Any], told: str | tuple[str, ...]
) -> None:
    with refuses(ReplayError, field=told):
        replace(full_job(), **change)
