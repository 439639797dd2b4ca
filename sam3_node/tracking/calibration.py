"""Weights of the confidence of masks, fitted for the bundled nano weights by

    python -m tools.doubt.fit out/doubt/train out/doubt/short out/doubt/real

Features are those of `tracking.confidence.FEATURES`; others have weight 0. Other models use the same table,
uncalibrated."""

BIAS = 0.2392
WEIGHTS = {
    "score": 0.7345,
    "presence": 0.25,
    "stability": 0.5898,
    "overlap": -1.395,
    "appearance": 2.094,
    "area": -1.052,
    "growth": -0.01353,
    "previous": -0.5359,
    "shape": -2.765,
    "carried": 0.1799,
}
JUMPED = 0.3
"""Largest confidence of a mask that has jumped: the share of those that were right on the training clips."""
SURE = 0.82
"""Confidence from which at most 5 % of the masks were wrong in each folder of training clips."""
CALIBRATED_FOR = ("nano",)
"""Names of the models whose masks the weights were fitted to."""
