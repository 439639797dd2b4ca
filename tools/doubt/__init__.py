"""Calibration of the confidence of masks: records of tracks, pseudo-tracks of real video, the fit, and its measures."""
