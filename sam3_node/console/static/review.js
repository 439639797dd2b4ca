// Marks on a recording: what people have said of its frames, and the queue of the frames to look at next.

import { showPairs } from "./panels.js";
import { call } from "./requests.js";

const WHY = {
  doubtful: ({ frames }) => `doubtful on ${frames} frames`,
  gone: ({ frames }) => `without a mask on ${frames} frames`,
  jump: () => "its shape jumps",
};

/** Keeps the marks of a recording. `host` has try, say, select(camera, id), goTo(index), nameOf(camera, id), getView(),
 * getSelected() and changed(). */
export class Review {
  constructor(host) {
    Object.assign(this, host);
    this.marks = [];
    this.queue = [];
    this.visited = new Set(); // entries of the queue that this page has shown
  }

  /** Take the marks and the queue from the server. */
  take({ marks, queue }) {
    Object.assign(this, { marks, queue });
    this.show();
    this.changed();
  }

  /** Return the marks with a prompt on a frame. */
  findPrompts(camera, seq) {
    return this.marks.filter((mark) => mark.camera === camera && mark.seq === seq && (mark.points || mark.box));
  }

  /** Return the label that a mark has given an object. */
  findLabel(camera, id) {
    return this.marks.find((mark) => mark.camera === camera && mark.id === id && mark.label)?.label ?? "object";
  }

  /** Go to the next frame of the queue, and choose the object to look at. */
  next() {
    const name = ({ camera, seq, id, reason }) => `${camera} ${seq} ${id} ${reason}`;
    let entry = this.queue.find((one) => !this.visited.has(name(one)));
    if (!entry) {
      this.visited.clear();
      entry = this.queue[0];
    }
    if (!entry) {
      this.say("No frame is left to look at.");
      return;
    }
    this.visited.add(name(entry));
    this.goTo(entry.index);
    this.select(entry.camera, entry.id);
    this.say(`Object ${entry.id}: ${WHY[entry.reason](entry)}.`);
  }

  /** Keep a mark on the frame of a view. Return it with the id of its object. */
  async mark(view, fields) {
    return call("mark", { camera: view.camera, seq: view.seq, ...fields });
  }

  /** State what the chosen object is on the shown frame, or all objects if none is chosen. */
  async state(state) {
    const view = this.getView();
    const id = view && this.getSelected(view.camera);
    if (!view) return;
    await this.try(async () => {
      await this.mark(view, { state, ...(id === null ? {} : { id }) });
      this.say(`${id === null ? "All of the frame" : this.nameOf(view.camera, id)}: ${state}.`);
    });
  }

  async undo() {
    await this.try(async () => {
      const mark = await call("undo_mark");
      if (mark.camera === undefined) this.say("No mark is left to take back.");
      else this.say(`Took back: ${describe(mark)} on frame ${mark.seq}.`);
    });
  }

  /** Show how many marks there are, how long the queue is, and what was said of the shown frame. */
  show() {
    const view = this.getView();
    const here = this.marks.filter((mark) => mark.camera === view?.camera && mark.seq === view?.seq);
    showPairs("#review", [
      ["to look at", String(this.queue.length)],
      ["marks", String(this.marks.length)],
      ...here.slice(-8).map((mark, number) => [`${number + 1}`, describe(mark)]),
    ]);
    document.querySelector("#undo-mark").disabled = !this.marks.length;
  }
}

function describe({ id, label, points, labels, box, hidden, removed, state }) {
  const whose = id === undefined ? "frame" : `${label ?? "object"} ${id}`;
  const isPositive = labels?.[0] !== 0;
  const what = box ? "box" : points ? `point ${isPositive ? "inside" : "outside"}` : hidden ? "hidden" : removed ? "removed" : state;
  return `${whose}: ${what}`;
}
