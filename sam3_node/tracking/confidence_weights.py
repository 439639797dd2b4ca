"""Hold the fitted weights of the confidence of masks and of names.

`training.doubt` fits both on records of the bundled weights, and replaces one part of this file. Features without a
weight have weight 0. Other models and detectors use the same weights, uncalibrated.
"""

# masks: python -m training.doubt.fit out/doubt/train out/doubt/join out/doubt/short out/doubt/real --rough
#   out/doubt/moved --check out/doubt/rendered out/doubt/droid out/doubt/bent
MASK_BIAS = -1.208
MASK_WEIGHTS = {
    "score": 0.8374,
    "presence": 0.25,
    "stability": 0.6116,
    "overlap": -0.7637,
    "appearance": 2.669,
    "area": -0.05616,
    "previous": -0.2046,
    "shape": -2.19,
    "carried": 0.1768,
}
"""Weights of `tracking.confidence.FEATURES`."""
JUMPED = 0.38
"""Largest confidence of a mask that has jumped: the share of these that were right on the training clips."""
SURE_MASK = 0.91
"""Confidence from which at most 5 % of the masks were wrong in each folder of clips."""
MASKS_CALIBRATED_FOR = ("nano",)
"""Names of the models whose masks the weights were fitted to."""

# names: python -m training.doubt.names out/scenes/names-fit -o out/doubt/names
NAME_BIAS = -2.273
NAME_WEIGHTS = {
    "score": 0.07703,
    "rival": 0.5705,
    "other": 0.4231,
    "look": 0.4372,
    "agreement": 1.909,
}
"""Weights of `tracking.names.FEATURES`."""
USUAL_MARGINS = {"look": 1.36, "thing": 0.71}
"""Mean margins of right names, for detectors and phrases that have none."""
SURE_NAME = 0.9
"""Confidence below which a name is doubtful. It is chosen, see docs/objects-by-name.md."""
NAMES_CALIBRATED_FOR = ("nano",)
"""Names of the detectors whose detections the weights were fitted to."""
