// Colours of objects: the palette of Okabe and Ito without black, then tints and shades of it.
// They are those of sam3_node/visualization.py, so that an object has one colour in the console and in videos.

const COLOURS = [
  "e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7",
  "ffd17a", "b5e0fa", "7fd6b9", "a89b00", "8fa8ff", "ffa66b", "8c4a6b", "b07aff",
];

/** Return [red, green, blue] of an object, 0 to 255. */
export function pickColour(id) {
  const colour = COLOURS[id % COLOURS.length];
  return [0, 2, 4].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

/** Return the CSS colour of an object. */
export function cssColour(id) {
  return `#${COLOURS[id % COLOURS.length]}`;
}

/** Return black or white, whichever is readable on a colour. */
export function readableOn([red, green, blue]) {
  return 0.299 * red + 0.587 * green + 0.114 * blue > 110 ? "#101418" : "#ffffff";
}

/** Return the state of an instance as the page names it: sure, doubtful, occluded or tentative. */
export function nameState(instance) {
  if (instance.state !== "tracked") return instance.state;
  return instance.doubtful ? "doubtful" : "sure";
}

/** A mark for each state, so that none depends on colour alone. */
export const MARKS = { sure: "●", doubtful: "◐", occluded: "○", tentative: "◌" };
