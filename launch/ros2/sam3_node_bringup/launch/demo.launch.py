"""Plays the bundled recording as a camera, for a sam3-node that runs, and shows its objects in RViz.

ros2 launch sam3_node_bringup demo.launch.py
"""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from launch import LaunchDescription

TOPICS = {
    "image_topic": "image/compressed",
    "depth_topic": "depth_registered/image_raw",
    "camera_info_topic": "camera_info",
}


def generate_launch_description() -> LaunchDescription:
    """Return the player and the node of its camera. `recording` names another recording."""
    path = Path(get_package_share_directory("sam3_node_bringup")) / "launch/sam3.launch.py"
    player = Node(
        package="sam3_node_ros",
        executable="player",
        parameters=[{"recording": LaunchConfiguration("recording")}],
        output="screen",
    )
    arguments = TOPICS | {"rviz": LaunchConfiguration("rviz")}
    bridge = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(path)), launch_arguments=arguments.items()
    )
    return LaunchDescription(
        [
            DeclareLaunchArgument("recording", default_value=""),
            DeclareLaunchArgument("rviz", default_value="True"),
            player,
            bridge,
        ]
    )
