// The keys of the page, and the list of them.

import { make } from "./dom.js";

const CHANGES = new Set(["/", "F2", "Delete", "P", "X", "C", "H"]);
const CHOICES = ["1 … 9", "choose an object"];
const ON_PICTURE = [
  ["arrows", "on the picture: move the cross; Alt 1 pixel, Ctrl 50"],
  ["Enter", "add or correct there; with Shift: it is not that"],
  ["B", "begin a box; Enter ends it"],
];

/** Runs what a key stands for. `both`, `live` and `recorded` list [key, what it does, function]. */
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
    event.preventDefault();
    found[2]();
  }

  listed() {
    return [...(this.isLive() ? this.live : this.recorded), ...this.both];
  }

  /** Fill the list of keys. */
  show() {
    const shown = [...this.listed(), CHOICES, ...(this.isLive() ? ON_PICTURE : [])];
    const entries = shown.flatMap(([key, text]) => [
      make("dt", {}, make("kbd", { textContent: key === " " ? "Space" : key })),
      make("dd", { textContent: text }),
    ]);
    document.querySelector("#keys").replaceChildren(...entries);
  }
}
