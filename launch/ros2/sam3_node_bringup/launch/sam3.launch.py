"""Starts the node of one camera, configures and activates it. Include it once for each camera, each in a `GroupAction`.

ros2 launch sam3_node_bringup sam3.launch.py namespace:=wrist camera:=wrist image_topic:=/wrist/color/image_raw
"""

from dataclasses import fields
from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch.actions import DeclareLaunchArgument, EmitEvent, RegisterEventHandler
from launch.conditions import IfCondition
from launch.events import matches_action
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode, Node
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState
from launch_ros.parameter_descriptions import ParameterValue
from lifecycle_msgs.msg import Transition
from sam3_node_ros.link import Ros2Settings

from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    """Return the node, with an argument for each of its parameters, its transitions, and RViz if it is asked for."""
    share = Path(get_package_share_directory("sam3_node_bringup"))
    names = {field.name: (type(field.default), str(field.default)) for field in fields(Ros2Settings)}
    names["use_sim_time"] = bool, "False"
    arguments = [
        DeclareLaunchArgument("namespace", default_value=""),
        DeclareLaunchArgument("name", default_value="sam3_bridge"),
        DeclareLaunchArgument("rviz", default_value="False"),
        *(DeclareLaunchArgument(name, default_value=default) for name, (_, default) in names.items()),
    ]
    node = LifecycleNode(
        package="sam3_node_ros",
        executable="bridge",
        name=LaunchConfiguration("name"),
        namespace=LaunchConfiguration("namespace"),
        output="screen",
        parameters=[
            {
                name: ParameterValue(LaunchConfiguration(name), value_type=kind)
                for name, (kind, _) in names.items()
            }
        ],
    )
    rviz = Node(
        package="rviz2",
        executable="rviz2",
        namespace=LaunchConfiguration("namespace"),
        arguments=["-d", str(share / "rviz/sam3.rviz")],
        condition=IfCondition(LaunchConfiguration("rviz")),
    )

    def change(transition_id: int) -> EmitEvent:
        return EmitEvent(
            event=ChangeState(lifecycle_node_matcher=matches_action(node), transition_id=transition_id)
        )

    configured = OnStateTransition(
        target_lifecycle_node=node,
        start_state="configuring",
        goal_state="inactive",
        entities=[change(Transition.TRANSITION_ACTIVATE)],
    )
    return LaunchDescription(
        [*arguments, RegisterEventHandler(configured), node, rviz, change(Transition.TRANSITION_CONFIGURE)]
    )
