// The keys of the page, and the list of them.

import { make } from "./dom.js";

const CHANGES = new Set(["/", "F2", "Delete", "P", "X", "C", "H", "Tab", "A", "R", "Z"]);
const ON_PICTURE = [
  ["arrows", "move the cross; Alt 1 pixel, Ctrl 50"],
  ["Enter", "add or correct there; with Shift: it is not that"],
  ["B", "begin a box; Enter ends it; Alt Enter: find all like it"],
  ["Alt drag", "find all that is like the box; with Shift: not what is like it"],
];
const ON_RECORDING = ON_PICTURE.slice(0, 2).concat([["B", "begin a box; Enter ends it"]]);
const GROUPS = ["Time", "Objects", "On the picture", "Node", "Page"];

/** Runs what a key stands for. `both`, `live` and `recorded` list [key, group, what it does, function]. */
export class Keys {
  constructor({ isLive, canChange, choose, both, live, recorded }) {
    Object.assign(this, { isLive, canChange, choose, both, live, recorded });
    document.addEventListener("keydown", (event) => this.handle(event));
  }

  handle(event) {
    const isTyping = event.target.matches?.("input:not([type=range]), textarea, select");
    const isElsewhere = isTyping || document.querySelector("dialog[open]");
    if (isElsewhere || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === " " && event.target.matches?.("button")) return;
    const key = event.key.length === 1 ? event.key.toUpperCase() : event.key;
    if (/^[1-9]$/.test(key)) {
      this.choose(Number(key));
      return;
    }
    const found = this.listed().find(([name]) => name === key);
    if (!found || (CHANGES.has(key) && !this.canChange())) return;
    if (found[3]() !== false) event.preventDefault();
  }

  listed() {
    return [...(this.isLive() ? this.live : this.recorded), ...this.both];
  }

  /** Fill the list of keys, group by group. */
  show() {
    const shown = [...this.listed(), ["1 … 9", "Objects", "choose an object"]];
    const onPicture = this.isLive() ? ON_PICTURE : this.canChange() ? ON_RECORDING : [];
    for (const [key, text] of onPicture) shown.push([key, "On the picture", text]);
    const filled = GROUPS.map((group) => [group, shown.filter(([, of]) => of === group)]).filter(([, rows]) => rows.length);
    const sections = filled.map(([group, rows]) => make("section", {}, make("h3", { textContent: group }), list(rows)));
    document.querySelector("#keys").replaceChildren(...sections);
  }
}

function list(rows) {
  const entries = rows.flatMap(([key, , text]) => [
    make("dt", {}, make("kbd", { textContent: key === " " ? "Space" : key })),
    make("dd", { textContent: text }),
  ]);
  return make("dl", {}, ...entries);
}
