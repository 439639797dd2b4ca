"""Fits of the confidence of masks and names; pseudo-tracks of real video and moved clips to fit them on."""
