"""Weights of the confidence of masks, fitted for the bundled nano weights by

    python -m tools.doubt.fit out/doubt/train out/doubt/short out/doubt/real

Features are those of `tracking.confidence.FEATURES`; others have weight 0. Other models use the same table,
uncalibrated."""

BIAS = -0.001584
WEIGHTS = {
    "score": 0.6043,
    "presence": 0.25,
    "stability": 1.083,
    "overlap": -1.456,
    "appearance": 1.973,
    "area": -1.156,
    "previous": -0.125,
    "shape": -2.73,
    "carried": 0.1763,
}
JUMPED = 0.38
"""Largest confidence of a mask that has jumped: the share of those that were right on the training clips."""
SURE = 0.81
"""Confidence from which at most 5 % of the masks were wrong in each folder of training clips."""
CALIBRATED_FOR = ("nano",)
"""Names of the models whose masks the weights were fitted to."""
