"""Installation by colcon (ament_python)."""

from setuptools import setup

NAME = "sam3_node_ros"

setup(
    name=NAME,
    version="0.1.0",
    packages=[NAME],
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml", f"{NAME}/fast_dds.xml"]),
    ],
    package_data={NAME: ["fast_dds.xml"]},
    install_requires=["setuptools"],
    zip_safe=False,
    description="Lifecycle node that connects a camera's topics to sam3-node, and publishes its masks",
    license="Apache-2.0",
    entry_points={"console_scripts": [f"bridge = {NAME}.bridge:main", f"player = {NAME}.player:main"]},
)
