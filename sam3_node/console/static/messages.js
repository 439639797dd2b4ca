// Words for people: events of the node, errors, and what the page notices itself.

const LOST_MS = 3000; // an arm hides things for a moment

export const isTouch = matchMedia("(pointer: coarse)").matches;
/** "click" or "tap", with a capital letter for the beginning of a sentence. */
export const CLICK = isTouch ? "tap" : "click";
export const CLICK_FIRST = isTouch ? "Tap" : "Click";

const ERRORS = {
  full: "All places for objects are taken. Remove an object first.",
  node_restarted: "The node was started again, so this object is gone. Add it again.",
  busy: "The node is busy. Try again in a moment.",
  no_answer: "The node does not answer.",
  unknown_object: "The node no longer has this object.",
};

/** Return the words for an error of a request. */
export function describeError(error) {
  const text = ERRORS[error.code];
  if (text) return text;
  const message = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  return /[.?!]$/.test(message) ? message : `${message}.`;
}

/** Return a time in words: "12 s", "5 min" or "2 h". */
export function describeAge(seconds) {
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(0)} h`;
}

/** Return the words for an object that was lost. */
export function describeLost({ id, label, age_s, held, hidden_by }) {
  const seen = age_s == null ? "" : ` · seen ${describeAge(age_s)} ago`;
  const why = [held && "held", hidden_by && `hidden by ${hidden_by}`].filter(Boolean);
  return `${label || "unnamed"} (${id})${seen}${why.map((text) => ` · ${text}`).join("")}`;
}

/** Return the words of an event of the node, null for one that people need not read. `nameOf(camera, id)` names an object. */
export function describeEvent({ op, camera, id, label, prompts, error, seq, episode, keep, ids, absent_s }, nameOf) {
  const name = () => label || nameOf(camera, Number(id));
  const words = {
    add_object: () => `Added ${label || "an object"}.`,
    add_like: () => `Added ${label || "an object"} by its looks.`,
    refine_object: () => `Corrected ${name()}.`,
    remove_object: () => `Removed ${name()}.`,
    rename_object: () => `Object ${id} is now called ${label}.`,
    set_prompts: () => (prompts ? `Looks for ${prompts}.` : "Looks for nothing by name."),
    add_exemplar: () => "Looks for all that is like a box.",
    reset: () => "Removed all objects.",
    begin_episode: () => `Began episode ${episode}.`,
    end_episode: () => `Ended episode ${episode}: ${String(keep).toLowerCase() === "true" ? "kept" : "discarded"}.`,
    pause: () => "Paused.",
    resume: () => "Goes on.",
    caught_up: () => (error ? `Could not follow ${name()} from its ${CLICK}: ${error}.` : `Follows ${name()} now.`),
    grasped: () => `The gripper holds ${name()}.`,
    released: () => `The gripper has released ${name()}.`,
    recalled: () => `Knows ${name()} again, after ${describeAge(Number(absent_s))}.`,
    ambiguous: () => `Something came into view that may be any of the objects ${ids}.`,
    served: () => `Camera ${camera} has joined.`,
    dropped: () => `Camera ${camera} has lost its place to another one.`,
    failed: () => `Frame ${seq} of ${camera} failed: ${error}.`,
    restored: () => "Continued from a snapshot.",
    pin_frame: () => null,
    regrouped: () => null,
  };
  return words[op] ? words[op]() : `${op.replaceAll("_", " ")}.`;
}

/** Notices objects that are lost and found again on live pictures. `note` gets {kind, camera, id, label}. */
export class Watch {
  constructor(note) {
    this.note = note;
    this.cameras = new Map();
  }

  /** Take the masks of a live picture. */
  see(camera, masks, now = performance.now()) {
    const before = this.cameras.get(camera);
    const objects = before?.epoch === masks.epoch ? before.objects : new Map();
    this.cameras.set(camera, { epoch: masks.epoch, objects });
    const seen = new Set(masks.shed?.held ?? []);
    for (const { id, label, area, state } of masks.instances) {
      seen.add(id);
      const known = objects.get(id) ?? { isLost: false };
      objects.set(id, known);
      known.label = label;
      if (state === "tentative") continue;
      if (area > 0) {
        if (known.isLost) this.note({ kind: "found", camera, id, label });
        Object.assign(known, { isLost: false, wasSeen: true, hiddenAt: null });
      } else {
        known.hiddenAt ??= now;
        if (!known.isLost && known.wasSeen && now - known.hiddenAt >= LOST_MS) {
          known.isLost = true;
          this.note({ kind: "lost", camera, id, label });
        }
      }
    }
    for (const id of objects.keys()) if (!seen.has(id)) objects.delete(id);
  }
}
