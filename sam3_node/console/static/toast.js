// A line at the bottom of the page, for a moment.

import { make } from "./dom.js";

const TOAST_MS = 5000;
const ASKING_MS = 12_000; // of a line with buttons
let timer = null;

/** Show a line for a moment, with buttons [text, function]. */
export function say(text, isError = false, actions = []) {
  const toast = document.querySelector("#toast");
  const hide = () => toast.classList.remove("shown");
  const buttons = actions.map(([textContent, run]) =>
    make("button", {
      textContent,
      onclick: () => {
        hide();
        run();
      },
    }),
  );
  toast.replaceChildren(make("span", { textContent: text }), ...buttons);
  toast.dataset.kind = isError ? "error" : "done";
  toast.classList.add("shown");
  clearTimeout(timer);
  timer = setTimeout(hide, actions.length ? ASKING_MS : TOAST_MS);
}
