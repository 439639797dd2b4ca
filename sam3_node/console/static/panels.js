// The panels beside the picture: objects, stage times, the node, events. Rows are kept and changed in place, so that
// the page's memory stays flat.

import { make, setText } from "./dom.js";
import { describeLost } from "./messages.js";
import { MARKS, cssColour, nameState } from "./palette.js";

const WINDOW = 300;
const STAGES = ["decode", "preprocess", "encode", "track", "detect", "recall", "masks", "remember", "pack"];

/** Keep one element for each key: `build` makes a missing one, `update` changes it, the others are removed. */
function keepRows(host, entries, build, update) {
  const rows = new Map([...host.children].map((row) => [row.dataset.key, row]));
  entries.forEach(([key, value], index) => {
    const row = rows.get(String(key)) ?? build(key, value);
    row.dataset.key = key;
    rows.delete(String(key));
    if (host.children[index] !== row) host.insertBefore(row, host.children[index] ?? null);
    update(row, value, key);
  });
  for (const row of rows.values()) row.remove();
}

/** The table of objects. `actions` has select(id), rename(id) and remove(id). */
export class Tracks {
  constructor(actions) {
    this.actions = actions;
    this.body = document.querySelector("#tracks tbody");
    this.count = document.querySelector("#count");
  }

  /** Show the objects of a view, and those that the node held on its frame to shed load. */
  update(masks, selected, canChange) {
    const instances = (masks?.instances ?? []).map((instance) => [instance.id, instance]);
    const held = (masks?.shed?.held ?? []).map((id) => [id, null]);
    const entries = [...instances, ...held].sort(([a], [b]) => a - b);
    keepRows(
      this.body,
      entries,
      (id) => this.build(id),
      (row, instance) => this.fill(row, instance, selected, canChange),
    );
    setText(this.count, entries.length ? String(entries.length) : "none");
  }

  build(id) {
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = cssColour(id);
    const pick = make("button", { className: "pick", title: `Choose object ${id}` }, swatch, String(id));
    pick.onclick = () => this.actions.select(id);
    const rename = make("button", { className: "live change rename", textContent: "✎", title: "Rename (F2)" });
    rename.setAttribute("aria-label", `Rename object ${id}`);
    rename.onclick = () => this.actions.rename(id);
    const remove = make("button", { className: "change remove", textContent: "✕", title: "Remove (Delete)" });
    remove.setAttribute("aria-label", `Remove object ${id}`);
    remove.onclick = () => this.actions.remove(id);
    const cells = [pick, "", "", "", ""].map((content) => make("td", {}, content));
    cells[4].append(rename, " ", remove);
    const row = make("tr", {}, ...cells);
    row.dataset.id = id;
    return row;
  }

  fill(row, instance, selected, canChange) {
    const [, label, state, score, actions] = row.children;
    actions.hidden = !canChange;
    row.setAttribute("aria-selected", String(Number(row.dataset.id) === selected));
    if (!instance) {
      setText(state, "held");
      state.dataset.state = "held";
      return;
    }
    const name = nameState(instance);
    setText(label, instance.label);
    setText(state, `${MARKS[name]} ${name}`);
    state.dataset.state = name;
    setText(score, instance.area ? instance.score.toFixed(2) : "–");
    row.dataset.area = instance.area;
  }
}

/** The objects that were lost, each a button that shows its last picture. `fetchPicture(object)` returns a Blob. */
export class Lost {
  constructor(fetchPicture) {
    this.fetchPicture = fetchPicture;
    this.host = document.querySelector("#lost");
  }

  update(objects, canAsk) {
    keepRows(
      this.host,
      objects.map((object) => [`${object.epoch} ${object.id}`, object]),
      () => this.build(),
      (row, object) => {
        row.object = object;
        setText(row.firstChild, describeLost(object));
        row.firstChild.disabled = !(canAsk && object.has_picture);
      },
    );
  }

  build() {
    const button = make("button", { type: "button", title: "Show its last picture, or hide it" });
    const row = make("li", {}, button);
    button.onclick = () => this.toggle(row);
    return row;
  }

  async toggle(row) {
    const shown = row.querySelector("img");
    if (shown) {
      shown.remove();
      return;
    }
    const blob = await this.fetchPicture(row.object);
    if (!blob || row.querySelector("img")) return;
    const image = make("img", { src: URL.createObjectURL(blob), alt: `Last picture of ${row.object.label || "it"}` });
    image.onload = image.onerror = () => URL.revokeObjectURL(image.src);
    row.append(image);
  }
}

/** Times of the stages as a waterfall: median as a bar, the 99th percentile as a mark. */
export class Stages {
  constructor() {
    this.host = document.querySelector("#stages");
    this.total = document.querySelector("#latency");
    this.clear();
  }

  clear() {
    this.samples = new Map();
    this.latencies = [];
  }

  add(masks) {
    if (!masks) return;
    for (const [name, us] of Object.entries(masks.stages_us)) {
      if (!this.samples.has(name)) this.samples.set(name, []);
      keep(this.samples.get(name), us / 1000);
    }
    if (masks.latency_ms !== null) keep(this.latencies, masks.latency_ms);
  }

  update() {
    const names = [...this.samples.keys()].sort((a, b) => rank(a) - rank(b));
    let begin = 0;
    const rows = names.map((name) => {
      const sorted = [...this.samples.get(name)].sort((a, b) => a - b);
      const row = { begin, median: quantile(sorted, 0.5), worst: quantile(sorted, 0.99) };
      begin += row.median;
      return [name, row];
    });
    const end = Math.max(1, ...rows.map(([, row]) => row.begin + row.worst));
    keepRows(this.host, rows, buildStage, (element, row, name) => {
      const [title, track, value] = element.children;
      setText(title, name);
      place(track.children[0], row.begin / end, row.median / end);
      place(track.children[1], row.begin / end, row.worst / end);
      setText(value, `${format(row.median)} / ${format(row.worst)} ms`);
    });
    this.host.parentElement.hidden = !rows.length;
    const sorted = [...this.latencies].sort((a, b) => a - b);
    setText(this.total, sorted.length ? `p50 ${quantile(sorted, 0.5).toFixed(0)} · p99 ${quantile(sorted, 0.99).toFixed(0)} ms` : "");
  }
}

function buildStage() {
  const track = make("span", { className: "track" }, make("i"), make("i", { className: "worst" }));
  return make("div", { className: "stage", title: "median / 99th percentile" }, make("span"), track, make("span"));
}

function place(bar, left, width) {
  bar.style.left = `${(100 * left).toFixed(2)}%`;
  bar.style.width = `${(100 * width).toFixed(2)}%`;
}

function keep(values, value) {
  values.push(value);
  if (values.length > WINDOW) values.shift();
}

function quantile(sorted, share) {
  return sorted.length ? sorted[Math.floor(share * (sorted.length - 1))] : 0;
}

function format(ms) {
  return ms < 10 ? ms.toFixed(1) : ms.toFixed(0);
}

function rank(name) {
  const index = STAGES.indexOf(name);
  return index < 0 ? STAGES.length : index;
}

/** Pairs of a name and a value in a list. */
export function showPairs(selector, pairs) {
  const host = document.querySelector(selector);
  const kept = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
  keepRows(
    host,
    kept.flatMap(([name, value]) => [[`${name} name`, name], [name, String(value)]]),
    (key) => make(key.endsWith(" name") ? "dt" : "dd"),
    (element, text) => setText(element, text),
  );
}

/** Return the pairs of the node's panel. */
export function describeNode(status, camera, state) {
  if (!status) return [["state", state.connected ? "no status yet" : "not connected"]];
  const stats = status.cameras?.[camera] ?? {};
  const mb = (bytes) => (bytes == null ? null : `${(bytes / 1e6).toFixed(0)} MB`);
  const lost = [stats.too_old && `${stats.too_old} too old`, stats.failed && `${stats.failed} failed`].filter(Boolean);
  return [
    ["model", status.model],
    ["device", status.device],
    ["detector", status.detector ?? "none"],
    ["rate", stats.fps == null ? null : `${stats.fps.toFixed(1)} Hz`],
    ["frames skipped", stats.received ? `${stats.skipped} of ${stats.received}${lost.length ? ` (${lost.join(", ")})` : ""}` : null],
    ["load shed", stats.shed_level ? `level ${stats.shed_level}` : null],
    ["catching up", stats.catching_up ? `${stats.catching_up} objects` : null],
    ["host memory", mb(status.rss_bytes)],
    ["GPU memory", mb(status.device_bytes)],
    ["last error", stats.last_error && stats.last_error_age_s != null
      ? `${stats.last_error} (${stats.last_error_age_s.toFixed(0)} s ago)` : stats.last_error],
  ];
}

/** The list of events, the newest first: {number, time_ms, text, actions}, with buttons [text, function]. */
export function showEvents(events) {
  keepRows(
    document.querySelector("#events"),
    events.map((event) => [event.number, event]),
    (key, { time_ms, text, actions }) => {
      const time = new Date(time_ms).toTimeString().slice(0, 8);
      const buttons = actions.map(([textContent, onclick]) => make("button", { className: "change", textContent, onclick }));
      return make("li", {}, make("time", { textContent: time }), text, ...buttons.flatMap((button) => [" ", button]));
    },
    () => {},
  );
}

/** The names that the node looks for, each with a button that removes it. */
export function showNames(names, canChange, remove) {
  keepRows(
    document.querySelector("#names"),
    names.map((name) => [name, name]),
    (name) => {
      const button = make("button", { textContent: "✕", title: "Stop looking for it" });
      button.setAttribute("aria-label", `Stop looking for ${name}`);
      button.onclick = () => remove(name);
      return make("li", {}, make("span", { textContent: name }), button);
    },
    (row) => {
      row.lastChild.hidden = !canChange;
    },
  );
}

/** The node's vocabulary, each phrase a button that is pressed while the node looks for it. */
export function showVocabulary(words, names, toggle) {
  keepRows(
    document.querySelector("#vocabulary"),
    words.map((word) => [word, word]),
    (word) => make("li", {}, make("button", { type: "button", textContent: word, onclick: () => toggle(word) })),
    (row, word) => row.firstChild.setAttribute("aria-pressed", String(names.includes(word))),
  );
}
