// Pictures that stand still: the node keeps their frames for marks, while the page renews the lease.

import { call } from "./requests.js";

const LEASE_S = 60;
const RENEW_MS = 20_000;
const MAX_HOLD_MS = 600_000; // nobody may stand before the page
const SETTLE_MS = 200; // between two places of the slider

/** Holds one frame of each camera. `changed` is called when a frame is held or gone. */
export class Pins {
  constructor(changed) {
    this.changed = changed;
    this.pins = new Map();
    setInterval(() => this.renew(), RENEW_MS);
  }

  /** Hold the frame of a view, in the place of another one of its camera. */
  hold(view) {
    const before = this.pins.get(view.camera);
    if (before?.seq === view.seq || view.masks?.epoch == null) return;
    if (before) this.drop(before);
    const pin = { camera: view.camera, seq: view.seq, epoch: view.masks.epoch, state: "asking", until: Date.now() + MAX_HOLD_MS };
    this.pins.set(pin.camera, pin);
    pin.timer = setTimeout(() => this.ask(pin), before ? SETTLE_MS : 0);
  }

  /** Let all frames go. */
  release() {
    for (const pin of this.pins.values()) this.drop(pin);
    this.pins.clear();
  }

  /** Return the pin of the frame that a camera's picture shows, if it was asked for. */
  find(camera, seq) {
    const pin = this.pins.get(camera);
    return pin?.seq === seq ? pin : null;
  }

  renew() {
    for (const pin of this.pins.values()) {
      const isWatched = !document.hidden && Date.now() < pin.until;
      if (pin.state === "held" && isWatched) this.ask(pin);
      else if (pin.state === "held" && Date.now() > pin.renewed + 1000 * LEASE_S) this.note(pin, "gone");
    }
  }

  async ask(pin) {
    try {
      await this.send(pin, LEASE_S);
      pin.renewed = Date.now();
      if (this.pins.get(pin.camera) === pin) this.note(pin, "held");
      else this.drop({ ...pin, state: "held" }); // the slider has gone on meanwhile
    } catch (error) {
      if (pin.renewed && ["no_answer", "no_console", "busy"].includes(error.code)) return; // the lease goes on: ask again later
      this.note(pin, ["unknown_frame", "node_restarted"].includes(error.code) ? "gone" : "refused");
    }
  }

  drop(pin) {
    clearTimeout(pin.timer);
    if (pin.state === "held") this.send(pin, 0).catch(() => {}); // its lease ends by itself
  }

  send({ camera, seq, epoch }, lease) {
    return call("pin_frame", { camera, seq, epoch, lease_s: lease });
  }

  note(pin, state) {
    pin.state = state;
    this.changed();
  }
}

/** Return what marks on a picture that stands still do: a line for people. */
export function describeMarks(pin) {
  if (!pin || pin.state === "asking") return "";
  if (pin.state === "held") return `Marks work on this picture until ${new Date(pin.until).toTimeString().slice(0, 5)}.`;
  if (pin.state === "gone") return "Too old to mark. A mark is offered on the newest picture.";
  return "The node cannot hold this picture: mark it soon.";
}
