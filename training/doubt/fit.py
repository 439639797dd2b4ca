"""Fit the confidence of masks on records of tracks, and write `sam3_node/tracking/confidence_weights.py`.

    python -m training.doubt.fit out/doubt/train1 out/doubt/short out/doubt/real

Logistic regression with weights whose signs are given, so that more evidence never lowers the confidence. Each folder
of records counts by the square root of its size. A track's history depends on the weights, so records are played and
weights fitted in turn. Masks that have jumped are left out: their largest confidence is the share of them that is
right. The threshold of `sure` is the lowest at which at most 5 % of the sure masks are wrong in each folder, fitted or
checked, but the `--rough` ones, whose truth a teacher made on frames that lie far apart.
"""

import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sam3_node.tracking.confidence import DEPARTURES, FEATURES
from sam3_node.tracking.logistic import fit_logistic
from tools.command import new_parser
from tools.doubt.measure import Played, auroc, play, risk_at

Floats = npt.NDArray[np.float64]

ROUNDS = 3
RIDGE = 1e-4
MAX_WRONG = 0.05
AGAINST = (*DEPARTURES, "overlap")
"""Features that lower the confidence; all others raise it."""
MIN_WEIGHTS = {"score": 0.15}
"""Least absolute weights. Other models predict the IoU better than nano."""
FIRST_WEIGHTS = {
    "score": 0.15,
    "presence": 2.0,
    "stability": 2.0,
    "overlap": -1.0,
    "appearance": 2.0,
    "previous": -1.0,
    "shape": -2.0,
}
FIRST_BIAS = -0.5
"""Where the rounds begin. Each goes half the way to the best weights for the histories of the round before."""
TARGET = Path("sam3_node/tracking/confidence_weights.py")


class Fit(NamedTuple):
    """Fitted weights [F], bias, confidence of masks that have jumped, and sure threshold; and the records played."""

    weights: Floats
    bias: float
    jumped: float
    sure: float
    groups: list[Played]


def fit_weights(groups: list[Played], used: list[str]) -> tuple[Floats, float]:
    """Return the weights [F] and the bias of the logistic function; weights of features that are not used are 0."""
    signs = np.array([-1.0 if name in AGAINST else 1.0 for name in FEATURES])
    columns = [FEATURES.index(name) for name in used]
    x = np.concatenate([group.features[~group.jumped][:, columns] for group in groups]) * signs[columns]
    y = np.concatenate([group.right[~group.jumped] for group in groups]).astype(np.float64)
    share = np.concatenate([np.full(int((~g.jumped).sum()), len(g.iou) ** -0.5) for g in groups])
    least = np.array([MIN_WEIGHTS.get(name, 0.0) for name in used])
    weights = np.zeros(len(FEATURES))
    found, bias = fit_logistic(x, y, share / share.sum(), least, RIDGE)
    weights[columns] = found * signs[columns]
    return weights, bias


def choose_threshold(groups: list[Played]) -> float:
    """Return the lowest confidence with at most MAX_WRONG of the sure masks wrong, in each group."""
    for threshold in np.arange(0.5, 0.995, 0.01):
        wrong = [
            1 - g.right[g.confidence >= threshold].mean() for g in groups if (g.confidence >= threshold).any()
        ]
        if max(wrong, default=0.0) <= MAX_WRONG:
            return round(float(threshold), 2)
    return 0.99


def fit(folders: list[list[Path]], used: list[str], rounds: int = ROUNDS) -> Fit:
    """Fit the weights to the records in these files."""
    weights = np.array([FIRST_WEIGHTS.get(name, 0.0) for name in FEATURES])
    bias = FIRST_BIAS
    jumped = 0.5
    groups = [play(paths, (weights, bias, jumped)) for paths in folders]
    for _ in range(rounds):
        new_weights, new_bias = fit_weights(groups, used)
        weights = (weights + new_weights) / 2
        bias = (bias + new_bias) / 2
        jumped = round(float(np.concatenate([group.right[group.jumped] for group in groups]).mean()), 2)
        groups = [play(paths, (weights, bias, jumped)) for paths in folders]
    return Fit(weights, bias, jumped, choose_threshold(groups), groups)


def describe(name: str, group: Played, sure: float) -> str:
    """Return one line of measures."""
    kept = group.confidence >= sure
    wrong = 1 - group.right[kept].mean() if kept.any() else 0.0
    return (
        f"{name:24s} {len(group.iou):6d} masks, {100 * (1 - group.right.mean()):4.1f} % wrong; AUROC "
        f"{auroc(group.confidence, group.right):.3f} (score {auroc(group.score, group.right):.3f}); wrong at 65 %: "
        f"{100 * risk_at(group.confidence, group.right, 0.65):.1f} % (score "
        f"{100 * risk_at(group.score, group.right, 0.65):.1f} %); sure: {100 * kept.mean():.0f} %, "
        f"wrong {100 * wrong:.1f} %"
    )


def write(path: Path, found: Fit, command: str) -> None:
    """Write the weights of masks into the module of weights."""
    replace_part(
        path,
        *textwrap.wrap(f"# masks: {command}", 115, subsequent_indent="#   "),
        f"MASK_BIAS = {found.bias:.4g}",
        "MASK_WEIGHTS = {",
        *(
            f'    "{name}": {weight:.4g},'
            for name, weight in zip(FEATURES, found.weights, strict=True)
            if weight
        ),
        "}",
        '"""Weights of `tracking.confidence.FEATURES`."""',
        f"JUMPED = {found.jumped}",
        '"""Largest confidence of a mask that has jumped: the share of these that were right on the training clips."""',
        f"SURE_MASK = {found.sure}",
        '"""Confidence from which at most 5 % of the masks were wrong in each folder of clips."""',
        'MASKS_CALIBRATED_FOR = ("nano",)',
        '"""Names of the models whose masks the weights were fitted to."""',
    )


def replace_part(path: Path, *lines: str) -> None:
    """Write lines in the place of the part of a module that begins with the same comment; append a new part."""
    text = path.read_text() if path.exists() else ""
    before, _, replaced = text.partition(lines[0].split(":")[0] + ":")
    after = re.split(r"\n(?=# \w+: )", replaced, maxsplit=1)[1:]
    parts = before.rstrip(), "\n".join(lines), *(part.strip() for part in after)
    path.write_text("\n\n".join(part for part in parts if part) + "\n")


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="folders of records")
    parser.add_argument("--without", default="", help="features to leave out, comma-separated")
    parser.add_argument("--rough", type=Path, nargs="*", default=[], help="records of rough truth")
    parser.add_argument("--check", type=Path, nargs="*", default=[], help="records for the threshold only")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    args = parser.parse_args()
    used = [name for name in FEATURES if name not in args.without.split(",")]
    folders = [*args.records, *args.rough]
    files = [sorted(folder.glob("*.npz")) for folder in folders]
    found = fit(files, used)
    model = found.weights, found.bias, found.jumped
    checked = [play(sorted(folder.glob("*.npz")), model) for folder in args.check]
    found = found._replace(sure=choose_threshold([*found.groups[: len(args.records)], *checked]))
    for name, weight in zip(FEATURES, found.weights, strict=True):
        print(f"{name:16s} {weight:8.3f}")
    print(f"bias {found.bias:.3f}, jumped {found.jumped}, sure from {found.sure}")
    for folder, group in zip(folders, found.groups, strict=True):
        print(describe(folder.name, group, found.sure))
    for folder, played in zip(args.check, checked, strict=True):
        print(describe(folder.name, played, found.sure))
    if not args.dry_run:
        write(TARGET, found, shlex.join(["python", "-m", "training.doubt.fit", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
