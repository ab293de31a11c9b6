// The live view: events of the server into figures, the map, sequences, the tree and memory over time.

import { drawLines } from "./charts.js";
import { announce, bytes, fillRows, make, number, percent, runs, seconds } from "./format.js";
import { BlockMap, drawLegend } from "./map.js";
import { Refused, keyDialog, stream } from "./server.js";
import { showSequence, showBlocks } from "./details.js";
import { Prompt } from "./prompt.js";

const MOST_POINTS = 480;
const $ = (id) => document.getElementById(id);
const state = { history: [] };
let isAdmin = false;
let connection = new AbortController();

const map = new BlockMap($("map"), (first, last) => {
  if (isAdmin) showBlocks(first, last, state.block);
  else announce("Tokens and holders are shown to the administrator only.");
});
const openKey = keyDialog(() => connection.abort());
const prompt = new Prompt((runsOfPrompt) => map.mark(runsOfPrompt));

// -- figures --------------------------------------------------------------------------------------------------

const FIGURES = [
  ["Generated", (s) => [number(s.rates.generated_per_s, 0), "tokens/s"], 1, "--c0"],
  ["First token, lately", (s) => [seconds(s.rates.first_token_s), ""], 2, "--c1"],
  ["Hit rate, lately", (s) => [percent(s.rates.hit_rate), "of prompts"], 3, "--c2", 1],
  ["Running", (s) => [number(s.counts.num_running), "sequences"]],
  ["Waiting", (s) => [number(s.counts.num_waiting), "requests"]],
  ["In use", (s) => [percent((s.counts.held + s.counts.in_flight + s.counts.pinned) / s.counts.num_blocks), `of ${s.block}s`]],
  ["Preempted", (s) => [number(s.counts.num_preemptions), "times"]],
  ["Evicted", (s) => [number(s.counts.evicted_blocks), `${s.block}s`]],
];
const STATE_FIGURES = [
  ["States of sequences", (s) => [number(s.counts.state_slots - s.counts.checkpoints - s.counts.free_state_slots),
    `of ${number(s.counts.state_slots)}`]],
  ["Checkpoints of states", (s) => [number(s.counts.checkpoints), `${number(s.counts.evicted_checkpoints)} evicted`]],
  ["Hits cut short", (s) => [number(s.counts.short_hits), "for lack of a state"]],
  ["States made of blocks", (s) => [number(s.counts.slots_from_blocks), `${number(s.counts.slots_to_blocks)} became blocks`]],
];

const figuresOf = (s) => (s?.counts?.state_slots === undefined ? FIGURES : [...FIGURES, ...STATE_FIGURES]);

function makeFigures() {
  $("figures").replaceChildren(...figuresOf(state).map(([name, , column]) => make("dl", { className: "figure" },
    make("dt", {}, name), make("dd", {}, "–"),
    column ? make("dd", {}, make("canvas", { "aria-hidden": "true" })) : null)));
}

function drawFigures() {
  const figures = figuresOf(state);
  if ($("figures").children.length !== figures.length) makeFigures();
  figures.forEach(([, read, column, ink, top], i) => {
    const figure = $("figures").children[i];
    const [value, block] = read(state);
    figure.querySelector("dd").replaceChildren(value, " ", make("small", {}, block));
    const canvas = figure.querySelector("canvas");
    if (canvas) drawLines(canvas, [{ values: state.history.map((point) => point[column]), ink }], { top: top ?? null });
  });
}

function drawMemory() {
  const { memory, history } = state;
  const used = history.map((point) => point[4]);
  const both = history.map((point) => point[4] + point[5]);
  const text = `In memory ${bytes(memory.used)} in use and ${bytes(memory.cached)} cached of ${bytes(memory.total)}`;
  const tiers = memory.tiers.map((tier, i) => ({ values: history.map((point) => point[6 + i] ?? null), ink: `--c${2 + i}` }));
  const top = Math.max(memory.total, ...tiers.flatMap((one) => one.values.map((value) => value ?? 0)));
  drawLines($("memory"), [{ values: both, ink: "--cached", fill: 0.85 }, { values: used, ink: "--held", fill: 0.9 },
    ...tiers], { top, grid: true, label: text });
  const rows = [["--held", "memory, in use", bytes(memory.used), bytes(memory.total)],
    ["--cached", "memory, cached", bytes(memory.cached), bytes(memory.total)],
    ["--gone", "taken from the system", bytes(memory.committed), bytes(memory.total)],
    ...memory.tiers.map((tier, i) => [`--c${2 + i}`, tier.name, bytes(tier.bytes), ""])];
  fillRows($("memory-table"), rows.map((row) => row.slice(1)), (cell, r, c) => {
    if (c || cell.firstElementChild) return;
    const swatch = make("i", { className: "swatch" });
    swatch.style.background = `var(${rows[r][0]})`;
    cell.prepend(swatch);
  });
}

// -- the map --------------------------------------------------------------------------------------------------

const UNIT_IS = {
  block: (size) => `A block is the room for the keys and values of ${number(size)} consecutive ${size === 1 ? "token" : "tokens"}: `
    + "memory is handed out, shared and given back by blocks.",
  token: () => "This storage hands out one range of tokens to each sequence. A token's place holds its keys and values in all layers.",
  page: () => "This storage hands out buffers to each sequence, one for each layer. A page is a piece of such a buffer.",
};

function drawMapText() {
  const { per_cell: perCell, blocks } = state.map;
  const each = perCell === 1 ? `a cell is a ${state.block}` : `a cell is ${number(perCell)} ${state.block}s`;
  const size = state.block === "block" ? ` of ${state.block_size} tokens` : "";
  const Block = state.block[0].toUpperCase() + state.block.slice(1);
  setText($("map-title"), `${Block}s`);
  setText($("map-table-block"), `${Block}s`);
  setText($("find-label"), `${Block} number`);
  setText($("map-help"), `Click a ${state.block} to see its tokens and who holds it. With the keyboard: arrow keys move, Enter opens.`);
  setText($("block-is"), UNIT_IS[state.block]?.(state.block_size) ?? "");
  $("map-size").textContent = `${number(blocks)} ${state.block}s${size}; ${each}`;
  drawLegend($("legend"), $("map-table"), state.counts, state.tenants ?? [], map.colours);
}

for (const input of document.querySelectorAll("input[name=colours]"))
  input.addEventListener("change", () => {
    map.colours = input.value;
    map.draw();
    drawMapText();
  });

$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const block = Number($("find-block").value);
  showBlocks(block, block, state.block);
});
$("details-close").addEventListener("click", () => { $("details").hidden = true; map.mark([]); $("map").focus(); });
document.addEventListener("quire-mark", (event) => map.mark(event.detail));

// -- sequences and the tree -----------------------------------------------------------------------------------

// Rows are kept, so that focus stays where it is while figures change.
function keepRows(body, rows, keyOf, fresh, fill) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const wanted = rows.map((one) => {
    const key = keyOf(one);
    let row = known.get(key);
    if (!row) {
      row = fresh(one);
      row.dataset.key = key;
    }
    known.delete(key);
    fill(row, one);
    return row;
  });
  for (const row of known.values()) row.remove();
  wanted.forEach((row, i) => { if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null); });
}

const setText = (cell, text) => { if (cell.textContent !== text) cell.textContent = text; };

function drawSequences() {
  const { sequences = [], num_sequences: count = 0 } = state;
  $("sequences-count").textContent = count > sequences.length ? `${number(count)}, the first ${sequences.length} shown` : number(count);
  const cells = (row) => row.children;
  keepRows($("sequences"), sequences, (one) => `${one.id}/${one.index}`, (one) => {
    const button = make("button", { type: "button", className: "link name", title: one.id },
      one.index ? `${one.id} #${one.index}` : one.id);
    button.addEventListener("click", () => showSequence(one.id, one.index));
    return make("tr", {}, make("th", { scope: "row" }, button), make("td"),
      ...Array.from({ length: 4 }, () => make("td", { className: "number" })), make("td", { className: "runs" }));
  }, (row, one) => {
    const [, tenant, tokens, computed, cached, age, table] = cells(row);
    setText(tenant, one.tenant);
    setText(tokens, number(one.tokens));
    setText(computed, number(one.computed));
    setText(cached, number(one.cached));
    setText(age, seconds(one.age));
    setText(table, (one.hidden_runs ? "… " : "") + runs(one.runs));
  });
  if (!sequences.length && !$("sequences").children.length)
    $("sequences").append(make("tr", {}, make("td", { colSpan: 7, className: "muted" }, "Nothing runs.")));
}

function drawTree() {
  const { rows, nodes, hidden } = state.tree ?? { rows: [], nodes: 0, hidden: 0 };
  $("tree-count").textContent = `${number(nodes)} blocks${hidden ? `, ${number(hidden)} of them in branches not shown` : ""}`;
  keepRows($("tree"), rows, (one) => `${one.node}`, () => make("tr", {}, make("th", { scope: "row" }), make("td"),
    ...Array.from({ length: 8 }, () => make("td", { className: "number" }))),
  (row, one) => {
    const [name, tenant, blocks, tokens, size, held, cached, readers, age, idle] = row.children;
    name.style.paddingLeft = `${Math.min(one.level, 12) * 0.9}rem`;
    const label = `${one.level ? "└ " : ""}${one.words ?? `node ${one.node}`}`;
    if (one.block === null) setText(name, `${label} (given up)`);
    else if (name.dataset.block !== `${one.block}` || name.textContent !== label) {
      name.dataset.block = `${one.block}`;
      const button = make("button", { type: "button", className: "link name", title: `node ${one.node}` }, label);
      button.addEventListener("click", () => showBlocks(one.block, one.block));
      name.replaceChildren(button);
    }
    setText(tenant, one.namespace ? `${one.tenant} (namespace ${one.namespace})` : one.tenant);
    setText(blocks, number(one.blocks));
    setText(tokens, number(one.tokens));
    setText(size, number(one.size));
    setText(held, number(one.held));
    setText(cached, number(one.cached));
    setText(readers, one.readers > 1 ? number(one.readers) : "–");
    setText(age, `${one.older ? "> " : ""}${seconds(one.age)}`);
    setText(idle, one.held ? "in use" : seconds(one.idle));
  });
  if (!rows.length) $("tree").replaceChildren(make("tr", {}, make("td", { colSpan: 10, className: "muted" },
    state.block === "block" ? "Nothing is known yet." : "This storage finds no prefix again: paged and virtual do.")));
}

// -- events ---------------------------------------------------------------------------------------------------

function setStatus(text, kind) {
  setText($("status"), text);
  $("status").className = kind;
}

function showRights() {
  for (const element of document.querySelectorAll(".needs-admin")) if (element.id !== "details") element.hidden = !isAdmin;
  $("no-admin").hidden = isAdmin;
  if (!isAdmin) $("details").hidden = true;
}

function take(message) {
  if (message.history) state.history = message.history;
  Object.assign(state, message);
  const { rates, memory } = state;
  if (message.kind === "update")
    state.history.push([state.at, rates.generated_per_s, rates.first_token_s, rates.hit_rate, memory.used, memory.cached,
      ...memory.tiers.map((tier) => tier.bytes)]);
  if (state.history.length > MOST_POINTS) state.history.splice(0, state.history.length - MOST_POINTS);
  setText($("model"), state.model);
  map.block = state.block;
  map.update(message);
  drawFigures();
  drawMemory();
  drawMapText();
  if (isAdmin) {
    drawSequences();
    if (message.tree || state.block !== "block") drawTree();
    prompt.follow(state.sequences ?? [], state.block);
  }
  document.body.dataset.number = state.number;
}

async function watch() {
  let pause = 500;
  for (;;) {
    connection = new AbortController();
    try {
      const [headers, events] = await stream("/window/events", { signal: connection.signal });
      isAdmin = headers.get("X-Quire-Admin") === "1";
      showRights();
      for (const name of ["owners", "tenants", "sequences", "tree", "idle"]) delete state[name];
      map.owners = map.idle = null;
      for await (const data of events) {
        take(JSON.parse(data));
        setStatus("live", "live");
        pause = 500;
      }
      setStatus("the server has stopped", "lost");
    } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        setStatus(error.message, "lost");
        openKey();
        await new Promise((resolve) => connection.signal.addEventListener("abort", resolve));
        continue;
      }
      if (connection.signal.aborted) continue;
      setStatus(error instanceof Refused ? error.message : "no connection, trying again", "lost");
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(10_000, pause * 2);
  }
}

makeFigures();
showRights();
watch();
