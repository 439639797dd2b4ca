"""Ask for the next pick of bins with heaps, and compare it with the truth: what lies on what, and exact surfaces.

    python -m tools.bench.accuracy.picks [--bins N] [--nano] [--picture FILE] [--json FILE]

Boxes, cans and bags of parts fall into a bin and come to rest. A camera 0.6 to 0.8 m above sees them at 640x480, with
the noise of a D435. The masks are the true ones; with `--nano` those of nano, after a box around each thing. A thing is
free if less than 2 % of its area, seen from above, is under others. A suction point is compared with the plane through
the true surface within 8 mm of it. Rendering needs the extra `scenes`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from msgspec.structs import replace

from sam3_node.calibration import Calibration
from sam3_node.geometry import (
    Array,
    RayMap,
    invert,
    quaternion_from_rotation,
    rotation_from_quaternion,
    transform_points,
)
from sam3_node.models import TrackerModel
from sam3_node.perception.loading import load_model
from sam3_node.perception.objects import ObjectStatus
from sam3_node.perception.picks.picking import PickLimits, Picks, PickScene, rank_picks
from sam3_node.perception.pipeline import Pipeline, Surroundings
from sam3_node.resumable import run_to_end
from sam3_node.schema.replies import ParallelGrip, Pick, SuctionPoint
from sam3_node.settings import EngineSettings, ModelSettings, SpatialSettings, TrackerSettings
from sam3_node.types import NANOSECONDS, DepthImage, Frame, Image, Instance, Mask
from sam3_node.wire import encode_depth
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.measuring import Measuring
from tools.bench.accuracy.spatial import LOST, SEEN_THROUGH, add_noise
from tools.bench.common import Figures, make_parser
from tools.scenes.bins import INSIDE_M, LENS, SIZE, BinPicture, BinScene

BINS = 50
THINGS = 20
SEED = 0
MIN_AREA_PX = 100
"""Visible pixels of a thing that is tracked."""
FREE_SHARE = 0.02
"""Share of a thing's area under others, up to which it is free."""
NEAR_MM = 3.0
NEAR_DEG = 5.0
CUP_M = 0.008
"""Distance from a suction point up to which the true surface counts."""
GLASSES = 4
"""Transparent things in a bin of these."""
TRACKED_SHARE = 0.6
"""Share of the things that have masks where not all have."""
PATCH_PX = 50
"""Side of a wrong mask on an empty bin."""
LEVEL_M = 0.008
"""Height up to which a point of an empty bin is of its floor or of the table. Wrong masks on walls are so far from
floor and rim."""
COMPARED = 10
"""Bins whose visible shares are compared."""
COLUMNS = 4
"""Pictures beside each other in the contact sheet."""
FEWER = f"true masks of {TRACKED_SHARE:.0%} of the things"
GLASS = f"{GLASSES} of {THINGS} things of glass"
NANO = "nano's masks"
PINHOLE = {
    "width_px": SIZE[1], "height_px": SIZE[0], "fx_px": LENS.fx, "fy_px": LENS.fy, "cx_px": LENS.cx, "cy_px": LENS.cy,
}  # fmt: skip
Counts = dict[str, list[float]]
RAYS = RayMap().rays(LENS, SIZE)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--bins", type=int, default=BINS, help=f"bins of each kind (default {BINS})")
    parser.add_argument("--nano", action="store_true", help="also with nano's masks")
    parser.add_argument("--picture", type=Path, help="write a contact sheet of the first bins")
    args = parser.parse_args()
    figures = Figures("accuracy.picks")
    counts = defaultdict[str, list[float]](list)
    tiles = []
    model = load_model(ModelSettings(device="cpu"), TrackerSettings(), EngineSettings())
    for seed in range(SEED, SEED + args.bins):
        scene = BinScene(seed, THINGS)
        picture = scene.render()
        tiles.append(measure_bin(scene, picture, counts))
        measure_glass(scene, picture, counts)
        measure_empty(seed, counts)
        if seed < SEED + COMPARED:
            measure_visible(scene, picture, counts)
        if args.nano:
            measure_nano(scene, picture, make_pipeline(model, scene.base_from_camera), counts)
        scene.close()
        print(f"{seed - SEED + 1} of {args.bins} bins", flush=True)
    show(figures, counts, args.bins)
    if args.picture is not None:
        rows = [np.hstack(tiles[first : first + COLUMNS]) for first in range(0, 2 * COLUMNS, COLUMNS)]
        cv2.imwrite(str(args.picture), np.vstack(rows))
    figures.write(args.json)


def show(figures: Figures, counts: Counts, bins: int) -> None:
    """Add the figures."""
    for kind in ("true masks", FEWER, GLASS, NANO):
        if f"{kind}: picks" not in counts:
            continue
        what = f"next pick, {kind}"
        firsts = counts[f"{kind}: first is free"]
        figures.add(f"{what}: bins with a pick", len(firsts), f"of {bins}")
        figures.add(f"{what}: first pick truly free", 100 * float(np.mean(firsts)), "%", "95 %")
        rests = 100 * float(np.mean(counts[f"{kind}: first under nothing that rests"]))
        figures.add(f"{what}: first pick on which nothing rests, by the physics", rests, "%", "95 %")
        figures.add(f"{what}: picks of a bin, mean", float(np.mean(counts[f"{kind}: picks"])), "")
        figures.add(f"{what}: all picks truly free", 100 * float(np.mean(counts[f"{kind}: free"])), "%")
        told = 100 * float(np.mean(counts[f"{kind}: told"]))
        figures.add(f"{what}: truly free things that are picks", told, "%")
        for which in ("first", "all"):
            right = 100 * float(np.mean(counts[f"{kind}: {which} suction right"]))
            target = "95 %" if which == "first" else ""
            name = f"{what}: {which} suction points within {NEAR_MM:g} mm and {NEAR_DEG:g} degrees"
            figures.add(name, right, "%", target)
        figures.add_percentiles(f"{what}: suction points, distance", counts[f"{kind}: mm"], "mm")
        figures.add_percentiles(f"{what}: suction points, angle", counts[f"{kind}: degrees"], "degrees")
        elsewhere = int(np.sum(counts[f"{kind}: elsewhere"]))
        figures.add(f"{what}: suction points on bin or table", elsewhere, "", "0")
        width = counts[f"{kind}: width"]
        figures.add_percentiles(
            f"{what}: width of a grip against the true one, error", [abs(one) for one in width], "mm"
        )
    visible = np.array(counts["visible"])
    what = "next pick: visible share of all things, minus the true one"
    figures.add(f"{what}, median", float(np.median(visible)), "of 1")
    figures.add(f"{what}, 5th percentile", float(np.percentile(visible, 5)), "of 1")
    figures.add("next pick: picks of glass", int(np.sum(counts["glass"])), "", "0")
    figures.add("next pick, empty bins without masks: picks", int(np.sum(counts["empty"])), "", "0")
    figures.add(
        "next pick, empty bins with masks on floor and table: picks", int(np.sum(counts["floor"])), "", "0"
    )
    figures.add(
        "next pick, empty bins with masks on the walls: suction points",
        int(np.sum(counts["wall suction"])),
        "",
        "0",
    )
    figures.add("the same: grips", int(np.sum(counts["wall"])), "")
    figures.add_percentiles("next pick of about 20 things, CPU time of a request", counts["ms"], "ms")


def measure_bin(scene: BinScene, picture: BinPicture, counts: Counts) -> Image:
    """Ask for picks by true masks, of all things and of some; return a picture of the first."""
    random = np.random.default_rng([SEED, len(scene.labels)])
    depth_mm = add_noise(picture.depth_m, random)
    masks = list_masks(scene, picture)
    begin_s = time.process_time()
    picks = ask(scene, depth_mm, masks)
    counts["ms"].append(1000 * (time.process_time() - begin_s))
    judge(scene, picture, picks, masks, "true masks", counts)
    chosen = [label for label in masks if random.random() < TRACKED_SHARE]
    some = {label: masks[label] for label in chosen}
    judge(scene, picture, ask(scene, depth_mm, some), some, FEWER, counts)
    return draw(picture, scene.base_from_camera, picks, len(masks))


def measure_visible(scene: BinScene, picture: BinPicture, counts: Counts) -> None:
    """Compare the visible share of all things, also of those under others, with the true one."""
    depth_mm = add_noise(picture.depth_m, np.random.default_rng(SEED))
    masks = list_masks(scene, picture)
    for pick in ask(scene, depth_mm, masks, PickLimits(covered=True)).picks:
        assert pick.visible_share is not None
        counts["visible"].append(pick.visible_share - masks[pick.id].area / scene.count_alone(pick.id))


def measure_glass(scene: BinScene, picture: BinPicture, counts: Counts) -> None:
    """Ask for picks where some things are of glass: most of their depth is that of what is behind."""
    random = np.random.default_rng([SEED, 1, len(scene.labels)])
    glasses = random.choice(scene.labels, GLASSES, replace=False).tolist()
    behind_m = scene.render(without=glasses).depth_m
    inside = np.isin(picture.labels, glasses)
    chance = random.random(SIZE)
    seen_m = np.where(inside & (chance < SEEN_THROUGH), behind_m, picture.depth_m)
    seen_m = np.where(inside & (chance > 1 - LOST), 0.0, seen_m)
    masks = list_masks(scene, picture)
    picks = ask(scene, add_noise(seen_m, random), masks)
    judge(scene, picture, picks, masks, GLASS, counts)
    counts["glass"].append(sum(pick.id in glasses for pick in picks.picks))


def measure_empty(seed: int, counts: Counts) -> None:
    """Ask for picks of an empty bin: without masks, and with wrong ones on its floor, the table and its walls."""
    scene = BinScene(seed, 0)
    picture = scene.render()
    depth_mm = add_noise(picture.depth_m, np.random.default_rng(seed))
    counts["empty"].append(len(ask(scene, depth_mm, {}).picks))
    heights = place_points(picture, scene.base_from_camera)[..., 2]
    is_wall = (heights > 2 * LEVEL_M) & (heights < INSIDE_M[2] - 2 * LEVEL_M)
    patches = {"floor": heights < LEVEL_M, "wall": is_wall}
    random = np.random.default_rng(seed)
    for name, where in patches.items():
        masks = {}
        for label, (row, column) in enumerate(
            random.permutation(np.argwhere(where))[:GLASSES].tolist(), start=1
        ):
            square = np.zeros(SIZE, np.bool_)
            square[
                max(0, row - PATCH_PX // 2) : row + PATCH_PX // 2,
                max(0, column - PATCH_PX // 2) : column + PATCH_PX // 2,
            ] = True
            masks[label] = Mask.from_full(square & where)
        picks = ask(scene, depth_mm, masks).picks
        counts[name].append(len(picks))
        counts[f"{name} suction"].append(sum(pick.suction is not None for pick in picks))
    scene.close()


def measure_nano(scene: BinScene, picture: BinPicture, pipeline: Pipeline, counts: Counts) -> None:
    """Ask for picks by nano's masks, after a box around each visible thing."""
    random = np.random.default_rng([SEED, 2, len(scene.labels)])
    frame = make_frame(picture, add_noise(picture.depth_m, random))
    pipeline.step(frame)
    ids = {}
    for label, mask in list_masks(scene, picture).items():
        ids[pipeline.add(FramePrompt(box=list(mask.box)), seq=0).id] = label
    masks = pipeline.step(replace(frame, seq=1, capture_ns=NANOSECONDS // 15))
    found = run_to_end(rank_picks(pipeline.last_scene, pipeline.objects, PickLimits()))
    # picks by the numbers of their things
    picks = [replace(pick, id=ids[pick.id]) for pick in found.picks]
    seen = {ids[one.id]: one.mask for one in masks.instances if one.mask.area and not one.doubtful}
    judge(scene, picture, found._replace(picks=picks), seen, NANO, counts)


def make_pipeline(model: TrackerModel, base_from_camera: Array) -> Pipeline:
    """Return a pipeline of nano that measures the table, seen by a fixed camera."""
    surroundings = Surroundings(spatial=SpatialSettings(table=True), calibration=calibrate(base_from_camera))
    return Pipeline(model, TrackerSettings(max_objects=64), "cam0", surroundings=surroundings)


def list_masks(scene: BinScene, picture: BinPicture) -> dict[int, Mask]:
    """Return the true masks of the things that are visible."""
    masks = {label: Mask.from_full(picture.labels == label) for label in scene.labels}
    return {label: mask for label, mask in masks.items() if mask.area >= MIN_AREA_PX}


def calibrate(base_from_camera: Array) -> Calibration:
    """Return the calibration of a fixed camera."""
    x, y, z, w = quaternion_from_rotation(base_from_camera[:3, :3]).tolist()
    translation = tuple(base_from_camera[:3, 3].tolist())
    hand_eye = {"kind": "eye_to_hand", "translation_m": translation, "rotation_quaternion_xyzw": (x, y, z, w)}
    return Calibration(intrinsics=PINHOLE, hand_eye=hand_eye)


def make_frame(picture: BinPicture, depth_mm: DepthImage) -> Frame:
    height, width = SIZE
    depth = encode_depth(np.ascontiguousarray(depth_mm), "z16", 0.001, True)
    return Frame("cam0", 0, 0, width, height, "bgr8", picture.colour.tobytes(), depth=depth)


def ask(
    scene: BinScene, depth_mm: DepthImage, masks: Mapping[int, Mask], limits: PickLimits | None = None
) -> Picks:
    """Return the picks of a frame with sure masks, whose ids are the numbers of the things."""
    height, width = SIZE
    depth = encode_depth(np.ascontiguousarray(depth_mm), "z16", 0.001, True)
    frame = Frame("cam0", 0, 0, width, height, "bgr8", b"", depth=depth)
    instances = [
        Instance(label, "", 1.0, "tracked", 1, 0, mask, confidence=1.0) for label, mask in masks.items()
    ]
    measuring = Measuring(SpatialSettings(table=True), calibrate(scene.base_from_camera))
    step = measuring.measure(frame, instances, None)
    objects = [ObjectStatus(id=label, label="") for label in masks]
    return run_to_end(rank_picks(PickScene.of(step), objects, limits or PickLimits()))


def judge(
    scene: BinScene, picture: BinPicture, picks: Picks, masks: Mapping[int, Mask], kind: str, counts: Counts
) -> None:
    """Compare picks with the truth. Their ids are the numbers of the things."""
    free = {label for label in scene.labels if sum(scene.covered[label].values()) < FREE_SHARE}
    counts[f"{kind}: picks"].append(len(picks.picks))
    counts[f"{kind}: first is free"] += [pick.id in free for pick in picks.picks[:1]]
    counts[f"{kind}: first under nothing that rests"] += [
        not scene.resting[pick.id] for pick in picks.picks[:1]
    ]
    counts[f"{kind}: free"] += [pick.id in free for pick in picks.picks]
    told = {pick.id for pick in picks.picks}
    counts[f"{kind}: told"] += [label in told for label in free if label in masks]
    for pick in picks.picks:
        if pick.suction is not None:
            judge_suction(scene, picture, pick.suction, pick, kind, counts)
        if pick.grip is not None:
            counts[f"{kind}: width"].append(
                1000 * (pick.grip.width_m - measure_width(scene, pick.id, pick.grip))
            )


def judge_suction(
    scene: BinScene, picture: BinPicture, suction: SuctionPoint, pick: Pick, kind: str, counts: Counts
) -> None:
    """Compare a suction point with the exact surface under it."""
    camera_from_base = invert(scene.base_from_camera)
    point = transform_points(camera_from_base, suction.position_m)
    column, row = (
        round(LENS.fx * float(point[axis] / point[2]) + (LENS.cx, LENS.cy)[axis]) for axis in (0, 1)
    )
    counts[f"{kind}: elsewhere"].append(picture.labels[row, column] == 0)
    x, y = RAYS * picture.depth_m
    seen = np.stack([x, y, picture.depth_m], axis=-1)
    there = seen[row, column]
    near = (np.linalg.norm(seen - there, axis=-1) < CUP_M) & (picture.labels == picture.labels[row, column])
    around = seen[near] - seen[near].mean(axis=0)
    normal = np.linalg.svd(around, full_matrices=False)[2][2]
    normal *= -np.sign(normal @ there)
    mm = 1000 * float(np.linalg.norm(point - there))
    told = camera_from_base[:3, :3] @ suction.normal
    degrees = float(np.degrees(np.arccos(np.clip(told @ normal, -1, 1))))
    counts[f"{kind}: mm"].append(mm)
    counts[f"{kind}: degrees"].append(degrees)
    is_right = mm <= NEAR_MM and degrees <= NEAR_DEG and picture.labels[row, column] == pick.id
    counts[f"{kind}: all suction right"].append(is_right)
    if pick.rank == 1:
        counts[f"{kind}: first suction right"].append(is_right)


def measure_width(scene: BinScene, label: int, grip: ParallelGrip) -> float:
    """Return the true width of a thing along the fingers' way, above the fingertips."""
    points = scene.list_top(label)
    rotation = rotation_from_quaternion(grip.quaternion_xyzw)
    ways = (points - grip.position_m) @ rotation
    return float(np.ptp(ways[ways[:, 2] < 0, 1])) if (ways[:, 2] < 0).any() else 0.0


def place_points(picture: BinPicture, base_from_camera: Array) -> Array:
    """Return the point of each pixel in the base, [h, w, 3]."""
    x, y = RAYS * picture.depth_m
    return transform_points(base_from_camera, np.stack([x, y, picture.depth_m], axis=-1))


def draw(picture: BinPicture, base_from_camera: Array, picks: Picks, count: int) -> Image:
    """Return the picture with the ranks, the suction points (yellow) with their normals, and the grips (white)."""
    image = picture.colour.copy()
    camera_from_base = invert(base_from_camera)

    def find_pixel(point: Any) -> tuple[int, int]:
        x, y, z = transform_points(camera_from_base, point).tolist()
        return round(LENS.fx * x / z + LENS.cx), round(LENS.fy * y / z + LENS.cy)

    for pick in picks.picks:
        colour = (0, 255, 0) if pick.rank == 1 else (255, 180, 0)
        outline = cv2.findContours(
            (picture.labels == pick.id).astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE
        )[0]
        cv2.drawContours(image, outline, -1, colour, 2)
        if pick.grip is not None:
            y = rotation_from_quaternion(pick.grip.quaternion_xyzw)[:, 1] * pick.grip.width_m / 2
            ends = [find_pixel(np.array(pick.grip.position_m) + sign * y) for sign in (-1, 1)]
            cv2.line(image, ends[0], ends[1], (255, 255, 255), 2)
        if pick.suction is not None:
            place = find_pixel(pick.suction.position_m)
            depth = float(transform_points(camera_from_base, pick.suction.position_m)[2])
            cv2.circle(image, place, round(LENS.fx * pick.suction.radius_m / depth), (0, 255, 255), 2)
            tip = np.array(pick.suction.position_m) + 0.03 * np.array(pick.suction.normal)
            cv2.arrowedLine(image, place, find_pixel(tip), (0, 0, 255), 2)
        x0, y0, *_ = cv2.boundingRect(np.concatenate(outline))
        cv2.putText(image, str(pick.rank), (x0, y0 + 12), cv2.FONT_HERSHEY_SIMPLEX, 0.6, (255, 255, 255), 2)
    text = f"{len(picks.picks)} picks of {count} things"
    cv2.putText(image, text, (10, 25), cv2.FONT_HERSHEY_SIMPLEX, 0.8, (255, 255, 255), 2)
    return image


if __name__ == "__main__":
    main()
