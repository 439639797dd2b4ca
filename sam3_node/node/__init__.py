"""The node process: receives frames, runs the frame step, publishes masks, and answers requests."""
