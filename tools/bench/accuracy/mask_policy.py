"""Does a mask help a policy? Clone an expert with and without masks, and count how often the clones succeed.

    python -m tools.bench.accuracy.mask_policy --json FILE --plot FILE.png      a quarter of an hour on one core

The task is `tools.scenes.reach`: a gripper must come to rest over the named one of four drifting objects. For each
seed, the expert demonstrates `--demos` scenes, with noise in what it does and none in what is learned. Each way of
`WAYS` trains the same network on the same demonstrations for `--updates` updates. All networks are told the name, as
kind and colour, and the gripper's place. Masks of demonstrations are the truth's. Each test of `TESTS` plays
`--episodes` unseen scenes for each seed, the same for all ways. There, masks are those of the tracker in the loop,
which is shown the true box on the first frame alone; the way `TRUE` repeats `CUT` with the truth's masks.

A rate is over the episodes of all seeds, with Wilson's interval; a difference of two ways is that of the same scenes,
with an interval by bootstrap, first over seeds, then over episodes.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.publish import frame_from
from sam3_node.client.observations.slots import ANY, ObjectSlots, fit_mask
from sam3_node.geometry import mask_iou
from sam3_node.models import TrackerModel
from sam3_node.perception.loading import load_model
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import CameraSettings, ModelSettings, TrackerSettings
from sam3_node.types import NANOSECONDS, Image, Mask
from sam3_node.wire.frame_prompt import FramePrompt
from tools.bench.common import Figures, Record, make_parser
from tools.command import errors_in_one_line, set_up_cpu
from tools.plots import draw
from tools.scenes.reach import COLOURS, KINDS, SPEED, TARGET_ID, Outcome, ReachWorld

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

PICTURES = "pictures alone"
NOISE = "pictures, trained with noise for the table"
MASK = "pictures and mask"
CUT = "the target alone, the rest grey"
TRUE = "the same, with true masks"
WAYS = (PICTURES, NOISE, MASK, CUT)
"""What is trained. `NOISE` needs masks in training alone, as GR00T's mask-guided training does."""
TESTS = {
    "as trained": (False, False),
    "other tables": (True, False),
    "look-alikes": (False, True),
    "both": (True, True),
}
"""For each test, whether the table is covered, and whether objects are alike."""

SIDE = 40
"""Width and height of what a network sees, in pixels."""
NOISE_SHARE = 0.9
"""Share of the pictures whose table is replaced."""
EXPERT_NOISE = 0.25 * SPEED
"""Standard deviation of the noise in the expert's moves."""
BATCH = 64
LEARNING_RATE = 3e-3
CAMERA = CameraSettings(name="cam0", encoding="bgr8")
PERIOD_NS = NANOSECONDS // 10
Z_95 = 1.96
RESAMPLES = 10_000
TEST_SEEDS = 1_000_000
"""Seeds of scenes from here on are those of tests."""


class View(NamedTuple):
    """What a network may see, of one moment or of n in a first dimension."""

    picture: Image
    """uint8 [SIDE, SIDE, 3], BGR"""
    target: Bools
    """[SIDE, SIDE], its mask"""
    things: Bools
    """[SIDE, SIDE], mask of all objects and of the gripper; for training alone"""
    state: Floats
    """one-hot kind and colour of the target, and the gripper's place"""


class Demonstrations(NamedTuple):
    """n views, and the expert's moves, float32 [n, 2], in fractions of `SPEED`."""

    views: View
    moves: Floats


class MaskSource(Protocol):
    """What finds the target's mask in a test."""

    def begin(self, image: Image, ids: Image) -> None:
        """Begin an episode by its first image and truth."""

    def find(self, image: Image, ids: Image) -> Bools:
        """Return the target's mask, bool [SIDE, SIDE]."""


class TrueMasks:
    """The truth's masks."""

    def begin(self, image: Image, ids: Image) -> None:
        pass

    def find(self, image: Image, ids: Image) -> Bools:
        return sample_mask(ids == TARGET_ID)


class TrackedMasks:
    """Masks of the tracker, as a policy gets them from the client. It sees one true box on the first image."""

    def __init__(self, model: TrackerModel) -> None:
        self._model = model
        self.ious: list[float] = []
        """of each mask with the truth, where the target can be seen"""
        self.doubtful: list[bool] = []
        """of each mask, whether the node doubts it"""

    def begin(self, image: Image, ids: Image) -> None:
        self._pipeline = Pipeline(self._model, TrackerSettings(), CAMERA.name)
        self._slots = ObjectSlots([ANY], (SIDE, SIDE))
        self._seq = 0
        self._pipeline.step(frame_from(CapturedImage(image, 0), 0, CAMERA))
        x0, y0, x1, y1 = Mask.from_full(ids == TARGET_ID).box
        self._pipeline.add(FramePrompt(box=(float(x0), float(y0), float(x1), float(y1))), seq=0)

    def find(self, image: Image, ids: Image) -> Bools:
        self._seq += 1
        now_ns = self._seq * PERIOD_NS
        found = self._pipeline.step(frame_from(CapturedImage(image, now_ns), self._seq, CAMERA))
        true = Mask.from_full(ids == TARGET_ID)
        if true.area:
            self.ious += [mask_iou(one.mask, true) for one in found.instances] or [0.0]
        seen = self._slots.observe(found, now_ns)
        self.doubtful.append(bool(seen.doubtful[0]))
        return seen.masks[0]


class Clone(nn.Module):
    """A small convolutional network: views to moves. The name scales and shifts its features, whose places it reads."""

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(channels, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.name = nn.Linear(states, 64)
        self.second = nn.Conv2d(32, 32, 3, 1, 1)
        self.move = nn.Sequential(nn.Linear(64 + states, 128), nn.ReLU(), nn.Linear(128, 2))
        self.register_buffer("places", torch.linspace(0, 1, SIDE // 4))
        self.places: Tensor

    def forward(self, images: Tensor, states: Tensor) -> Tensor:
        """Return moves [n, 2] in fractions of `SPEED`, from images [n, channels, SIDE, SIDE] and states [n, states]."""
        scale, shift = self.name(states)[..., None, None].chunk(2, dim=1)
        logits = self.second(torch.relu(self.first(images) * (1 + scale) + shift))
        heat = logits.flatten(2).softmax(-1).unflatten(-1, logits.shape[2:])
        x = (heat.sum(2) * self.places).sum(-1)
        y = (heat.sum(3) * self.places).sum(-1)
        moves: Tensor = self.move(torch.cat([x, y, states], dim=1))
        return moves


def sample_mask(full: Bools) -> Bools:
    """Return a mask as the client's slots sample it, bool [SIDE, SIDE]."""
    fitted = fit_mask(Mask.from_full(full), (SIDE, SIDE))
    return np.zeros((SIDE, SIDE), np.bool_) if fitted is None else fitted.mask


def look(world: ReachWorld, image: Image, target: Bools, ids: Image) -> View:
    """Return the view of a world."""
    name = [kind == world.kinds[0] for kind in KINDS] + [colour == world.colours[0] for colour in COLOURS]
    state = np.array([*name, *world.gripper], np.float32)
    small = np.asarray(cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA), np.uint8)
    return View(small, target, sample_mask(ids > 0), state)


def demonstrate(seed: int, scenes: int) -> Demonstrations:
    """Record the expert in scenes as trained."""
    rng = np.random.default_rng(seed)
    views: list[View] = []
    moves = []
    for number in range(scenes):
        world = ReachWorld(seed * scenes + number)
        while world.outcome is None:
            image, ids = world.render()
            views.append(look(world, image, sample_mask(ids == TARGET_ID), ids))
            move = world.find_move()
            moves.append(move / SPEED)
            world.move(move + rng.normal(0, EXPERT_NOISE, 2))
    return Demonstrations(View(*map(np.stack, zip(*views, strict=True))), np.array(moves, np.float32))


def to_images(way: str, views: View) -> Tensor:
    """Return what a network sees, float32 [n, channels, SIDE, SIDE]; grey is 0."""
    images = torch.from_numpy(views.picture).permute(0, 3, 1, 2).float() / 255 - 0.5
    targets = torch.from_numpy(views.target)[:, None].float()
    if way == MASK:
        return torch.cat([images, targets], dim=1)
    return images * targets if way == CUT else images


def cover_table(images: Tensor, things: Tensor) -> Tensor:
    """Replace the table by noise in most images."""
    chosen = torch.rand(len(images), 1, 1, 1) < NOISE_SHARE
    return torch.where(chosen & ~things[:, None], torch.rand_like(images) - 0.5, images)


def train(way: str, demos: Demonstrations, seed: int, updates: int) -> Clone:
    """Clone the expert."""
    torch.manual_seed(seed)
    images = to_images(way, demos.views).contiguous(memory_format=torch.channels_last)
    things, states, moves = map(torch.from_numpy, (demos.views.things, demos.views.state, demos.moves))
    clone = Clone(images.shape[1], states.shape[1])
    clone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch does not declare it
    optimizer = torch.optim.Adam(clone.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=updates)
    for _ in range(updates):
        batch = torch.randint(len(images), (BATCH,))
        seen = cover_table(images[batch], things[batch]) if way == NOISE else images[batch]
        loss = (clone(seen, states[batch]) - moves[batch]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"  {way}: loss {loss.item():.4f}", flush=True)
    return clone.eval()


@torch.inference_mode()
def play(clone: Clone, way: str, world: ReachWorld, masks: MaskSource) -> Outcome:
    """Let a clone act until the episode ends."""
    masks.begin(*world.render())
    while world.outcome is None:
        image, ids = world.render()
        view = look(world, image, masks.find(image, ids), ids)
        one = View(view.picture[None], view.target[None], view.things[None], view.state[None])
        move = clone(to_images(way, one), torch.from_numpy(one.state))[0].numpy()
        world.move(move.astype(np.float64) * SPEED)
    return world.outcome


def bound_rate(successes: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a rate, in percent."""
    rate = successes / count
    spread = Z_95 * math.sqrt(rate * (1 - rate) / count + (Z_95 / (2 * count)) ** 2)
    middle = rate + Z_95**2 / (2 * count)
    scale = 100 / (1 + Z_95**2 / count)
    low = scale * (middle - spread)
    high = scale * (middle + spread)
    # rounding must not put the rate itself outside
    return max(0.0, min(low, 100 * rate)), min(100.0, max(high, 100 * rate))


def bound_difference(one: Bools, other: Bools) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two rates, in percent, of the same scenes [seeds, episodes]."""
    rng = np.random.default_rng(0)
    differences = one.astype(np.float64) - other
    seeds, episodes = differences.shape
    chosen = rng.integers(seeds, size=(RESAMPLES, seeds, 1))
    scenes = rng.integers(episodes, size=(RESAMPLES, seeds, episodes))
    low, high = np.percentile(differences[chosen, scenes].mean((1, 2)), (2.5, 97.5))
    return 100 * float(low), 100 * float(high)


def measure(args: argparse.Namespace, figures: Figures) -> None:
    """Train all ways with each seed, test them, and keep the figures."""
    model = load_model(
        ModelSettings.model_validate({"name": args.model, "threads": args.threads}), TrackerSettings()
    )
    tracked = TrackedMasks(model)
    true = TrueMasks()
    sources: dict[str, MaskSource] = {PICTURES: true, NOISE: true, MASK: tracked, CUT: tracked, TRUE: true}
    outcomes: dict[tuple[str, str], list[list[Outcome]]] = {
        (way, test): [] for test in TESTS for way in sources
    }
    for seed in range(args.seeds):
        demos = demonstrate(seed, args.demos)
        print(f"seed {seed}: {len(demos.moves)} views", flush=True)
        clones = {way: train(way, demos, seed, args.updates) for way in WAYS}
        clones[TRUE] = clones[CUT]
        for (way, test), found in outcomes.items():
            first = TEST_SEEDS + seed * args.episodes
            worlds = [ReachWorld(number, *TESTS[test]) for number in range(first, first + args.episodes)]
            seen = CUT if way == TRUE else way
            found.append([play(clones[way], seen, world, sources[way]) for world in worlds])
            print(f"  {test}, {way}: {100 * np.mean(np.array(found[-1]) == 'reached'):.0f} %", flush=True)
    report(outcomes, figures)
    figures.add("mean IoU of the tracker's masks with the truth", float(np.mean(tracked.ious)), "IoU")
    figures.add("masks of the tracker that are doubtful", 100 * float(np.mean(tracked.doubtful)), "%")
    figures.add(
        "parameters of a network with a mask", sum(one.numel() for one in clones[MASK].parameters()), ""
    )


def report(outcomes: dict[tuple[str, str], list[list[Outcome]]], figures: Figures) -> None:
    """Keep the rate of each way in each test, and what the mask gains."""
    reached = {key: np.array(found) == "reached" for key, found in outcomes.items()}
    for (way, test), successes in reached.items():
        bounds = bound_rate(int(successes.sum()), successes.size)
        figures.add(f"reached, {test}, {way}", 100 * float(successes.mean()), "%", interval=bounds)
        rates = [100 * float(rate) for rate in successes.mean(1)]
        figures.add(f"reached by each seed, {test}, {way}", rates, "%")
        wrong = float(np.mean(np.array(outcomes[way, test]) == "wrong"))
        figures.add(f"over another object, {test}, {way}", 100 * wrong, "%")
    for test in TESTS:
        for way in (NOISE, MASK, CUT):
            pair = reached[way, test], reached[PICTURES, test]
            gain = 100 * float(pair[0].mean() - pair[1].mean())
            figures.add(f"gain, {test}, {way}", gain, "points", interval=bound_difference(*pair))


def plot(records: Sequence[Record], path: Path) -> None:
    """Draw a scene of each test, and below it the rates with their intervals."""
    rates = {record["figure"]: record for record in records}
    shades = {PICTURES: "0.8", NOISE: "0.5", MASK: "lightskyblue", CUT: "C0", TRUE: "white"}
    with draw(path, 2, len(TESTS), (8, 4.8), squeeze=False) as axes:
        for column, (test, (covered, alike)) in enumerate(TESTS.items()):
            world = ReachWorld(TEST_SEEDS + 1, covered, alike)
            image, ids = world.render()
            scene, chart = axes[:, column]
            scene.imshow(image[..., ::-1])
            scene.contour(ids == TARGET_ID, [0.5], colors="white", linewidths=1.5)
            scene.set_axis_off()
            scene.set_title(test, fontsize=10)
            for place, (way, shade) in enumerate(shades.items()):
                record = rates[f"reached, {test}, {way}"]
                low, high = (record["interval"][end] for end in ("low", "high"))
                value = record["value"]
                chart.bar(place, value, 0.8, color=shade, edgecolor="black", linewidth=0.8, label=way)
                chart.errorbar(
                    place, value, [[max(0, value - low)], [max(0, high - value)]], color="black", capsize=3
                )
                chart.text(place, high + 3, f"{value:.0f}", ha="center", fontsize=8)
            chart.set(ylim=(0, 114), xticks=())
        axes[1][0].set_ylabel("target reached, %")
        figure = axes[0][0].figure
        figure.legend(*axes[1][0].get_legend_handles_labels(), ncols=3, loc="lower center", fontsize=8)
        axes[1][0].set_xlabel(" \n \n ")


def main() -> None:
    parser = make_parser(__doc__, model="nano", threads=1)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each way (default 3)")
    parser.add_argument("--demos", type=int, default=300, help="demonstrations of each seed (default 300)")
    parser.add_argument("--updates", type=int, default=800, help="of each training (default 800)")
    parser.add_argument("--episodes", type=int, default=20, help="of each test and seed (default 20)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the rates")
    args = parser.parse_args()
    figures = Figures("accuracy.mask_policy")
    set_up_cpu(args.threads)
    with errors_in_one_line():
        measure(args, figures)
        figures.write(args.json)
        if args.plot:
            plot(figures.records, args.plot)


if __name__ == "__main__":
    main()
