"""The life of a named object: confirmed, missed, kept for a time, and who makes room."""

from __future__ import annotations

from sam3_node.tracking.association import Lifecycle, LifecycleRules

S = 1_000_000_000
RULES = LifecycleRules(
    min_detections=2, max_missed_rounds=2, duplicate_missed_rounds=4, max_lost_s=3.0, min_evidence_score=0.5
)


def confirmed(*ids: int, now_ns: int = 0) -> Lifecycle:
    lifecycle = Lifecycle(RULES)
    for object_id in ids:
        for _ in range(2):
            lifecycle.mark_detected(object_id, "mug", 0.8, now_ns)
    return lifecycle


def test_two_sightings_make_it_more_than_tentative() -> None:
    lifecycle = Lifecycle(RULES)
    lifecycle.mark_detected(1, "mug", 0.8, 0)
    assert lifecycle.is_tentative(1)
    lifecycle.mark_detected(1, "mug", 0.8, 0)
    assert not lifecycle.is_tentative(1)


def test_a_tentative_one_that_is_missed_goes() -> None:
    lifecycle = Lifecycle(RULES)
    lifecycle.mark_detected(1, "mug", 0.8, 0)
    lifecycle.mark_missed(1)
    assert lifecycle.expired(0) == []
    lifecycle.mark_missed(1)
    assert lifecycle.expired(0) == [1]


def test_a_sure_mask_keeps_a_confirmed_one_without_detections() -> None:
    lifecycle = confirmed(1)
    for second in range(1, 10):
        lifecycle.mark_missed(1)
        lifecycle.observe(1, 0.6, True, second * S)
        assert lifecycle.expired(second * S) == []


def test_without_evidence_it_goes_after_the_time() -> None:
    for score, visible in ((0.9, False), (0.4, True)):
        lifecycle = confirmed(1)
        lifecycle.observe(1, score, visible, 3 * S)
        assert lifecycle.expired(3 * S) == []
        assert lifecycle.expired(3 * S + 1) == [1]


def test_a_clock_that_begins_again_keeps_no_one_for_ever() -> None:
    lifecycle = confirmed(1, now_ns=1000 * S)
    lifecycle.observe(1, 0.0, False, 0)
    assert lifecycle.expired(3 * S) == []
    assert lifecycle.expired(3 * S + 1) == [1]


def test_a_tentative_one_lives_by_detections_alone() -> None:
    lifecycle = Lifecycle(RULES)
    lifecycle.mark_detected(1, "mug", 0.8, 0)
    lifecycle.observe(1, 0.9, True, 4 * S)
    assert lifecycle.expired(4 * S) == [1]


def test_hidden_or_long_missed_is_away() -> None:
    lifecycle = confirmed(1, 2)
    lifecycle.observe(1, 0.0, False, 0)
    lifecycle.mark_missed(2)
    assert (lifecycle.is_lost(1), lifecycle.is_lost(2)) == (True, False)
    lifecycle.mark_missed(2)
    assert lifecycle.is_lost(2)
    lifecycle.mark_detected(1, "mug", 0.8, 0)
    assert not lifecycle.is_lost(1)


def test_the_name_has_the_most_votes() -> None:
    lifecycle = Lifecycle(RULES)
    for label, score in (("cup", 0.5), ("mug", 0.4), ("mug", 0.4)):
        lifecycle.mark_detected(1, label, score, 0)
    assert lifecycle.label(1) == "mug"


def test_names_that_are_withdrawn_leave_the_other_votes() -> None:
    lifecycle = Lifecycle(RULES)
    lifecycle.mark_detected(1, "cup", 0.5, 0)
    lifecycle.mark_detected(1, "mug", 0.9, 0)
    lifecycle.mark_detected(2, "mug", 0.9, 0)
    assert lifecycle.keep_labels(["cup"]) == [2]
    assert lifecycle.label(1) == "cup"


def test_a_repeat_goes_once_its_detections_go_to_another() -> None:
    lifecycle = confirmed(1)
    lifecycle.mark_detected(2, "mug", 0.5, 0)
    lifecycle.mark_missed(2)
    assert lifecycle.is_duplicate(2), "a tentative one at once"
    for _ in range(3):
        lifecycle.mark_missed(1)
    assert not lifecycle.is_duplicate(1)
    lifecycle.mark_missed(1)
    assert lifecycle.is_duplicate(1)


def test_who_makes_room() -> None:
    lifecycle = confirmed(1, 2, 3)
    assert lifecycle.eviction_candidate(0.99) is None, "confirmed and in view"
    lifecycle.mark_detected(4, "mug", 0.4, 0)
    assert lifecycle.eviction_candidate(0.5) == 4
    assert lifecycle.eviction_candidate(0.3) is None
    lifecycle.observe(2, 0.9, True, 1 * S)
    for hidden in (2, 3):
        lifecycle.observe(hidden, 0.0, False, 2 * S)
    assert lifecycle.eviction_candidate(0.1) == 3, "out of view for longest"


def test_what_is_forgotten_is_not_there() -> None:
    lifecycle = confirmed(1)
    lifecycle.forget(1)
    lifecycle.forget(1)
    assert 1 not in lifecycle
    assert lifecycle.ids == []


def test_what_detections_say_of_each_name() -> None:
    lifecycle = Lifecycle(RULES)
    lifecycle.mark_detected(1, "mug", 0.9, 0, [1.0, 2.0])
    lifecycle.mark_detected(1, "cup", 0.5, 0, [5.0, 6.0])
    lifecycle.mark_missed(1)
    assert lifecycle.name_features(1, "mug") == [1.0, 2.0, 1 / 3]
    assert lifecycle.name_features(1, "cup") == [5.0, 6.0, 1 / 3]
    assert lifecycle.name_features(1, "jar") is None
    lifecycle.keep_labels(["mug"])
    assert lifecycle.name_features(1, "cup") is None
    lifecycle.observe(1, 0.0, False, 0)
    assert lifecycle.name_features(1, "mug") == [1.0, 2.0, 1 / 3]
    lifecycle.mark_missed(1)  # out of view in a round of the detector: what comes back may be another thing
    assert lifecycle.name_features(1, "mug") is None
    lifecycle.mark_detected(1, "mug", 0.9, 0, [7.0, 8.0])
    assert lifecycle.name_features(1, "mug") == [7.0, 8.0, 1.0]


def test_a_detection_elsewhere_voids_what_was_known_of_the_name() -> None:
    lifecycle = Lifecycle(RULES)
    for _ in range(3):
        lifecycle.mark_detected(1, "mug", 0.9, 0, [4.0])
    lifecycle.mark_detected(1, "mug", 0.3, 0, [-1.0], anew=True)
    assert lifecycle.name_features(1, "mug") == [-1.0, 1.0]


def test_a_state_holds_the_names() -> None:
    lifecycle = Lifecycle(RULES)
    lifecycle.mark_detected(1, "mug", 0.9, 0, [1.0])
    again = Lifecycle(RULES)
    again.restore(lifecycle.state())
    for each in (lifecycle, again):
        each.mark_detected(1, "mug", 0.9, 0, [2.0])
        assert each.name_features(1, "mug") == [1.5, 1.0]
