"""ROS 2 node that connects one camera to sam3-node."""
