"""Fit the confidence of names on rendered clips, and write `sam3_node/tracking/confidence_weights.py`.

    python -m training.doubt.names out/scenes/names-fit -o out/doubt/names

`tools.doubt.names` plays the clips and records the names. `--step` leaves frames out, to be faster. Logistic regression
as in `training.doubt.fit`; each mask that is sure and not tentative counts.
"""

import shlex
import sys
from pathlib import Path

import numpy as np

from sam3_node.tracking.logistic import fit_logistic
from sam3_node.tracking.names import FEATURES
from tools.command import errors_in_one_line, new_parser
from tools.doubt.names import Bools, Floats, Ints, NameRecords, load, record_folder
from training.doubt.fit import TARGET, replace_part

RIDGE = 1e-3
"""Penalty on squared weights."""


def fit(x: Floats, right: Bools) -> tuple[Floats, float]:
    """Return the weights [F], none below 0, and the bias of the logistic function."""
    scale = x.std(axis=0) + 1e-6
    count = len(right)
    share = np.full(count, 1 / count)
    least = np.zeros(x.shape[1])
    weights, bias = fit_logistic(x / scale, right.astype(np.float64), share, least, RIDGE)
    return weights / scale, bias


def describe_held_out(records: NameRecords, clip: Ints, sure: float, folds: int = 8) -> str:
    """Return the coverage and the wrong names at a confidence, on clips that the weights were not fitted to."""
    confidence = np.zeros(len(clip))
    for fold in range(folds):
        held = clip % folds == fold
        weights, bias = fit(records.features[~held], records.right[~held])
        confidence[held] = 1 / (1 + np.exp(-(records.features[held] @ weights + bias)))
    kept = confidence >= sure
    share = (kept & records.right).sum() / records.right.sum()
    wrong = 1 - records.right[kept].mean()
    return f"held out: {100 * share:.0f} % of the right names stay sure, {100 * wrong:.1f} % of the sure ones are wrong"


def write(path: Path, weights: Floats, bias: float, neutral: Floats, sure: float, command: str) -> None:
    """Write the weights of names into the module of weights."""
    margins = ", ".join(f'"{name}": {neutral[FEATURES.index(name)]:.2f}' for name in ("look", "thing"))
    replace_part(
        path,
        f"# names: {command}",
        f"NAME_BIAS = {bias:.4g}",
        "NAME_WEIGHTS = {",
        *(
            f'    "{name}": {weight:.4g},'
            for name, weight in zip(FEATURES, weights, strict=True)
            if weight > 1e-4
        ),
        "}",
        '"""Weights of `tracking.names.FEATURES`."""',
        f"USUAL_MARGINS = {{{margins}}}",
        '"""Mean margins of right names, for detectors and phrases that have none."""',
        f"SURE_NAME = {sure}",
        '"""Confidence below which a name is doubtful. It is chosen, see docs/objects-by-name.md."""',
        'NAMES_CALIBRATED_FOR = ("nano",)',
        '"""Names of the detectors whose detections the weights were fitted to."""',
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path, help="rendered clips with names")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--step", type=int, default=3, help="play every N-th frame")
    parser.add_argument("--every", type=int, default=2, help="as detector.every, of played frames")
    parser.add_argument("--sure", type=float, default=0.9, help="confidence below which names are doubtful")
    args = parser.parse_args()
    with errors_in_one_line():
        paths = list(record_folder(args.folder, args.out, args.step, args.every))
    records, clip = load(paths)
    weights, bias = fit(records.features, records.right)
    print(describe_held_out(records, clip, args.sure))
    print(
        f"{len(clip)} masks of {len(paths)} clips, {100 * (1 - records.right.mean()):.1f} % with a wrong name"
    )
    for name, weight in zip(FEATURES, weights, strict=True):
        print(f"{name:10s} {weight:7.3f}")
    print(f"bias {bias:.3f}, sure from {args.sure}")
    command = shlex.join(["python", "-m", "training.doubt.names", *sys.argv[1:]])
    write(TARGET, weights, bias, records.features[records.right].mean(axis=0), args.sure, command)


if __name__ == "__main__":
    main()
