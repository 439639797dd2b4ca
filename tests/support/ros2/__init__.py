"""Stand-ins for ROS 2, which no registry has: message classes, and the part of rclpy that the bridge uses."""
