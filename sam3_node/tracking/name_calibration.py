"""Weights of the confidence of names, fitted for the bundled detector by

    python -m tools.doubt.names out/scenes/names-fit -o out/doubt/names

Features are those of `tracking.names.FEATURES`. Other detectors use them uncalibrated, without margins.
"""

BIAS = -2.646
WEIGHTS = {
    "score": 0.099,
    "rival": 0.5937,
    "other": 0.3439,
    "look": 0.3995,
    "thing": 0.05025,
    "agreement": 2.267,
}
NEUTRAL = {"look": 1.35, "thing": 0.96}
"""Mean margins of right names, for detectors and phrases that have none."""
SURE = 0.9
"""Confidence from which at most 1 % of the names were wrong on clips that were held out."""
CALIBRATED_FOR = ("nano",)
"""Names of the detectors whose detections the weights were fitted to."""
