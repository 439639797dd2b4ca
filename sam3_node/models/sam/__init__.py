"""SAM 2 and SAM 3 video trackers as stages with plain tensor signatures."""
