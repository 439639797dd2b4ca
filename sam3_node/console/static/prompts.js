// What the user marks and types becomes requests to the node. A mark goes with the seq and the epoch that were on the
// screen when it was made.

import { CLICK_FIRST, describeError, isTouch } from "./messages.js";
import { call } from "./requests.js";
import { fromBase64, isInside } from "./wire.js";

const SLOW_PREVIEW_MS = 250;
const REST_MS = 8000;
const OLD_PREVIEW_MS = 1000;
const OLD_CHOICE_MS = 4000;
const MAX_PREVIEW_SHARE = 0.6;
const DOUBLE_MS = 500;
const DOUBLE_PX = 12;
const YOUNG_MS = 10_000;

/** Sends marks: to the node, or on a recording to its file, by `mark(view, fields)`. `ask` and `tell` send the worker a message, with and without a reply; `say(text, isError, actions)` shows a
 * line with buttons [text, function]; `goLive` ends a still picture; `getNewest(camera)` returns the newest view. */
export class Prompts {
  constructor(host) {
    this.isLive = () => true;
    Object.assign(this, host);
    this.previews = true;
    this.hovering = null;
    this.under = null; // the tile that the pointer is on
    this.isPreviewing = false;
    this.meant = null; // {tile, place, masks, at, until} of the preview: what a click there may mean, and which one is chosen
    this.restUntil = 0;
    this.isMarking = false;
    this.lastMark = null;
    this.negates = false; // on a touch screen: the next marks say what an object is not
    this.again = null; // {camera, id, label} of a lost object that the next mark shows
    this.shownName = ""; // the name of the last exemplar
    this.young = []; // objects that were added on live pictures, until masks contain them
  }

  /** A point on an object corrects it. A point elsewhere starts one; one of what it is not, corrects the chosen one. */
  async point(tile, [x, y], isOn, view) {
    const isPositive = isOn && !this.negates;
    const choice = isPositive && this.isMeant(tile, [x, y]) ? { choice: this.meant.at } : {};
    await this.once(tile, [x, y], async () => {
      // on a recording, a mark belongs to the chosen object, also where its mask is not
      const chosen = this.isLive() ? null : this.getSelected(tile.camera);
      const hit = chosen ?? (await this.ask({ type: "hit", camera: tile.camera, x, y })) ?? this.findYoung(tile, x, y);
      if (!this.canChange()) {
        this.select(tile.camera, hit);
        return;
      }
      const id = hit ?? (isPositive ? null : this.getSelected(tile.camera));
      if (id === null && !isPositive) {
        const how = isTouch ? "tap it or its row" : "click it, or press its number";
        this.say(`Choose an object first: ${how}. Then mark what it is not.`, true);
        return;
      }
      const prompt = { points: [[x, y]], labels: [isPositive ? 1 : 0] };
      if (isPositive && (await this.addAgain(tile, prompt, view))) return;
      if (id === null) await this.add(tile, { ...prompt, ...choice }, view);
      else await this.refine(tile, id, prompt, view);
    });
  }

  /** A box starts an object. On a recording, it corrects the chosen one. */
  async box(tile, box, view) {
    if (!this.canChange()) return;
    const chosen = this.isLive() ? null : this.getSelected(tile.camera);
    await this.once(tile, box, async () => {
      if (chosen !== null) {
        await this.refine(tile, chosen, { box }, view);
        return;
      }
      if (!(await this.addAgain(tile, { box }, view))) await this.add(tile, { box }, view);
    });
  }

  /** A box shows what to look for, or what not: all like this, under the name that is typed, or that was shown last. */
  async exemplar(tile, box, isLike, view) {
    if (!this.canChange() || !this.isLive()) return;
    const name = this.getName() || this.shownName;
    if (!name) {
      this.say("Type a name first: all that is like the box gets it.", true);
      return;
    }
    await this.once(tile, box, async () => {
      await this.send(tile, "add_exemplar", { name, boxes: [box], labels: [isLike ? 1 : 0] }, view, () => {
        this.shownName = name;
        this.say(`Looks for ${name}: all that is ${isLike ? "like" : "not like"} this box.`);
      });
    });
  }

  /** Carry out one mark at a time. The second click of a double click is none. */
  async once(tile, place, run) {
    const { lastMark } = this;
    const isNear = isAt(lastMark, tile, place);
    if (this.isMarking || (isNear && Date.now() - lastMark.at < DOUBLE_MS)) return;
    this.isMarking = true;
    tile.element.dataset.marking = "yes";
    try {
      await run();
    } finally {
      this.isMarking = false;
      delete tile.element.dataset.marking;
      this.lastMark = { tile, place, at: Date.now() };
    }
  }

  /** Let the next mark show where an object is again. */
  readd(camera, id, label) {
    this.again = { camera, id, label };
    this.say(`${CLICK_FIRST} ${label} on the picture of ${camera}.`, false, [["Cancel", () => (this.again = null)]]);
  }

  async addAgain(tile, prompt, view) {
    const { again } = this;
    if (again?.camera !== tile.camera) return false;
    this.again = null;
    const isKnown = view.masks?.instances.some((instance) => instance.id === again.id);
    if (isKnown) await this.refine(tile, again.id, prompt, view);
    else await this.add(tile, { ...prompt, label: again.label }, view);
    return true;
  }

  async add(tile, prompt, view) {
    if (!this.isLive()) {
      await this.keep(view, { ...prompt, label: this.getLabel() || "object" }, "Added");
      return;
    }
    await this.send(tile, "add_object", prompt, view, (result) => {
      const { camera, id, mask } = result;
      if (mask) this.young.push({ camera, id, at: Date.now(), instance: { box: mask.box, bits: fromBase64(mask.bits) } });
      this.select(camera, id);
      const name = prompt.label ? `${prompt.label} (${id})` : `object ${id}`;
      this.say(`Added ${name}.`, false, [
        ["Name it", () => this.askLabel(id)],
        ["Undo", () => this.remove(camera, id, name, this.getNewest(camera) ?? view)],
      ]);
    });
  }

  async refine(tile, id, prompt, view) {
    this.select(tile.camera, id);
    if (!this.isLive()) {
      await this.keep(view, { ...prompt, id, label: this.nameOf(view, id) }, "Marked");
      return;
    }
    await this.send(tile, "refine_object", { id, ...prompt }, view, () => this.say(`Corrected object ${id}.`));
  }

  /** Keep a mark on a frame of a recording, and choose its object. */
  async keep(view, fields, done) {
    await this.try(async () => {
      const { id, label } = await this.mark(view, fields);
      this.select(view.camera, id);
      this.say(`${done} ${label ?? "object"} (${id}) on frame ${view.seq}.`, false, [["Undo", () => this.undo()]]);
    });
  }

  async remove(camera, id, label, view) {
    if (!this.isLive()) {
      await this.keep(view, { id, removed: true }, "Removed, from here on,");
      return;
    }
    await this.try(async () => {
      await call("remove_object", { id, camera, ...epoch(view) });
      this.tell({ type: "patch", camera, id });
      this.select(camera, null);
      this.say(`Removed ${label}.`);
    });
  }

  async rename(camera, id, label, view) {
    await this.try(async () => {
      await call("rename_object", { id, label, camera, ...epoch(view) });
      this.say(`Object ${id} is now called ${label}.`);
    });
  }

  /** Return the object that was added at a place on a live picture a moment ago, if masks do not contain it yet. */
  findYoung(tile, x, y) {
    if (isFrozen(tile)) return null; // a still picture shows what was added on it
    const inMasks = new Set(tile.shown.masks?.instances.map((instance) => instance.id));
    this.young = this.young.filter(({ id, at, camera }) => Date.now() - at < YOUNG_MS && !(camera === tile.camera && inMasks.has(id)));
    return this.young.find(({ camera, instance }) => camera === tile.camera && isInside(instance, x, y))?.id ?? null;
  }

  /** Forget objects that masks do not contain yet: some may have been removed. */
  forgetYoung() {
    this.young = [];
  }

  /** Preview what a click would give, while the node answers quickly. The newest place supersedes the others. */
  hover(tile, place) {
    if (place && this.isMeant(tile, place)) return; // the hand shakes a little
    this.meant = null;
    this.hovering = place && { tile, place };
    this.under = place && tile;
    if (!place) tile.showMask(null);
    if (!this.isPreviewing) this.previewNext();
  }

  async previewNext() {
    const wanted = this.hovering;
    const isWanted = this.previews && this.isLive() && this.canChange() && wanted?.tile.shown?.masks && performance.now() > this.restUntil;
    if (!isWanted) return;
    this.isPreviewing = true;
    this.hovering = null;
    const begin = performance.now();
    const { tile, place } = wanted;
    try {
      const hit = await this.ask({ type: "hit", camera: tile.camera, x: place[0], y: place[1] });
      const { seq, camera } = origin(tile.shown);
      const result = hit === null ? await call("segment", { points: [place], seq, camera, multimask: true }) : null;
      this.showPreview(tile, result);
      if (result && this.under === tile) this.meant = { tile, place, masks: result.masks ?? [], at: null };
      if (result && performance.now() - begin > SLOW_PREVIEW_MS) this.restUntil = performance.now() + REST_MS;
    } catch {
      tile.showMask(null);
      this.restUntil = performance.now() + 500;
    }
    this.isPreviewing = false;
    if (this.hovering) this.previewNext();
  }

  /** Show a preview, unless the pointer has left or the mask is most of the picture. On a live picture it soon ends. */
  showPreview(tile, result) {
    const { width, height } = tile.shown;
    const isLarge = result && result.mask.area > MAX_PREVIEW_SHARE * width * height;
    const isShown = result && !isLarge && this.under === tile;
    tile.element.dataset.preview = isShown ? result.seq : ""; // the frame that the preview is of
    tile.showMask(isShown ? result.mask : null, isFrozen(tile) ? null : OLD_PREVIEW_MS);
  }

  /** Show the next of the masks that a click here may mean: a part or the whole. Return false if there is no other. */
  chooseNext() {
    const { meant } = this;
    if (!meant || meant.masks.length < 2 || this.under !== meant.tile) return false;
    meant.at = meant.at === null ? 0 : (meant.at + 1) % meant.masks.length;
    const { mask, score } = meant.masks[meant.at];
    meant.until = isFrozen(meant.tile) ? Infinity : performance.now() + OLD_CHOICE_MS;
    meant.tile.showMask(mask, isFrozen(meant.tile) ? null : OLD_CHOICE_MS);
    this.say(`Mask ${meant.at + 1} of ${meant.masks.length}, score ${score.toFixed(2)}. ${CLICK_FIRST} it to track it.`);
    return true;
  }

  /** True if a mask was chosen for a click at this place. */
  isMeant(tile, place) {
    return this.meant?.at != null && performance.now() < this.meant.until && isAt(this.meant, tile, place);
  }

  async send(tile, op, args, view, done) {
    this.meant = null;
    this.restUntil = performance.now() + 300;
    await this.try(
      async () => {
        const result = await call(op, { ...args, ...origin(view) });
        if (result.mask) this.tell({ type: "patch", label: args.label, ...result });
        tile.showMask(result.mask ?? null);
        done(result);
      },
      { unknown_frame: () => this.offerNewest(tile, op, args, done) },
    );
  }

  /** The frame of a mark is gone. Say so, and let the user decide whether the mark fits the newest picture. */
  offerNewest(tile, op, args, done) {
    const run = () => {
      const newest = this.getNewest(tile.camera);
      this.goLive();
      this.send(tile, op, args, newest, done);
    };
    const text = `This picture is too old to mark. On the newest one, another thing may be there.`;
    this.say(text, true, [["Mark the newest", run], ["Go live", this.goLive]]);
  }

  async try(run, handlers = {}) {
    try {
      await run();
    } catch (error) {
      if (handlers[error.code]) handlers[error.code]();
      else this.say(describeError(error), true);
    }
  }
}

function isFrozen(tile) {
  return tile.element.dataset.frozen === "true";
}

/** True if a mark or a preview is as near as the two places of a double click. */
function isAt(mark, tile, place) {
  if (mark?.tile !== tile) return false;
  const reach = (DOUBLE_PX * tile.shown.width) / tile.overlay.clientWidth;
  return Math.hypot(place[0] - mark.place[0], place[1] - mark.place[1]) < reach;
}

function origin(view) {
  return { seq: view.seq, camera: view.camera, ...epoch(view) };
}

function epoch(view) {
  return view?.masks?.epoch == null ? {} : { epoch: view.masks.epoch };
}
