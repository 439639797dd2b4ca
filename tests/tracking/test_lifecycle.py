"""The life of a named object: confirmed, missed, kept for a time, and who makes room."""

from __future__ import annotations

from sam3_node.tracking.lifecycle import Lifecycle, LifeRules

S = 1_000_000_000
RULES = LifeRules(confirm=2, patience=2, merge=4, max_lost_s=3.0, sure=0.5)


def confirmed(*ids: int, now_ns: int = 0) -> Lifecycle:
    lives = Lifecycle(RULES)
    for object_id in ids:
        for _ in range(2):
            lives.sight(object_id, "mug", 0.8, now_ns)
    return lives


def test_two_sightings_make_it_more_than_tentative() -> None:
    lives = Lifecycle(RULES)
    lives.sight(1, "mug", 0.8, 0)
    assert lives.is_tentative(1)
    lives.sight(1, "mug", 0.8, 0)
    assert not lives.is_tentative(1)


def test_a_tentative_one_that_is_missed_goes() -> None:
    lives = Lifecycle(RULES)
    lives.sight(1, "mug", 0.8, 0)
    lives.miss(1)
    assert lives.expired(0) == []
    lives.miss(1)
    assert lives.expired(0) == [1]


def test_a_sure_mask_keeps_a_confirmed_one_without_detections() -> None:
    lives = confirmed(1)
    for second in range(1, 10):
        lives.miss(1)
        lives.observe(1, 0.6, True, second * S)
        assert lives.expired(second * S) == []


def test_without_evidence_it_goes_after_the_time() -> None:
    for score, visible in ((0.9, False), (0.4, True)):
        lives = confirmed(1)
        lives.observe(1, score, visible, 3 * S)
        assert lives.expired(3 * S) == []
        assert lives.expired(3 * S + 1) == [1]


def test_a_clock_that_begins_again_keeps_no_one_for_ever() -> None:
    lives = confirmed(1, now_ns=1000 * S)
    lives.observe(1, 0.0, False, 0)
    assert lives.expired(3 * S) == []
    assert lives.expired(3 * S + 1) == [1]


def test_a_tentative_one_lives_by_detections_alone() -> None:
    lives = Lifecycle(RULES)
    lives.sight(1, "mug", 0.8, 0)
    lives.observe(1, 0.9, True, 4 * S)
    assert lives.expired(4 * S) == [1]


def test_hidden_or_long_missed_is_away() -> None:
    lives = confirmed(1, 2)
    lives.observe(1, 0.0, False, 0)
    lives.miss(2)
    assert (lives.is_away(1), lives.is_away(2)) == (True, False)
    lives.miss(2)
    assert lives.is_away(2)
    lives.sight(1, "mug", 0.8, 0)
    assert not lives.is_away(1)


def test_the_name_has_the_most_votes() -> None:
    lives = Lifecycle(RULES)
    for label, score in (("cup", 0.5), ("mug", 0.4), ("mug", 0.4)):
        lives.sight(1, label, score, 0)
    assert lives.label(1) == "mug"


def test_names_that_are_withdrawn_leave_the_other_votes() -> None:
    lives = Lifecycle(RULES)
    lives.sight(1, "cup", 0.5, 0)
    lives.sight(1, "mug", 0.9, 0)
    lives.sight(2, "mug", 0.9, 0)
    assert lives.keep_labels(["cup"]) == [2]
    assert lives.label(1) == "cup"


def test_a_repeat_goes_once_its_detections_go_to_another() -> None:
    lives = confirmed(1)
    lives.sight(2, "mug", 0.5, 0)
    lives.miss(2)
    assert lives.is_repeat(2), "a tentative one at once"
    for _ in range(3):
        lives.miss(1)
    assert not lives.is_repeat(1)
    lives.miss(1)
    assert lives.is_repeat(1)


def test_who_makes_room() -> None:
    lives = confirmed(1, 2, 3)
    assert lives.gives_way(0.99) is None, "confirmed and in view"
    lives.sight(4, "mug", 0.4, 0)
    assert lives.gives_way(0.5) == 4
    assert lives.gives_way(0.3) is None
    lives.observe(2, 0.9, True, 1 * S)
    for hidden in (2, 3):
        lives.observe(hidden, 0.0, False, 2 * S)
    assert lives.gives_way(0.1) == 3, "out of sight for longest"


def test_what_is_forgotten_is_not_there() -> None:
    lives = confirmed(1)
    lives.forget(1)
    lives.forget(1)
    assert 1 not in lives
    assert lives.ids == []
