"""Weights of the confidence of masks, fitted for the bundled nano weights by

    python -m tools.doubt.fit out/doubt/train1 out/doubt/short out/doubt/real --check out/doubt/val

Features are those of `tracking.confidence.FEATURES`; others have weight 0. Other models use the same table,
uncalibrated."""

BIAS = -0.7157
WEIGHTS = {
    "score": 0.15,
    "presence": 1.871,
    "stability": 1.647,
    "overlap": -1.283,
    "appearance": 2.002,
    "area": -1.072,
    "growth": -0.2844,
    "previous": -1.486,
    "shape": -2.113,
    "carried": 0.2236,
}
JUMPED = 0.31
"""Largest confidence of a mask that has jumped: the share of those that were right on the training clips."""
SURE = 0.79
"""Confidence from which at most 5 % of the masks were wrong in each folder of training clips."""
CALIBRATED_FOR = ("nano",)
"""Names of the models whose masks the weights were fitted to."""
