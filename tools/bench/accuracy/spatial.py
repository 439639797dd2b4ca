"""Measure positions in 3-D: rendered scenes with the noise of a D435, hard objects, a real room, and the time.

python -m tools.bench.accuracy.spatial [--clips N] [--kitchen FOLDER] [--picture FILE] [--json FILE]

The true position is the mean of the visible surface's points, by exact depth under the exact mask. `--kitchen` is a
folder of RGB-D frames with camera poses, in which a book and a mug on the table are tracked from boxes. Rendering needs
the extra `scenes` and OSMesa.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from sam3_node.bags.native.reader import TABLETOP, LabelledClip
from sam3_node.calibration import Calibration
from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.publish import frame_from
from sam3_node.geometry import Array, DepthMap, Float, RayMap, quaternion_from_rotation
from sam3_node.perception.loading import load_model
from sam3_node.perception.pipeline import Pipeline, Surroundings
from sam3_node.perception.step import StepFrame
from sam3_node.perception.surfaces import measure_surfaces
from sam3_node.settings import CameraSettings, EngineSettings, ModelSettings, TrackerSettings
from sam3_node.types import NANOSECONDS, Frame, FramePose, Instance, Intrinsics, Mask, RobotState
from sam3_node.wire import decode_depth, encode_depth
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.measuring import Measuring
from tools.bench.common import SHARED, Figures, make_parser, time_cpu
from tools.scenes.clips import Clip

CLIPS = 10
FRAMES = 4
SEED = 7
CASE_DRAWS = 5
MIN_AREA_PX = 300
MAX_DISTANCE_M = 2.0
KITCHEN_BOXES = {"book": (517, 262, 600, 342), "mug": (362, 163, 402, 204)}
TIMED_OBJECTS = 5
TIMED_RUNS = 300
STEPPED_FRAMES = 60
SIZE = (480, 640)
CAMERA = Intrinsics(600.0, 600.0, 319.5, 239.5)
STEPS = 160
MAX_DEPTH_M = 3.0
SEEN_THROUGH = 0.6
"""Share of a transparent object's pixels with the depth behind it."""
LOST = 0.3
"""Share of them without depth. The rest has its own."""
Distance = Callable[[Array], Array]
"""Signed distances [n] of points [n, 3]."""
FOCAL_PX = 447.0
BASELINE_M = 0.05
DISPARITY_NOISE_PX = 0.08
DISPARITY_STEP_PX = 1 / 32
"""Resolution, focal length and baseline of a D435 at 848x480, and its noise and step of disparity, after
https://dev.intelrealsense.com/docs/tuning-depth-cameras-for-best-performance: 3.6 mm at 1 m, growing with the squared
distance."""
CORRELATION_PX = 1.5
"""Sigma of the blur of white noise: neighbours share the stereo window."""
EDGE_STEP = 0.02
"""Relative step of depth that is an edge."""
EDGE_HOLES = 0.4
"""Share of the pixels at edges that have no depth."""
EDGE_FLYING = 0.3
"""Share of them that have a depth between both sides."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clips", type=int, default=CLIPS, help=f"rendered clips (default {CLIPS})")
    parser.add_argument("--kitchen", type=Path, default=SHARED / "data/rgbd/kitchen")
    parser.add_argument("--picture", type=Path, help="write a picture of the hard objects")
    args = parser.parse_args()
    figures = Figures("accuracy.spatial")
    measure_cases(figures, args.picture)
    measure_kitchen(figures, args.kitchen)
    measure_time(figures)
    measure_step(figures)
    measure_rendered(figures, args.clips)
    figures.write(args.json)


def compute_truth(depth_m: Array, inside: np.ndarray, rays: Float) -> Array:
    """Return the mean [3] of the surface's points under a mask."""
    z = depth_m[inside]
    return np.append(rays[:, inside] * z, z[None], axis=0).mean(axis=1)


def measure_cases(figures: Figures, picture: Path | None) -> None:
    """Measure each hard object in several places, with the true mask."""
    random = np.random.default_rng(SEED)
    rays = RayMap().rays(CAMERA, SIZE)
    errors: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    tiles = []
    for draw in range(CASE_DRAWS):
        for case in make_cases(random):
            noisy = add_noise(case.seen_m, random)
            depth = DepthMap(noisy, 0.001, rays, CAMERA.fx)
            surfaces = measure_surfaces([Mask.from_full(case.inside)], depth)
            truth = compute_truth(case.depth_m, case.inside, rays)
            shares.setdefault(case.name, []).append(surfaces.shares[0])
            for position in surfaces.positions_m:
                errors.setdefault(case.name, []).append(1000 * float(np.linalg.norm(position - truth)))
            if draw == 0:
                tiles.append(draw_case(case, noisy, [*surfaces.positions_m, None][0], truth))
    for name, found in shares.items():
        figures.add(f"{name} object: position error, median", float(np.median(errors[name])), "mm")
        figures.add(f"{name} object: share of valid depth", float(np.median(found)), "of 1")
    if picture is not None:
        cv2.imwrite(str(picture), np.hstack(tiles))


def draw_case(case: Case, noisy: np.ndarray, position: Array | None, truth: Array) -> np.ndarray:
    """Return the measured depth around the object, with the mask's outline, the truth (green) and the result (red)."""
    grey = np.clip((noisy.astype(np.float32) - 450) / 3, 0, 255).astype(np.uint8)
    image = np.asarray(cv2.applyColorMap(grey, cv2.COLORMAP_BONE))
    outline = cv2.findContours(case.inside.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)[0]
    cv2.drawContours(image, outline, -1, (0, 200, 255), 1)
    for point, colour, size in ((truth, (0, 220, 0), 9), (position, (0, 0, 255), 4)):
        if point is not None:
            x, y = (round(CAMERA.fx * float(point[axis] / point[2]) + 319.5 - 80 * axis) for axis in (0, 1))
            cv2.circle(image, (x, y), size, colour, 2)
    cv2.putText(image, case.name, (150, 120), cv2.FONT_HERSHEY_SIMPLEX, 0.9, (255, 255, 255), 2)
    return image[90:390, 140:500]


def make_frame(
    image: np.ndarray, depth_mm: np.ndarray, intrinsics: Intrinsics, seq: int, fps: float
) -> Frame:
    depth = encode_depth(np.ascontiguousarray(depth_mm), "z16", 0.001, True)
    captured = CapturedImage(image, round(seq * NANOSECONDS / fps), depth, intrinsics)
    return frame_from(captured, seq, CameraSettings(name="cam0"))


def make_pipeline(calibration: Calibration | None = None) -> Pipeline:
    model = load_model(ModelSettings(device="cpu"), TrackerSettings(), EngineSettings())
    return Pipeline(model, TrackerSettings(), "cam0", surroundings=Surroundings(calibration=calibration))


def measure_rendered(figures: Figures, count: int) -> None:
    """Compare positions on rendered clips with the truth, with true masks and with the tracker's."""
    from tools.scenes.generate import generate
    from tools.scenes.plan import ClipSettings
    from tools.scenes.render import Renderer

    height, width = SIZE
    settings = ClipSettings("test", FRAMES, width, height, 12.0, {"free": 1.0}, depth=True)
    renderer = Renderer(2 * width, 2 * height)
    random = np.random.default_rng(SEED)
    errors: dict[str, list[float]] = {"true masks": [], "the tracker's masks": []}
    for index in range(count):
        clip = generate(renderer, settings, SEED, index).clip
        for name, error_m in measure_clip(clip, random):
            errors[name].append(1000 * error_m)
    for name, found in errors.items():
        print(f"{name}: {len(found)} objects on frames")
        targets = ("under 3 mm", "under 10 mm") if name == "true masks" else ()
        figures.add_percentiles(f"rendered scenes, {name}: position error,", found, "mm", *targets)


def measure_clip(clip: Clip, random: np.random.Generator) -> list[tuple[str, float]]:
    """Return the kind of mask and the position error in metres, for each object on each frame within 2 m."""
    given = clip.meta["intrinsics"]
    intrinsics = Intrinsics(given["fx"], given["fy"], given["cx"] - 0.5, given["cy"] - 0.5)
    rays = RayMap().rays(intrinsics, SIZE)
    pipeline = make_pipeline()
    added = {}
    found: list[tuple[str, float]] = []
    for seq in range(len(clip)):
        labels = clip.labels(seq)
        exact = clip.depth(seq)
        assert exact is not None
        depth_m = exact.astype(np.float64) / 1000
        frame = make_frame(clip.image(seq), add_noise(depth_m, random), intrinsics, seq, clip.meta["fps"])
        if seq == 0:
            pipeline.step(frame)
        for label in set(np.unique(labels).tolist()) - {0}:
            if seq == 0 and np.count_nonzero(labels == label) >= MIN_AREA_PX:
                box = Mask.from_full(labels == label).box
                added[label] = pipeline.add(FramePrompt(box=list(box)), seq=0).id
        masks = pipeline.step(frame) if seq else None
        tracked = {item.id: item for item in masks.instances} if masks else {}
        for label, object_id in added.items():
            inside = labels == label
            truth = compute_truth(depth_m, inside, rays) if np.count_nonzero(inside) >= MIN_AREA_PX else None
            if truth is None or truth[2] > MAX_DISTANCE_M:
                continue
            exact_mask = Instance(object_id, "", 1.0, "tracked", 0, 0, Mask.from_full(inside))
            (own,) = Measuring().measure(frame, [exact_mask], None).instances
            pairs = (("true masks", own), ("the tracker's masks", tracked.get(object_id)))
            for kind, item in pairs:
                if item is not None and item.position_m is not None:
                    found.append((kind, float(np.linalg.norm(truth - item.position_m))))
    return found


def measure_kitchen(figures: Figures, folder: Path) -> None:
    """Track a book and a mug over the moving frames, with their positions in the world by the data's poses."""
    matrix = np.loadtxt(folder / "camera-intrinsics.txt")
    pinhole = {
        "width_px": 640, "height_px": 480, "fx_px": matrix[0, 0], "fy_px": matrix[1, 1],
        "cx_px": matrix[0, 2], "cy_px": matrix[1, 2],
    }  # fmt: skip
    hand_eye = {"kind": "eye_in_hand", "translation_m": (0, 0, 0), "rotation_vector_rad": (0, 0, 0)}
    calibration = Calibration(intrinsics=pinhole, hand_eye=hand_eye)
    pipeline = make_pipeline(calibration)
    added: dict[int, str] = {}
    tracked: dict[str, list[Instance]] = {name: [] for name in KITCHEN_BOXES}
    for seq, file in enumerate(sorted(folder.glob("*.color.jpg"))):
        stem = file.name.removesuffix(".color.jpg")
        image = cv2.imread(str(file))
        depth = cv2.imread(str(folder / f"{stem}.depth.png"), cv2.IMREAD_UNCHANGED)
        assert image is not None
        assert depth is not None
        depth = np.where(depth == 65535, 0, depth).astype(np.uint16)
        pose = np.loadtxt(folder / f"{stem}.pose.txt")
        x, y, z, w = quaternion_from_rotation(pose[:3, :3]).tolist()
        gripper = FramePose("gripper", "base", seq, tuple(pose[:3, 3].tolist()), (x, y, z, w))
        frame = make_frame(image, depth, calibration.intrinsics_for(SIZE), seq, 30.0)
        masks = pipeline.step(StepFrame(frame, robot_state=RobotState(gripper)))
        if seq == 0:
            prompts = {name: FramePrompt(box=list(box)) for name, box in KITCHEN_BOXES.items()}
            added = {pipeline.add(prompt, seq=0).id: name for name, prompt in prompts.items()}
        for item in masks.instances:
            tracked[added[item.id]].append(item)
    for name, found in tracked.items():
        show_static(figures, name, found)


def show_static(figures: Figures, name: str, tracked: Sequence[Instance]) -> None:
    """Show how far the positions of an object that rests lie from their median."""
    whole = [item for item in tracked if item.area and _is_inside(item)]
    positions = [item.position_m for item in whole if item.position_m is not None]
    what = f"kitchen, {name} on {len(whole)} frames wholly in view"
    sure = sum(not item.doubtful for item in whole)
    figures.add(f"{what}: frames with a sure mask", 100 * sure / max(1, len(whole)), "%")
    if positions:
        offsets = np.linalg.norm(positions - np.median(positions, axis=0), axis=1)
        what = f"{what}: distance from the median position"
        figures.add(f"{what}, median", 100 * float(np.median(offsets)), "cm")
        figures.add(f"{what}, maximum", 100 * float(offsets.max()), "cm", "under 3 cm")


def _is_inside(item: Instance) -> bool:
    """Return True if a mask does not touch the border of the image, beyond which an object may go on."""
    x0, y0, x1, y1 = item.box
    return x0 > 0 and y0 > 0 and x1 < SIZE[1] and y1 < SIZE[0]


def measure_time(figures: Figures) -> None:
    """Time the stage for 5 objects, in turn with the same frame without depth."""
    random = np.random.default_rng(SEED)
    depth_m = np.full(SIZE, 1.1)
    instances = []
    for index in range(TIMED_OBJECTS):
        inside = np.zeros(SIZE, np.uint8)
        cv2.ellipse(inside, (90 + 115 * index, 240), (45, 60), 10.0 * index, 0, 360, 1, -1)
        depth_m[inside > 0] = 0.8 + 0.02 * index
        mask = Mask.from_full(inside > 0)
        instances.append(Instance(index + 1, "", 1.0, "tracked", 0, 0, mask))
    image = np.zeros((*SIZE, 3), np.uint8)
    noisy = add_noise(depth_m, random)
    cv2.setNumThreads(1)
    for encoding in ("z16", "z16+zstd"):
        spent: dict[str, list[float]] = {"without": [], "with": [], "decoding": []}
        stage = Measuring()
        depth = encode_depth(noisy, encoding, 0.001, True)
        for seq in range(TIMED_RUNS):
            frame = make_frame(image, noisy, CAMERA, seq, 30.0)
            for name, given in (("without", None), ("with", depth)):
                timed = replace(frame, depth=given)
                spent[name].append(time_cpu(partial(stage.measure, timed, instances, None)))
            spent["decoding"].append(time_cpu(partial(decode_depth, depth)))
        medians = {name: float(np.median(found[10:])) for name, found in spent.items()}
        extra = medians["with"] - medians["without"]
        case = f"3-D of {TIMED_OBJECTS} objects at 640x480, depth {encoding}"
        what = f"{case}: extra CPU time of a frame, median"
        figures.add(what, extra, "ms", "under 1 ms")
        figures.add(f"{what}, of which decoding", medians["decoding"], "ms")


def measure_step(figures: Figures) -> None:
    """Time the whole step on the bundled recording, by two pipelines in turn: one gets frames without depth."""
    clip = LabelledClip.load(TABLETOP)
    boxes = [Mask.from_full(mask).box for mask in clip.truth(0).values()][:TIMED_OBJECTS]
    pipelines = {"with": make_pipeline(), "without": make_pipeline()}
    spent: dict[str, list[float]] = {name: [] for name in pipelines}
    for seq, frame in enumerate(clip.frames[:STEPPED_FRAMES]):
        for name, pipeline in pipelines.items():
            timed = frame if name == "with" else replace(frame, depth=None)
            spent[name].append(time_cpu(partial(pipeline.step, timed)))
            if seq == 0:
                for box in boxes:
                    pipeline.add(FramePrompt(box=list(box)), seq=frame.seq)
    ratios = np.divide(spent["with"][5:], spent["without"][5:])
    what = f"step of nano with {len(boxes)} objects on the CPU, with depth / without: CPU time, median"
    figures.add(what, float(np.median(ratios)), "ratio")


class Case(NamedTuple):
    """An object on a table: exact depth [h, w], the depth that a sensor sees, and the object's mask [h, w]."""

    name: str
    depth_m: Array
    seen_m: Array
    inside: npt.NDArray[np.bool_]


def make_cases(random: np.random.Generator) -> list[Case]:
    """Make one scene of each kind, with the object at a random place."""
    shift = np.append(random.uniform(-0.05, 0.05, 2), random.uniform(-0.08, 0.08))
    glass = _render("transparent", _capsule((0.0, -0.03, 0.75), (0.0, 0.05, 0.79), 0.035), shift)
    chance = random.random(SIZE)
    seen = np.where(glass.inside & (chance < SEEN_THROUGH), _trace(_table), glass.depth_m)
    seen = np.where(glass.inside & (chance > 1 - LOST), 0.0, seen)
    return [
        _render("thin", _capsule((-0.1, 0.0, 0.82), (0.1, 0.03, 0.84), 0.003), shift),
        _render("hollow", _ring((0.0, 0.0, 0.8), 0.06, 0.012), shift),
        _render("half occluded", _ball((0.03, 0.0, 0.8), 0.05), shift, _ball((-0.03, 0.01, 0.6), 0.05)),
        glass._replace(seen_m=seen),
    ]


def _render(name: str, shape: Distance, shift: Array, occluder: Distance | None = None) -> Case:
    def object_distance(points: Array) -> Array:
        return shape(points - shift)

    others = [_table] if occluder is None else [_table, lambda points: occluder(points - shift)]
    alone = _trace(object_distance)
    behind = np.min([_trace(other) for other in others], axis=0)
    inside = (alone < behind) & (alone < MAX_DEPTH_M)
    depth = np.minimum(alone, behind)
    return Case(name, depth, depth, inside)


def _trace(distance: Distance) -> Array:
    """Return the depth [h, w] along the optical axis; MAX_DEPTH_M and more where nothing is met."""
    rows, columns = np.indices(SIZE)
    rays = np.stack([(columns - CAMERA.cx) / CAMERA.fx, (rows - CAMERA.cy) / CAMERA.fy, np.ones(SIZE)], -1)
    rays = rays.reshape(-1, 3)
    lengths = np.linalg.norm(rays, axis=1)
    depth = np.full(len(rays), 0.3)
    active = np.arange(len(rays))
    for _ in range(STEPS):
        step = distance(rays[active] * depth[active, None])
        depth[active] += step / lengths[active]
        active = active[(np.abs(step) > 1e-5) & (depth[active] < MAX_DEPTH_M)]
    depth[active] = MAX_DEPTH_M + 1  # grazing rays
    return depth.reshape(SIZE)


def _table(points: Array) -> Array:
    normal = np.array([0.0, -0.8, -0.6])
    return points @ normal + 0.62


def _ball(centre: tuple[float, float, float], radius: float) -> Distance:
    return lambda points: np.linalg.norm(points - centre, axis=1) - radius


def _capsule(
    first: tuple[float, float, float], second: tuple[float, float, float], radius: float
) -> Distance:
    start = np.array(first)
    along = np.subtract(second, first)

    def distance(points: Array) -> Array:
        share = np.clip((points - start) @ along / (along @ along), 0, 1)
        return np.linalg.norm(points - start - share[:, None] * along, axis=1) - radius

    return distance


def _ring(centre: tuple[float, float, float], radius: float, thickness: float) -> Distance:
    axis = np.array([0.0, -0.8, -0.6])

    def distance(points: Array) -> Array:
        offset = points - centre
        height = offset @ axis
        flat = np.linalg.norm(offset - height[:, None] * axis, axis=1) - radius
        return np.hypot(flat, height) - thickness

    return distance


def add_noise(depth_m: npt.NDArray[np.float64], random: np.random.Generator) -> npt.NDArray[np.uint16]:
    """Return exact depth [h, w] in metres (0: none) as the camera would measure it, uint16 [h, w] in millimetres."""
    z = depth_m.astype(np.float32)
    white = random.normal(size=z.shape).astype(np.float32)
    smooth = cv2.GaussianBlur(white, (0, 0), CORRELATION_PX)
    smooth /= smooth.std()
    disparity = FOCAL_PX * BASELINE_M / np.maximum(z, 0.1) + DISPARITY_NOISE_PX * smooth
    disparity = np.round(disparity / DISPARITY_STEP_PX) * DISPARITY_STEP_PX
    noisy = FOCAL_PX * BASELINE_M / np.maximum(disparity, 0.1)
    kernel = np.ones((3, 3), np.uint8)
    far = cv2.dilate(z, kernel)
    near = cv2.erode(z, kernel)
    edge = far - near > EDGE_STEP * z
    edge = cv2.dilate(edge.astype(np.uint8), kernel) > 0  # about 2 px on both sides
    far = cv2.dilate(far, kernel)
    near = cv2.erode(near, kernel)
    chance = random.random(z.shape)
    between = near + random.random(z.shape) * (far - near)
    noisy = np.where(edge & (chance < EDGE_FLYING), between, noisy)
    noisy = np.where(edge & (chance > 1 - EDGE_HOLES) | (z <= 0), 0, noisy)
    return np.clip(np.round(1000 * noisy), 0, 65535).astype(np.uint16)


if __name__ == "__main__":
    main()
