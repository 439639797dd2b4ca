"""Weights of the confidence of masks. Written by `python -m tools.doubt.fit`."""

BIAS = 0.0
WEIGHTS = {
    "score": 1.0,
}
SURE = 0.8
CALIBRATED_FOR = ("nano",)
