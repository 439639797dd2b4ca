"""Weights of the confidence of masks, fitted for the bundled nano weights by

    python -m tools.doubt.fit out/doubt/train out/doubt/short out/doubt/real

Features are those of `tracking.confidence.FEATURES`; others have weight 0. Other models use the same table,
uncalibrated."""

BIAS = -1.556
WEIGHTS = {
    "score": 0.3359,
    "presence": 0.9345,
    "stability": 1.591,
    "overlap": -0.845,
    "appearance": 2.715,
    "area": -0.7197,
    "previous": -0.2648,
    "shape": -2.634,
    "carried": 0.2889,
}
JUMPED = 0.4
"""Largest confidence of a mask that has jumped: the share of those that were right on the training clips."""
SURE = 0.84
"""Confidence from which at most 5 % of the masks were wrong in each folder of training clips."""
CALIBRATED_FOR = ("nano",)
"""Names of the models whose masks the weights were fitted to."""
