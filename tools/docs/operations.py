"""Make the table of control operations: arguments from the code, types and results from here."""

from typing import Any

from sam3_node.schema.operations import (
    CHANGES,
    EPISODE_MARKS,
    OPERATIONS,
    PROMPT,
    Operation,
    PromptOperation,
    list_required,
)

from .tables import code, table

_MASK = "`id`, `camera`, `epoch`, `seq`, `mask`, `score`, `age_ms`"

RESULTS = {
    "add_object": "`id`, `camera`, `epoch`; with `seq` also `seq`, `mask`, `score`, `age_ms`, `stride`. `priority` is "
    "`normal` or `low`; `choice` is 0 for the first of `segment`'s `masks` for the same prompt",
    "add_like": f"{_MASK}: on the latest frame of `camera`, what looks like the object `like` of `like_camera`, "
    "also of one that was lost. Refused unless one place there looks like it for sure",
    "refine_object": f"{_MASK}, `stride`",
    "pin_frame": "`camera`, `epoch`, `seq`, `age_ms`, `lease_s` (60 if absent, 0..120), see below; 0 lets it go",
    "remove_object": "`id`, `camera`, `epoch`",
    "rename_object": "`id`, `label` as it is used, `camera`, `epoch`. Detections no longer change the label",
    "list_objects": "`objects`: list of `camera epoch silent_s id label state score age frames_since_seen priority`",
    "segment": f"{_MASK[6:]}. Points and/or a box. `multimask` adds `masks`: each `mask score` that they may mean",
    "segment_everything": "`camera`, `epoch`, `seq`, `age_ms` and `masks`, a list of `mask score`, the surest first. "
    "`grid` is 1..32 points a side (16), `min_iou` (0.88), `min_stability` (0.95) and `max_overlap` (0.7) are in 0..1, "
    "`most` is 1..256 (100)",
    "segment_photo": "`width`, `height` and `masks`, a list of `label mask score`. `photo` is a JPEG or PNG of no "
    "camera. `objects` is a list of 1 to 64 maps of `points`, `labels` and `box`, each a mask in their order, with "
    '`label` ""; or `names`, with `scores` as of `set_prompts`: a mask of each thing found, the best first. '
    "`multimask` gives all masks that the one object may mean",
    "points": "`id`, `camera`, `epoch`, `seq`, `frame`, `points_m`: up to `count` (1000 if absent, at most 10,000) "
    "points of the object's visible surface on the latest frame, as in a masks message",
    "where": "`objects`: those in view first, then those that were seen last, see below. Without `id` and `label`, "
    "all. An empty list: unknown",
    "picture": "`id`, `camera`, `epoch`, `seq`, `capture_ns`, `jpeg`, and the `box` of that frame that it shows: the "
    "last picture of an object, also of one that was lost, at most 128 pixels wide and high. Refused if there is none",
    "add_exemplar": "`prompts`; of a frame also `seq`, `age_ms`. See [exemplars](objects-by-name.md#all-like-this)",
    "reset": "forgets all objects, of that camera or of all",
    "pause": "`paused`: true",
    "resume": "`paused`: false",
    "status": "the node's state: `node`, model, memory, and for each camera `epoch`, `silent_s`, counts, rates, ages, "
    "latencies, the frames that are kept for prompts with their bytes, and its masks' offset from the newest camera's; "
    "`frames_refused` has, for each camera whose messages cannot be read, their number (`frames`), `last_error`, "
    "`endpoint` and `silent_s`; "
    "`episode` is the open one, or null; "
    "`helpers_ended` maps recorders and other helpers of its group that have ended to the reason",
    "describe": "everything that a recording needs for making the masks again: the model part of `status`, all "
    "settings, digests of the weights, versions, and `events`, the number of events so far",
    "snapshot": "`snapshot`, its number. The node copies what it tracks between two frames. With `name` (1 to 64 "
    "letters, digits, _ and -) it writes a file beside `snapshot.path`, else it keeps the bytes for 2 minutes",
    "read_snapshot": "`ready`, false while the snapshot is made; then `size`, `sha256` and `data`, at most 4 MiB from "
    "`offset`, empty for one with a name",
    "restore": "tracks what a snapshot with a name holds; ids begin again. `sha256`, `saved_ns`, `ids_continue` "
    "(false), `cameras`. Published as the event `restored`",
    "hand_over": "`snapshot`, as above, for `taker`, which names itself (a line of at most 200 characters), with a "
    "`token` of its choice. The node pauses in the same moment, published as the event `pause`, and refuses changes. "
    "Without `taker` it is confirmed at once; see below",
    "confirm_hand_over": "`node`, and the `state` of the hand-over with this `token`: `confirmed`, the ids are the "
    "taker's, and if this node is resumed, its ids begin again; `expired`, `cancelled`, the node works on with the "
    "same ids; `taken_back`, it was resumed; `unknown` to this process. `accepted`: false cancels",
    "begin_episode": "`episode`, its number in this run of the node, `task` and `begun_ns`. `task` is a line of at "
    "most 200 characters. Refused while an episode is open. See [LeRobot](lerobot.md)",
    "end_episode": "`episode`, `task`, `begun_ns`, `ended_ns` and `keep`; with `keep` false recorders discard it. The "
    "events of both operations have these results as `args`",
    "set_prompts": "`prompts` as they are used: trimmed, each once. On all cameras; refused without a detector. "
    "`prompts` is a list of at most 256 texts of at most 200 characters; `scores` maps some of them to 0.01..1, `most` "
    "to integers from 1, `priorities` to `normal` or `low`",
}


def operation_table() -> str:
    """Return the table of operations. Raises KeyError for an operation that is not described here."""
    published = CHANGES + EPISODE_MARKS
    rows = [
        [code(op), _list(kind), RESULTS[op], "yes" if op in published else ""]
        for op, kind in OPERATIONS.items()
    ]
    return table(["op", "args", "result", "published as an event"], rows)


def _list(kind: type[Operation[Any]]) -> str:
    required = [code(name) for name in kind.__struct_fields__ if name in list_required(kind)]
    takes_prompt = issubclass(kind, PromptOperation)
    prompt = ["prompt"] if takes_prompt else []
    own = [name for name in kind.__struct_fields__ if name not in PROMPT or not takes_prompt]
    optional = [code(name) + "?" for name in own if name not in list_required(kind)]
    return ", ".join([*required, *prompt, *optional])
