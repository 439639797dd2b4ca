"""Camera messages of ROS and Foxglove."""
