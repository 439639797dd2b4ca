// The worker that receives views, keeps the last 30 seconds, and draws them. It asks for the next view after it has
// drawn one, at the screen's own rate: a slow page gets fewer views and never older ones.

import { LabelPlacer } from "./labels.js";
import { Painter } from "./paint.js";
import { encodeLabels, paintIds } from "./png.js";
import { fromBase64, isInside, parseView, withoutPixels } from "./wire.js";

const HISTORY_MS = 30_000;
const HISTORY_BYTES = 160 << 20;
const PING_MS = 2000;
const MAX_PINGS = 10;
const RETRY_MS = 400;
const MIN_LABELLED_PX = 480; // width of a picture on the screen below which the list alone names the objects

const cameras = new Map();
const painter = new Painter();
let socket = null;
let isLive = true;
let frozen = null; // {camera, place} while the pictures stand still
let wanted = -1; // index in a recording
let asked = -1;
let selected = { camera: null, id: null };
let shows = "both";
let pings = []; // recent {trip, offset}: round trip, and the server's clock less this one's, in ms
let pingedAt = -PING_MS;

/** Return Unix time in ms with the resolution of performance.now(), which a step of the clock does not change. */
const now = () => performance.timeOrigin + performance.now();
const nextFrame = self.requestAnimationFrame?.bind(self) ?? ((run) => setTimeout(run, 16));

function findCamera(name) {
  if (!cameras.has(name)) {
    const place = { context: null, ratio: 1, isLabelled: false, placer: new LabelPlacer() };
    cameras.set(name, { name, ...place, history: [], bytes: 0, shown: null, turn: 0, ghosts: new Map() });
    postMessage({ type: "camera", camera: name });
  }
  return cameras.get(name);
}

function open(url) {
  socket = new WebSocket(url);
  socket.binaryType = "arraybuffer";
  socket.onopen = () => {
    postMessage({ type: "open" });
    pings = [];
    pingedAt = -PING_MS;
    asked = -1;
    askNext();
  };
  socket.onmessage = ({ data }) => {
    if (typeof data !== "string") {
      take(data);
      return;
    }
    const message = JSON.parse(data);
    if (message.type === "pong") {
      const trip = now() - message.time;
      pings.push({ trip, offset: message.now - message.time - trip / 2 });
      if (pings.length > MAX_PINGS) pings.shift();
      askNext();
    } else if (message.type === "damaged") {
      postMessage(message);
      asked = message.number;
      nextFrame(askNext);
    } else {
      if (message.type === "state") isLive = message.mode === "live";
      postMessage(message);
    }
  };
  socket.onclose = () => {
    postMessage({ type: "closed" });
    setTimeout(() => open(url), RETRY_MS);
  };
}

function send(message) {
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

/** Ask for the next view. Now and then, first measure the way to the server, while nothing else is on it. */
function askNext() {
  if (isLive && performance.now() - pingedAt >= PING_MS) {
    pingedAt = performance.now();
    send({ type: "ping", time: now() });
  } else if (isLive) send({ type: "next" });
  else if (wanted >= 0 && asked !== wanted) {
    asked = wanted;
    send({ type: "get", index: wanted });
  }
}

async function take(buffer) {
  const view = parseView(buffer);
  view.received = now();
  view.drawnAt = 0;
  if (view.origin_ms != null) view.origin = view.origin_ms - findOffset();
  const camera = findCamera(view.camera);
  if (isLive) remember(camera, view, buffer.byteLength);
  try {
    if (!frozen) await show(camera, view);
    else if (frozen.camera === camera.name) postPlace(camera);
  } finally {
    nextFrame(askNext);
  }
}

/** Return the server's clock less this one's in ms, by the shortest recent round trip. */
function findOffset() {
  return pings.reduce((best, ping) => (ping.trip < best.trip ? ping : best), { trip: Infinity, offset: 0 }).offset;
}

function remember(camera, view, bytes) {
  const { history } = camera;
  history.push({ view, bytes });
  camera.bytes += bytes;
  const share = HISTORY_BYTES / cameras.size;
  while (history.length > 1 && (view.received - history[0].view.received > HISTORY_MS || camera.bytes > share)) {
    camera.bytes -= history.shift().bytes;
    if (frozen?.camera === camera.name) frozen.place = Math.max(0, frozen.place - 1);
  }
}

/** Decode and draw a view, unless a later one was drawn meanwhile. */
async function show(camera, view) {
  const turn = ++camera.turn;
  camera.latest = view;
  if (!camera.context) return;
  let bitmap = null;
  try {
    if (view.picture.length) bitmap = await createImageBitmap(new Blob([view.picture], { type: view.image.type }));
  } catch (error) {
    postMessage({ type: "damaged", number: view.number, text: `the picture cannot be decoded: ${error.message}` });
  }
  if (turn !== camera.turn) {
    bitmap?.close();
    return;
  }
  noteBoxes(camera, view);
  camera.shown = view;
  const labels = painter.draw(camera.context, bitmap, view, {
    ratio: camera.ratio,
    shows,
    selected: selected.camera === camera.name ? selected.id : null,
    ghosts: camera.ghosts,
    placer: camera.isLabelled ? camera.placer : null,
  });
  bitmap?.close();
  view.drawnAt = now();
  const place = frozen?.camera === camera.name ? frozen.place : camera.history.length - 1;
  const times = { place, places: camera.history.length, span: measureSpan(camera) };
  postMessage({ type: "shown", view: { ...withoutPixels(view), labels }, frozen: frozen !== null, ...times });
}

/** Keep where each object was seen last, for the time in which it is hidden. */
function noteBoxes(camera, view) {
  if (camera.epoch !== view.masks?.epoch && view.masks) {
    camera.ghosts.clear();
    camera.epoch = view.masks.epoch;
  }
  const instances = view.masks?.instances ?? [];
  for (const instance of instances) if (instance.bits.length) camera.ghosts.set(instance.id, instance.box);
  if (camera.ghosts.size > 512) camera.ghosts.clear();
}

function postPlace(camera) {
  const place = frozen?.place ?? camera.history.length - 1;
  const newest = camera.history.at(-1).view;
  const times = { place, places: camera.history.length, span: measureSpan(camera) };
  postMessage({ type: "place", camera: camera.name, ...times, newest: withoutPixels(newest) });
}

/** Return the ms from the oldest to the newest view of a camera's history. */
function measureSpan({ history }) {
  return history.length ? history.at(-1).view.received - history[0].view.received : 0;
}

/** Show a place of a camera's history, and of the other cameras what was shown at that time. */
function showHistory(name, place) {
  const chosen = cameras.get(name);
  if (!chosen?.history.length) return;
  const index = Math.max(0, Math.min(place, chosen.history.length - 1));
  frozen = { camera: name, place: index };
  const time = chosen.history[index].view.received;
  for (const camera of cameras.values()) {
    const found = camera === chosen ? chosen.history[index] : camera.history.findLast((item) => item.view.received <= time);
    if (found) show(camera, found.view);
  }
}

function redraw() {
  for (const camera of cameras.values()) if (camera.latest) show(camera, camera.latest);
}

const handlers = {
  open: ({ url }) => open(url),
  canvas: ({ camera, canvas }) => {
    const found = findCamera(camera);
    found.context = canvas.getContext("2d", { alpha: false });
    if (found.latest) show(found, found.latest);
  },
  size: ({ camera, width, height, ratio }) => {
    const found = findCamera(camera);
    found.isLabelled = width / ratio >= MIN_LABELLED_PX;
    if (!found.context) return;
    found.context.canvas.width = width;
    found.context.canvas.height = height;
    found.ratio = ratio;
    if (found.latest) show(found, found.latest);
  },
  freeze: ({ camera }) => {
    const found = cameras.get(camera);
    const shown = found?.history.findIndex((item) => item.view === found.shown) ?? -1;
    if (shown >= 0) showHistory(camera, shown);
  },
  scrub: ({ camera, place }) => showHistory(camera, place),
  live: () => {
    frozen = null;
    for (const camera of cameras.values()) if (camera.history.length) show(camera, camera.history.at(-1).view);
  },
  get: ({ index }) => {
    const idle = asked === wanted;
    wanted = index;
    if (idle) askNext();
  },
  // a reply's mask on the picture that stands still; without mask the object is taken away
  patch: ({ camera, id, seq, label, score, mask }) => {
    const view = cameras.get(camera)?.latest;
    if (!view?.masks || (mask && view.seq !== seq)) return;
    const before = view.masks.instances.find((instance) => instance.id === id);
    view.masks.instances = view.masks.instances.filter((instance) => instance !== before);
    if (mask) {
      const fresh = { id, label: label ?? "object", state: "tracked", doubtful: false, age: 0, unseen: 0 };
      const bits = fromBase64(mask.bits);
      view.masks.instances.push({ ...fresh, ...before, score, box: mask.box, area: mask.area, bits });
    }
    show(cameras.get(camera), view);
  },
  select: ({ camera, id }) => {
    selected = { camera, id };
    redraw();
  },
  shows: (message) => {
    shows = message.shows;
    redraw();
  },
  hit: ({ request, camera, x, y }) => {
    const instances = cameras.get(camera)?.shown?.masks?.instances ?? [];
    const found = instances.filter((instance) => instance.bits.length && isInside(instance, x, y));
    found.sort((a, b) => a.area - b.area); // the smallest is on top
    postMessage({ type: "reply", request, value: found[0]?.id ?? null });
  },
  // the picture in its own pixels, and the ids of the objects on it
  snapshot: async ({ request, camera }) => {
    const view = cameras.get(camera)?.shown;
    const value = view ? { seq: view.seq, files: await makeSnapshot(view) } : null;
    postMessage({ type: "reply", request, value });
  },
};

async function makeSnapshot(view) {
  const files = [];
  if (view.picture.length) {
    const bitmap = await createImageBitmap(new Blob([view.picture], { type: view.image.type }));
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
    canvas.getContext("2d").drawImage(bitmap, 0, 0);
    bitmap.close();
    files.push([`${view.camera}-${view.seq}.png`, await canvas.convertToBlob({ type: "image/png" })]);
  }
  if (view.masks) files.push([`${view.camera}-${view.seq}-masks.png`, await encodeLabels(paintIds(view.masks.instances, view), view)]);
  return files;
}

self.onmessage = ({ data }) => handlers[data.type](data);
