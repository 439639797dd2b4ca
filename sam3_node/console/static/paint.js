// Drawing of masks: an outline by state and a light hatch, both in the colour of the id. Between the lines of the hatch,
// the object keeps its own colours. Sure is solid, doubtful dashed with a dense hatch, tentative dotted without a hatch,
// occluded a dotted box where the object was last.

import { MARKS, nameState, pickColour, readableOn } from "./palette.js";
import { unpackBits } from "./wire.js";

const HATCH = 0.6; // opacity of the lines of a hatch
const LABEL_PX = 12;
const MAX_LABEL = 20;
const OTHER = [255, 255, 255];
const ROBOT = [150, 150, 150];
const STYLES = {
  // hatch: distance of its lines, dash: length of dashes, both in widths of the outline; 0: none. tint: opacity
  sure: { hatch: 14, dash: 0 },
  doubtful: { hatch: 6, dash: 9 },
  tentative: { hatch: 0, dash: 4 },
  other: { hatch: 0, dash: 7 },
  robot: { hatch: 6, dash: 2 },
  preview: { hatch: 0, dash: 0, tint: 0.14 },
};

/** Paints views on a canvas. It keeps its buffers, so that a stream of views allocates none. */
export class Painter {
  constructor() {
    this.layer = new OffscreenCanvas(1, 1);
    this.context = this.layer.getContext("2d");
    this.image = null;
    this.inside = new Uint8Array(0);
  }

  /** Draw a picture with its masks, and labels at the places that `placer` finds, if there is one. Return the labels.
   * `ghosts` maps ids to boxes where hidden objects were last. */
  draw(target, bitmap, view, { ratio, shows, selected, ghosts, placer }) {
    const { width, height } = target.canvas;
    if (bitmap) target.drawImage(bitmap, 0, 0, width, height);
    else {
      target.fillStyle = "#303840";
      target.fillRect(0, 0, width, height);
    }
    const scale = width / view.width;
    const thickness = Math.max(1, Math.round((2.5 * ratio) / scale));
    const first = shows === "other" ? [] : view.masks?.instances ?? [];
    const second = shows === "masks" ? [] : view.other?.instances ?? [];
    const robot = shows !== "other" && view.masks?.robot;
    const drawn = [
      ...(robot ? [[{ ...robot, id: null }, "robot", ROBOT]] : []),
      ...first.map((instance) => [instance, nameState(instance), pickColour(instance.id)]),
      ...second.map((instance) => [instance, "other", OTHER]),
    ].filter(([instance]) => instance.bits.length);
    this.paintMasks(target, drawn, view, thickness, selected);
    for (const instance of first) {
      const box = ghosts?.get(instance.id);
      if (box && !instance.bits.length) drawGhost(target, box, scale, ratio, instance.id);
    }
    if (!placer) return [];
    const texts = new Map(first.map((instance) => [instance.id, describe(instance)]));
    target.font = `600 ${LABEL_PX * ratio}px system-ui, sans-serif`;
    const high = (1.4 * LABEL_PX * ratio) / scale;
    const labels = first.map(({ id }) => ({ id, width: target.measureText(texts.get(id)).width / scale + 0.7 * high, height: high }));
    const placed = placer.place(labels, first, view, ghosts);
    for (const { id, rect, part } of placed) drawLabel(target, id, texts.get(id), rect, part, scale, ratio, id === selected);
    return placed;
  }

  /** Draw one mask alone, such as a preview: an instance with `box` and `bits`. */
  drawMask(target, instance, size, colour, ratio) {
    const thickness = Math.max(1, Math.round((2.5 * ratio * size.width) / target.canvas.width));
    this.paintMasks(target, [[instance, "preview", colour]], size, thickness, null);
  }

  paintMasks(target, drawn, size, thickness, selected) {
    if (!drawn.length) return;
    const x0 = Math.min(...drawn.map(([instance]) => instance.box[0]));
    const y0 = Math.min(...drawn.map(([instance]) => instance.box[1]));
    const width = Math.max(...drawn.map(([instance]) => instance.box[2])) - x0;
    const height = Math.max(...drawn.map(([instance]) => instance.box[3])) - y0;
    const pixels = this.clearLayer(size.width, size.height, y0, height);
    for (const [instance, style, colour] of drawn) {
      const wide = instance.id !== null && instance.id === selected ? 2 * thickness : thickness;
      this.paintMask(pixels, size.width, instance, STYLES[style], colour, wide);
    }
    this.context.putImageData(this.image, 0, 0, x0, y0, width, height);
    const scale = target.canvas.width / size.width;
    const place = [x0 * scale, y0 * scale, width * scale, height * scale];
    target.drawImage(this.layer, x0, y0, width, height, ...place);
  }

  /** Return the layer's pixels as RGBA words, with the rows in use cleared. */
  clearLayer(width, height, top, rows) {
    if (!this.image || this.image.width !== width || this.image.height !== height) {
      this.layer.width = width;
      this.layer.height = height;
      this.image = new ImageData(width, height);
    }
    const pixels = new Uint32Array(this.image.data.buffer);
    pixels.fill(0, top * width, (top + rows) * width);
    return pixels;
  }

  paintMask(pixels, stride, instance, style, [red, green, blue], thickness) {
    const [x0, y0, x1, y1] = instance.box;
    const [width, height] = [x1 - x0, y1 - y0];
    const count = width * height;
    if (this.inside.length < count) this.inside = new Uint8Array(count);
    const inside = unpackBits(instance.bits, count, this.inside);
    const colour = (blue << 16) | (green << 8) | red;
    const line = (0xff000000 | colour) >>> 0;
    const dark = (0xc0000000 | 0x181410) >>> 0;
    const faint = ((Math.round(255 * HATCH) << 24) | colour) >>> 0;
    const tint = style.tint ? ((Math.round(255 * style.tint) << 24) | colour) >>> 0 : 0;
    const hatch = style.hatch * thickness;
    const stroke = Math.ceil(thickness / 2);
    const [middleX, middleY] = [width / 2, height / 2];
    const turns = (width + height) / (4 * thickness * (style.dash || 1)); // dashes in one radian
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const index = y * width + x;
        if (!inside[index]) continue;
        // by the frame's pixels, so that the lines stand still while the object moves
        let value = hatch && (x0 + x + y0 + y) % hatch < stroke ? faint : tint;
        const depth = measureDepth(inside, width, height, x, y, thickness);
        if (depth === 1) {
          const gap = style.dash && Math.floor(Math.atan2(y - middleY, x - middleX) * turns) & 1;
          value = gap ? dark : line;
        } else if (depth === 2) value = dark;
        if (value >>> 24) pixels[(y0 + y) * stride + x0 + x] = value;
      }
    }
  }
}

/** Return 1 for a pixel within `reach` of the mask's edge, 2 for one just inside that, 0 for the others. */
function measureDepth(inside, width, height, x, y, reach) {
  if (isNearEdge(inside, width, height, x, y, reach)) return 1;
  return isNearEdge(inside, width, height, x, y, reach + Math.ceil(reach / 2)) ? 2 : 0;
}

function isNearEdge(inside, width, height, x, y, reach) {
  if (x < reach || y < reach || x >= width - reach || y >= height - reach) return true;
  const index = y * width + x;
  const down = reach * width;
  const slant = Math.ceil(0.7 * reach);
  const slantDown = slant * width;
  return !(
    inside[index - reach] && inside[index + reach] && inside[index - down] && inside[index + down] &&
    inside[index - slantDown - slant] && inside[index - slantDown + slant] &&
    inside[index + slantDown - slant] && inside[index + slantDown + slant]
  );
}

function drawGhost(target, box, scale, ratio, id) {
  const [x0, y0, x1, y1] = box.map((value) => value * scale);
  target.save();
  target.setLineDash([2 * ratio, 5 * ratio]);
  target.lineWidth = 2.5 * ratio;
  target.strokeStyle = `rgb(${pickColour(id).join(" ")})`;
  target.strokeRect(x0, y0, x1 - x0, y1 - y0);
  target.restore();
}

/** Return the text of a label: number, name, and a mark for any state but sure. The list has the rest. */
function describe(instance) {
  const state = nameState(instance);
  const name = instance.label.length > MAX_LABEL ? `${instance.label.slice(0, MAX_LABEL - 1)}…` : instance.label;
  return `${instance.id} ${name}${state === "sure" ? "" : ` ${MARKS[state]}`}`;
}

/** Draw a label, and a line to its object where it lies apart. */
function drawLabel(target, id, text, rect, part, scale, ratio, isSelected) {
  const [x0, y0, x1, y1] = rect.map((value) => value * scale);
  const [left, top, right, bottom] = part.map((value) => value * scale);
  const colour = pickColour(id);
  const clip = (value, low, high) => Math.max(low, Math.min(value, high));
  const from = [clip((left + right) / 2, x0, x1), clip((top + bottom) / 2, y0, y1)];
  const to = [clip(from[0], left, right), clip(from[1], top, bottom)];
  if (Math.hypot(to[0] - from[0], to[1] - from[1]) > (y1 - y0) / 2) {
    target.beginPath();
    target.moveTo(...from);
    target.lineTo(...to);
    target.lineWidth = 1.5 * ratio;
    target.strokeStyle = `rgb(${colour.join(" ")})`;
    target.stroke();
  }
  target.fillStyle = `rgb(${colour.join(" ")})`;
  target.fillRect(x0, y0, x1 - x0, y1 - y0);
  if (isSelected) {
    target.lineWidth = 2 * ratio;
    target.strokeStyle = "#ffffff";
    target.strokeRect(x0 + ratio, y0 + ratio, x1 - x0 - 2 * ratio, y1 - y0 - 2 * ratio);
  }
  target.fillStyle = readableOn(colour);
  target.textBaseline = "middle";
  target.fillText(text, x0 + 0.25 * (y1 - y0), (y0 + y1) / 2 + ratio / 2);
}
