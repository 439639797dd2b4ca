"""Compare the time of a frame step with transformers' own streaming inference, on the same weights and frames.

    python -m tools.bench.latency.step                     nano with 1, 4 and 16 objects, then compile and bf16
    python -m tools.bench.latency.step --model small       a tracker of SAM 3's class with 4.5 M parameters
    python -m tools.bench.latency.step --model full        Sam3TrackerVideoConfig() defaults, with parity
    python -m tools.bench.latency.step --dtype bfloat16    this package in bfloat16, transformers in --peer-dtype

Weights are random, and as large as in a trained model: at transformers' initialisation all logits are below 1e-2,
and any two implementations agree. Threads wait passively, as in the node. The steps of both
implementations alternate, so that other load on the machine slows both. Each of --runs runs starts both afresh; the
ratio of a run compares its median times. "by CPU" is the ratio of the median CPU times of the process, which other
load disturbs less. The benchmark also checks parity: the largest difference of the logits of the first object, beside
the largest logit on any frame. On a CPU it also prints the step's rate beside the rate of a large matrix product in the
same dtype (sgemm for float32), measured at once before and after.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    EdgeTamVideoConfig,
    EdgeTamVideoModel,
    Sam2VideoConfig,
    Sam2VideoInferenceSession,
    Sam2VideoModel,
    Sam3TrackerVideoConfig,
    Sam3TrackerVideoInferenceSession,
    Sam3TrackerVideoModel,
)

from sam3_node.models import TrackerModel
from sam3_node.models.checkpoints import NANO
from sam3_node.tracking import ObjectPrompt, Tracker
from tools.bench.common import RUNS, Figures, make_parser, objects_text
from tools.bench.counting import count
from tools.bench.edgetam_weights import RepVitConfig
from tools.bench.tiny_weights import sam3_config

PRESENCE_BIAS = 60.0  # without it random weights call objects absent
LOGIT_GAIN = 2.0
"""Factor of the mask heads' last layer: logits become 5 to 20, where the other matrices keep the size of signals."""
TRAINED_LOGIT = 5.0
"""The least largest logit at which a small difference shows parity."""
SESSIONS = {
    Sam2VideoModel: Sam2VideoInferenceSession,
    Sam3TrackerVideoModel: Sam3TrackerVideoInferenceSession,
}
MODELS: dict[Any, Any] = {kind.config_class: kind for kind in (*SESSIONS, EdgeTamVideoModel)}
CONFIGS: dict[str, Callable[[], Any]] = {
    "nano": lambda: AutoConfig.from_pretrained(NANO),
    "small": lambda: sam3_config(
        128, 18, 2, 4, hidden_size=192, intermediate_size=512, num_hidden_layers=6, global_attn_indexes=[2, 5]
    ),
    "tiny": lambda: sam3_config(hidden=128),
    "full": Sam3TrackerVideoConfig,
    "sam2.1-tiny": Sam2VideoConfig,
    "sam2.1-small": lambda: sam2_config(96, 1, (1, 2, 11, 2), (7, 10, 13)),
    "sam2.1-base-plus": lambda: sam2_config(112, 2, (2, 3, 16, 3), (12, 16, 20), background=14),
    "sam2.1-large": lambda: sam2_config(144, 2, (2, 6, 36, 4), (23, 33, 43), windows=(8, 4, 16, 8)),
    "edgetam": lambda: edgetam_config(),
}


def sam2_config(
    width: int,
    heads: int,
    blocks: tuple[int, ...],
    global_blocks: tuple[int, ...],
    windows: tuple[int, ...] = (8, 4, 14, 7),
    background: int = 7,
) -> Any:
    """Return the configuration of a published size of SAM 2.1; the defaults are those of most sizes."""
    widths = [width << stage for stage in range(len(blocks))]
    return Sam2VideoConfig(
        vision_config={
            "model_type": "sam2_vision_model",
            "backbone_channel_list": widths[::-1],
            "backbone_config": {
                "model_type": "sam2_hiera_det_model",
                "hidden_size": width,
                "num_attention_heads": heads,
                "blocks_per_stage": list(blocks),
                "embed_dim_per_stage": widths,
                "num_attention_heads_per_stage": [heads << stage for stage in range(len(blocks))],
                "window_size_per_stage": list(windows),
                "global_attention_blocks": list(global_blocks),
                "window_positional_embedding_background_size": [background] * 2,
            },
        }
    )


def edgetam_config() -> Any:
    """Return the configuration of the published EdgeTAM."""
    return EdgeTamVideoConfig(
        vision_config={"model_type": "edgetam_vision_model", "backbone_config": RepVitConfig()},
        enable_temporal_pos_encoding_for_object_pointers=False,
        enable_occlusion_spatial_embedding=False,
    )


def random_source(name: str, device: str) -> Any:
    """Return a tracker of transformers with seeded random weights, whose logits have a trained model's size.

    They are made on the device: on a CPU, SAM 3's take half a minute.
    """
    torch.manual_seed(0)
    config = CONFIGS[name]()
    with torch.device(device):
        source = MODELS[type(config)](config).eval().requires_grad_(False)
    for path, value in source.named_parameters():
        if value.ndim > 1 and "embed" not in path and value.std() > 0:
            value.mul_(1 / math.sqrt(value[0].numel()) / value.std())
    for head in source.mask_decoder.output_hypernetworks_mlps:
        head.proj_out.weight.mul_(LOGIT_GAIN)
    source.mask_decoder.pred_obj_score_head.proj_out.bias.fill_(PRESENCE_BIAS)
    return source.to(device)


def points(count: int, size: int) -> list[list[float]]:
    """Return one point (x, y) for each object, in pixels of the model's image."""
    return [[size * (0.2 + 0.6 * i / max(1, count)), size * 0.5] for i in range(count)]


DTYPES = ("float32", "bfloat16")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def name_device(device: str) -> str:
    """Return the name of the GPU, or "CPU" with the number of threads."""
    on_gpu = device.startswith("cuda")
    return torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"


class Ours:
    """sam3_node's tracker with all objects."""

    def __init__(self, model: TrackerModel, objects: int) -> None:
        self.tracker = Tracker(model, max_objects=objects)
        places = enumerate(points(objects, model.image_size))
        self.prompts = [ObjectPrompt(number, points=[xy]) for number, xy in places]

    def step(self, pixels: torch.Tensor) -> torch.Tensor:
        prompts = self.prompts
        self.prompts = []
        return self.tracker.step(pixels, prompts).logits[0]


class Theirs:
    """transformers' streaming inference with all objects in one session."""

    def __init__(self, source: Any, objects: int) -> None:
        self.source = source
        device = source.no_memory_embedding.device
        size = source.prompt_encoder.input_image_size
        devices = ("inference_device", "inference_state_device", "video_storage_device")
        sizes = {"video_height": size, "video_width": size}
        self.session = SESSIONS[type(source)](**sizes, **dict.fromkeys(devices, device), dtype=source.dtype)
        inside = torch.ones(1, 1, 1, dtype=torch.int32)
        for i, xy in enumerate(points(objects, size)):
            index = self.session.obj_id_to_idx(i)
            prompt = {"point_coords": torch.tensor([[[xy]]]), "point_labels": inside.clone()}
            self.session.add_point_inputs(index, 0, prompt)
            self.session.obj_with_new_inputs.append(i)

    def step(self, pixels: torch.Tensor) -> torch.Tensor:
        frame = pixels.to(self.source.dtype)
        return self.source(inference_session=self.session, frame=frame).pred_masks[0, 0]


class Taken(NamedTuple):
    """Milliseconds that a step took, with the device's work: of the wall clock, and of all CPUs."""

    wall_ms: float
    cpu_ms: float


def timed(step: Callable[[torch.Tensor], torch.Tensor], pixels: torch.Tensor) -> tuple[Taken, torch.Tensor]:
    """Return the time of one step, and its logits."""
    start = time.perf_counter()
    start_cpu = time.process_time()
    logits = step(pixels)
    if pixels.is_cuda:
        torch.cuda.synchronize()
    taken = Taken((time.perf_counter() - start) * 1e3, (time.process_time() - start_cpu) * 1e3)
    return taken, logits.float()


def clip(source: Any, frames: int) -> list[torch.Tensor]:
    """Return noisy copies of one random image [1, 3, size, size]."""
    size = source.prompt_encoder.input_image_size
    device = source.no_memory_embedding.device
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(1, 3, size, size, generator=generator)
    noise = (torch.randn(image.shape, generator=generator) for _ in range(frames))
    return [(0.9 * image + 0.4 * each).to(device) for each in noise]


class Times(NamedTuple):
    """Median times of one run of two implementations, and the largest difference of their logits."""

    ours: Taken
    theirs: Taken
    difference: float
    least_logit: float
    """the largest logit of the frame on which it is least"""

    @property
    def ratio(self) -> float:
        """Speed of this package as a multiple of transformers'."""
        return self.theirs.wall_ms / self.ours.wall_ms

    @property
    def cpu_ratio(self) -> float:
        """CPU time of transformers as a multiple of this package's."""
        return self.theirs.cpu_ms / self.ours.cpu_ms


Step = Callable[[torch.Tensor], torch.Tensor]


def run_pair(ours: Step, theirs: Step, frames: list[torch.Tensor], warm: int) -> Times:
    """Step both through the frames in turns; the first `warm` frames are not timed."""
    taken = []
    difference = 0.0
    least = math.inf
    for pixels in frames:
        our_time, our_logits = timed(ours, pixels)
        their_time, their_logits = timed(theirs, pixels)
        difference = max(difference, (our_logits - their_logits).abs().max().item())
        least = min(least, their_logits.abs().max().item())
        taken.append((our_time, their_time))
    sides = zip(*taken[warm:], strict=True)
    our_median, their_median = (Taken(*map(statistics.median, zip(*times, strict=True))) for times in sides)
    return Times(our_median, their_median, difference, least)


def compare(source: Any, model: TrackerModel, objects: int, frames: int, warm: int, runs: int) -> list[Times]:
    """Run our tracker and transformers' `runs` times, each time from the first frame."""
    images = clip(source, frames)
    pairs = ((Ours(model, objects).step, Theirs(source, objects).step) for _ in range(runs))
    return [run_pair(*pair, images, warm) for pair in pairs]


def gemm_rate(dtype: torch.dtype, size: int = 2048, repeats: int = 5) -> float:
    """Return the rate of matrix products in GFLOP/s, the greatest of some."""
    matrix = torch.randn(size, size).to(dtype)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times) / 1e9


def rate_of(model: TrackerModel, images: list[torch.Tensor], objects: int) -> tuple[float, float, float]:
    """Return GFLOP of a step with a full bank, GFLOP/s of the fastest of the last five, and GFLOP/s of gemm."""
    ours = Ours(model, objects)
    before = gemm_rate(model.dtype)
    times = [timed(ours.step, pixels)[0].wall_ms for pixels in images]
    work = count(lambda: ours.step(images[0])).flops / 1e9
    return work, work / min(times[-5:]) * 1e3, max(before, gemm_rate(model.dtype))


def variants(source: Any, objects: int, frames: int, warm: int, runs: int, figures: Figures) -> None:
    """Compare bf16 and compile with the float32 eager step."""
    images = clip(source, frames)
    plain_model = stages(source)
    for name, dtype, compiled in (("bf16", torch.bfloat16, False), ("compile", torch.float32, True)):
        model = stages(source, dtype, compiled)
        pairs = ([Ours(each, objects).step for each in (model, plain_model)] for _ in range(runs))
        times = [run_pair(ours, plain, images, warm) for ours, plain in pairs]
        what = f"step in {name}"
        relative = "speed relative to float32 eager"
        figures.add(f"{what}, {relative}, {objects_text(objects)}", [run.ratio for run in times], "x")
        figures.add(f"{what}, {objects_text(objects)}", [run.ours.wall_ms for run in times], "ms")


def stages(source: Any, dtype: torch.dtype = torch.float32, compiled: bool = False) -> TrackerModel:
    """Return a TrackerModel with a copy of the source's weights."""
    own = type(source)(source.config).eval()
    own.load_state_dict(source.state_dict())
    model = TrackerModel(own.to(source.device, dtype), name="bench", mean=[0.5] * 3, std=[0.5] * 3)
    if compiled:
        model.compile()
    return model


def report(what: str, times: list[Times], rates: tuple[float, float, float] | None, figures: Figures) -> None:
    """Keep the figures of a number of objects."""
    relative = "relative to transformers' streaming inference"
    figures.add(f"{what}, speed {relative}", [run.ratio for run in times], "x")
    figures.add(f"{what}, saving of CPU time {relative}", [run.cpu_ratio for run in times], "x")
    figures.add(what, [run.ours.wall_ms for run in times], "ms")
    figures.add(f"{what}, transformers", [run.theirs.wall_ms for run in times], "ms")
    if rates is not None:
        work, rate, gemm = rates
        figures.add(f"{what}, arithmetic", work, "GFLOP")
        figures.add(f"{what}, rate", rate, "GFLOP/s")
        figures.add(f"{what}, rate of gemm in the same run", gemm, "GFLOP/s")
        figures.add(f"{what}, rate as a part of that of gemm", rate / gemm, "x")
    largest = max(run.difference for run in times)
    least = min(run.least_logit for run in times)
    figures.add(f"{what}, largest difference of the logits", largest, "logit", "under 0.001 in float32")
    figures.add(f"{what}, largest logit", least, "logit", target=f"at least {TRAINED_LOGIT:g}")


def main() -> None:
    parser = make_parser(__doc__, RUNS, "; 1 with --model full", threads=2, device=DEVICE)
    parser.add_argument("--model", choices=list(CONFIGS), default="nano")
    parser.add_argument("--objects", type=int, nargs="+", default=None, help="numbers of objects to compare")
    parser.add_argument("--frames", type=int, default=None, help="frames of one run, warm-up included")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of this package")
    parser.add_argument("--peer-dtype", choices=DTYPES, default=DTYPES[0], help="dtype of transformers")
    parser.add_argument("--no-variants", action="store_true", help="leave out bf16 and compile")
    parser.set_defaults(runs=None)
    args = parser.parse_args()
    figures = Figures("latency.step")
    torch.set_num_threads(args.threads)
    full = args.model == "full"
    frames = args.frames or (4 if full else 40)
    runs = args.runs or (1 if full else RUNS)
    warm = 1 if full else 10
    source = random_source(args.model, args.device)
    parameters = sum(p.numel() for p in source.parameters()) / 1e6
    kinds = f"{args.dtype} beside {args.peer_dtype}"
    device = name_device(args.device)
    print(f"{args.model}, {parameters:.1f} M parameters, {kinds}, {device}, torch {torch.__version__}")
    model = stages(source, getattr(torch, args.dtype))
    peer = copy.deepcopy(source).to(getattr(torch, args.peer_dtype))
    for objects in args.objects or ([1] if full else [1, 4, 16]):
        times = compare(peer, model, objects, frames, warm, runs)
        rates = rate_of(model, clip(source, frames), objects) if args.device == "cpu" else None
        suffix = "" if args.dtype == args.peer_dtype == DTYPES[0] else f", {kinds}"
        report(f"frame step of {args.model}, {objects_text(objects)}{suffix}", times, rates, figures)
    if not full and not args.no_variants:
        variants(source, 4, frames, warm, runs, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
