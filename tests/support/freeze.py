"""Freezes what the server of forked processes has imported; a collection in a fork would copy all its pages."""

import gc

gc.collect()
gc.freeze()
