"""Weights of the confidence of names, fitted for the bundled detector by

    python -m tools.doubt.names out/scenes/names-fit -o out/doubt/names

Features are those of `tracking.names.FEATURES`. Other detectors use them uncalibrated, without margins.
"""

BIAS = -2.273
WEIGHTS = {
    "score": 0.07703,
    "rival": 0.5705,
    "other": 0.4231,
    "look": 0.4372,
    "agreement": 1.909,
}
NEUTRAL = {"look": 1.36, "thing": 0.71}
"""Mean margins of right names, for detectors and phrases that have none."""
SURE = 0.9
"""Confidence below which a name is doubtful. It is chosen, see docs/objects-by-name.md."""
CALIBRATED_FOR = ("nano",)
"""Names of the detectors whose detections the weights were fitted to."""
