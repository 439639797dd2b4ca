// The pictures: a tile for each camera, of which one is large, and the pointer and keys that mark objects on it.

import { setText } from "./dom.js";
import { Painter } from "./paint.js";
import { fromBase64 } from "./wire.js";

const STALE_MS = 1000;
const DRAG_PX = 6;
const POINT_PX = 7;
const FLASH_MS = 700;
const WHITE = [255, 255, 255];
const painter = new Painter();

/** One camera's tile. `shown` is the header of the view that is on the screen, without pixels. */
class Tile {
  constructor(camera, host, worker) {
    this.camera = camera;
    this.worker = worker;
    this.host = host;
    this.shown = null;
    this.times = [];
    this.cursor = null; // [x, y] of the keyboard's cross, in pixels of the frame
    this.corner = null; // first corner of a box
    this.preview = null;
    this.element = document.createElement("figure");
    this.element.className = "tile";
    this.element.dataset.camera = camera;
    const picture = document.createElement("canvas");
    picture.className = "picture";
    this.overlay = document.createElement("canvas");
    this.overlay.className = "overlay";
    this.overlay.tabIndex = 0;
    this.overlay.setAttribute("role", "img");
    this.caption = document.createElement("figcaption");
    this.old = document.createElement("div");
    this.old.className = "old";
    this.element.append(picture, this.overlay, this.old, this.caption);
    const offscreen = picture.transferControlToOffscreen();
    worker.postMessage({ type: "canvas", camera, canvas: offscreen }, [offscreen]);
  }

  /** Fit the tile into its place, and tell the worker how many pixels it has. */
  fit() {
    const place = this.element.parentElement;
    if (!this.shown || !place) return;
    const { width, height } = this.shown;
    if (place.id === "main-tile") place.style.setProperty("--aspect", `${width} / ${height}`);
    const [across, down] = place.id === "main-tile" ? [place.clientWidth, place.clientHeight] : [Infinity, place.clientHeight - 4];
    const scale = Math.min(across / width, down / height);
    const [cssWidth, cssHeight] = [Math.floor(width * scale), Math.floor(height * scale)];
    const ratio = Math.min(devicePixelRatio, 1920 / Math.max(1, cssWidth));
    const key = `${cssWidth} ${cssHeight} ${ratio}`;
    if (key === this.fitted || cssWidth < 1) return;
    this.fitted = key;
    this.element.style.width = `${cssWidth}px`;
    this.element.style.height = `${cssHeight}px`;
    const size = { width: Math.round(cssWidth * ratio), height: Math.round(cssHeight * ratio) };
    Object.assign(this.overlay, size);
    this.worker.postMessage({ type: "size", camera: this.camera, ...size, ratio });
    this.drawOverlay();
  }

  show(view, isFrozen) {
    const resized = !this.shown || this.shown.width !== view.width || this.shown.height !== view.height;
    this.shown = view;
    if (resized) this.fit();
    if (!isFrozen) {
      this.times.push(view.received);
      if (this.times.length > 30) this.times.shift();
    }
    const { dataset } = this.element;
    dataset.seq = view.seq;
    dataset.frozen = isFrozen;
    dataset.masks = view.masks ? view.masks.instances.length : "";
    dataset.labels = JSON.stringify(view.labels.map(({ id, rect }) => [id, ...rect]));
    if (view.origin != null) dataset.drawnAge = (view.drawnAt - view.origin).toFixed(0);
    this.overlay.setAttribute("aria-label", this.describe());
    this.noteMarks();
  }

  /** Draw the marks of the shown frame if they are others than before. */
  noteMarks() {
    const marks = this.host.findMarks(this.camera, this.shown?.seq);
    const key = JSON.stringify(marks);
    if (key === (this.markKey ?? "[]")) return;
    this.markKey = key;
    this.marks = marks;
    this.element.dataset.marks = marks.length;
    this.drawOverlay();
  }

  /** Age of the picture on the screen in ms; null in a recording. */
  age() {
    if (this.shown?.origin == null) return null;
    return performance.timeOrigin + performance.now() - this.shown.origin;
  }

  rate() {
    if (this.times.length < 2) return 0;
    const now = performance.timeOrigin + performance.now();
    return (1000 * (this.times.length - 1)) / Math.max(this.times.at(-1) - this.times[0], now - this.times.at(-1));
  }

  isStale() {
    return this.age() !== null && this.age() > STALE_MS;
  }

  refresh(isFrozen) {
    const age = this.age();
    const isStale = this.isStale() && !isFrozen;
    this.element.classList.toggle("stale", isStale);
    setText(this.old, isStale ? `${(age / 1000).toFixed(1)} s old` : "");
    if (!this.shown) return;
    const masks = this.shown.masks ? "" : "  no masks";
    const rate = age === null ? "" : `  ${this.rate().toFixed(0)} Hz`;
    const shed = this.shown.masks?.shed ? `  load shed, level ${this.shown.masks.shed.level}` : "";
    setText(this.caption, `${this.camera}  #${this.shown.seq}${rate}${masks}${shed}`);
  }

  describe() {
    const objects = (this.shown?.masks?.instances ?? []).map((instance) => `${instance.id} ${instance.label}`);
    return `Camera ${this.camera}. ${objects.length ? `Objects: ${objects.join(", ")}.` : "No objects."}`;
  }

  /** Pixels of the frame at a pointer's place. */
  toFrame(event) {
    const box = this.overlay.getBoundingClientRect();
    const clip = (value, high) => Math.max(0, Math.min(high - 0.01, value));
    return [
      clip(((event.clientX - box.left) / box.width) * this.shown.width, this.shown.width),
      clip(((event.clientY - box.top) / box.height) * this.shown.height, this.shown.height),
    ];
  }

  drawOverlay(box = null) {
    const context = this.overlay.getContext("2d");
    context.clearRect(0, 0, this.overlay.width, this.overlay.height);
    if (!this.shown) return;
    const scale = this.overlay.width / this.shown.width;
    if (this.preview) painter.drawMask(context, this.preview, this.shown, WHITE, devicePixelRatio);
    for (const mark of this.marks ?? []) drawMark(context, mark, scale);
    if (box) strokeTwice(context, devicePixelRatio, () => context.strokeRect(...toRect(box).map((value) => value * scale)));
    if (!this.cursor) return;
    const [x, y] = this.cursor.map((value) => value * scale);
    if (this.corner) {
      const rect = toRect([...this.corner, ...this.cursor]).map((value) => value * scale);
      strokeTwice(context, devicePixelRatio, () => context.strokeRect(...rect));
    }
    strokeTwice(context, devicePixelRatio, () => {
      context.beginPath();
      context.moveTo(x - 18, y);
      context.lineTo(x + 18, y);
      context.moveTo(x, y - 18);
      context.lineTo(x, y + 18);
      context.stroke();
    });
  }

  /** Show a mask of a reply for some ms, or until the next one for null. */
  showMask(mask, ms = FLASH_MS) {
    this.preview = mask && { id: -1, box: mask.box, bits: fromBase64(mask.bits) };
    if (this.preview && !this.preview.bits.length) this.preview = null;
    this.drawOverlay();
    clearTimeout(this.flash);
    if (this.preview && ms !== null) this.flash = setTimeout(() => this.showMask(null), ms);
  }
}

/** Draw a mark of a person: a box, and a ring for each point, with a line across it where the object is not. */
function drawMark(context, { points = [], labels, box }, scale) {
  strokeTwice(context, devicePixelRatio, () => {
    if (box) context.strokeRect(...toRect(box).map((value) => value * scale));
    points.forEach(([x, y], index) => {
      const radius = POINT_PX * devicePixelRatio;
      context.beginPath();
      context.arc(x * scale, y * scale, radius, 0, 2 * Math.PI);
      if (labels?.[index] === 0) {
        context.moveTo(x * scale - radius, y * scale);
        context.lineTo(x * scale + radius, y * scale);
      }
      context.stroke();
    });
  });
}

function toRect([x0, y0, x1, y1]) {
  return [Math.min(x0, x1), Math.min(y0, y1), Math.abs(x1 - x0), Math.abs(y1 - y0)];
}

function strokeTwice(context, ratio, stroke) {
  for (const [colour, width] of [["#000000", 5], ["#ffffff", 2]]) {
    context.strokeStyle = colour;
    context.lineWidth = width * ratio;
    stroke();
  }
}

/** All tiles, and the one that is large. `marks` gets what the user marks: point(tile, xy, isInside), box(tile, box),
 * exemplar(tile, box, isLike). `changed` is called when another tile is large. `findMarks(camera, seq)` returns what people
 * have marked on a frame of a recording. */
export class Cameras {
  constructor(worker, marks, changed, findMarks) {
    this.findMarks = findMarks;
    this.worker = worker;
    this.marks = marks;
    this.changed = changed;
    this.tiles = new Map();
    this.main = null;
    this.places = { main: document.querySelector("#main-tile"), others: document.querySelector("#tiles") };
    this.places.main.insertAdjacentHTML("beforeend", '<p id="empty">Waiting for pictures.</p>');
    new ResizeObserver(() => this.fit()).observe(this.places.main);
  }

  add(camera) {
    const tile = new Tile(camera, this, this.worker);
    this.tiles.set(camera, tile);
    this.listen(tile);
    this.places.main.classList.add("filled");
    if (!this.main) this.enlarge(camera);
    else this.places.others.append(tile.element);
    this.places.others.hidden = this.tiles.size < 2;
    document.querySelector("#empty")?.remove();
  }

  enlarge(camera) {
    const tile = this.tiles.get(camera);
    if (!tile || tile === this.main) return;
    if (this.main) this.places.others.append(this.main.element);
    this.places.main.append(tile.element);
    this.main = tile;
    this.fit();
    this.changed();
  }

  enlargeNext() {
    const names = [...this.tiles.keys()];
    this.enlarge(names[(names.indexOf(this.main?.camera) + 1) % names.length]);
  }

  fit() {
    for (const tile of this.tiles.values()) tile.fit();
  }

  listen(tile) {
    const { overlay } = tile;
    let begin = null;
    overlay.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !tile.shown) return;
      if (tile !== this.main) {
        this.enlarge(tile.camera);
        return;
      }
      tile.cursor = tile.corner = null;
      begin = { at: [event.clientX, event.clientY], place: tile.toFrame(event), view: tile.shown };
      overlay.setPointerCapture(event.pointerId);
    });
    overlay.addEventListener("pointermove", (event) => {
      if (!tile.shown || tile !== this.main) return;
      if (!begin && event.pointerType !== "touch") this.marks.hover(tile, tile.toFrame(event));
      else if (begin && isDrag(begin, event)) tile.drawOverlay([...begin.place, ...tile.toFrame(event)]);
    });
    overlay.addEventListener("pointerleave", () => this.marks.hover(tile, null));
    overlay.addEventListener("pointercancel", () => {
      begin = null;
      tile.drawOverlay();
    });
    overlay.addEventListener("pointerup", (event) => {
      if (!begin) return;
      const { place, view } = begin;
      const wasDrag = isDrag(begin, event);
      begin = null;
      tile.drawOverlay();
      if (wasDrag) this.markBox(tile, toBox([...place, ...tile.toFrame(event)]), event, view);
      else this.marks.point(tile, place, !event.shiftKey, view);
    });
    overlay.addEventListener("keydown", (event) => this.handleKey(tile, event));
    overlay.addEventListener("blur", () => {
      tile.cursor = tile.corner = null;
      tile.drawOverlay();
    });
  }

  /** With Alt, a box shows what to look for; with Shift, too, what not. */
  markBox(tile, box, event, view) {
    if (event.altKey) this.marks.exemplar(tile, box, !event.shiftKey, view);
    else this.marks.box(tile, box, view);
  }

  handleKey(tile, event) {
    const step = event.altKey ? 1 : event.ctrlKey ? 50 : 10;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!tile.shown) return;
    const { width, height } = tile.shown;
    if (event.key in moves) {
      const [dx, dy] = moves[event.key];
      const [x, y] = tile.cursor ?? [width / 2, height / 2];
      const clip = (value, high) => Math.max(0, Math.min(high - 1, value));
      tile.cursor = [clip(x + dx * step, width), clip(y + dy * step, height)];
    } else if (event.key === "Enter" && tile !== this.main) this.enlarge(tile.camera);
    else if (event.key === "Enter" && tile.cursor && tile.corner) {
      this.markBox(tile, toBox([...tile.corner, ...tile.cursor]), event, tile.shown);
      tile.corner = null;
    } else if (event.key === "Enter" && tile.cursor) this.marks.point(tile, tile.cursor, !event.shiftKey, tile.shown);
    else if (event.key.toLowerCase() === "b" && tile.cursor) tile.corner = tile.corner ? null : [...tile.cursor];
    else if (event.key === "Escape" && (tile.cursor || tile.corner)) tile.cursor = tile.corner = null;
    else return;
    event.preventDefault();
    event.stopPropagation();
    tile.drawOverlay();
  }
}

function isDrag(begin, event) {
  return Math.hypot(event.clientX - begin.at[0], event.clientY - begin.at[1]) > DRAG_PX;
}

function toBox(corners) {
  const [x, y, width, height] = toRect(corners);
  return [x, y, x + width, y + height];
}
