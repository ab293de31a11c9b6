// Storages side by side: one simulation in `quire compare`, stepped from here, drawn once for each storage.

import { announce, bytes, colour, fillRows, make, number, percent } from "./format.js";
import { send } from "./server.js";
import { errorWords } from "./words.js";

const COLUMNS = 32;
const NO_OWNER = -1;
const CACHED = -2;
const $ = (id) => document.getElementById(id);
let isRunning = true;
let state = null;
let chain = Promise.resolve(); // one call at a time, in order

const RESERVED = {
  max: "as long as it may ever become",
  pow2: "the next power of two; free memory may lie in gaps",
  exact: "just what it will need; free memory may lie in gaps",
};
const TELLS = {
  paged: (s) => `blocks of ${s.block_size} ${s.block_size === 1 ? "token" : "tokens"}, anywhere; prefixes shared`,
  contiguous: (s) => `one range for each request, ${RESERVED[s.reservation]}`,
  growing: () => "a buffer for each layer, replaced by a larger one when full",
  virtual: () => "pieces of 32 tokens mapped behind each other; prefixes shared",
};
// Requests, prompt, output and shared tokens: short requests between long ones, so that finished ones leave gaps.
const DEMO = [[2, 40, 60, 0], [2, 280, 60, 0], [3, 60, 20, 0], [8, 168, 80, 128], [2, 300, 180, 0], [4, 40, 30, 0], [6, 200, 150, 0]];
const ROWS = [
  ["Running now", (s) => number(s.running), (s) => s.running],
  ["Running, mean", (s) => number(s.running_mean, 1), (s) => s.running_mean],
  ["Waiting", (s) => number(s.waiting), (s) => -s.waiting],
  ["Done", (s) => number(s.done), (s) => s.done],
  ["Refused: can never fit", (s) => number(s.refused)],
  ["Preempted", (s) => number(s.preemptions)],
  ["Reserved", (s) => bytes(s.reserved)],
  ["Used of it", (s) => bytes(s.used)],
  ["Reserved and empty (internal)", (s) => percent(s.waste_share), (s) => -s.waste_share],
  ["Free, but in gaps too small (external)", (s) => bytes(s.external)],
  ["Cached", (s) => bytes(s.cached)],
  ["Prompt tokens not computed", (s) => number(s.prefix_tokens), (s) => s.prefix_tokens],
  ["Tokens generated", (s) => number(s.generated), (s) => s.generated],
  ["Simulated time", (s) => `${number(s.seconds, 1)} s`],
];

function call(path, body) {
  const next = chain.then(async () => {
    try {
      take(await send("POST", `/comparison${path}`, body));
    } catch (error) {
      setStatus(errorWords(error), "lost");
    }
  });
  chain = next;
  return next;
}

function setStatus(text, kind) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = kind;
}

let starting = Promise.resolve();
function start() {
  starting = starting.then(begin);
  return starting;
}

async function begin() {
  $("storages").replaceChildren(); // their descriptions depend on the settings
  await call("", { block_size: Number($("block-size").value), reservation: $("reservation").value });
  for (const one of DEMO) await add(...one);
}

async function add(count, prompt, output, shared) {
  await call("/requests", { count, prompt_tokens: prompt, output_tokens: output, shared_tokens: shared });
}

const tellAll = () => state && announce(state.storages.filter((one) => one.missing === null)
  .map((one) => `${one.name}: ${one.running} running, ${one.waiting} waiting, ${one.refused} refused`).join("; "));

function take(answer) {
  state = answer;
  setStatus(isRunning ? "running" : "paused", "live");
  $("steps").textContent = `${number(answer.steps)} steps, ${number(answer.open)} requests open`;
  draw();
}

function draw() {
  if (!$("storages").children.length)
    $("storages").replaceChildren(...state.storages.map((one) => make("section", { className: "storage", id: `storage-${one.name}`,
      "aria-label": one.name }, make("h2", {}, one.name), make("p", { className: "muted" }, TELLS[one.name](state)),
    make("div", { className: "big" }), make("canvas", { role: "img" }))));
  const there = state.storages.filter((one) => one.missing === null);
  for (const one of state.storages) drawStorage($(`storage-${one.name}`), one);
  const head = make("tr", {}, make("th", { scope: "col" }, ""), ...there.map((one) => make("th", { scope: "col", className: "number" }, one.name)));
  if (!$("figures-table").tHead.children.length) $("figures-table").tHead.append(head);
  fillRows($("figures-table").tBodies[0], ROWS.map(([name, write]) => [name, ...there.map((one) => write(one))]), (cell, r, c) => {
    const rank = ROWS[r][2];
    if (!c || !rank) return;
    const best = Math.max(...there.map(rank));
    const isBest = state.asked && rank(there[c - 1]) === best && there.some((one) => rank(one) !== best);
    cell.className = isBest ? "number best" : "number";
  });
}

function drawStorage(section, one) {
  const big = section.querySelector(".big");
  const canvas = section.querySelector("canvas");
  if (one.missing !== null) {
    big.replaceChildren(make("p", {}, `not on this machine: ${one.missing}`));
    return;
  }
  const tell = (value, name) => make("div", {}, make("b", {}, value), make("span", {}, name));
  big.replaceChildren(tell(number(one.running), "running"), tell(number(one.waiting), "waiting"), tell(number(one.done), "done"),
    tell(one.reserved ? percent(one.waste_share) : "–", "reserved, empty"), tell(bytes(one.external), "free, in gaps"), tell(number(one.refused), "refused"));
  canvas.setAttribute("aria-label", `${one.name}: ${one.running} running, ${one.waiting} waiting, ${bytes(one.used)} used of `
    + `${bytes(one.reserved)} reserved of ${bytes(one.total)}`);
  const width = canvas.clientWidth;
  const size = width / COLUMNS;
  const rows = one.owners.length / COLUMNS;
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(size * rows * ratio);
  canvas.style.height = `${size * rows}px`;
  const paint = canvas.getContext("2d");
  paint.scale(ratio, ratio);
  const inks = Array.from({ length: 14 }, (_, i) => colour(`--c${i}`));
  const [free, cached, in_flight] = [colour("--free"), colour("--gone"), colour("--in_flight")];
  const full = size - 1.5;
  one.owners.forEach((owner, at) => {
    const [x, y] = [(at % COLUMNS) * size, Math.floor(at / COLUMNS) * size];
    paint.fillStyle = owner === CACHED ? cached : owner < NO_OWNER ? in_flight : free;
    paint.fillRect(x, y, full, full);
    if (owner < 0) return;
    const ink = inks[owner % inks.length];
    const high = (full * one.fills[at]) / 100;
    paint.save();
    paint.beginPath();
    paint.rect(x, y, full, full - high);
    paint.clip();
    paint.strokeStyle = ink;
    paint.globalAlpha = 0.7;
    paint.lineWidth = 1;
    for (let offset = -full; offset < full; offset += 3.5) {
      paint.beginPath();
      paint.moveTo(x + offset, y + full);
      paint.lineTo(x + offset + full, y);
      paint.stroke();
    }
    paint.restore();
    paint.fillStyle = ink;
    paint.fillRect(x, y + full - high, full, high);
  });
}

function setRunning(value) {
  isRunning = value;
  $("run").textContent = value ? "Pause" : "Run";
  $("run").setAttribute("aria-pressed", `${value}`);
  if (state) setStatus(value ? "running" : "paused", "live");
}

for (const button of document.querySelectorAll("button[data-count]"))
  button.addEventListener("click", () => {
    const { count, prompt, output, shared = "0" } = button.dataset;
    add(Number(count), Number(prompt), Number(output), Number(shared)).then(tellAll);
  });
$("own").addEventListener("submit", (event) => {
  event.preventDefault();
  add(...["count", "prompt", "output", "shared"].map((name) => Number($(`own-${name}`).value))).then(tellAll);
});
$("own-prompt").addEventListener("input", () => { $("own-shared").max = $("own-prompt").value; });
$("demo").addEventListener("click", async () => { for (const one of DEMO) await add(...one); tellAll(); });
for (const name of ["block-size", "reservation"]) $(name).addEventListener("change", start);
$("finish").addEventListener("click", () => call("/finish", {}));
$("run").addEventListener("click", () => setRunning(!isRunning));
$("one-step").addEventListener("click", () => { setRunning(false); call("/step", { steps: 1 }); });
$("reset").addEventListener("click", start);
$("speed").addEventListener("input", () => { $("speed-value").textContent = $("speed").value; });
addEventListener("resize", () => state && draw());

async function tick() {
  for (;;) {
    const speed = Number($("speed").value);
    const steps = Math.max(1, Math.round(speed / 8));
    const began = performance.now();
    if (isRunning && state?.open && !document.hidden) await call("/step", { steps });
    await new Promise((resolve) => setTimeout(resolve, Math.max(30, (1000 * steps) / speed - (performance.now() - began))));
  }
}

start();
tick();
