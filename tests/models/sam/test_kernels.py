"""The Triton kernels of memory attention: their numbers in Triton's interpreter, their code for an H100."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sam3_node.models.sam.fp8 import MAX_E4M3
from sam3_node.models.sam.probes import relative_error
from tests.support.paths import ROOT
from tests.support.refuses import refuses
from tests.support.tiny import tiny_model

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.engines

HOPPER = 90
SHARED_KB = {80: 163, 89: 99, 90: 227}
"""Shared memory of a block, by the GPU's generation."""
POINTERS = dict.fromkeys(["x", "weight", "bias", "query", "key", "value", "out"], "*bf16") | {
    "rows": "*i32",
    "counts": "*i32",
    "rotation": "*fp32",
    "log_sum": "*fp32",
}
FLOATS = ("scale", "pooled_bias")


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """Run the comparisons in a process whose triton interprets."""
    return run_interpreted("tests.support.interpreted_kernels")


def run_interpreted(module: str) -> dict[str, float]:
    program = [sys.executable, "-m", module]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert run.returncode == 0, run.stderr
    found: dict[str, float] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(
    "case",
    [
        "all keys",
        "a length for each object",
        "keys split among blocks",
        "parts without keys",
        "a query shared by all",
    ],
)
def test_the_kernels_compute_attention(case: str, errors: dict[str, float]) -> None:
    assert errors[case] < 1e-5


def test_the_probe_of_a_start_finds_them_right(errors: dict[str, float]) -> None:
    """It covers rotation, projection, attention and both norms."""
    assert errors["all, by their own probe"] < 1e-5


def test_half_precision_rounds_as_expected(errors: dict[str, float]) -> None:
    assert 1e-6 < errors["float16"] < 4e-3


@pytest.mark.parametrize("method", ["exact", "pooled", "sparse", "compressed"])
def test_a_read_by_kernels_equals_torchs(method: str, errors: dict[str, float]) -> None:
    assert errors[f"read {method}"] < 1e-4


def test_values_are_scaled_and_bounded_for_fp8_as_torch_does(errors: dict[str, float]) -> None:
    assert errors["rounded to FP8"] < 1e-4


def test_only_valid_keys_are_projected(errors: dict[str, float]) -> None:
    assert errors["keys projected"] == 3 + 70 + 2


@pytest.fixture(scope="module")
def compiled() -> dict[str, float]:
    """Compile reads and steps in a process whose triton interprets."""
    return run_interpreted("tests.support.interpreted_compile")


@pytest.mark.parametrize("method", ["exact", "pooled", "sparse"])
def test_a_compiled_read_by_kernels_equals_torchs(method: str, compiled: dict[str, float]) -> None:
    """For 1 to 16 objects, 2 to 10 memories and 1 to 31 pointers."""
    assert compiled[f"{method}, difference"] < 1e-4
    assert compiled[f"{method}, graphs"] == 2, "one for an object, and one for more"


@pytest.mark.parametrize("how", ["called", "captured"])
def test_compiled_stages_with_kernels_track_as_torch_does(how: str, compiled: dict[str, float]) -> None:
    assert compiled[f"tracks {how}, difference"] < 1e-4
    assert compiled[f"tracks {how}, graphs"] == 7, "of the warm-up; frames compile nothing"


def record_variants(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Let launches do nothing; return the variants of each kernel that would be compiled for them on an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    from sam3_node.models.sam import kernels

    backend = CUDABackend(GPUTarget("cuda", HOPPER, 32))
    found = dict[str, set[str]]()

    class Recorder:
        def __init__(self, name: str) -> None:
            kernel = getattr(kernels, name)
            self.name = name
            self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **sizes: found.setdefault(self.name, set()).add(
                str(self.bind(*args, **sizes)[1:])
            )

    for name in ("_project_keys", "_rotate", "_attend"):
        monkeypatch.setattr(kernels, name, Recorder(name))
    # from 4 objects on, nothing is split
    monkeypatch.setattr(kernels, "count_processors", lambda device: 4)
    return found


def test_no_number_of_objects_or_pointers_compiles_a_kernel_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = record_variants(monkeypatch)
    model = tiny_model("sam3").to(torch.bfloat16)
    model.memory_attention.use_kernels()
    top = torch.zeros(1, model.hidden, *model.grid, dtype=torch.bfloat16)
    with torch.inference_mode():
        for objects, pointers in itertools.product(range(1, 17), range(1, 32)):
            memory = torch.zeros(objects, 2, model.memory_tokens, model.memory_channels, dtype=torch.bfloat16)
            offset = torch.zeros(objects, 2, dtype=torch.int64)
            content = torch.zeros(objects, pointers, model.hidden, dtype=torch.bfloat16)
            model.memory_attention(top, memory, offset, content, torch.zeros(objects, pointers), None)
    assert {name: len(variants) for name, variants in found.items()} == {
        "_project_keys": 1,
        "_rotate": 2,  # of the image's own queries and keys at once, and of queries alone
        "_attend": 1,
    }


def compile_for(
    generation: int,
    kernel: Any,
    constants: dict[str, Any],
    warps: int,
    stages: int,
    pointers: Mapping[str, str] = POINTERS,
) -> Any:
    """Compile a kernel as it is launched for SAM 3, for a GPU that need not be here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name in FLOATS else "i32")
        for name in names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if kinds[name].startswith("*")}
    source = ASTSource(
        kernel, kinds, {(names.index(key),): value for key, value in constants.items()}, aligned
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)


@pytest.mark.parametrize("generation", [89, HOPPER])
@pytest.mark.parametrize("gelu", [False, True])
def test_the_rounding_to_fp8_compiles_for_gpus_that_multiply_in_it(
    generation: int, gelu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sam3_node.models.sam import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"GELU": gelu, "LARGEST": MAX_E4M3, "BLOCK": kernels.QUANTISE_BLOCK}
    pointers = {"x": "*bf16", "inverse": "*fp32", "out": "*fp8e4nv"}
    compiled = compile_for(generation, kernels._quantise, sizes, 4, 3, pointers)
    assert "cvt.rn.satfinite.e4m3x2" in compiled.asm["ptx"]  # the GPU's own rounding


def count_spills(ptx: str, generation: int, folder: Path) -> int:
    """Return the bytes that ptxas stores and loads for want of registers."""
    from triton.backends.nvidia.compiler import get_ptxas

    file = folder / "kernel.ptx"
    suffix = "a" if generation >= HOPPER else ""
    file.write_text(ptx)
    options = ["-v", f"-arch=sm_{generation}{suffix}", "-o", os.devnull]
    command = [get_ptxas(generation).path, *options, str(file)]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill", log)
    assert spills, log
    return sum(map(int, spills))


@pytest.mark.parametrize(
    ("name", "number", "generation", "pooled"),
    [
        *itertools.product(["LARGE"], range(4), [HOPPER], [False]),
        *itertools.product(["MIDDLE"], range(4), [80], [False]),
        *itertools.product(["SMALL"], range(4), [89], [False]),
        *itertools.product(["LARGE"], [0], [HOPPER], [True]),
        ("projection", 0, HOPPER, False),
    ],
)
def test_the_kernels_keep_their_numbers_in_registers(
    name: str,
    number: int,
    generation: int,
    pooled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sam3_node.models.sam import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if name == "projection":
        sizes = {"WIDTH": 64, "HALF": 128, "BLOCK": kernels.PROJECT_BLOCK}
        compiled = compile_for(generation, kernels._project_keys, sizes, kernels.PROJECT_WARPS, 3)
    else:
        launch = getattr(kernels, name)[number]
        sizes = {
            "WIDTH": 64,
            "WIDE": 256,
            "BLOCK_M": launch.queries,
            "BLOCK_N": launch.keys,
            "POOLED": pooled,
        }
        compiled = compile_for(generation, kernels._attend, sizes, launch.warps, launch.stages)
    assert count_spills(compiled.asm["ptx"], generation, tmp_path) == 0
    assert ("wgmma" if generation == HOPPER else "mma.sync") in compiled.asm["ptx"]  # the GPU's matrix units
    assert compiled.metadata.shared <= SHARED_KB[generation] * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_on_a_gpu_are_as_exact_as_half_precision(dtype: torch.dtype) -> None:
    from sam3_node.models.sam.kernels import choose_launch, measure_error

    device = torch.device("cuda")
    assert 1e-4 < measure_error(device, dtype, choose_launch(device)) < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gelu", [False, True])
def test_a_gpu_rounds_to_fp8_as_torch_does(gelu: bool) -> None:
    from sam3_node.models.sam.kernels import quantise

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    x = (torch.randn(300, 1100, device="cuda") * 4).bfloat16()
    inverse = torch.tensor(50.0, device="cuda")
    values = torch.nn.functional.gelu(x.float()) if gelu else x.float()
    right = (values * inverse).clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
    other = quantise(x, inverse, gelu).view(torch.uint8) != right.view(torch.uint8)
    # a GELU that differs in its last bits decides between two numbers where it lies in their middle
    assert other.float().mean() <= (1e-3 if gelu else 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_launch_for_cuda_serves_the_tensors_of_the_current_gpu() -> None:
    from sam3_node.models.sam.kernels import choose_launch, list_launches, use_launch

    device = torch.device("cuda")
    launches = list_launches(device)
    try:
        use_launch(device, launches[-1])
        assert choose_launch(torch.empty(0, device=device).device) == launches[-1]
    finally:
        use_launch(device, launches[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("objects", [1, 3])
def test_attention_to_a_full_bank_is_as_exact_as_bfloat16(objects: int) -> None:
    from sam3_node.models.sam.kernels import attend

    generator = torch.Generator("cuda").manual_seed(torch.seed() % 1000)
    area = 72 * 72
    tokens = 7 * 72 * 72 + 64

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    query = make(objects, area, 256)
    key = make(objects, tokens, 256)
    value = make(objects, tokens, 64)
    counts = torch.tensor([[0, 7 * area, 64], [0, area, 3], [0, 2 * area, 64]], device="cuda")[:objects]
    poison = torch.full((8 * objects * area * 64,), float("nan"), device="cuda")
    del poison  # what the kernel does not write is NaN
    found = attend(query, key, value, counts.int(), [0, 7 * area], 1, False)
    for row, (_, full, pointers) in enumerate(counts.tolist()):
        used = torch.cat([torch.arange(full), torch.arange(7 * area, 7 * area + pointers)]).cuda()
        scores = query[row].float() @ key[row, used].float().T / 16
        expected = scores.softmax(-1) @ value[row, used].float()
        assert relative_error(found[row], expected) < 0.01


@pytest.mark.parametrize(
    ("tiles", "processors", "expected"), [(41, 132, 3), (82, 132, 3), (656, 132, 1), (132, 132, 1), (1, 4, 4)]
)
def test_keys_are_split_where_blocks_would_leave_processors_idle(
    tiles: int, processors: int, expected: int
) -> None:
    from sam3_node.models.sam.kernels import choose_splits

    assert choose_splits(tiles, processors) == expected


def test_the_fastest_launch_is_kept_for_starts_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sam3_node.engines import fast_torch
    from sam3_node.models.sam import kernels

    device = torch.device("cpu")
    launched = []
    slow, broken, fastest, _ = kernels.LARGE

    def measure(run: Any, **_: Any) -> float:
        launched.append(kernels.choose_launch(device))
        if launched[-1] == broken:
            raise RuntimeError("ptxas fatal : Value 'sm_110a' is not defined for option 'gpu-name'")
        return 1.0 if launched[-1] == fastest else 2.0

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "do_bench", measure)
    monkeypatch.setattr(kernels, "_chosen", {})
    fast_torch.use_kept_launch(device, tmp_path)
    assert kernels.choose_launch(device) == slow, "nothing is timed at a start"
    fast_torch.keep_launch(device, tmp_path)
    assert launched == list(kernels.LARGE)
    assert kernels.choose_launch(device) == fastest
    kernels.use_launch(device, slow)
    fast_torch.use_kept_launch(device, tmp_path)
    assert kernels.choose_launch(device) == fastest
    broken = fastest
    monkeypatch.setattr(kernels, "list_launches", lambda device: (broken,))
    with refuses(RuntimeError, field="sm_110a"):
        kernels.time_launches(device)


def test_the_kernels_trace_without_running() -> None:
    model = tiny_model("sam3").to(torch.bfloat16)
    model.memory_attention.use_kernels()
    area = model.grid[0] * model.grid[1]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        out = model.memory_attention(
            torch.empty(1, model.hidden, *model.grid, dtype=torch.bfloat16),
            torch.empty(2, 3, area, model.memory_channels, dtype=torch.bfloat16),
            torch.zeros(2, 3, dtype=torch.int64),
            torch.empty(2, 4, model.hidden, dtype=torch.bfloat16),
            torch.empty(2, 4),
            torch.ones(2, 7, dtype=torch.bool),
        )
    assert out.shape == (2, model.hidden, *model.grid)
