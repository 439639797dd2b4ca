"""Node process: receives frames, steps the pipeline, publishes masks, answers requests."""
