// Tests of the page's modules. Each exported function is a case that test_live_source.py runs in a browser.

import { LabelPlacer } from "./labels.js";
import { Watch, describeEvent } from "./messages.js";
import { Lost } from "./panels.js";
import { Pins, describeMarks } from "./pins.js";
import { encodeLabels, paintIds } from "./png.js";
import { Prompts } from "./prompts.js";

const SIZE = { width: 640, height: 480 };

function check(condition, text) {
  if (!condition) throw new Error(text);
}

function equal(found, expected, text = "") {
  const [left, right] = [found, expected].map((value) => JSON.stringify(value));
  check(left === right, `${text} expected ${right}, found ${left}`);
}

/** A mask of a reply: the upper part of the picture. */
function makeMask(share) {
  const high = Math.round(SIZE.height * share);
  const bits = btoa(String.fromCharCode(...new Uint8Array((high * SIZE.width) / 8).fill(255)));
  return { box: [0, 0, SIZE.width, high], area: high * SIZE.width, bits };
}

/** A page with one picture, a node that answers when `release` is called, and what was asked of it. */
function makePage(answer) {
  const asked = [];
  const said = [];
  const waiting = [];
  globalThis.fetch = async (path, { body }) => {
    const request = { op: path.replace("api/", ""), args: JSON.parse(body) };
    asked.push(request);
    await new Promise((resolve) => waiting.push(resolve));
    const { error, ...result } = answer(request);
    return { ok: !error, text: async () => JSON.stringify(error ? { error } : result) };
  };
  const instances = [];
  const view = { camera: "cam0", seq: 7, ...SIZE, masks: { epoch: 1, instances } };
  const showMask = (mask, ms) => Object.assign(tile, { preview: mask, ms });
  const tile = { camera: "cam0", shown: view, element: { dataset: { frozen: "true" } }, overlay: { clientWidth: 640 }, showMask };
  const prompts = new Prompts({
    ask: async () => null,
    tell: () => {},
    say: (text, isError, actions = []) => said.push({ text, isError, actions }),
    select: () => {},
    getSelected: () => null,
    canChange: () => true,
    goLive: () => {},
    getNewest: () => ({ ...view, seq: 99 }),
    askLabel: () => {},
  });
  const settle = () => new Promise((resolve) => setTimeout(resolve, 20));
  const release = async () => {
    await settle();
    waiting.shift()?.();
    await settle();
  };
  return { asked, said, view, tile, prompts, settle, release };
}

export async function theNewestPlaceSupersedesThoseBefore() {
  const { asked, tile, prompts, settle, release } = makePage(() => ({ mask: makeMask(0.3) }));
  for (const x of [60, 80, 100, 120]) {
    prompts.hover(tile, [x, 60]);
    await settle();
  }
  await release();
  await release();
  equal(asked.map(({ args }) => args.points[0]), [[60, 60], [120, 60]]);
  check(tile.preview, "expected a preview of the last place");
}

export async function noPreviewStaysWhenThePointerHasLeft() {
  const { tile, prompts, release } = makePage(() => ({ mask: makeMask(0.3) }));
  prompts.hover(tile, [60, 60]);
  prompts.hover(tile, null);
  await release();
  check(!tile.preview, "expected no preview");
}

export async function aPreviewOfMostOfThePictureIsNotShown() {
  for (const share of [0.9, 0.3]) {
    const { tile, prompts, release } = makePage(() => ({ mask: makeMask(share) }));
    prompts.hover(tile, [60, 60]);
    await release();
    equal(Boolean(tile.preview), share < 0.5, `${share}:`);
  }
}

export async function aPreviewEndsByItselfOnALivePictureAlone() {
  for (const frozen of ["true", "false"]) {
    const { tile, prompts, release } = makePage(() => ({ mask: makeMask(0.3) }));
    tile.element.dataset.frozen = frozen;
    prompts.hover(tile, [60, 60]);
    await release();
    equal(tile.ms === null, frozen === "true");
  }
}

export async function aMaskThatWasChosenBeginsTheObject() {
  const masks = [0.1, 0.2, 0.3].map((share) => ({ mask: makeMask(share), score: 1 - share }));
  const page = makePage(() => ({ id: 1, camera: "cam0", mask: makeMask(0.1), masks }));
  const { asked, tile, view, prompts, release } = page;
  equal(prompts.chooseNext(), false, "without a preview:");
  prompts.hover(tile, [60, 60]);
  await release();
  equal([prompts.chooseNext(), prompts.chooseNext()], [true, true]);
  equal(tile.preview.area, masks[1].mask.area);
  prompts.hover(tile, [61, 60]);
  equal(tile.preview.area, masks[1].mask.area, "after a small move:");
  prompts.point(tile, [61, 60], true, view);
  await release();
  equal([asked[0].args.multimask, asked[1].op, asked[1].args.choice], [true, "add_object", 1]);
}

export async function aMoveForgetsTheChosenMask() {
  const masks = [0.1, 0.2].map((share) => ({ mask: makeMask(share), score: 1 - share }));
  const { asked, tile, view, prompts, release } = makePage(() => ({ id: 1, camera: "cam0", mask: makeMask(0.1), masks }));
  prompts.hover(tile, [60, 60]);
  await release();
  prompts.chooseNext();
  prompts.hover(tile, [300, 200]);
  await release();
  prompts.point(tile, [300, 200], true, view);
  await release();
  equal(asked.at(-1).args.choice, undefined);
}

export async function aDoubleClickIsOneMark() {
  const { asked, tile, view, prompts, release } = makePage(() => ({ id: 1, camera: "cam0", mask: makeMask(0.1) }));
  prompts.point(tile, [60, 60], true, view);
  prompts.point(tile, [61, 60], true, view); // while the first is under way
  await release();
  prompts.point(tile, [61, 60], true, view); // just after
  await release();
  equal(asked.length, 1);
  prompts.point(tile, [300, 60], true, view); // elsewhere
  await release();
  equal(asked.length, 2);
}

export async function aMarkOnAFrameThatIsGoneIsOfferedOnTheNewest() {
  const gone = { code: "unknown_frame", message: "no such frame" };
  const page = makePage(({ args }) => (args.seq === 99 ? { id: 1, camera: "cam0", mask: makeMask(0.1) } : { error: gone }));
  page.prompts.point(page.tile, [60, 60], true, page.view);
  await page.release();
  equal(page.asked.length, 1, "moved without a question:");
  const [{ isError, actions }] = page.said;
  equal(isError, true);
  actions[0][1]();
  await page.release();
  equal(page.asked.map(({ op, args }) => [op, args.seq]), [["add_object", 7], ["add_object", 99]]);
}

export async function aStillPictureIsHeldUntilItIsLetGo() {
  const changes = [];
  const { asked, view, release } = makePage(() => ({ seq: 7, lease_s: 60 }));
  const pins = new Pins(() => changes.push(pins.find("cam0", 7)?.state));
  pins.hold(view);
  pins.hold(view); // as it is drawn again
  await release();
  equal(changes, ["held"]);
  check(describeMarks(pins.find("cam0", 7)).startsWith("Marks work"), "expected that marks work");
  check(!pins.find("cam0", 8), "expected no other frame");
  pins.release();
  await release();
  equal(asked.map(({ op, args }) => [op, args.seq, args.epoch, args.lease_s]), [["pin_frame", 7, 1, 60], ["pin_frame", 7, 1, 0]]);
}

export async function aStillPictureThatIsGoneIsTold() {
  const { view, release } = makePage(() => ({ error: { code: "unknown_frame", message: "no such frame" } }));
  const pins = new Pins(() => {});
  pins.hold(view);
  await release();
  check(describeMarks(pins.find("cam0", 7)).startsWith("Too old"), "expected that it is too old");
}

export async function aLostObjectIsAddedAgainOrCorrected() {
  for (const isKnown of [false, true]) {
    const { asked, tile, view, prompts, release } = makePage(() => ({ id: 3, camera: "cam0", mask: makeMask(0.1) }));
    if (isKnown) view.masks.instances.push({ id: 3 });
    prompts.readd("cam0", 3, "cup");
    prompts.point(tile, [60, 60], true, view);
    await release();
    const [{ op, args }] = asked;
    equal([op, args.id, args.label], isKnown ? ["refine_object", 3, undefined] : ["add_object", undefined, "cup"]);
  }
}

export async function lostObjectsAreToldAndFoundOnesToo() {
  const told = [];
  const watch = new Watch(({ kind, id }) => told.push([kind, id]));
  const see = (now, ...areas) => {
    const instances = areas.map((area, id) => ({ id, label: "cup", area, state: area ? "tracked" : "occluded" }));
    watch.see("cam0", { epoch: 1, instances }, now);
  };
  see(0, 9, 9, 0); // object 2 was never seen
  for (const now of [100, 2000, 5000, 9000]) see(now, 0, 9, 0);
  see(9100, 9, 9, 0);
  equal(told, [["lost", 0], ["found", 0]]);
}

export async function eventsAreWordsForPeople() {
  const nameOf = (camera, id) => `cup ${id} of ${camera}`;
  equal(describeEvent({ op: "remove_object", camera: "cam0", id: "2" }, nameOf), "Removed cup 2 of cam0.");
  equal(describeEvent({ op: "pin_frame", camera: "cam0", seq: "2" }, nameOf), null);
  const recalled = { op: "recalled", camera: "cam0", id: "2", absent_s: "12.4" };
  equal(describeEvent(recalled, nameOf), "Knows cup 2 of cam0 again, after 12 s.");
  const ambiguous = { op: "ambiguous", camera: "cam0", id: "2", ids: "2, 3" };
  equal(describeEvent(ambiguous, nameOf), "Something came into view that may be any of the objects 2, 3.");
}

export async function lostObjectsShowTheirLastPictureOnAClick() {
  const host = document.body.appendChild(Object.assign(document.createElement("ul"), { id: "lost" }));
  const asked = [];
  const lost = new Lost(async (object) => {
    asked.push(object.id);
    return new Blob(["JPEG"]);
  });
  const cup = { epoch: 1, id: 2, label: "cup", age_s: 12.4, held: true, hidden_by: "robot", has_picture: true };
  lost.update([cup, { epoch: 1, id: 3, label: "", age_s: 400, has_picture: false }], true);
  const texts = [...host.children].map((row) => row.textContent);
  equal(texts, ["cup (2) · seen 12 s ago · held · hidden by robot", "unnamed (3) · seen 7 min ago"]);
  const [button, other] = host.querySelectorAll("button");
  check(other.disabled, "expected no picture of the other");
  button.click();
  await new Promise((resolve) => setTimeout(resolve, 20));
  equal([asked, host.querySelectorAll("img").length], [[2], 1]);
  lost.update([{ ...cup, age_s: 13.4 }], true);
  equal(host.querySelectorAll("img").length, 1, "a picture that stays:");
  button.click();
  equal(host.querySelectorAll("img").length, 0);
  lost.update([], true);
  equal(host.children.length, 0);
  host.remove();
}

/** Return an instance that covers a box but for its corners. */
function makeInstance(id, [x0, y0, x1, y1]) {
  const [width, height] = [x1 - x0, y1 - y0];
  const bits = new Uint8Array(Math.ceil((width * height) / 8));
  for (let index = 0; index < width * height; index++) {
    const [x, y] = [(index % width) / width - 0.5, Math.floor(index / width) / height - 0.5];
    if (x * x + y * y < 0.25) bits[index >> 3] |= 128 >> (index & 7);
  }
  return { id, box: [x0, y0, x1, y1], area: width * height, bits };
}

export async function labelsLeaveOtherObjectsFree() {
  let seed = 1;
  const random = (high) => (seed = (seed * 48271) % 2147483647) % high;
  for (let round = 0; round < 20; round++) {
    const instances = [1, 2, 3, 4, 5, 6].map((id) => {
      const [x, y] = [random(500), random(360)];
      return makeInstance(id, [x, y, x + 40 + random(90), y + 40 + random(70)]);
    });
    const ids = paintIds(instances, SIZE);
    const labels = instances.map(({ id }) => ({ id, width: 90, height: 15 }));
    const placed = new LabelPlacer().place(labels, instances, SIZE);
    equal(placed.length, labels.length);
    for (const { id, rect } of placed) {
      const [x0, y0, x1, y1] = rect.map(Math.floor);
      for (let y = y0; y < y1; y++) {
        for (let x = x0; x < x1; x++) check([0, id].includes(ids[y * SIZE.width + x]), `label ${id} covers another object`);
      }
    }
  }
}

export async function aLabelStandsAtTheLargestPart() {
  const instance = makeInstance(1, [0, 0, 600, 400]);
  const width = 600;
  const isSet = (x, y) => (x < 30 && y < 30) || (x >= 400 && x < 560 && y >= 250 && y < 380);
  instance.bits.fill(0);
  for (let index = 0; index < 600 * 400; index++) {
    if (isSet(index % width, Math.floor(index / width))) instance.bits[index >> 3] |= 128 >> (index & 7);
  }
  const [{ rect }] = new LabelPlacer().place([{ id: 1, width: 90, height: 15 }], [instance], SIZE);
  check(rect[0] > 380 && rect[2] < 580 && rect[1] > 200 && rect[3] < 400, `found ${rect}`);
}

export async function aLabelImageHoldsTheIdsOfTheObjects() {
  for (const large of [255, 300]) {
    const instances = [makeInstance(1, [10, 20, 200, 220]), makeInstance(large, [100, 120, 160, 190])];
    const ids = paintIds(instances, SIZE);
    equal(ids[155 * SIZE.width + 130], large); // the smaller one is on top
    const file = await encodeLabels(ids, SIZE);
    const bitmap = await createImageBitmap(file); // checks sizes and sums
    equal([bitmap.width, bitmap.height], [SIZE.width, SIZE.height]);
    const bytes = new Uint8Array(await file.arrayBuffer());
    const at = bytes.findIndex((_, index) => String.fromCharCode(...bytes.subarray(index, index + 4)) === "IDAT");
    const packed = bytes.subarray(at + 4, at + 4 + new DataView(bytes.buffer).getUint32(at - 4));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const rows = new Uint8Array(await new Response(stream).arrayBuffer());
    const wide = large > 255 ? 2 : 1;
    const stride = 1 + wide * SIZE.width;
    for (let index = 0; index < ids.length; index += 7) {
      const start = Math.floor(index / SIZE.width) * stride + 1 + wide * (index % SIZE.width);
      equal(wide === 2 ? 256 * rows[start] + rows[start + 1] : rows[start], ids[index]);
    }
  }
}
