// Storages side by side: one simulation on the server, stepped from here, drawn four times.

import { announce, bytes, colour, fillRows, make, number, percent } from "./format.js";
import { keyDialog, send } from "./server.js";

const COLUMNS = 32;
const NOBODY = -1;
const CACHED = -2;
const $ = (id) => document.getElementById(id);
let session = null;
let isRunning = true;
let state = null;
let chain = Promise.resolve(); // one call at a time, in order

const TELLS = {
  paged: "blocks of 16 tokens, anywhere; prefixes shared",
  contiguous: "one range for each request, as long as it may ever become",
  growing: "a buffer for each layer, replaced by a larger one when full",
  virtual: "pieces of 32 tokens mapped behind each other; prefixes shared",
};
const ROWS = [
  ["Running now", (s) => number(s.running), (s) => s.running],
  ["Running, mean", (s) => number(s.running_mean, 1), (s) => s.running_mean],
  ["Waiting", (s) => number(s.waiting), (s) => -s.waiting],
  ["Done", (s) => number(s.done), (s) => s.done],
  ["Refused: can never fit", (s) => number(s.refused)],
  ["Preempted", (s) => number(s.preemptions)],
  ["Reserved", (s) => bytes(s.reserved)],
  ["Used of it", (s) => bytes(s.used)],
  ["Reserved and empty", (s) => percent(s.waste_share), (s) => -s.waste_share],
  ["Cut off beside it", (s) => bytes(s.external)],
  ["Cached", (s) => bytes(s.cached)],
  ["Prompt tokens not computed", (s) => number(s.prefix_tokens), (s) => s.prefix_tokens],
  ["Tokens generated", (s) => number(s.generated), (s) => s.generated],
  ["Simulated time", (s) => `${number(s.seconds, 1)} s`],
];

function call(method, path, body) {
  const next = chain.then(async () => {
    try {
      const answer = await send(method, `/window/storages${path}`, body);
      if (answer) take(answer);
    } catch (error) {
      setStatus(error.message, "lost");
      if (error.status === 401 || error.status === 403) openKey();
      if (error.status === 404) session = null;
    }
  });
  chain = next;
  return next;
}

const openKey = keyDialog(() => start());

function setStatus(text, kind) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = kind;
}

async function start() {
  if (session) await call("DELETE", `/${session}`);
  session = null;
  await call("POST", "");
}

function take(answer) {
  state = answer;
  session = answer.id;
  setStatus(isRunning ? "running" : "paused", "live");
  $("steps").textContent = `${number(answer.steps)} steps, ${number(answer.open)} requests open`;
  draw();
}

function draw() {
  if (!$("storages").children.length)
    $("storages").replaceChildren(...state.storages.map((one) => make("section", { className: "storage", id: `storage-${one.name}`,
      "aria-label": one.name }, make("h2", {}, one.name), make("p", { className: "muted" }, TELLS[one.name]),
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
    tell(one.reserved ? percent(one.waste_share) : "–", "reserved, empty"), tell(number(one.refused), "refused"));
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
  const [free, cached, leased] = [colour("--free"), colour("--gone"), colour("--leased")];
  const full = size - 1.5;
  one.owners.forEach((owner, at) => {
    const [x, y] = [(at % COLUMNS) * size, Math.floor(at / COLUMNS) * size];
    paint.fillStyle = owner === CACHED ? cached : owner < NOBODY ? leased : free;
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
    if (!session) return;
    call("POST", `/${session}/requests`, { count: Number(count), prompt_tokens: Number(prompt),
      output_tokens: Number(output), shared_tokens: Number(shared) }).then(() => {
      announce(state.storages.filter((one) => one.missing === null)
        .map((one) => `${one.name}: ${one.running} running, ${one.waiting} waiting, ${one.refused} refused`).join("; "));
    });
  });
$("finish").addEventListener("click", () => session && call("POST", `/${session}/finish`, {}));
$("run").addEventListener("click", () => setRunning(!isRunning));
$("one-step").addEventListener("click", () => { setRunning(false); if (session) call("POST", `/${session}/step`, { steps: 1 }); });
$("reset").addEventListener("click", start);
$("speed").addEventListener("input", () => { $("speed-value").textContent = $("speed").value; });
addEventListener("resize", () => state && draw());
addEventListener("pagehide", () => { if (session) send("DELETE", `/window/storages/${session}`).catch(() => {}); });

async function tick() {
  for (;;) {
    const speed = Number($("speed").value);
    const steps = Math.max(1, Math.round(speed / 8));
    const began = performance.now();
    if (isRunning && session && state.open && !document.hidden) await call("POST", `/${session}/step`, { steps });
    await new Promise((resolve) => setTimeout(resolve, Math.max(30, (1000 * steps) / speed - (performance.now() - began))));
  }
}

start();
tick();
