"""Merge the topics with joints of a recording: an arm and its gripper may have one each, a leader has another's names.

Each joint is read from one topic, the likeliest to be what the robot did. A note tells which other topics have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

PROBED = 1000
"""Joint states that are read to find which topics have which joints. A topic that begins later is told."""
MAX_SHOWN = 10
"""Joints or topics that a note lists."""

_FOLLOWS = re.compile(r"puppet|follower|slave|measured|actual", re.IGNORECASE)
"""Words of topics of what the robot did."""
_LEADS = re.compile(
    r"master|leader|teleop|goal|command|cmd|desired|target|reference|action|setpoint|plan", re.IGNORECASE
)
"""Words of topics of another robot, or of what the robot was to do."""


class JointTopics:
    """The topic that each joint is read from. Topics come in any order; the first to claim a joint has it."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._rivals: dict[tuple[str, str], list[str]] = {}

    def claim(self, topic: str, joints: Iterable[str]) -> list[str]:
        """Return the joints of a message that are read from its topic."""
        own = []
        for joint in joints:
            owner = self._owners.setdefault(joint, topic)
            if owner == topic:
                own.append(joint)
                continue
            shared = self._rivals.setdefault((owner, topic), [])
            if joint not in shared and len(shared) < MAX_SHOWN:
                shared.append(joint)
        return own

    def notes(self) -> list[str]:
        """Say that joints come from several topics, and which topics have joints that another one has, too."""
        owners = list(dict.fromkeys(self._owners.values()))
        shown = ", ".join(owners[:MAX_SHOWN])
        apart = [
            f"joints come from {len(owners)} topics, {shown[:300]}: a message has those of its own topic alone"
        ]
        return (apart if len(owners) > 1 else []) + [
            f"joints {', '.join(joints)[:300]} are in {owner} and in {topic}: those of {owner} are used; name another "
            "topic to choose it"
            for (owner, topic), joints in list(self._rivals.items())[:MAX_SHOWN]
        ]


def rank_topics(topics: Iterable[str]) -> list[str]:
    """Return topics with joints, the likeliest to be what the robot did first."""
    return sorted(topics, key=_rank)


def _rank(topic: str) -> tuple[bool, bool, int, str]:
    return _LEADS.search(topic) is not None, _FOLLOWS.search(topic) is None, len(topic), topic


def claim_first(found: Sequence[tuple[str, Iterable[str]]]) -> JointTopics:
    """Return which topic has which joint, from the first messages of all topics."""
    names: dict[str, dict[str, None]] = {}
    for topic, joints in found:
        names.setdefault(topic, {}).update(dict.fromkeys(joints))
    topics = JointTopics()
    for topic in rank_topics(names):
        topics.claim(topic, names[topic])
    return topics
