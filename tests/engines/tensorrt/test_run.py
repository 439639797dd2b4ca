"""What of building and running TensorRT plans needs neither the library nor a GPU."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sam3_node.cli import main as cli
from sam3_node.engines.build_progress import Phases, ProgressLine
from sam3_node.engines.specs import ALIGNMENT, StageSpec, TensorSpec, objects_of, placed
from sam3_node.engines.tensorrt.library import PACKAGES, Library, find_library, log_of
from sam3_node.engines.tensorrt.run import Contexts
from sam3_node.errors import EngineError, MissingExtraError

CPU = torch.device("cpu")
STAGE = StageSpec(
    "scale",
    torch.nn.Identity(),
    (TensorSpec("image", (1, 4), torch.float16), TensorSpec("factor", ("objects", 3), torch.float32)),
    (TensorSpec("out", ("objects", 4), torch.float16),),
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


class LibraryContext:
    """What of TensorRT's own execution context is used."""

    def __init__(self, how: object, refused: str = "") -> None:
        self.how, self.refused = how, refused
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.memory = (0, 0)

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = (address, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return name != self.refused


class LibraryEngine:
    """What of TensorRT's own engine is used; there is room for `room` contexts."""

    device_memory_size_v2 = 4096

    def __init__(self, api: ModuleType, room: int = 9, refused: str = "") -> None:
        self.api, self.room, self.refused = api, room, refused

    def create_runtime_config(self) -> SimpleNamespace:
        config = SimpleNamespace()
        config.set_execution_context_allocation_strategy = lambda how: setattr(config, "allocation", how)
        return config

    def create_execution_context(self, how: object) -> LibraryContext | None:
        self.room -= 1
        if self.room < 0:
            log_of(self.api).errors.append("CUDA error 2: out of memory")
            return None
        return LibraryContext(how, self.refused)


@pytest.fixture
def api() -> ModuleType:
    class ILogger:
        INTERNAL_ERROR, ERROR, VERBOSE = range(3)

    api = ModuleType("tensorrt")
    api.ILogger = ILogger  # type: ignore[attr-defined]
    api.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="given")  # type: ignore[attr-defined]
    api.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")  # type: ignore[attr-defined]
    return api


def contexts_of(engine: LibraryEngine, name: str = "tensorrt") -> Contexts:
    return Contexts(Library(name, "10.8", engine.api), engine, STAGE, CPU)


def test_each_number_of_objects_has_a_context_of_its_own(api: ModuleType) -> None:
    contexts = contexts_of(LibraryEngine(api))
    made = {objects: contexts.of(objects) for objects in (1, 2, 8)}
    assert len(set(map(id, made.values()))) == 3
    for objects, context in made.items():
        assert contexts.of(objects) is context
        assert context.shapes == {"image": (1, 4), "factor": (objects, 3)}
        assert context.how == "given"
    assert len({context.memory for context in made.values()}) == 1, "one block of memory for all"
    address, size = made[1].memory
    assert size == LibraryEngine.device_memory_size_v2
    assert address


def test_what_compiles_as_it_runs_compiles_at_once(api: ModuleType) -> None:
    how = contexts_of(LibraryEngine(api), "tensorrt_rtx").of(2).how
    assert how.allocation == "given"
    assert how.dynamic_shapes_kernel_specialization_strategy == "eager"


def test_a_context_that_finds_no_room_says_what_to_lower(api: ModuleType) -> None:
    contexts = contexts_of(LibraryEngine(api, room=1))
    first = contexts.of(1)
    with pytest.raises(
        EngineError, match=r"no room .* for 4 objects: CUDA error 2: out of memory; .*--tracker\.max_objects"
    ):
        contexts.of(4)
    assert contexts.of(1) is first


def test_a_plan_that_does_not_take_the_shapes_is_refused(api: ModuleType) -> None:
    contexts = contexts_of(LibraryEngine(api, refused="factor"))
    for _ in range(2):
        with pytest.raises(EngineError, match=r"scale: factor: the plan does not take \[4, 3\]"):
            contexts.of(4)


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
