"""Evaluation of video object segmentation: DAVIS' measures, recovery from occlusion, settings side by side."""
