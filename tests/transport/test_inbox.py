"""The order in which an inbox gives frames: scripted arrivals, without sockets and without time."""

from __future__ import annotations

import pytest

from sam3_node.transport.receiver import Inbox


def run(script: str, capacity: int = 8) -> str:
    """Return the cameras in the order of their turns. A letter is a frame of that camera, a dot takes the next one."""
    inbox: Inbox[str] = Inbox(capacity)
    turns = []
    for step in script.replace(" ", ""):
        if step == ".":
            turns.append(inbox.take(timeout_ms=0) or "-")
        else:
            assert inbox.put(step, step, timeout_ms=0)
    inbox.close()
    inbox.release()
    return "".join(turns)


@pytest.mark.parametrize(
    ("script", "turns"),
    [
        pytest.param("abc...", "abc", id="new cameras in the order of their arrival"),
        pytest.param("abc. abc. abc. abc.", "abca", id="saturated cameras take turns"),
        # s was taken longest ago: its frame does not wait behind frames that arrived before it
        pytest.param(
            "sabc.... abc s.... ", "sabcsabc", id="a slow camera is next as soon as its frame arrives"
        ),
        pytest.param("abcs.... abc. abc. abc. abcs.", "abcsabcs", id="also after turns that it did not use"),
        pytest.param("abab.. bab. bab. bab. bab.", "ababab", id="a repeated frame gains no turn"),
        # a camera that paused has one turn, not those that it missed
        pytest.param("sa.. a. a. a. a. sa. sa. sa. sa.", "saaaaasasa", id="missed turns are not made up for"),
        pytest.param("ab. n. .", "abn", id="a new name does not overtake a waiting camera"),
        pytest.param("ab.. abn.", "aba", id="nor one that was taken before it arrived"),
        pytest.param("a. . b.", "a-b", id="nothing waits"),
    ],
)
def test_the_camera_that_was_taken_longest_ago_is_next(script: str, turns: str) -> None:
    assert run(script) == turns


@pytest.mark.parametrize("flood", [1, 10, 1000])
def test_a_flooding_camera_takes_no_turn_from_the_others(flood: int) -> None:
    turns = run(("f" * flood + "abc" + ".") * 400)
    assert {camera: turns.count(camera) for camera in "fabc"} == dict.fromkeys("fabc", 100)


def test_a_camera_at_a_tenth_of_the_rate_never_waits_for_more_than_the_present_step() -> None:
    # three cameras have a frame before every turn, s before every tenth
    turns = run("".join("abc" + ("s" if turn % 10 == 5 else "") + "." for turn in range(200)))
    assert [turn for turn, camera in enumerate(turns) if camera == "s" and turn > 10] == list(
        range(15, 200, 10)
    )
    rates = [turns.count(camera) for camera in "abc"]
    assert max(rates) - min(rates) <= 1


def test_each_turn_gives_the_newest_frame() -> None:
    inbox: Inbox[int] = Inbox(4)
    for seq in range(5):
        inbox.put("a", seq, timeout_ms=0)
    assert inbox.take(timeout_ms=0) == 4
    assert inbox.take(timeout_ms=0) is None
    inbox.close()
    inbox.release()


def test_keys_that_are_used_once_keep_their_order_and_leave_nothing_behind() -> None:
    inbox: Inbox[int] = Inbox(4)
    taken = []
    for number in range(1000):
        assert inbox.put(number, number, timeout_ms=0)
        if number % 4 == 3:
            assert not inbox.put("more", 0, timeout_ms=0)
            taken += [inbox.take(timeout_ms=0) for _ in range(4)]
    assert taken == list(range(1000))
    assert len(inbox._turns) <= 4
    inbox.close()
    inbox.release()


def test_a_discarded_camera_begins_again_as_a_new_one() -> None:
    inbox: Inbox[str] = Inbox(2)
    for camera in "ab":
        inbox.put(camera, camera, timeout_ms=0)
    inbox.discard("a")
    assert inbox.put("c", "c", timeout_ms=0)
    assert [inbox.take(timeout_ms=0) for _ in range(3)] == ["b", "c", None]
    inbox.close()
    inbox.release()


def test_an_endpoint_with_many_names_takes_one_turn_in_each_round() -> None:
    inbox: Inbox[str] = Inbox(16)
    turns = []
    for _ in range(40):
        for number in range(8):
            inbox.put(f"evil{number}", f"evil{number}", 0, "second")
        inbox.put("cam0", "cam0", 0, "first")
        turns.append(inbox.take(timeout_ms=0))
    inbox.close()
    inbox.release()
    assert turns.count("cam0") == 20
    assert {turns.count(f"evil{number}") for number in range(8)} == {2, 3}


def test_a_look_at_the_next_item_leaves_it_and_its_turn() -> None:
    inbox: Inbox[str] = Inbox(8)
    assert inbox.peek(lambda item: True, timeout_ms=0) is None
    for camera in "ab":
        inbox.put(camera, camera, timeout_ms=0)
    assert [inbox.peek(lambda item: True, timeout_ms=0) for _ in range(2)] == ["a", "a"]
    assert inbox.peek(lambda item: item != "a", timeout_ms=0) is None  # only the next one is looked at
    assert [inbox.take(timeout_ms=0) for _ in range(2)] == ["a", "b"]
    inbox.close()
    assert inbox.peek(lambda item: True, timeout_ms=1000) is None
    inbox.release()
