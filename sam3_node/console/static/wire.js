// Messages of views: a header as JSON, the picture, and the bits of each mask. See sam3_node/console/views.py.

const decoder = new TextDecoder();

/** Read a message. Returns its header, in which each instance has `bits`, a view of the message. */
export function parseView(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(decoder.decode(new Uint8Array(buffer, 4, length)));
  let offset = 4 + length;
  const take = (bytes) => {
    const part = new Uint8Array(buffer, offset, bytes);
    offset += bytes;
    return part;
  };
  header.picture = take(header.image.bytes);
  for (const masks of [header.masks, header.other]) {
    for (const instance of masks?.instances ?? []) instance.bits = take(instance.bytes);
    if (masks?.robot) masks.robot.bits = take(masks.robot.bytes);
  }
  return header;
}

/** Return a copy of a header without pixels and bits, which may be posted to another thread cheaply. */
export function withoutPixels(view) {
  const strip = (masks) =>
    masks && { ...masks, robot: null, instances: masks.instances.map(({ bits, ...instance }) => instance) };
  const { picture, ...rest } = view;
  return { ...rest, masks: strip(view.masks), other: strip(view.other) };
}

/** Unpack the bits of a crop of `count` pixels, the first in the highest bit, to a byte for each pixel. */
export function unpackBits(bits, count, out) {
  for (let index = 0; index < count; index++) out[index] = (bits[index >> 3] >> (7 - (index & 7))) & 1;
  return out;
}

/** Return true if a pixel is inside the mask of an instance. */
export function isInside(instance, x, y) {
  const [x0, y0, x1, y1] = instance.box;
  if (x < x0 || y < y0 || x >= x1 || y >= y1) return false;
  const index = (Math.floor(y) - y0) * (x1 - x0) + Math.floor(x) - x0;
  return ((instance.bits[index >> 3] >> (7 - (index & 7))) & 1) === 1;
}

/** Decode base64 to bytes. */
export function fromBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}
