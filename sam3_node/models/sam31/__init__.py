"""SAM 3.1's tracker: up to 16 objects share a memory, a read and a run of the mask decoder."""

from .random_weights import random_model

__all__ = ["random_model"]
