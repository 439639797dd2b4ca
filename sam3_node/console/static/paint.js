// Drawing of masks: a tint by id, an outline by state. Sure is solid, doubtful dashed with hatching, tentative dotted
// without a tint, occluded a dotted box where the object was last.

import { MARKS, nameState, pickColour, readableOn } from "./palette.js";
import { unpackBits } from "./wire.js";

const TINT = 0.4;
const OTHER = [255, 255, 255];
const STYLES = {
  sure: { tint: TINT, dash: 0 },
  doubtful: { tint: TINT, dash: 9, hatched: true },
  tentative: { tint: 0.12, dash: 4 },
  other: { tint: 0, dash: 7 },
};

/** Paints views on a canvas. It keeps its buffers, so that a stream of views allocates none. */
export class Painter {
  constructor() {
    this.layer = new OffscreenCanvas(1, 1);
    this.context = this.layer.getContext("2d");
    this.image = null;
    this.inside = new Uint8Array(0);
  }

  /** Draw a picture with its masks and tags. `ghosts` maps ids to boxes where hidden objects were last. */
  draw(target, bitmap, view, { ratio, shows, selected, ghosts }) {
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
    const drawn = [
      ...first.map((instance) => [instance, nameState(instance), pickColour(instance.id)]),
      ...second.map((instance) => [instance, "other", OTHER]),
    ].filter(([instance]) => instance.bits.length);
    this.paintMasks(target, drawn, view, thickness, selected);
    const boxes = [];
    for (const instance of first) {
      const hidden = !instance.bits.length;
      const box = hidden ? ghosts?.get(instance.id) : instance.box;
      if (!box) continue;
      if (hidden) drawGhost(target, box, scale, ratio, instance.id);
      drawTag(target, instance, box, scale, ratio, boxes, instance.id === selected);
    }
  }

  /** Draw one mask alone, such as a preview: an instance with `box` and `bits`. */
  drawMask(target, instance, size, colour, ratio) {
    const thickness = Math.max(1, Math.round((2.5 * ratio * size.width) / target.canvas.width));
    this.paintMasks(target, [[instance, "sure", colour]], size, thickness, null);
  }

  paintMasks(target, drawn, size, thickness, selected) {
    if (!drawn.length) return;
    const x0 = Math.min(...drawn.map(([instance]) => instance.box[0]));
    const y0 = Math.min(...drawn.map(([instance]) => instance.box[1]));
    const width = Math.max(...drawn.map(([instance]) => instance.box[2])) - x0;
    const height = Math.max(...drawn.map(([instance]) => instance.box[3])) - y0;
    const pixels = this.clearLayer(size.width, size.height, y0, height);
    for (const [instance, style, colour] of drawn) {
      const wide = instance.id === selected ? 2 * thickness : thickness;
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
    const tint = ((Math.round(255 * style.tint) << 24) | colour) >>> 0;
    const faint = ((Math.round(110 * style.tint) << 24) | colour) >>> 0;
    const hatch = 4 * thickness;
    const [middleX, middleY] = [width / 2, height / 2];
    const turns = (width + height) / (4 * thickness * (style.dash || 1)); // dashes in one radian
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const index = y * width + x;
        if (!inside[index]) continue;
        let value = style.hatched && (x + y) % (2 * hatch) < hatch ? faint : tint;
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

/** Write id, label, score and state at the first free place: above the box, in it, below it, or lower. */
function drawTag(target, instance, box, scale, ratio, boxes, isSelected) {
  const { width: wide, height: high } = target.canvas;
  const size = Math.round(Math.max(13 * ratio, Math.min(22 * ratio, high / 30)));
  const state = nameState(instance);
  const mark = state === "sure" ? "" : `  ${MARKS[state]} ${state}`;
  const score = instance.bits.length ? `  ${instance.score.toFixed(2)}` : "";
  const text = `${instance.id}  ${instance.label}${score}${mark}`;
  target.font = `600 ${size}px system-ui, sans-serif`;
  const [width, height] = [Math.ceil(target.measureText(text).width) + size, Math.round(1.45 * size)];
  const [x0, y0, , y1] = box.map((value) => value * scale);
  const x = Math.max(0, Math.min(x0, wide - width));
  const overlaps = (y) => boxes.some((other) => x < other[2] && other[0] < x + width && y < other[3] && other[1] < y + height);
  const places = [y0 - height, y0, y1 - height, y1];
  for (let y = y1 + height; y < high - height; y += height) places.push(y);
  const y = places.find((place) => place >= 0 && place <= high - height && !overlaps(place)) ?? Math.max(0, y0 - height);
  boxes.push([x, y, x + width, y + height]);
  const colour = pickColour(instance.id);
  target.fillStyle = `rgb(${colour.join(" ")})`;
  target.fillRect(x, y, width, height);
  if (isSelected) {
    target.lineWidth = 3 * ratio;
    target.strokeStyle = "#ffffff";
    target.strokeRect(x, y, width, height);
  }
  target.fillStyle = readableOn(colour);
  target.textBaseline = "middle";
  target.fillText(text, x + size / 2, y + height / 2 + 1);
}
