// The page of a dataset: it shows its episodes and what becomes of them, and asks for what a person wants to change.

import { make, setText } from "./dom.js";
import { call, logIn, read } from "./requests.js";
import { restoreTheme, toggleTheme } from "./theme.js";
import { say } from "./toast.js";

const MAX_TASK = 200;
const MAX_NAME = 64;
const find = (selector) => document.querySelector(selector);
const seconds = (value) => `${value.toFixed(2)} s`;
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const cards = []; // by the numbers of episodes
let state = null; // what the server has told last

// Requests

/** Carry out a request, and show what it leads to. Return true if it was carried out. */
async function change(op, args, done) {
  try {
    show(await call(op, args));
  } catch (error) {
    say(error.message, true);
    await refresh(); // somebody else may have gone on
    return false;
  }
  say(done);
  return true;
}

async function refresh() {
  try {
    show(await read("api/episodes"));
    find("#notice").hidden = true;
  } catch (error) {
    find("#notice").hidden = false;
    setText(find("#notice"), error.message);
  }
}

const edit = (episode, fields, done) => change("edit_episode", { episode, ...fields }, `Episode ${episode}: ${done}.`);

async function trim({ number, seconds: whole, pieces }) {
  const [begin, end] = [pieces[0][0], pieces.at(-1)[1]];
  const limits = { type: "number", step: "any", min: 0, max: whole.toFixed(2), required: true };
  const fields = [
    ["Begin, seconds", { ...limits, value: begin.toFixed(2) }],
    ["End, seconds", { ...limits, value: end.toFixed(2) }],
  ];
  const found = await askFor(`Trim episode ${number}`, `It has ${seconds(whole)}. What is between begin and end stays.`, fields, "Trim");
  if (!found) return;
  const [begin_s, end_s] = found.map(Number);
  // the end of the episode itself has more digits than the field
  await edit(number, { begin_s, end_s: end_s < Number(whole.toFixed(2)) ? end_s : null }, "trimmed");
}

async function split({ number, seconds: whole, pieces }) {
  const [begin, end] = pieces.at(-1);
  const fields = [["Time, seconds", { type: "number", step: "any", min: 0, max: whole.toFixed(2), required: true, value: ((begin + end) / 2).toFixed(2) }]];
  const found = await askFor(`Split episode ${number}`, `It has ${seconds(whole)}. Another episode begins at this time.`, fields, "Split");
  if (found) await edit(number, { split_s: Number(found[0]) }, "split");
}

async function rename({ number, new_task }) {
  const fields = [["Task", { maxLength: MAX_TASK, required: true, value: new_task }]];
  const found = await askFor(`Rename episode ${number}`, "What is done in it, in words.", fields, "Rename");
  if (found) await edit(number, { task: found[0].trim() }, "renamed");
}

async function write() {
  const { edits, folder, new_name, changed } = state;
  const fields = [["Name of the new folder", { maxLength: MAX_NAME, required: true, pattern: "[A-Za-z0-9_.\\-]+", value: new_name }]];
  const hint = `A copy with ${plural(changed, "changed episode")} is written into ${folder}. The dataset itself stays as it is.`;
  const found = await askFor("Write a copy", hint, fields, "Write");
  if (!found) return;
  setWriting(true);
  const isDone = await change("write_episodes", { name: found[0], edits }, `${found[0]} is written.`);
  setWriting(false);
  if (isDone) find("#written").focus();
}

function setWriting(isWriting) {
  document.body.toggleAttribute("data-writing", isWriting);
  show(state);
}

async function undo() {
  await change("undo_edit", { edits: state.edits }, `Took back: ${describe(state.last)}.`);
}

/** Ask for values in a dialog. Return the texts of its fields [label, properties], or null if a person cancels. */
function askFor(title, hint, fields, yes) {
  const dialog = find("#edit-dialog");
  const inputs = fields.map(([, properties]) => make("input", { autocomplete: "off", ...properties }));
  setText(find("#edit-title"), title);
  setText(find("#edit-hint"), hint);
  setText(find("#edit-yes"), yes);
  find("#edit-fields").replaceChildren(...inputs.map((input, at) => make("label", {}, fields[at][0], input)));
  dialog.returnValue = "no";
  dialog.showModal();
  inputs[0].focus();
  inputs[0].select();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes" ? inputs.map((input) => input.value) : null);
  });
}

function describe({ episode, dropped, restored, split_s, task, begin_s, end_s }) {
  if (dropped) return `drop of episode ${episode}`;
  if (restored) return `restoration of episode ${episode}`;
  if (split_s !== undefined) return `split of episode ${episode} at ${seconds(split_s)}`;
  if (task !== undefined) return `new task of episode ${episode}`;
  return `trim of episode ${episode} from ${seconds(begin_s ?? 0)} to ${end_s === undefined ? "its end" : seconds(end_s)}`;
}

// What is shown

function show(found) {
  state = found;
  document.title = `${state.name} – sam3-node console`;
  document.body.toggleAttribute("data-read-only", state.read_only);
  const total = state.episodes.reduce((sum, episode) => sum + episode.seconds, 0);
  setText(find("#dataset"), `${state.name}: ${plural(state.episodes.length, "episode")}, ${total.toFixed(1)} s`);
  const isWriting = document.body.hasAttribute("data-writing");
  const pending = `${plural(state.edits, "edit")} pending, ${plural(state.changed, "episode")} changed`;
  setText(find("#pending"), isWriting ? "writing…" : state.edits ? pending : "no edits pending");
  find("#pending").toggleAttribute("data-pending", Boolean(state.edits));
  find("#undo").disabled = isWriting || !state.edits;
  find("#undo").title = state.last ? `Take back: ${describe(state.last)}` : "Nothing to take back";
  find("#write").disabled = isWriting || !state.changed;
  showWritten(state.written);
  for (const episode of state.episodes) {
    cards[episode.number] ??= new Card(episode.number);
    cards[episode.number].show(episode, isWriting);
  }
  for (const card of cards.splice(state.episodes.length)) card.element.remove();
}

function showWritten(written) {
  find("#written").hidden = !written;
  if (!written) return;
  setText(find("#written-folder"), written.folder);
  setText(find("#written-rows"), written.rows);
  find("#written-changes").replaceChildren(...written.changes.map((textContent) => make("li", { textContent })));
}

/** Return what becomes of an episode; empty if it stays as it is. */
function describeOutcome({ seconds: whole, pieces, task, new_task }) {
  if (!pieces.length) return "dropped";
  const parts = [];
  const spans = pieces.map(([begin, end]) => `${begin.toFixed(2)} to ${seconds(end)}`).join(", ");
  if (pieces.length > 1) parts.push(`becomes ${pieces.length} episodes: ${spans}`);
  else if (pieces[0][0] > 0 || pieces[0][1] < whole) parts.push(`keeps ${spans}`);
  if (new_task !== task) parts.push(`new task: ${new_task}`);
  return parts.join("; ");
}

/** Return the numbers of an episode as [name, text, whether they ask for a look]. */
function listFacts({ seconds: whole, rows, rates, without_masks, doubtful, off_in_time, gap_ms }) {
  const rate = ([camera, fps]) => [`camera ${camera}`, fps ? `${fps.toFixed(1)} fps` : "unknown", false];
  const count = (value) => (value === null ? "not counted" : String(value));
  const share = doubtful === null ? "not counted" : `${doubtful} (${((100 * doubtful) / rows).toFixed(0)} %)`;
  return [
    ["length", `${seconds(whole)}, ${plural(rows, "row")}`, false],
    ...Object.entries(rates).map(rate),
    ["rows without masks", count(without_masks), Boolean(without_masks)],
    ["rows with doubtful masks", share, Boolean(doubtful)],
    ["rows off in time", count(off_in_time), Boolean(off_in_time)],
    ["longest gap", gap_ms === null ? "unknown" : `${gap_ms.toFixed(0)} ms`, false],
  ];
}

/** The card of one episode. Its elements stay, so that an edit moves neither the page nor the focus. */
class Card {
  constructor(number) {
    this.number = number;
    this.title = make("h3");
    this.outcome = make("p", { className: "outcome" });
    this.facts = make("dl");
    this.kept = make("div", { className: "kept", ariaHidden: "true" });
    this.end = make("span");
    this.buttons = {
      drop: this.makeButton("Drop", () => edit(number, { dropped: true }, "dropped")),
      trim: this.makeButton("Trim…", () => trim(this.episode)),
      split: this.makeButton("Split…", () => split(this.episode)),
      rename: this.makeButton("Rename…", () => rename(this.episode)),
      restore: this.makeButton("Restore", () => edit(number, { restored: true }, "as it was")),
    };
    this.image = make("img", { loading: "lazy", alt: `Pictures of episode ${number} from its beginning to its end` });
    this.image.addEventListener("error", () => this.explain());
    this.image.src = `api/strips/${number}`;
    this.pictures = make("div", { className: "pictures" }, this.image, this.kept, make("div", { className: "ends" }, make("span", { textContent: "0 s" }), this.end));
    const head = make("div", { className: "head" }, this.title, this.outcome);
    const top = make("div", { className: "top" }, head, make("div", { className: "choices change" }, ...Object.values(this.buttons)));
    this.element = make("li", { className: "episode" }, top, this.pictures, this.facts);
    find("#episodes").append(this.element);
  }

  makeButton(textContent, run) {
    const button = make("button", { textContent, ariaLabel: `${textContent.replace("…", "")} episode ${this.number}` });
    button.addEventListener("click", async () => {
      await run();
      // a button that has gone leaves the focus nowhere
      if (button.hidden) Object.values(this.buttons).find((other) => !other.hidden)?.focus();
    });
    return button;
  }

  show(episode, isWriting) {
    this.episode = episode;
    const outcome = describeOutcome(episode);
    const isDropped = !episode.pieces.length;
    this.element.dataset.state = isDropped ? "dropped" : outcome ? "edited" : "same";
    setText(this.title, `${episode.number}  ·  ${episode.task}`);
    setText(this.outcome, outcome);
    setText(this.end, seconds(episode.seconds));
    const facts = listFacts(episode).flatMap(([name, text, isDoubt]) => {
      const value = make("dd", { textContent: text });
      value.toggleAttribute("data-doubt", isDoubt);
      return [make("dt", { textContent: name }), value];
    });
    this.facts.replaceChildren(...facts);
    this.showKept(episode);
    for (const button of Object.values(this.buttons)) button.disabled = isWriting;
    for (const name of ["drop", "rename"]) this.buttons[name].hidden = isDropped;
    for (const name of ["trim", "split"]) this.buttons[name].hidden = isDropped || !state.can_cut;
    this.buttons.restore.hidden = !outcome;
  }

  showKept({ seconds: whole, pieces }) {
    const bars = pieces.map(([begin, end]) => {
      const bar = make("i");
      bar.style.left = `${(100 * begin) / whole}%`;
      bar.style.width = `${(100 * (end - begin)) / whole}%`;
      return bar;
    });
    this.kept.replaceChildren(...bars);
  }

  /** Say in the place of the pictures why there are none. */
  async explain() {
    try {
      await read(`api/strips/${this.number}`);
    } catch (error) {
      this.image.replaceWith(make("p", { className: "broken", textContent: error.message }));
    }
  }
}

async function start() {
  restoreTheme();
  find("#theme").addEventListener("click", toggleTheme);
  find("#undo").addEventListener("click", undo);
  find("#write").addEventListener("click", write);
  try {
    await logIn();
  } catch (error) {
    say(error.message, true);
  }
  await refresh();
}

start();
