// Label images: a PNG whose pixel values are the ids of objects, 0 for none.

import { pickColour } from "./palette.js";

const SIGNATURE = [137, 80, 78, 71, 13, 10, 26, 10];
const GREY = 0;
const PALETTE = 3;
const TABLE = Array.from({ length: 256 }, (_, value) => {
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
  return value >>> 0;
});

/** Return the ids at each pixel, row after row. Where masks overlap, the smallest is on top. */
export function paintIds(instances, { width, height }) {
  const ids = new Uint16Array(width * height);
  for (const { id, box, bits } of [...instances].sort((a, b) => b.area - a.area)) {
    const [x0, y0, x1, y1] = box;
    if (!bits.length) continue;
    for (let y = y0, index = 0; y < y1; y++) {
      for (let x = x0; x < x1; x++, index++) if ((bits[index >> 3] >> (7 - (index & 7))) & 1) ids[y * width + x] = id;
    }
  }
  return ids;
}

/** Return a PNG file of ids: 8 bits with the colours of the page as palette, 16 bits grey if an id is above 255. */
export async function encodeLabels(ids, { width, height }) {
  const isWide = ids.some((id) => id > 255);
  const bytes = isWide ? 2 : 1;
  const rows = new Uint8Array(height * (1 + bytes * width));
  for (let y = 0; y < height; y++) {
    let at = y * (1 + bytes * width) + 1; // a row begins with its filter, 0 for none
    for (let x = 0; x < width; x++) {
      const id = ids[y * width + x];
      if (isWide) rows[at++] = id >> 8;
      rows[at++] = id & 255;
    }
  }
  const header = new Uint8Array(13);
  const view = new DataView(header.buffer);
  view.setUint32(0, width);
  view.setUint32(4, height);
  header.set([8 * bytes, isWide ? GREY : PALETTE], 8);
  const stream = new Blob([rows]).stream().pipeThrough(new CompressionStream("deflate"));
  const packed = new Uint8Array(await new Response(stream).arrayBuffer());
  const colours = Array.from({ length: 256 }, (_, id) => (id ? pickColour(id) : [0, 0, 0])).flat();
  const palette = isWide ? [] : [chunk("PLTE", new Uint8Array(colours))];
  const chunks = [chunk("IHDR", header), ...palette, chunk("IDAT", packed), chunk("IEND", new Uint8Array(0))];
  return new Blob([new Uint8Array(SIGNATURE), ...chunks], { type: "image/png" });
}

function chunk(name, data) {
  const out = new Uint8Array(12 + data.length);
  const view = new DataView(out.buffer);
  view.setUint32(0, data.length);
  out.set([...name].map((character) => character.charCodeAt(0)), 4);
  out.set(data, 8);
  let crc = 0xffffffff;
  for (const byte of out.subarray(4, 8 + data.length)) crc = TABLE[(crc ^ byte) & 255] ^ (crc >>> 8);
  view.setUint32(8 + data.length, ~crc >>> 0);
  return out;
}
