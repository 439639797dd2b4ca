// The timeline: the last seconds of a live stream, or a whole recording with its doubtful and different frames.

import { make, setText } from "./dom.js";
import { isTouch } from "./messages.js";

const LOW_IOU = 0.5;
const STEPS_S = [0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800];

/** The slider and its strip. `go(place)` is called when the user moves it. */
export class Timeline {
  constructor(go) {
    this.rows = [];
    this.slider = document.querySelector("#place");
    this.strip = document.querySelector("#strip");
    this.time = document.querySelector("#time");
    this.hint = document.querySelector("#place-hint");
    this.slider.addEventListener("input", () => go(Number(this.slider.value)));
    this.axis = document.querySelector("#axis");
    this.reach = document.querySelector("#reach i");
    new ResizeObserver(() => this.draw()).observe(this.strip.parentElement);
  }

  /** Show the place in a live stream's history. `hint` says what marks do; they work on the last `reachS` seconds. */
  showLive({ place, places, span }, ageMs, isFrozen, hint, reachS) {
    this.slider.max = Math.max(0, places - 1);
    this.slider.value = place;
    const text = isFrozen ? `${(ageMs / 1000).toFixed(1)} s ago` : "live";
    setText(this.time, text);
    setText(this.hint, hint);
    this.reach.style.width = `${Math.min(100, (100_000 * reachS) / Math.max(1, span)).toFixed(1)}%`;
    this.slider.setAttribute("aria-valuetext", text);
  }

  /** Show the place in a recording. */
  showRecorded(index) {
    const row = this.rows[index];
    this.index = index;
    this.slider.value = index;
    const iou = row?.iou == null ? "" : `   IoU ${row.iou.toFixed(2)}`;
    const text = row ? `${row.s.toFixed(2)} s of ${this.rows.at(-1).s.toFixed(2)} s   frame ${index + 1} of ${this.count}${iou}` : "";
    setText(this.time, text);
    setText(this.hint, isTouch ? "" : "Space: play  ·  D: next to look at  ·  [ and ]: step");
    this.slider.setAttribute("aria-valuetext", text);
    this.draw();
  }

  /** Take rows of a recording: seconds, number of doubtful masks and IoU of each frame. */
  add(start, rows, count) {
    this.rows.length = start;
    for (const row of rows) this.rows.push(row);
    this.count = count;
    this.slider.max = Math.max(0, count - 1);
    this.draw();
  }

  /** Return the IoU of the shown frame and the mean of all frames that have one; null where there is none. */
  readIou() {
    const values = this.rows.map((row) => row.iou).filter((iou) => iou !== null);
    const mean = values.length ? values.reduce((total, iou) => total + iou, 0) / values.length : null;
    return { shown: this.rows[this.index]?.iou ?? null, mean, frames: values.length };
  }

  /** Write seconds below the strip, at most one in 70 pixels. */
  writeAxis() {
    const length = this.rows.at(-1).s;
    const room = this.axis.clientWidth;
    const step = STEPS_S.find((step) => (room * step) / Math.max(length, 1e-3) >= 70) ?? STEPS_S.at(-1);
    const key = `${length} ${room} ${step}`;
    if (key === this.written || !room) return;
    this.written = key;
    const ticks = [];
    for (let s = 0; s <= length; s += step) {
      const tick = make("span", { textContent: `${Number(s.toFixed(1))} s` });
      tick.style.left = `${((100 * s) / Math.max(length, 1e-3)).toFixed(2)}%`;
      ticks.push(tick);
    }
    this.axis.replaceChildren(...ticks);
  }

  /** Return the next index after the present one that satisfies a condition, from the start again at the end. */
  findNext(matches) {
    const count = this.rows.length;
    for (let step = 1; step <= count; step++) {
      const index = ((this.index ?? -1) + step) % count;
      if (matches(this.rows[index])) return index;
    }
    return null;
  }

  draw() {
    if (!this.rows.length) return;
    this.writeAxis();
    const hasIou = this.rows.some((row) => row.iou !== null);
    this.strip.classList.toggle("chart", hasIou);
    const ratio = devicePixelRatio;
    const [width, height] = [this.strip.clientWidth * ratio, this.strip.clientHeight * ratio];
    if (this.strip.width !== width || this.strip.height !== height) Object.assign(this.strip, { width, height });
    const context = this.strip.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    context.clearRect(0, 0, width, height);
    const step = width / Math.max(1, this.count);
    this.rows.forEach((row, index) => {
      const x = index * step;
      if (row.doubtful) {
        context.fillStyle = colour("--warn");
        context.fillRect(x, height - 7 * ratio, Math.max(step, ratio), 7 * ratio);
      }
      if (row.iou !== null) {
        const low = row.iou < LOW_IOU;
        context.fillStyle = colour(low ? "--bad" : "--accent");
        const high = (height - 9 * ratio) * row.iou;
        context.fillRect(x, height - 9 * ratio - high, Math.max(step - 0.2, ratio), high);
        if (low) context.fillRect(x, 0, Math.max(step, ratio), 3 * ratio);
      }
    });
    if (hasIou) {
      context.fillStyle = colour("--soft");
      context.fillRect(0, height - 9 * ratio - (height - 9 * ratio) * LOW_IOU, width, 1);
    }
    context.fillStyle = colour("--text");
    context.fillRect((this.index ?? 0) * step - ratio, 0, Math.max(2 * ratio, step), height);
  }
}

/** True for a frame where two results differ much. */
export const isDifferent = (row) => row.iou !== null && row.iou < LOW_IOU;
