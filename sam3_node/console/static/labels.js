// Places of labels: small, beside the largest part of their object, and never over another object where there is room.
// The frame is divided into cells. A cell belongs to each object that has a pixel in it, so that a label on cells
// without another object covers no pixel of one.

const CELLS = 96; // across the frame
const NO_CELLS = new Uint8Array(0);
const COST = { label: 1e7, other: 1e5, own: 0.4, gap: 1.5, aside: 0.15, moved: 0.3, below: 6 };

/** Finds places for the labels of one camera. It remembers them, so that labels do not jump from frame to frame. */
export class LabelPlacer {
  constructor() {
    this.before = new Map(); // by id, the label's corner less that of its object's part
  }

  /** Return {id, rect, part} for each of `labels`, {id, width, height} in pixels of the frame; rects are [x0, y0, x1, y1].
   * `instances` have `id`, `box` and `bits`; `ghosts` maps ids without a mask to boxes where they were last. */
  place(labels, instances, size, ghosts) {
    const grid = new Grid(size);
    const cells = new Map(instances.map((instance) => [instance.id, grid.rasterize(instance)]));
    const covered = grid.sum(cells.values());
    const taken = [];
    const placed = [];
    for (const label of labels) {
      const own = cells.get(label.id) ?? NO_CELLS;
      const part = grid.findLargestPart(own) ?? ghosts?.get(label.id);
      if (!part) continue;
      const rect = this.choose(label, part, grid, covered, own, taken);
      taken.push(rect);
      placed.push({ id: label.id, rect, part });
    }
    this.before = new Map(placed.map(({ id, rect, part }) => [id, [rect[0] - part[0], rect[1] - part[1]]]));
    return placed;
  }

  choose(label, part, grid, covered, own, taken) {
    const { width: wide, height: high } = grid.size;
    const [width, height] = [Math.min(label.width, wide), Math.min(label.height, high)];
    const others = grid.accumulate((cell) => covered[cell] - (own[cell] ?? 0));
    const mine = grid.accumulate((cell) => own[cell] ?? 0);
    const last = this.before.get(label.id);
    let best = null;
    let lowest = Infinity;
    const consider = (left, top) => {
      const x = Math.max(0, Math.min(left, wide - width));
      const y = Math.max(0, Math.min(top, high - height));
      const rect = [x, y, x + width, y + height];
      let cost = COST.gap * measureGap(rect, part);
      cost += COST.aside * Math.abs(x + width / 2 - (part[0] + part[2]) / 2);
      if (y + height / 2 > (part[1] + part[3]) / 2) cost += COST.below;
      if (last) cost += COST.moved * Math.hypot(x - part[0] - last[0], y - part[1] - last[1]);
      if (cost >= lowest) return;
      cost += COST.label * taken.filter((other) => overlaps(rect, other)).length;
      if (cost >= lowest) return;
      cost += COST.other * grid.count(others, rect) + COST.own * grid.count(mine, rect);
      if (cost < lowest) [best, lowest] = [rect, cost];
    };
    const middle = (part[0] + part[2] - width) / 2;
    consider(middle, part[1] - height);
    if (last) consider(part[0] + last[0], part[1] + last[1]);
    for (let y = 0; y <= high - height; y += grid.cell) for (let x = 0; x <= wide - width; x += grid.cell) consider(x, y);
    return best;
  }
}

class Grid {
  constructor(size) {
    this.size = size;
    this.cell = Math.max(1, Math.ceil(size.width / CELLS));
    this.across = Math.ceil(size.width / this.cell);
    this.down = Math.ceil(size.height / this.cell);
  }

  /** Return 1 for each cell in which the instance has a pixel. */
  rasterize({ box, bits }) {
    if (!bits.length) return NO_CELLS;
    const cells = new Uint8Array(this.across * this.down);
    const [x0, y0, x1, y1] = box;
    const width = x1 - x0;
    for (let y = y0; y < y1; y++) {
      const row = Math.floor(y / this.cell) * this.across;
      for (let x = x0, index = (y - y0) * width; x < x1; x++, index++) {
        if ((bits[index >> 3] >> (7 - (index & 7))) & 1) cells[row + Math.floor(x / this.cell)] = 1;
      }
    }
    return cells;
  }

  /** Return the number of objects in each cell. */
  sum(grids) {
    const total = new Uint16Array(this.across * this.down);
    for (const cells of grids) for (let index = 0; index < cells.length; index++) total[index] += cells[index];
    return total;
  }

  /** Return the sums over all cells above and to the left of each corner. */
  accumulate(read) {
    const stride = this.across + 1;
    const sums = new Uint32Array(stride * (this.down + 1));
    for (let y = 0; y < this.down; y++) {
      for (let x = 0, row = 0; x < this.across; x++) {
        row += read(y * this.across + x);
        sums[(y + 1) * stride + x + 1] = sums[y * stride + x + 1] + row;
      }
    }
    return sums;
  }

  /** Return the sum over the cells that a rectangle touches. */
  count(sums, [x0, y0, x1, y1]) {
    const stride = this.across + 1;
    const [left, top] = [Math.floor(x0 / this.cell), Math.floor(y0 / this.cell)];
    const right = Math.min(this.across, Math.ceil(x1 / this.cell));
    const bottom = Math.min(this.down, Math.ceil(y1 / this.cell));
    return sums[bottom * stride + right] - sums[top * stride + right] - sums[bottom * stride + left] + sums[top * stride + left];
  }

  /** Return the box of the largest group of neighbouring cells, in pixels of the frame; null if there are none. */
  findLargestPart(cells) {
    const left = cells.slice();
    let largest = null;
    for (let start = 0; start < left.length; start++) {
      if (!left[start]) continue;
      const part = { count: 0, box: [Infinity, Infinity, -1, -1] };
      const waiting = [start];
      left[start] = 0;
      while (waiting.length) {
        const index = waiting.pop();
        const [x, y] = [index % this.across, Math.floor(index / this.across)];
        const { box } = part;
        part.count++;
        part.box = [Math.min(box[0], x), Math.min(box[1], y), Math.max(box[2], x + 1), Math.max(box[3], y + 1)];
        for (let v = Math.max(0, y - 1); v <= Math.min(this.down - 1, y + 1); v++) {
          for (let u = Math.max(0, x - 1); u <= Math.min(this.across - 1, x + 1); u++) {
            const next = v * this.across + u;
            if (left[next]) {
              left[next] = 0;
              waiting.push(next);
            }
          }
        }
      }
      if (!largest || part.count > largest.count) largest = part;
    }
    return largest && largest.box.map((value, at) => Math.min(value * this.cell, at % 2 ? this.size.height : this.size.width));
  }
}

function overlaps(a, b) {
  return a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
}

/** Return the distance of two rectangles, 0 if they touch. */
function measureGap(a, b) {
  return Math.hypot(Math.max(0, a[0] - b[2], b[0] - a[2]), Math.max(0, a[1] - b[3], b[1] - a[3]));
}
