"""The stages of a step. No stage imports another: they meet in the StepFrame."""
