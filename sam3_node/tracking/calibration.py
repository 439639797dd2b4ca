"""Weights of the confidence of masks, fitted for the bundled nano weights by

    python -m tools.doubt.fit /work/doubt-data/rec/train1 /work/doubt-data/rec/real --check /work/doubt-data/rec/val

Features are those of `tracking.confidence.FEATURES`; others have weight 0. The weights of other models use the same
table, uncalibrated."""

BIAS = -0.1125
WEIGHTS = {
    "score": 0.15,
    "presence": 1.519,
    "stability": 1.601,
    "overlap": -0.9884,
    "appearance": 1.284,
    "area": -1.193,
    "growth": -0.3123,
    "previous": -2.071,
    "shape": -1.645,
    "carried": 0.3367,
}
JUMPED = 0.28
"""Largest confidence of a mask that has jumped: the share of those that were right on the training clips."""
SURE = 0.7
"""Confidence from which at most 5 % of the masks were wrong on the training clips."""
CALIBRATED_FOR = ("nano",)
"""Names of the models whose masks the weights were fitted to."""
