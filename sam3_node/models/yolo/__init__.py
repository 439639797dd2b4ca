"""YOLO-World version 2: the network, its weights and the converter of public weights."""
