"""YOLO-World version 2: network, weights and converter."""
