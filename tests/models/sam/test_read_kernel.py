"""The Triton kernels of the memory read: their numbers in Triton's interpreter, their code for an H100."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.paths import ROOT
from tests.support.refuses import refuses
from tests.support.tiny import tiny_model

triton = pytest.importorskip("triton")

HOPPER = 90
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
    program = [sys.executable, "-m", "tests.support.interpreted_read"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
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


def test_half_precision_rounds_as_expected(errors: dict[str, float]) -> None:
    assert 1e-6 < errors["float16"] < 4e-3


@pytest.mark.parametrize("method", ["exact", "pooled", "sparse", "compressed"])
def test_a_read_by_kernels_equals_torchs(method: str, errors: dict[str, float]) -> None:
    assert errors[f"read {method}"] < 1e-4


def test_only_valid_keys_are_projected(errors: dict[str, float]) -> None:
    assert errors["keys projected"] == 3 + 70 + 2


def record_variants(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Let launches do nothing; return the variants of each kernel that would be compiled for them on an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    from sam3_node.models.sam import read_kernel

    backend, found = CUDABackend(GPUTarget("cuda", HOPPER, 32)), dict[str, set[str]]()

    class Recorder:
        def __init__(self, name: str) -> None:
            kernel = getattr(read_kernel, name)
            self.name = name
            self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **sizes: found.setdefault(self.name, set()).add(
                str(self.bind(*args, **sizes)[1:])
            )

    for name in ("_project_keys", "_rotate_pairs", "_attend"):
        monkeypatch.setattr(read_kernel, name, Recorder(name))
    # from 4 objects on, nothing is split
    monkeypatch.setattr(read_kernel, "count_processors", lambda device: 4)
    return found


def test_no_number_of_objects_or_pointers_compiles_a_kernel_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = record_variants(monkeypatch)
    model = tiny_model("sam3").to(torch.bfloat16)
    model.read_stage.use_kernels()
    top = torch.zeros(1, model.hidden, *model.grid, dtype=torch.bfloat16)
    with torch.inference_mode():
        for objects, pointers in itertools.product(range(1, 17), range(1, 32)):
            memory = torch.zeros(objects, 2, model.memory_tokens, model.memory_channels, dtype=torch.bfloat16)
            offset = torch.zeros(objects, 2, dtype=torch.int64)
            content = torch.zeros(objects, pointers, model.hidden, dtype=torch.bfloat16)
            model.read_stage(top, memory, offset, content, torch.zeros(objects, pointers), None)
    assert {name: len(variants) for name, variants in found.items()} == {
        "_project_keys": 1,
        "_rotate_pairs": 1,
        "_attend": 1,
    }


def compile_for(generation: int, kernel: Any, constants: dict[str, int], warps: int, stages: int) -> Any:
    """Compile a kernel as it is launched for SAM 3, for a GPU that need not be here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {
        name: "constexpr" if name in constants else POINTERS.get(name, "fp32" if name in FLOATS else "i32")
        for name in names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if kinds[name].startswith("*")}
    source = ASTSource(
        kernel, kinds, {(names.index(key),): value for key, value in constants.items()}, aligned
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)


def count_spills(ptx: str, generation: int, folder: Path) -> int:
    """Return the bytes that ptxas stores and loads for want of registers."""
    from triton.backends.nvidia.compiler import get_ptxas

    file, suffix = folder / "kernel.ptx", "a" if generation >= HOPPER else ""
    file.write_text(ptx)
    options = ["-v", f"-arch=sm_{generation}{suffix}", "-o", os.devnull]
    command = [get_ptxas(generation).path, *options, str(file)]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill", log)
    assert spills, log
    return sum(map(int, spills))


@pytest.mark.parametrize(
    ("name", "number", "generation"),
    [
        *itertools.product(["LARGE"], range(4), [HOPPER]),
        *itertools.product(["SMALL"], range(4), [89]),
        ("projection", 0, HOPPER),
    ],
)
def test_the_kernels_keep_their_numbers_in_registers(
    name: str, number: int, generation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sam3_node.models.sam import read_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"WIDTH": 64, "HALF": 128}
    if name == "projection":
        sizes["BLOCK"] = read_kernel.PROJECT_BLOCK
        compiled = compile_for(generation, read_kernel._project_keys, sizes, read_kernel.PROJECT_WARPS, 3)
    else:
        launch = getattr(read_kernel, name)[number]
        sizes |= {"BLOCK_M": launch.queries, "BLOCK_N": launch.keys}
        compiled = compile_for(generation, read_kernel._attend, sizes, launch.warps, launch.stages)
    assert count_spills(compiled.asm["ptx"], generation, tmp_path) == 0
    assert ("wgmma" if generation == HOPPER else "mma.sync") in compiled.asm["ptx"]  # the GPU's matrix units
    assert compiled.metadata.shared <= (227 if generation == HOPPER else 99) * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("objects", [1, 3])
def test_the_kernels_on_a_gpu_are_as_exact_as_bfloat16(objects: int) -> None:
    from sam3_node.models.sam.read_kernel import attend

    generator = torch.Generator("cuda").manual_seed(0)
    area, tokens = 72 * 72, 7 * 72 * 72 + 64

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    query, key, value = make(1, area, 256), make(objects, tokens, 256), make(objects, tokens, 64)
    counts = torch.tensor([[0, 7 * area, 64], [0, area, 3], [0, 2 * area, 64]], device="cuda")[:objects]
    turn = torch.stack([torch.ones(area, 128), torch.zeros(area, 128)], dim=1).cuda()
    found = attend(query, key, value, counts.int(), turn, [0, 7 * area], 1)
    for row, (_, full, pointers) in enumerate(counts.tolist()):
        used = torch.cat([torch.arange(full), torch.arange(7 * area, 7 * area + pointers)]).cuda()
        scores = query[0].float() @ key[row, used].float().T / 16
        expected = scores.softmax(-1) @ value[row, used].float()
        assert (found[row].float() - expected).abs().max() < 0.02


@pytest.mark.parametrize(
    ("tiles", "processors", "expected"), [(41, 132, 3), (82, 132, 3), (656, 132, 1), (132, 132, 1), (1, 4, 4)]
)
def test_keys_are_split_where_blocks_would_leave_processors_idle(
    tiles: int, processors: int, expected: int
) -> None:
    from sam3_node.models.sam.read_kernel import choose_splits

    assert choose_splits(tiles, processors) == expected


@pytest.mark.parametrize("kept", [False, True])
def test_the_first_start_on_a_gpu_keeps_the_fastest_launch(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sam3_node.engines import fast_torch
    from sam3_node.models.sam import read_kernel

    device, launched = torch.device("cpu"), []
    slow, broken, fastest, _ = read_kernel.LARGE

    def measure(run: Any) -> float:
        launched.append(read_kernel.choose_launch(device))
        if launched[-1] == broken:
            raise RuntimeError("ptxas fatal : Value 'sm_110a' is not defined for option 'gpu-name'")
        return 1.0 if launched[-1] == fastest else 2.0

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(read_kernel, "do_bench", measure)
    monkeypatch.setattr(read_kernel, "_fastest", {})
    if kept:
        fast_torch.choose_launch(device, tmp_path)
        launched.clear()
        read_kernel.use_launch(device, slow)
    fast_torch.choose_launch(device, tmp_path)
    assert launched == ([] if kept else list(read_kernel.LARGE))
    assert read_kernel.choose_launch(device) == fastest
    broken = fastest
    with refuses(RuntimeError, field="sm_110a"):
        monkeypatch.setattr(read_kernel, "list_launches", lambda device: (broken,))
        read_kernel.time_launches(device)


def test_the_kernels_trace_without_running() -> None:
    model = tiny_model("sam3").to(torch.bfloat16)
    model.read_stage.use_kernels()
    area = model.grid[0] * model.grid[1]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        out = model.read_stage(
            torch.empty(1, model.hidden, *model.grid, dtype=torch.bfloat16),
            torch.empty(2, 3, area, model.memory_channels, dtype=torch.bfloat16),
            torch.zeros(2, 3, dtype=torch.int64),
            torch.empty(2, 4, model.hidden, dtype=torch.bfloat16),
            torch.empty(2, 4),
            torch.ones(2, 7, dtype=torch.bool),
        )
    assert out.shape == (2, model.hidden, *model.grid)
