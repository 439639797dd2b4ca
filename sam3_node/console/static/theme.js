// Light or dark: what this browser has chosen, else what its system prefers.

const STORED = "sam3-theme";

/** Show the theme that was chosen last. The page has a button #theme, whose text is the other one. */
export function restoreTheme() {
  const preferred = matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark";
  setTheme(localStorage.getItem(STORED) ?? preferred);
}

export function toggleTheme() {
  const next = document.documentElement.dataset.theme === "light" ? "dark" : "light";
  localStorage.setItem(STORED, next);
  setTheme(next);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.querySelector("#theme").textContent = theme === "light" ? "Dark" : "Light";
}
