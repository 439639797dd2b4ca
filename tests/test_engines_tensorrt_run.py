"""What of building and running TensorRT plans needs neither the library nor a GPU."""

from __future__ import annotations

import io
import sys

import pytest
import torch

from sam3_node import cli
from sam3_node.engines.phases import Phases, ProgressLine
from sam3_node.engines.ports import Port, Stage
from sam3_node.engines.tensorrt_library import PACKAGES, find_library
from sam3_node.engines.tensorrt_run import ALIGNMENT, objects_of, placed
from sam3_node.errors import EngineError, MissingExtraError

CPU = torch.device("cpu")
STAGE = Stage(
    "scale",
    torch.nn.Identity(),
    (Port("image", (1, 4), torch.float16), Port("factor", ("objects", 3), torch.float32)),
    (Port("out", ("objects", 4), torch.float16),),
)


def image() -> torch.Tensor:
    return torch.zeros(1, 4, dtype=torch.float16)


@pytest.mark.parametrize("objects", [1, 3, 8])
def test_objects_are_counted(objects: int) -> None:
    assert objects_of(STAGE, (image(), torch.zeros(objects, 3)), 8, CPU) == objects


def test_a_stage_of_the_image_is_of_one() -> None:
    fixed = STAGE._replace(inputs=STAGE.inputs[:1])
    assert objects_of(fixed, (image(),), 1, CPU) == 1


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((image(),), "scale: expected 2 inputs, found 1"),
        ((image(), None), "factor: expected a tensor, found NoneType"),
        ((None, torch.zeros(2, 3)), "image: expected a tensor, found NoneType"),
        ((image(), torch.zeros(2, 4)), r"factor: expected \[2, 3\] .* found \[2, 4\]"),
        ((image(), torch.zeros(6)), r"factor: expected \[1, 3\] .* found \[6\]"),
        ((image().float(), torch.zeros(2, 3)), "image: expected .*float16.* found .*float32"),
        ((image().to("meta"), torch.zeros(2, 3)), "image: expected .* on cpu, found .* on meta"),
        ((image(), torch.zeros(9, 3)), "1 to 8 objects, found 9; build for more: .*--tracker.max_objects"),
        ((image(), torch.zeros(0, 3)), "1 to 8 objects, found 0"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: tuple[torch.Tensor, ...], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        objects_of(STAGE, inputs, 8, CPU)


def test_tensors_are_copied_only_where_they_must_be() -> None:
    block = torch.arange(1024.0)
    start = -block.data_ptr() % ALIGNMENT // block.element_size()
    aligned, odd = block[start : start + 512].view(16, 32), block[start + 1 : start + 513].view(16, 32)
    assert placed(aligned) is aligned
    for tensor in (odd, aligned.T):
        copy = placed(tensor)
        assert (
            copy.data_ptr() != tensor.data_ptr()
        )  # torch aligns what is new on a GPU, not what it is a part of
        assert copy.is_contiguous()
        assert torch.equal(copy, tensor)


def test_phases_within_phases_count_as_part_of_a_step() -> None:
    phases = Phases()
    assert phases.fraction == 0
    phases.start("all", None, 4)
    phases.step("all")
    phases.start("part", "all", 2)
    phases.start("detail", "part", 10)
    for _ in range(5):
        phases.step("detail")
    assert phases.fraction == pytest.approx((1 + 0.5 / 2) / 4)
    phases.finish("detail")
    assert phases.fraction == pytest.approx((1 + 0.5 / 2) / 4)
    phases.finish("part")
    phases.step("all")
    assert phases.fraction == pytest.approx(2 / 4)
    phases.finish("all")
    assert phases.fraction == 1


def test_phases_that_nobody_began_are_passed_over() -> None:
    phases = Phases()
    phases.step("unknown")
    phases.finish("unknown")
    assert phases.fraction == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_how_far_it_is_and_how_long_it_takes() -> None:
    now, stream = [0.0], Terminal()
    with ProgressLine("encode", stream=stream, clock=lambda: now[0]) as line:
        for now[0], fraction in ((10.0, 0.25), (10.1, 0.26), (30.0, 0.5)):
            line(fraction)
    shown = stream.getvalue().split("\r")
    assert [text.removesuffix("\x1b[K").strip() for text in shown if text] == [
        "encode:  25%  10 s, about 30 s left",
        "encode:  50%  30 s, about 30 s left",
        "encode: done in 30.0 s\x1b[K",
    ]


def test_an_earlier_build_is_the_better_estimate() -> None:
    now, stream = [0.0], Terminal()
    with ProgressLine("encode", 25.0, stream, lambda: now[0]) as line:
        for now[0] in (5.0, 28.0):
            line(0.9)
    assert "5 s, about 20 s left" in stream.getvalue()
    assert "28 s, any moment" in stream.getvalue()


def test_a_log_gets_one_line() -> None:
    stream = io.StringIO()
    with ProgressLine("encode", stream=stream) as line:
        line.say("exporting")
        line(0.5)
    assert stream.getvalue().startswith("encode: done in ")
    assert stream.getvalue().count("\n") == 1


@pytest.fixture
def without_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("without_tensorrt")
def test_a_missing_library_is_told_with_its_extras() -> None:
    with pytest.raises(MissingExtraError, match=r"sam3-node\[tensorrt\].*sam3-node\[tensorrt-rtx\]"):
        find_library()


@pytest.mark.usefixtures("without_tensorrt")
def test_a_build_without_the_library_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "build", "--gpu", "sm89"]) == 2
    assert "found neither" in capsys.readouterr().err
