"""Weights of the confidence of masks, fitted for the bundled nano weights by

    python -m tools.doubt.fit out/doubt/train out/doubt/short out/doubt/real

Features are those of `tracking.confidence.FEATURES`; others have weight 0. Other models use the same table,
uncalibrated."""

BIAS = -0.7669
WEIGHTS = {
    "score": 0.6337,
    "presence": 0.25,
    "stability": 1.589,
    "overlap": -0.9688,
    "appearance": 1.294,
    "area": -0.6445,
    "previous": -0.125,
    "shape": -1.748,
    "carried": 0.2765,
}
JUMPED = 0.5
"""Largest confidence of a mask that has jumped: the share of those that were right on the training clips."""
SURE = 0.94
"""Confidence from which at most 5 % of the masks were wrong in each folder of training clips."""
CALIBRATED_FOR = ("nano",)
"""Names of the models whose masks the weights were fitted to."""
