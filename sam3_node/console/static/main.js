// The page: it starts the worker that receives and draws views, and connects pictures, panels, timeline and keys.

import { Cameras } from "./cameras.js";
import { make, setText } from "./dom.js";
import { Keys } from "./keys.js";
import { CLICK_FIRST, Watch, describeEvent, isTouch } from "./messages.js";
import { Lost, Stages, Tracks, describeNode, showEvents, showNames, showPairs, showVocabulary } from "./panels.js";
import { Pins, describeMarks } from "./pins.js";
import { Player } from "./player.js";
import { Prompts } from "./prompts.js";
import { call, fetchPicture, isAllowed, logIn, lookFor, suggest } from "./requests.js";
import { Review } from "./review.js";
import { restoreTheme, toggleTheme } from "./theme.js";
import { Timeline, isDifferent } from "./timeline.js";
import { say } from "./toast.js";

const REFRESH_MS = 200;
const SILENT_MS = 1800;
const MAX_NOTES = 50;
const MAX_EVENTS = 100;
const MAX_LABELS = 512;
const find = (selector) => document.querySelector(selector);

const worker = new Worker("static/view-worker.js", { type: "module" });
const pending = new Map();
const stages = new Stages();
let requests = 0;
let state = null; // the last state of the server
let stateAt = 0;
let isOpen = false;
let frozen = false;
let place = { place: 0, places: 0, span: 0 };
let vocabulary = [];
const notes = []; // what the page noticed, as events
const labels = new Map(); // last names of objects, by camera and id
const newest = new Map(); // header of the newest view of each camera
let selected = { camera: null, id: null };
let refused = "";

const ask = (message) =>
  new Promise((resolve) => {
    pending.set(++requests, resolve);
    worker.postMessage({ ...message, request: requests });
  });
const isLive = () => state?.mode !== "recording";
const canChange = () => Boolean(state && !state.read_only);
const getSelected = (camera) => (selected.camera === camera ? selected.id : null);
const shownView = () => cameras.main?.shown ?? null;

const nameOf = (camera, id) => labels.get(`${camera} ${id}`) ?? `object ${id}`;

function select(camera, id) {
  selected = { camera, id };
  worker.postMessage({ type: "select", camera, id });
  refresh();
}

const prompts = new Prompts({
  ask,
  tell: (message) => worker.postMessage(message),
  say,
  select,
  getSelected,
  canChange,
  goLive: () => goLive(),
  getNewest: (camera) => newest.get(camera),
  askLabel: (id) => askLabel(id),
  getName: () => find("#name").value.trim(),
  getLabel: () => find("#mark-label").value.trim(),
  isLive,
  nameOf: (view, id) => view.masks?.instances.find((item) => item.id === id)?.label ?? review.findLabel(view.camera, id),
  mark: (view, fields) => review.mark(view, fields),
  undo: () => review.undo(),
});
const pins = new Pins(() => refresh());
const cameras = new Cameras(worker, prompts, () => refresh(), (camera, seq) => review.findPrompts(camera, seq)); // at once: buttons of the table act on the large picture's camera
const timeline = new Timeline((index) => goTo(index));
const tracks = new Tracks({
  select: (id) => select(cameras.main.camera, id),
  rename: (id) => askLabel(id),
  remove: (id) => removeObject(id),
});
const lost = new Lost(async (object) => {
  let picture = null;
  await prompts.try(async () => {
    picture = await fetchPicture(object);
  });
  return picture;
});
const watch = new Watch(({ kind, camera, id, label }) => {
  const name = `${label} (${id})`;
  if (kind === "found") addNote(`Found ${name} again.`);
  else addNote(`Lost ${name}.`, [["Re-add", () => prompts.readd(camera, id, label)]]);
});

/** Add what the page noticed to the events, and say it if it offers something to do. */
function addNote(text, actions = []) {
  notes.unshift({ number: `note ${(addNote.count = (addNote.count ?? 0) + 1)}`, time_ms: Date.now(), text, actions });
  notes.length = Math.min(notes.length, MAX_NOTES);
  if (actions.length && canChange()) say(text, false, actions);
}

// Time: freeze, scrub, play

function goTo(index) {
  if (!cameras.main) return;
  if (isLive()) {
    frozen = true;
    worker.postMessage({ type: "scrub", camera: cameras.main.camera, place: index });
  } else {
    player.goTo(index);
  }
}

function toggleFreeze() {
  if (frozen) goLive();
  else if (cameras.main) {
    frozen = true;
    worker.postMessage({ type: "freeze", camera: cameras.main.camera });
  }
  refresh();
}

function goLive() {
  frozen = false;
  pins.release();
  worker.postMessage({ type: "live" });
  refresh();
}

function step(by) {
  if (isLive()) goTo(Math.max(0, Math.min(place.places - 1, place.place + by)));
  else goTo(Math.max(0, Math.min(state.frames - 1, player.index + by)));
}

const player = new Player({
  timeline,
  show: (index) => worker.postMessage({ type: "get", index }),
  say,
  refresh: () => refresh(),
});

const review = new Review({
  try: (run) => prompts.try(run),
  say,
  select,
  goTo: (index) => player.goTo(index),
  nameOf: (camera, id) => shownView()?.masks?.instances.find((item) => item.id === id)?.label ?? nameOf(camera, id),
  getView: shownView,
  getSelected,
  changed: () => {
    for (const tile of cameras.tiles.values()) tile.noteMarks();
  },
});

const SHOWS = { both: "masks", masks: "other", other: "both" };
let shows = "both";

function toggleShows() {
  shows = SHOWS[shows];
  const names = { both: "both", masks: state.recording, other: state.against };
  find("#shows").textContent = `Show: ${names[shows]}`;
  worker.postMessage({ type: "shows", shows });
}

// Requests

async function request(op, args, done) {
  await prompts.try(async () => {
    await call(op, args);
    if (done) say(done);
  });
}

const setNames = (names) => prompts.try(() => lookFor(names, state?.status));
const getNames = () => state?.status?.prompts ?? [];

async function addName() {
  const name = find("#name").value.trim();
  if (!name) return;
  await prompts.try(async () => {
    await lookFor([...getNames(), name], state?.status);
    find("#name").value = "";
    say(`The node looks for ${name}.`);
  });
}

function togglePause() {
  const isPaused = state?.status?.paused;
  request(isPaused ? "resume" : "pause", {}, isPaused ? "The node processes frames." : "The node is paused.");
}

function toggleRecord() {
  request("record", { on: !state?.recorder?.on });
}

function toggleEpisode() {
  const open = state?.status?.episode;
  if (open) request("end_episode", {}, `Episode ${open.episode} is kept.`);
  else request("begin_episode", {}, "An episode has begun.");
}

function discardEpisode() {
  const open = state?.status?.episode;
  if (open) request("end_episode", { keep: false }, `Episode ${open.episode} is discarded.`);
}

function askReset() {
  const dialog = find("#reset-dialog");
  dialog.returnValue = "no";
  dialog.onclose = () => dialog.returnValue === "yes" && request("reset", {}, "All objects are removed.");
  dialog.showModal();
}

function askLabel(id = getSelected(cameras.main?.camera)) {
  const instance = shownView()?.masks?.instances.find((item) => item.id === id);
  if (!instance || !isLive() || !canChange()) return;
  const [dialog, input] = [find("#rename-dialog"), find("#label")];
  const { camera } = cameras.main;
  find("#rename-title").textContent = `New label of object ${id}`;
  input.value = instance.label;
  dialog.returnValue = "no";
  dialog.onclose = () => {
    const label = input.value.trim();
    if (dialog.returnValue === "yes" && label) prompts.rename(camera, id, label, shownView());
  };
  dialog.showModal();
  input.select();
}

/** Save the picture in its own pixels, and an image of the ids of the objects on it. */
async function saveSnapshot() {
  const snapshot = await ask({ type: "snapshot", camera: cameras.main?.camera });
  if (!snapshot?.files.length) return;
  for (const [name, blob] of snapshot.files) {
    const link = make("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
  say(`Saved ${snapshot.files.map(([name]) => name).join(" and ")}.`);
}

// The node's vocabulary

async function chooseNames() {
  vocabulary = await suggest("");
  find("#filter").value = "";
  find("#vocabulary-empty").hidden = vocabulary.length > 0;
  find("#filter").hidden = find("#vocabulary").hidden = !vocabulary.length;
  showWords();
  find("#vocabulary-dialog").showModal();
}

function showWords() {
  const typed = find("#filter").value.trim().toLowerCase();
  const chosen = getNames();
  const words = [...new Set([...chosen, ...vocabulary])].filter((word) => word.toLowerCase().includes(typed));
  showVocabulary(words, chosen, (word) => {
    const names = getNames();
    setNames(names.includes(word) ? names.filter((other) => other !== word) : [...names, word]);
  });
}

// Keys

function changeTheme() {
  toggleTheme();
  timeline.draw();
}

function chooseNext(by) {
  const ids = (shownView()?.masks?.instances ?? []).map((instance) => instance.id);
  if (!ids.length) return;
  const at = ids.indexOf(getSelected(cameras.main.camera));
  select(cameras.main.camera, ids[(at + by + ids.length) % ids.length]);
}

function removeChosen() {
  const id = getSelected(cameras.main?.camera);
  if (id !== null && canChange()) removeObject(id);
}

function hideChosen() {
  const id = getSelected(cameras.main?.camera);
  if (id !== null && shownView()) prompts.keep(shownView(), { id, hidden: true }, "Hidden:");
}

function removeObject(id) {
  const { camera } = cameras.main;
  prompts.remove(camera, id, nameOf(camera, id), shownView());
}

function toggleNegation() {
  prompts.negates = !prompts.negates;
  find("#negate").setAttribute("aria-pressed", String(prompts.negates));
}

function togglePreviews() {
  prompts.previews = !prompts.previews;
  say(`Previews under the pointer are ${prompts.previews ? "on" : "off"}.`);
}

const keys = new Keys({
  isLive,
  canChange,
  choose: (id) => cameras.main && select(cameras.main.camera, id),
  both: [
    ["[", "Time", "one frame back", () => step(-1)],
    ["]", "Time", "one frame forth", () => step(1)],
    ["J", "Objects", "next object", () => chooseNext(1)],
    ["K", "Objects", "object before", () => chooseNext(-1)],
    ["O", "Page", "next camera", () => cameras.enlargeNext()],
    ["S", "Page", "save a snapshot", saveSnapshot],
    ["T", "Page", "light or dark", changeTheme],
    ["?", "Page", "this list", () => find("#help-dialog").showModal()],
  ],
  live: [
    [" ", "Time", "freeze, or back to live", toggleFreeze],
    ["L", "Time", "back to live", goLive],
    ["/", "Objects", "type a name", () => find("#name").focus()],
    ["F2", "Objects", "rename the object", () => askLabel()],
    ["Delete", "Objects", "remove the object", removeChosen],
    ["H", "On the picture", "previews on or off", togglePreviews],
    ["Tab", "On the picture", "preview the part, or the whole", () => prompts.chooseNext()],
    ["P", "Node", "pause or resume", togglePause],
    ["X", "Node", "remove all, after a question", askReset],
    ["E", "Node", "begin an episode, or end and keep it", toggleEpisode],
    ["C", "Node", "record, or end the recording", toggleRecord],
  ],
  recorded: [
    [" ", "Time", "play or stop", () => player.toggle()],
    ["D", "Time", "next frame to look at, the most doubtful first", () => review.next()],
    ["F", "Time", "next frame that differs", () => player.jump(isDifferent, "different masks")],
    ["A", "Objects", "state the chosen object, or the frame, as checked", () => review.state("checked")],
    ["R", "Objects", "state it as rejected", () => review.state("rejected")],
    ["N", "Objects", "choose none: the next mark adds an object", () => select(null, null)],
    ["H", "Objects", "the object is hidden on this frame", hideChosen],
    ["Delete", "Objects", "remove the object, from this frame on", removeChosen],
    ["Z", "Objects", "take back the last mark", () => review.undo()],
    ["V", "Page", "show both results or one", () => state?.against && toggleShows()],
  ],
});

// What is shown

function explain() {
  const now = performance.now();
  if (refused) return refused;
  if (!isOpen || now - stateAt > SILENT_MS) return "The console's server does not answer. Is it still running?";
  return state?.problem || "";
}

function describeBadge(problem) {
  if (!isOpen || (state && !state.connected)) return ["lost", "no node"];
  if (!isLive()) return ["still", player.timer ? "playing" : "recording"];
  if (frozen) return ["still", "frozen"];
  if (state?.status?.paused) return ["wait", "paused"];
  if (problem) return ["wait", "waiting"];
  return cameras.main?.isStale() ? ["wait", "late"] : ["live", "live"];
}

function refresh() {
  const problem = explain();
  const notice = find("#notice");
  notice.hidden = !problem;
  setText(notice, problem);
  document.body.dataset.connected = isOpen && state?.connected && !refused ? "yes" : "no";
  const [kind, word] = describeBadge(problem);
  const badge = find("#badge");
  badge.dataset.kind = kind;
  setText(badge, word);
  const age = cameras.main?.age() ?? null;
  find("#age").hidden = age === null;
  setText(find("#age b"), age === null ? "–" : age < 10_000 ? age.toFixed(0) : (age / 1000).toFixed(0));
  setText(find("#age span"), age !== null && age >= 10_000 ? "s old" : "ms old");
  for (const tile of cameras.tiles.values()) tile.refresh(frozen);
  if (isLive()) timeline.showLive(place, age ?? 0, frozen, describePlace(), state?.marks_s ?? 0);
  find("#freeze").setAttribute("aria-pressed", String(frozen));
  setText(find("#freeze"), frozen ? "Live" : "Freeze");
  find("#play").setAttribute("aria-pressed", String(Boolean(player.timer)));
  showView();
  if (state) showState();
}

/** Return what to do at the place in time, and what marks do there. */
function describePlace() {
  if (!frozen) return `${canChange() ? "Marks work on the green part" : ""}${isTouch ? "" : "  ·  Space: freeze  ·  [ and ]: step"}`;
  const view = shownView();
  const marks = view && canChange() ? describeMarks(pins.find(view.camera, view.seq)) : "";
  return [marks, isTouch ? "" : "Space or L: back to live"].filter(Boolean).join("  ·  ");
}

function showView() {
  const view = shownView();
  tracks.update(view?.masks, getSelected(cameras.main?.camera), canChange());
  lost.update((state?.lost ?? []).filter(({ camera }) => camera === cameras.main?.camera), canChange());
  stages.update();
  if (state?.against) showComparison();
  if (state && !isLive()) review.show();
}

function showState() {
  const { status, recorder } = state;
  find("#pause").setAttribute("aria-pressed", String(Boolean(status?.paused)));
  setText(find("#pause"), status?.paused ? "Resume" : "Pause");
  find("#episode").setAttribute("aria-pressed", String(Boolean(status?.episode)));
  setText(find("#episode"), status?.episode ? "Keep episode" : "Begin episode");
  find("#discard").hidden = !status?.episode;
  find("#record").setAttribute("aria-pressed", String(Boolean(recorder?.on)));
  if (recorder && recorder.line !== showState.line) {
    if (showState.line !== undefined && recorder.line) say(recorder.line, recorder.line.startsWith("recording failed"));
    showState.line = recorder.line;
  }
  showNames(getNames(), canChange(), (name) => setNames(getNames().filter((other) => other !== name)));
  showPairs("#health", describeNode(status, cameras.main?.camera, state));
  showEvents(listEvents());
  if (find("#vocabulary-dialog").open) showWords();
}

/** Return the events of the node in words, and what the page noticed, the newest first. */
function listEvents() {
  const told = (state.events ?? []).map((event) => {
    const text = describeEvent(event, nameOf);
    const isLost = event.op === "remove_object" || (event.op === "caught_up" && event.error);
    const label = isLost ? labels.get(`${event.camera} ${event.id}`) : null;
    const actions = label ? [["Re-add", () => prompts.readd(event.camera, Number(event.id), label)]] : [];
    if (event.op === "pause") actions.push(["Resume", () => state.status?.paused && togglePause()]);
    return { number: event.number, time_ms: event.time_ms, text, actions };
  });
  const shown = [...told.filter(({ text }) => text), ...notes];
  return shown.sort((a, b) => b.time_ms - a.time_ms).slice(0, MAX_EVENTS);
}

/** Note the newest view of a live camera: names of its objects, and which of them are lost. */
function noteNewest(view) {
  newest.set(view.camera, view);
  for (const { id, label } of view.masks?.instances ?? []) {
    const key = `${view.camera} ${id}`;
    labels.delete(key);
    labels.set(key, label);
    if (labels.size > MAX_LABELS) labels.delete(labels.keys().next().value);
  }
  if (view.masks) watch.see(view.camera, view.masks);
}

function showComparison() {
  const { shown, mean, frames } = timeline.readIou();
  const format = (iou) => (iou === null ? "–" : iou.toFixed(3));
  showPairs("#comparison", [
    ["filled", `${state.recording} (${state.kind})`],
    ["dashed", `${state.against} (${state.other_kind})`],
    ["IoU of this frame", format(shown)],
    [`mean IoU of ${frames} frames`, format(mean)],
  ]);
}

function takeState(message) {
  const isFirst = state === null;
  if (state?.status?.node && message.status?.node && message.status.node !== state.status.node) {
    stages.clear();
    select(null, null);
    say("The node was started again. Ids of objects have begun again.");
  }
  const last = state?.events?.at(-1)?.number ?? 0;
  const isRemoval = ({ op, number }) => number > last && ["reset", "remove_object", "dropped", "restored"].includes(op);
  if (message.events?.some(isRemoval)) prompts.forgetYoung();
  state = message;
  stateAt = performance.now();
  document.body.dataset.mode = state.mode;
  document.body.toggleAttribute("data-read-only", state.read_only);
  if (state.against) document.body.dataset.against = "";
  if (isFirst) keys.show();
  if (isFirst && !isLive()) {
    document.title = `${state.recording} – sam3-node console`;
    player.show(0);
  }
  refresh();
}

async function checkAccess() {
  try {
    refused = (await isAllowed()) ? "" : "Open this page with the URL that `sam3-node console` has printed: it has the token.";
  } catch {
    refused = "";
  }
  refresh();
}

const handlers = {
  camera: ({ camera }) => cameras.add(camera),
  shown: ({ view, frozen: isFrozen, ...at }) => {
    const tile = cameras.tiles.get(view.camera);
    tile.show(view, isFrozen);
    if (tile === cameras.main) place = at;
    if (tile === cameras.main && !isFrozen) stages.add(view.masks);
    if (isLive() && isFrozen && canChange()) pins.hold(view);
    if (isLive() && !isFrozen) noteNewest(view);
    if (isFrozen || !isLive()) showView(); // live, the panels are refreshed less often than the picture
  },
  place: ({ camera, newest: view, ...at }) => {
    if (camera === cameras.main?.camera) place = at;
    noteNewest(view);
  },
  open: () => {
    isOpen = true;
    refused = "";
    stateAt = performance.now();
  },
  closed: () => {
    isOpen = false;
    refresh();
    checkAccess();
  },
  state: takeState,
  timeline: ({ start, rows }) => {
    timeline.add(start, rows, state.frames);
    timeline.showRecorded(player.index);
    if (state.against) showComparison();
  },
  review: (message) => review.take(message),
  damaged: ({ text }) => say(text, true),
  reply: ({ request, value }) => {
    pending.get(request)?.(value);
    pending.delete(request);
  },
};

const CLICKS = {
  negate: toggleNegation,
  choose: chooseNames,
  freeze: toggleFreeze,
  play: () => player.toggle(),
  "next-doubtful": () => review.next(),
  checked: () => review.state("checked"),
  rejected: () => review.state("rejected"),
  "undo-mark": () => review.undo(),
  "next-different": () => player.jump(isDifferent, "different masks"),
  shows: toggleShows,
  snapshot: saveSnapshot,
  record: toggleRecord,
  episode: toggleEpisode,
  discard: discardEpisode,
  pause: togglePause,
  reset: askReset,
  theme: changeTheme,
  help: () => find("#help-dialog").showModal(),
};

/** Say on the page what marks do, in the words of the pointer that it has. */
function describePointer() {
  document.body.toggleAttribute("data-touch", isTouch);
  const more = isTouch ? '"It is not…", then tap' : "Shift and click";
  find("#review-hint").textContent = `${CLICK_FIRST} or drag a box: correct the chosen object. Without one: a mask, or a new object.`;
  find("#marks-hint").textContent = `${CLICK_FIRST}: add an object, or correct its mask. Drag: a box. ${more}: what it is not.`;
}

function listen() {
  find("#filter").addEventListener("input", showWords);
  worker.onmessage = ({ data }) => handlers[data.type](data);
  for (const [id, run] of Object.entries(CLICKS)) find(`#${id}`).addEventListener("click", run);
  find("#names-form").addEventListener("submit", (event) => {
    event.preventDefault();
    addName();
  });
  find("#name").addEventListener("input", async () => {
    const words = await suggest(find("#name").value);
    find("#words").replaceChildren(...words.map((word) => Object.assign(document.createElement("option"), { value: word })));
  });
  find("#name").addEventListener("keydown", (event) => event.key === "Escape" && find("#name").blur());
}

async function start() {
  restoreTheme();
  timeline.draw();
  listen();
  describePointer();
  try {
    await logIn();
  } catch (error) {
    refused = error.message;
  }
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  worker.postMessage({ type: "open", url: `${scheme}://${location.host}${location.pathname}views` });
  setInterval(refresh, REFRESH_MS);
}

start();
