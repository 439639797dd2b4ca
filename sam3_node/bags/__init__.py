"""Recordings. MCAP files hold the wire's own messages, byte for byte."""

from .masks import MaskBagWriter, read_masks

__all__ = ["MaskBagWriter", "read_masks"]
