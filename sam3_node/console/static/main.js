// The page: it starts the worker that receives and draws views, and connects pictures, panels, timeline and keys.

import { Cameras } from "./cameras.js";
import { setText } from "./dom.js";
import { Keys } from "./keys.js";
import { Stages, Tracks, describeNode, showEvents, showNames, showPairs } from "./panels.js";
import { Player } from "./player.js";
import { Prompts } from "./prompts.js";
import { call, isAllowed, logIn, lookFor, suggest } from "./requests.js";
import { Timeline, isDifferent, isDoubtful } from "./timeline.js";

const REFRESH_MS = 200;
const SILENT_MS = 1800;
const TOAST_MS = 5000;
const THEME = "sam3-theme";
const find = (selector) => document.querySelector(selector);

const worker = new Worker("static/view-worker.js", { type: "module" });
const pending = new Map();
const stages = new Stages();
let requests = 0;
let state = null; // the last state of the server
let stateAt = 0;
let isOpen = false;
let frozen = false;
let place = { place: 0, places: 0 };
let selected = { camera: null, id: null };
let refused = "";

const ask = (message) =>
  new Promise((resolve) => {
    pending.set(++requests, resolve);
    worker.postMessage({ ...message, request: requests });
  });
const isLive = () => state?.mode !== "recording";
const canChange = () => Boolean(state && isLive() && !state.read_only);
const getSelected = (camera) => (selected.camera === camera ? selected.id : null);
const shownView = () => cameras.main?.shown ?? null;

function say(text, isError = false) {
  const toast = find("#toast");
  toast.textContent = text;
  toast.dataset.kind = isError ? "error" : "done";
  toast.classList.add("shown");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => toast.classList.remove("shown"), TOAST_MS);
}

function select(camera, id) {
  selected = { camera, id };
  worker.postMessage({ type: "select", camera, id });
  refresh();
}

const prompts = new Prompts({ ask, tell: (message) => worker.postMessage(message), say, select, getSelected, canChange });
const cameras = new Cameras(worker, prompts, () => refresh()); // at once: buttons of the table act on the large picture's camera
const timeline = new Timeline((index) => goTo(index));
const tracks = new Tracks({
  select: (id) => select(cameras.main.camera, id),
  rename: (id) => askLabel(id),
  remove: (id) => prompts.remove(cameras.main.camera, id, shownView()),
});

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

function askReset() {
  const dialog = find("#reset-dialog");
  dialog.returnValue = "no";
  dialog.onclose = () => dialog.returnValue === "yes" && request("reset", {}, "All objects are removed.");
  dialog.showModal();
}

function askLabel(id = getSelected(cameras.main?.camera)) {
  const instance = shownView()?.masks?.instances.find((item) => item.id === id);
  if (!instance || !canChange()) return;
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

async function saveSnapshot() {
  const blob = await ask({ type: "snapshot", camera: cameras.main?.camera });
  if (!blob) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${cameras.main.camera}-${shownView().seq}.png`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  say(`Saved ${link.download}.`);
}

// Keys

function toggleTheme() {
  const next = document.documentElement.dataset.theme === "light" ? "dark" : "light";
  localStorage.setItem(THEME, next);
  setTheme(next);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("#theme").textContent = theme === "light" ? "Dark" : "Light";
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
  if (id !== null && canChange()) prompts.remove(cameras.main.camera, id, shownView());
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
    ["[", "one frame back", () => step(-1)],
    ["]", "one frame forth", () => step(1)],
    ["J", "next object", () => chooseNext(1)],
    ["K", "object before", () => chooseNext(-1)],
    ["O", "next camera", () => cameras.enlargeNext()],
    ["S", "save a snapshot", saveSnapshot],
    ["T", "light or dark", toggleTheme],
    ["?", "this list", () => find("#help-dialog").showModal()],
  ],
  live: [
    [" ", "freeze, or back to live", toggleFreeze],
    ["L", "back to live", goLive],
    ["/", "type a name", () => find("#name").focus()],
    ["F2", "rename the object", () => askLabel()],
    ["Delete", "remove the object", removeChosen],
    ["P", "pause or resume the node", togglePause],
    ["X", "remove all, after a question", askReset],
    ["C", "record, or end the recording", toggleRecord],
    ["H", "previews on or off", togglePreviews],
  ],
  recorded: [
    [" ", "play or stop", () => player.toggle()],
    ["D", "next doubtful frame", () => player.jump(isDoubtful, "doubtful masks")],
    ["F", "next frame that differs", () => player.jump(isDifferent, "different masks")],
    ["V", "show both results or one", () => state?.against && toggleShows()],
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
  if (isLive()) timeline.showLive(place.place, place.places, age ?? 0, frozen);
  find("#freeze").setAttribute("aria-pressed", String(frozen));
  setText(find("#freeze"), frozen ? "Live" : "Freeze");
  find("#play").setAttribute("aria-pressed", String(Boolean(player.timer)));
  showView();
  if (state) showState();
}

function showView() {
  const view = shownView();
  tracks.update(view?.masks, getSelected(cameras.main?.camera), canChange());
  stages.update();
}

function showState() {
  const { status, recorder } = state;
  find("#pause").setAttribute("aria-pressed", String(Boolean(status?.paused)));
  setText(find("#pause"), status?.paused ? "Resume" : "Pause");
  find("#record").setAttribute("aria-pressed", String(Boolean(recorder?.on)));
  if (recorder && recorder.line !== showState.line) {
    if (showState.line !== undefined && recorder.line) say(recorder.line, recorder.line.startsWith("recording failed"));
    showState.line = recorder.line;
  }
  showNames(getNames(), canChange(), (name) => setNames(getNames().filter((other) => other !== name)));
  showPairs("#health", describeNode(status, cameras.main?.camera, state));
  showEvents(state.events ?? []);
}

function takeState(message) {
  const isFirst = state === null;
  if (state?.status?.node && message.status?.node && message.status.node !== state.status.node) {
    stages.clear();
    select(null, null);
    say("The node was started again. Ids of objects have begun again.");
  }
  state = message;
  stateAt = performance.now();
  document.body.dataset.mode = state.mode;
  document.body.toggleAttribute("data-read-only", state.read_only);
  if (state.against) document.body.dataset.against = "";
  if (isFirst) keys.show();
  if (isFirst && !isLive()) {
    document.title = `${state.recording} – sam3-node console`;
    showPairs("#comparison", [["filled", `${state.recording} (${state.kind})`], ["dashed", `${state.against} (${state.other_kind})`]]);
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
    if (isFrozen || !isLive()) showView(); // live, the panels are refreshed less often than the picture
  },
  place: ({ camera, ...at }) => {
    if (camera === cameras.main?.camera) place = at;
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
  },
  damaged: ({ text }) => say(text, true),
  reply: ({ request, value }) => {
    pending.get(request)?.(value);
    pending.delete(request);
  },
};

const CLICKS = {
  freeze: toggleFreeze,
  play: () => player.toggle(),
  "next-doubtful": () => player.jump(isDoubtful, "doubtful masks"),
  "next-different": () => player.jump(isDifferent, "different masks"),
  shows: toggleShows,
  snapshot: saveSnapshot,
  record: toggleRecord,
  pause: togglePause,
  reset: askReset,
  theme: toggleTheme,
  help: () => find("#help-dialog").showModal(),
};

function listen() {
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
  const preferred = matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark";
  setTheme(localStorage.getItem(THEME) ?? preferred);
  listen();
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
