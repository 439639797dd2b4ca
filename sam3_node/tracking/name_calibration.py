"""Weights of the confidence of names, fitted for the bundled detector by

    python -m tools.doubt.names

Features are those of `tracking.names.FEATURES`. Other detectors use the same table, uncalibrated, without margins."""

BIAS = -5.0
WEIGHTS = {
    "score": 0.3,
    "rival": 0.73,
    "other": 0.09,
    "look": 0.36,
    "thing": 0.05,
    "agreement": 2.9,
}
NEUTRAL = {"look": 1.3, "thing": 0.7}
"""Means of the margins of right names, for detectors and phrases that have none."""
SURE = 0.8
"""Confidence from which at most 1 % of the names were wrong on the clips of the fit."""
CALIBRATED_FOR = ("nano",)
"""Names of the detectors whose detections the weights were fitted to."""
