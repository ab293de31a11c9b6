// The live view: events of the server into figures, the map, sequences, the tree and memory over time.

import { drawLines } from "./charts.js";
import { announce, bytes, fillRows, make, number, percent, runs, seconds } from "./format.js";
import { BlockMap, drawLegend } from "./map.js";
import { Refused, keyDialog, stream } from "./server.js";
import { showSequence, showUnits } from "./details.js";
import { Prompt } from "./prompt.js";

const MOST_POINTS = 480;
const $ = (id) => document.getElementById(id);
const state = { history: [] };
let isAdmin = false;
let connection = new AbortController();

const map = new BlockMap($("map"), (first, last) => {
  if (isAdmin) showUnits(first, last, state.unit);
  else announce("Tokens and holders are shown to the administrator only.");
});
const openKey = keyDialog(() => connection.abort());
const prompt = new Prompt((runsOfPrompt) => map.mark(runsOfPrompt));

// -- figures --------------------------------------------------------------------------------------------------

const FIGURES = [
  ["Generated", (s) => [number(s.rates.generated_per_s, 0), "tokens/s"], 1, "--c0"],
  ["First token, lately", (s) => [seconds(s.rates.first_token_s), ""], 2, "--c1"],
  ["Hit rate, lately", (s) => [percent(s.rates.hit_rate), "of prompts"], 3, "--c2", 1],
  ["Running, waiting", (s) => [`${number(s.counts.num_running)}, ${number(s.counts.num_waiting)}`, ""]],
  ["In use", (s) => [percent((s.counts.held + s.counts.leased + s.counts.pinned) / s.counts.num_blocks), `of ${s.unit}s`]],
  ["Preempted, evicted", (s) => [`${number(s.counts.num_preemptions)}, ${number(s.counts.evicted_blocks)}`, ""]],
];

function makeFigures() {
  $("figures").replaceChildren(...FIGURES.map(([name, , column]) => make("dl", { className: "figure" },
    make("dt", {}, name), make("dd", {}, "–"),
    column ? make("dd", {}, make("canvas", { "aria-hidden": "true" })) : null)));
}

function drawFigures() {
  FIGURES.forEach(([, read, column, ink, top], i) => {
    const figure = $("figures").children[i];
    const [value, unit] = read(state);
    figure.querySelector("dd").replaceChildren(value, " ", make("small", {}, unit));
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

function drawMapText() {
  const { per_cell: perCell, units } = state.map;
  const each = perCell === 1 ? `a cell is a ${state.unit}` : `a cell is ${number(perCell)} ${state.unit}s`;
  const size = state.unit === "block" ? ` of ${state.block_size} tokens` : "";
  const Unit = state.unit[0].toUpperCase() + state.unit.slice(1);
  setText($("map-title"), `${Unit}s`);
  setText($("map-table-unit"), `${Unit}s`);
  setText($("find-label"), `${Unit} number`);
  setText($("map-help"), `Click a ${state.unit} to see its tokens and who holds it. With the keyboard: arrow keys move, Enter opens.`);
  $("map-size").textContent = `${number(units)} ${state.unit}s${size}; ${each}`;
  drawLegend($("legend"), $("map-table"), state.counts, state.tenants ?? [], map.byTenant);
}

for (const input of document.querySelectorAll("input[name=colours]"))
  input.addEventListener("change", () => {
    map.byTenant = input.value === "tenant";
    map.draw();
    drawMapText();
  });

$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const unit = Number($("find-unit").value);
  showUnits(unit, unit, state.unit);
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
    return make("tr", {}, make("th", { scope: "row" }, button), make("td"), make("td", { className: "number" }),
      make("td", { className: "number" }), make("td", { className: "number" }), make("td", { className: "runs" }));
  }, (row, one) => {
    const [, tenant, tokens, cached, age, table] = cells(row);
    setText(tenant, one.tenant);
    setText(tokens, `${number(one.computed)} of ${number(one.tokens)}`);
    setText(cached, number(one.cached));
    setText(age, seconds(one.age));
    setText(table, (one.hidden_runs ? "… " : "") + runs(one.runs));
  });
  if (!sequences.length && !$("sequences").children.length)
    $("sequences").append(make("tr", {}, make("td", { colSpan: 6, className: "muted" }, "Nothing runs.")));
}

function drawTree() {
  const { rows, nodes, hidden } = state.tree ?? { rows: [], nodes: 0, hidden: 0 };
  $("tree-count").textContent = `${number(nodes)} blocks${hidden ? `, ${number(hidden)} of them in branches not shown` : ""}`;
  keepRows($("tree"), rows, (one) => `${one.node}`, () => make("tr", {}, make("th", { scope: "row" }), make("td"),
    ...Array.from({ length: 3 }, () => make("td", { className: "number" })), make("td"),
    ...Array.from({ length: 2 }, () => make("td", { className: "number" }))),
  (row, one) => {
    const [name, tenant, blocks, tokens, size, held, age, idle] = row.children;
    name.style.paddingLeft = `${Math.min(one.level, 12) * 0.9}rem`;
    const label = `${one.level ? "└ " : ""}node ${one.node}`;
    if (one.unit === null) setText(name, `${label} (given up)`);
    else if (name.dataset.unit !== `${one.unit}` || name.textContent !== label) {
      name.dataset.unit = `${one.unit}`;
      const button = make("button", { type: "button", className: "link" }, label);
      button.addEventListener("click", () => showUnits(one.unit, one.unit));
      name.replaceChildren(button);
    }
    setText(tenant, one.namespace ? `${one.tenant} (namespace ${one.namespace})` : one.tenant);
    setText(blocks, number(one.blocks));
    setText(tokens, number(one.tokens));
    setText(size, number(one.size));
    setText(held, `${number(one.held)}, ${number(one.cached)}${one.readers > 1 ? `, shared by ${one.readers}` : ""}`);
    setText(age, `${one.older ? "> " : ""}${seconds(one.age)}`);
    setText(idle, one.held ? "in use" : seconds(one.idle));
  });
  if (!rows.length) $("tree").replaceChildren(make("tr", {}, make("td", { colSpan: 8, className: "muted" },
    state.unit === "block" ? "Nothing is known yet." : "This storage finds no prefix again: paged and virtual do.")));
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
  map.unit = state.unit;
  map.update(message);
  drawFigures();
  drawMemory();
  drawMapText();
  if (isAdmin) {
    drawSequences();
    if (message.tree || state.unit !== "block") drawTree();
    prompt.follow(state.sequences ?? [], state.unit);
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
      for (const name of ["owners", "tenants", "sequences", "tree"]) delete state[name];
      map.owners = null;
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
