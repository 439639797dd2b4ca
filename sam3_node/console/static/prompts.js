// What the user marks and types becomes requests to the node. A mark goes with the seq and the epoch that were on the
// screen when it was made.

import { call } from "./requests.js";

const SLOW_PREVIEW_MS = 250;
const REST_MS = 8000;

/** Sends marks. `ask` and `tell` send the worker a message, with and without a reply; `say(text, isError)` shows a line. */
export class Prompts {
  constructor({ ask, tell, say, select, getSelected, canChange }) {
    Object.assign(this, { ask, tell, say, select, getSelected, canChange });
    this.previews = true;
    this.hovering = null;
    this.under = null; // the tile that the pointer is on
    this.isPreviewing = false;
    this.restUntil = 0;
  }

  /** A point on an object corrects it. A point elsewhere starts one; one of what it is not, corrects the chosen one. */
  async point(tile, [x, y], isPositive, view) {
    const hit = await this.ask({ type: "hit", camera: tile.camera, x, y });
    const chosen = this.getSelected(tile.camera);
    const id = hit ?? (isPositive ? null : chosen);
    if (!this.canChange()) {
      this.select(tile.camera, hit);
      return;
    }
    if (id === null && !isPositive) {
      this.say("Choose an object first: click it, or press its number. Then mark what it is not.", true);
      return;
    }
    const prompt = { points: [[x, y]], labels: [isPositive ? 1 : 0] };
    if (id === null) await this.add(tile, prompt, view);
    else await this.refine(tile, id, prompt, view);
  }

  /** A box starts an object. */
  async box(tile, box, view) {
    if (this.canChange()) await this.add(tile, { box }, view);
  }

  async add(tile, prompt, view) {
    await this.send(tile, "add_object", { ...prompt, ...origin(view) }, (result) => {
      this.select(tile.camera, result.id);
      this.say(`Added object ${result.id}. F2 names it, shift and click corrects it.`);
    });
  }

  async refine(tile, id, prompt, view) {
    this.select(tile.camera, id);
    await this.send(tile, "refine_object", { id, ...prompt, ...origin(view) }, () => this.say(`Corrected object ${id}.`));
  }

  async remove(camera, id, view) {
    await this.try(async () => {
      await call("remove_object", { id, camera, ...epoch(view) });
      this.tell({ type: "patch", camera, id });
      this.select(camera, null);
      this.say(`Removed object ${id}.`);
    });
  }

  async rename(camera, id, label, view) {
    await this.try(async () => {
      await call("rename_object", { id, label, camera, ...epoch(view) });
      this.say(`Object ${id} is now called ${label}.`);
    });
  }

  /** Preview what a click would give, while the node answers quickly. The newest place supersedes the others. */
  hover(tile, place) {
    this.hovering = place && { tile, place };
    this.under = place && tile;
    if (!place) tile.showMask(null);
    if (!this.isPreviewing) this.previewNext();
  }

  async previewNext() {
    const wanted = this.hovering;
    const isWanted = this.previews && this.canChange() && wanted?.tile.shown?.masks && performance.now() > this.restUntil;
    if (!isWanted) return;
    this.isPreviewing = true;
    this.hovering = null;
    const begin = performance.now();
    try {
      const hit = await this.ask({ type: "hit", camera: wanted.tile.camera, x: wanted.place[0], y: wanted.place[1] });
      const { seq, camera } = origin(wanted.tile.shown);
      const result = hit === null ? await call("segment", { points: [wanted.place], seq, camera }) : null;
      if (this.under === wanted.tile) wanted.tile.showMask(result?.mask ?? null, true); // the pointer may have left
      if (result && performance.now() - begin > SLOW_PREVIEW_MS) this.restUntil = performance.now() + REST_MS;
    } catch {
      wanted.tile.showMask(null);
      this.restUntil = performance.now() + 500;
    }
    this.isPreviewing = false;
    if (this.hovering) this.previewNext();
  }

  async send(tile, op, args, done) {
    this.restUntil = performance.now() + 300;
    await this.try(async () => {
      const result = await call(op, args);
      if (result.mask) this.tell({ type: "patch", ...result });
      tile.showMask(result.mask ?? null);
      done(result);
    });
  }

  async try(run) {
    try {
      await run();
    } catch (error) {
      const text = error.code === "unknown_frame" ? `The node no longer holds this frame. ${error.message}` : error.message;
      this.say(text, true);
    }
  }
}

function origin(view) {
  return { seq: view.seq, camera: view.camera, ...epoch(view) };
}

function epoch(view) {
  return view?.masks?.epoch == null ? {} : { epoch: view.masks.epoch };
}
