"""The queue of frames to look at: its order, what a run is, and what people have said of it."""

from collections.abc import Iterable

import numpy as np

from sam3_node.bags.review import QueueEntry, Reviewer
from sam3_node.schema.marks import Mark, MarkState
from sam3_node.types import Instance, Mask, MaskFrame

SIZE = (40, 60)
FRAMES = 60


def square(x: int, side: int = 10) -> Mask:
    image = np.zeros(SIZE, np.bool_)
    image[10 : 10 + side, x : x + side] = True
    return Mask.from_full(image)


def instance(object_id: int, mask: Mask, doubtful: bool = False) -> Instance:
    state = "tracked" if mask.area else "occluded"
    return Instance(object_id, "thing", 0.9, state, 0, 0, mask, doubtful=doubtful)


def queue(
    frames: dict[int, Iterable[Instance]], marks: Iterable[Mark] = (), rest: Iterable[Instance] = ()
) -> list[QueueEntry]:
    """Return the queue of a recording; frames that are not named have the `rest`."""
    reviewer = Reviewer()
    for seq in range(FRAMES):
        masks = MaskFrame("cam0", seq, 0, SIZE[1], SIZE[0], instances=tuple(frames.get(seq, rest)))
        reviewer.add(seq, masks)
    return reviewer.queue(list(marks))


def said(seq: int, object_id: int | None, state: MarkState = "checked") -> Mark:
    return Mark(camera="cam0", seq=seq, id=object_id, state=state)


DOUBT = {
    seq: [instance(1, square(5), seq in range(8, 32)), instance(2, square(30), seq == 3)]
    for seq in range(FRAMES)
}


def test_the_most_doubtful_object_comes_first_where_its_doubt_begins() -> None:
    found = queue(DOUBT)
    assert [(one.seq, one.id, one.frames) for one in found] == [(8, 1, 24), (3, 2, 1)]
    assert [one.doubt for one in found] == [24 / FRAMES, round(1 / FRAMES, 4)]
    assert {one.reason for one in found} == {"doubtful"}


def test_a_jump_of_shape_is_offered_where_it_ends_and_motion_is_none() -> None:
    sides = {12: 8, 13: 8, 14: 4}
    moving = {
        seq: [instance(1, square(seq % 40, sides.get(min(seq, 14), 10)), seq == 2)] for seq in range(FRAMES)
    }
    found = queue(moving)
    assert [(one.seq, one.reason) for one in found] == [(14, "jump"), (2, "doubtful")]
    assert found[0].jump > 0.7
    # what a person has looked at does not come again
    assert not queue(moving, [said(2, 1), said(12, None)])


def test_an_object_that_is_gone_is_asked_for_once() -> None:
    gone = {seq: [instance(1, Mask.empty(SIZE))] for seq in range(9, 15)}
    (found,) = queue(gone, rest=[instance(1, square(5))])
    assert (found.seq, found.reason, found.frames) == (9, "gone", 6)


def test_what_was_checked_splits_a_run_and_a_correction_speaks_of_the_rest() -> None:
    assert [one.seq for one in queue(DOUBT, [said(8, 1), said(3, None)])] == [20]
    # the frames beside one that was looked at are much the same
    assert not queue(DOUBT, [said(8, None), said(3, 2), *(said(seq, 1) for seq in (14, 20, 26))])
    mark = Mark(camera="cam0", seq=9, id=1, points=((8.0, 12.0),))
    assert [(one.seq, one.frames) for one in queue(DOUBT, [mark])] == [(3, 1)]
    # once it is carried out, its own frame is not doubtful any more, and what follows is asked for again
    redone = {**DOUBT, 9: [instance(1, square(5)), instance(2, square(30))]}
    assert [(one.seq, one.frames) for one in queue(redone, [mark])] == [(20, 22), (3, 1)]
    later = {**DOUBT, 8: [instance(1, square(5)), instance(2, square(30))]}
    assert [one.seq for one in queue(later, [said(8, 1), said(3, 2)])] == [20]
    # an opinion that is taken back says nothing
    assert queue(DOUBT, [said(8, 1), said(8, 1, "open")]) == queue(DOUBT)
    # a prompt for a new object says nothing of the others
    assert queue(DOUBT, [Mark(camera="cam0", seq=8, points=((8.0, 12.0),))]) == queue(DOUBT)
