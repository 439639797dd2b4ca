"""Weights of the confidence of masks, fitted for the bundled nano weights by

    python -m tools.doubt.fit out/doubt/train out/doubt/short out/doubt/real

Features are those of `tracking.confidence.FEATURES`; others have weight 0. Other models use the same table,
uncalibrated."""

BIAS = -1.278
WEIGHTS = {
    "score": 0.2659,
    "presence": 0.25,
    "stability": 2.724,
    "overlap": -0.8286,
    "appearance": 2.349,
    "area": -0.7347,
    "previous": -0.1517,
    "shape": -2.651,
    "carried": 0.2534,
}
JUMPED = 0.52
"""Largest confidence of a mask that has jumped: the share of those that were right on the training clips."""
SURE = 0.92
"""Confidence from which at most 5 % of the masks were wrong in each folder of training clips."""
CALIBRATED_FOR = ("nano",)
"""Names of the models whose masks the weights were fitted to."""
