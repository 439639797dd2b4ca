"""Weights of the confidence of masks, fitted for the bundled nano weights by

    python -m tools.doubt.fit out/doubt/train out/doubt/short out/doubt/real

Features are those of `tracking.confidence.FEATURES`; others have weight 0. Other models use the same table,
uncalibrated."""

BIAS = -1.249
WEIGHTS = {
    "score": 0.3448,
    "presence": 0.6504,
    "stability": 1.538,
    "overlap": -0.8951,
    "appearance": 2.656,
    "area": -1.058,
    "previous": -0.3827,
    "shape": -2.46,
    "carried": 0.2861,
}
JUMPED = 0.46
"""Largest confidence of a mask that has jumped: the share of those that were right on the training clips."""
SURE = 0.83
"""Confidence from which at most 5 % of the masks were wrong in each folder of training clips."""
CALIBRATED_FOR = ("nano",)
"""Names of the models whose masks the weights were fitted to."""
