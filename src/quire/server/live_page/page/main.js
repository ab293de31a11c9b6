// The live page: the server's events as figures, the map, charts, requests, the tree and evictions.

import { drawChart } from "./charts.js";
import { announce, bytes, fillLegend, make, number, percent, runs, seconds } from "./format.js";
import { BlockMap, drawLegend } from "./map.js";
import { Refused, keyDialog, stream } from "./server.js";
import { drawSessions } from "./sessions.js";
import { showSequence, showBlocks } from "./details.js";
import { Try } from "./try.js";
import { LOSSES, PHASES, PREEMPTED, errorWords, lossWords, phaseKind, phaseWords } from "./words.js";

const MOST_POINTS = 480;
const MOST_RUNS = 8; // of a block table; a click shows all of them
const $ = (id) => document.getElementById(id);
const state = { history: [] };
let isAdmin = false;
let connection = new AbortController();

const map = new BlockMap($("map"), (first, last) => {
  if (isAdmin) showBlocks(first, last, state.block);
  else announce("Tokens and holders are shown to the administrator only.");
});
const openKey = keyDialog(() => connection.abort());
const box = new Try((runsOfPrompt) => map.mark(runsOfPrompt));

// -- figures --------------------------------------------------------------------------------------------------

const inUse = (counts) => counts.held + counts.in_flight + counts.pinned;
const FIGURES = [
  ["Generated", (s) => [number(s.rates.generated_per_s, 0), "tokens/s"]],
  ["First token", (s) => [seconds(s.rates.first_token_s), "lately"]],
  ["Hit rate", (s) => [percent(s.rates.hit_rate), "of prompts, lately"]],
  ["Running", (s) => [number(s.counts.num_running), "sequences"]],
  ["Waiting", (s) => [number(s.counts.num_waiting), "sequences"]],
  ["In use", (s) => [percent(inUse(s.counts) / s.counts.num_blocks), `of ${s.block}s`]],
  ["Preempted", (s) => [number(s.counts.num_preemptions), "times"]],
  ["Evicted", (s) => [number(s.counts.evicted_blocks), `${s.block}s`]],
];
const STATE_FIGURES = [
  ["States of sequences", (s) => [number(s.counts.state_slots - s.counts.checkpoints - s.counts.free_state_slots
    - (s.counts.draft_slots ?? 0)), `of ${number(s.counts.state_slots)}`]],
  ["Checkpoints of states", (s) => [number(s.counts.checkpoints), `${number(s.counts.evicted_checkpoints)} evicted`]],
  ["Hits cut short", (s) => [number(s.counts.short_hits), "for lack of a state"]],
  ["States made of blocks", (s) => [number(s.counts.slots_from_blocks), `${number(s.counts.slots_to_blocks)} became blocks`]],
];
// Of steps with drafts; a place is that of a draft among those of its sequence and step.
const DRAFT_FIGURES = [
  ["Drafts accepted", (s) => [percent(share(s.counts.num_accepted_tokens, s.counts.num_draft_tokens)),
    `of ${number(s.counts.num_draft_tokens)}`]],
  ["Tokens a step", (s) => [number(s.counts.num_drafts ? 1 + s.counts.num_accepted_tokens / s.counts.num_drafts : null, 2),
    "with drafts, of a sequence"]],
  ["Accepted by place", (s) => {
    const shares = s.counts.num_accepted_by_position.map((count) => share(count, s.counts.num_drafts));
    const others = shares.slice(1).map((value) => number(value === null ? null : 100 * value));
    return [percent(shares[0]), others.length ? `then ${others.join(", ")} %` : "of the only place"];
  }],
];
const share = (part, whole) => (whole ? part / whole : null);

const figuresOf = (s) => [
  ...FIGURES,
  ...(s?.counts?.state_slots === undefined ? [] : STATE_FIGURES),
  ...(s?.counts?.num_drafts === undefined ? [] : DRAFT_FIGURES),
];

function makeFigures() {
  $("figures").replaceChildren(...figuresOf(state).map(([name]) => make("dl", { className: "figure" },
    make("dt", {}, name), make("dd", {}, "–"))));
}

function drawFigures() {
  const figures = figuresOf(state);
  if ($("figures").children.length !== figures.length) makeFigures();
  figures.forEach(([, read], i) => {
    const [value, unit] = read(state);
    $("figures").children[i].querySelector("dd").replaceChildren(value, " ", make("small", {}, unit));
  });
}

// -- over time ------------------------------------------------------------------------------------------------

function drawCharts() {
  const { rates, memory, history } = state;
  const times = history.map((point) => point[0]);
  const column = (at) => history.map((point) => point[at] ?? null);
  const line = (name, at, ink, scale, now, top = null) => drawChart($(`chart-${name}`), times, [{ values: column(at), ink }],
    { scale, top, label: `${$(`chart-${name}`).querySelector("h3").firstChild.textContent.trim()}: ${now} now` });
  line("generated", 1, "--c0", "rate", `${number(rates.generated_per_s)} tokens a second`);
  line("first", 2, "--c1", "seconds", seconds(rates.first_token_s));
  line("hits", 3, "--c2", "share", percent(rates.hit_rate), 1);
  const tiers = memory.tiers.map((tier, i) => ({ values: column(6 + i), ink: `--c${2 + i}` }));
  const top = Math.max(memory.total, ...tiers.flatMap((one) => one.values.map((value) => value ?? 0)));
  drawChart($("chart-memory"), times, [{ values: history.map((point) => point[4] + point[5]), ink: "--cached", fill: true },
    { values: column(4), ink: "--held", fill: true }, ...tiers], { scale: "bytes", top,
    label: `Memory: ${bytes(memory.used)} in use and ${bytes(memory.cached)} cached of ${bytes(memory.total)}` });
  fillLegend($("memory-legend"), [["--held", "memory in use", bytes(memory.used)], ["--cached", "memory cached", bytes(memory.cached)],
    ...memory.tiers.map((tier, i) => [`--c${2 + i}`, `tier ${tier.name}`, bytes(tier.bytes)]),
    [null, "of the cache", bytes(memory.total)], [null, "taken from the system so far", bytes(memory.committed)]]);
}

// -- the map --------------------------------------------------------------------------------------------------

const UNIT_IS = {
  block: (size) => `A block is the room for the keys and values of ${number(size)} consecutive ${size === 1 ? "token" : "tokens"}: `
    + "memory is allocated, shared and freed by blocks.",
  token: () => "This storage gives each sequence one range of tokens. A token's place holds its keys and values in all layers.",
  page: () => "This storage gives each sequence buffers, one for each layer. A page is a piece of such a buffer.",
};

function drawMapText() {
  const { per_cell: perCell, blocks } = state.map;
  const each = perCell === 1 ? `a cell is a ${state.block}` : `a cell is ${number(perCell)} ${state.block}s`;
  const size = state.block === "block" ? ` of ${state.block_size} tokens` : "";
  const Block = state.block[0].toUpperCase() + state.block.slice(1);
  setText($("map-title"), `${Block}s`);
  setText($("map-table-block"), `${Block}s`);
  setText($("find-label"), `${Block} number`);
  setText($("map-help"), `Click a ${state.block} to see its tokens and holders. With the keyboard: arrow keys move, Enter opens.`);
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

// -- requests, the tree, evictions ---------------------------------------------------------------------------

// Rows are reused, so that the focus stays in place while figures change.
function keepRows(body, rows, keyOf, fill) {
  const columns = [...body.parentElement.tHead.rows[0].cells];
  const fresh = () => make("tr", { role: "row" }, ...columns.map((column, i) => (i
    ? make("td", { role: "cell", className: column.className, "data-label": column.textContent })
    : make("th", { role: "rowheader", scope: "row" }))));
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const wanted = rows.map((one) => {
    const key = keyOf(one);
    const row = known.get(key) ?? fresh();
    row.dataset.key = key;
    known.delete(key);
    fill(row.children, one);
    return row;
  });
  for (const row of known.values()) row.remove();
  wanted.forEach((row, i) => { if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null); });
}

// One row across the table if there is nothing to list.
const noRows = (body, text) => body.replaceChildren(make("tr", { role: "row" },
  make("td", { role: "cell", colSpan: body.parentElement.tHead.rows[0].cells.length, className: "muted none" }, text)));

const setText = (cell, text) => { if (cell.textContent !== text) cell.textContent = text; };
const setTexts = (cells, texts) => texts.forEach((text, i) => setText(cells[i], text));

const nameOf = (one) => (one.index ? `${one.id} #${one.index}` : one.id);

function drawSequences() {
  const { sequences = [], num_sequences: count = 0, waiting = [], counts } = state;
  const all = [...sequences, ...waiting];
  const hidden = Math.max(0, count - sequences.length) + Math.max(0, counts.num_waiting - waiting.length);
  setText($("sequences-count"), `${number(count)} with blocks, ${number(counts.num_waiting)} waiting${hidden ? `; ${number(hidden)} not shown` : ""}`);
  keepRows($("sequences"), all, (one) => `${one.id}/${one.index}`, ([name, phase, ...rest], one) => {
    const hasBlocks = one.blocks > 0;
    if (name.dataset.open !== `${hasBlocks}`) {
      name.dataset.open = `${hasBlocks}`;
      const button = make(hasBlocks ? "button" : "span", { className: hasBlocks ? "link name" : "name", title: one.id }, nameOf(one));
      if (hasBlocks) { button.type = "button"; button.addEventListener("click", () => showSequence(one.id, one.index)); }
      name.replaceChildren(button);
    }
    phase.className = `phase ${phaseKind(one)}`;
    rest[5].className = "runs";
    setText(phase, phaseWords(one));
    setTexts(rest, [one.tenant, number(one.tokens), number(one.computed), number(one.cached), seconds(one.age),
      one.blocks ? (one.hidden_runs || one.runs.length > MOST_RUNS ? "… " : "") + runs(one.runs.slice(-MOST_RUNS)) : "–"]);
  });
  if (!all.length) noRows($("sequences"), "No sequence runs or waits.");
}

function branchName(one) {
  if (one.words === null) return [`node ${one.node}`];
  const shared = one.shared || one.before ? [make("span", { className: "muted" }, `…${one.before}`)] : [];
  return [...shared, one.words || "(nothing of its own yet)"];
}

function drawTree() {
  const { rows, nodes, hidden } = state.tree ?? { rows: [], nodes: 0, hidden: 0 };
  setText($("tree-count"), `${number(nodes)} blocks${hidden ? `, ${number(hidden)} of them in branches not shown` : ""}`);
  keepRows($("tree"), rows, (one) => `${one.node}`, ([name, ...rest], one) => {
    const about = JSON.stringify([one.level, one.block, one.before, one.words, one.shared]);
    if (name.dataset.about !== about) {
      name.dataset.about = about;
      name.style.paddingLeft = `${Math.min(one.level, 12) * 0.9}rem`;
      const text = [one.level ? "└ " : "", ...branchName(one)];
      const button = one.block === null ? make("span", {}, ...text, " (evicted)")
        : make("button", { type: "button", className: "link name", title: `node ${one.node}` }, ...text);
      if (one.block !== null) button.addEventListener("click", () => showBlocks(one.block, one.block));
      name.replaceChildren(button);
    }
    setTexts(rest, [one.namespace ? `${one.tenant} (namespace ${one.namespace})` : one.tenant, number(one.blocks),
      number(one.tokens), number(one.size), number(one.held), number(one.cached), one.readers > 1 ? number(one.readers) : "–",
      `${one.older ? "> " : ""}${seconds(one.age)}`, one.held ? "in use" : seconds(one.idle)]);
  });
  if (!rows.length) noRows($("tree"), state.block === "block" ? "No prefix is known yet." : "This storage shares no prefixes; paged and virtual do.");
}

function drawEvictions() {
  const counts = Object.entries(state.evictions_by_reason ?? {}).filter(([, count]) => count);
  setText($("evictions-count"), counts.length
    ? `since the start: ${counts.map(([reason, count]) => `${number(count)} ${count === 1 ? "block" : "blocks"} because ${LOSSES[reason] ?? reason}`).join(", ")}`
    : "none since the start");
  if (!isAdmin) return;
  const { evictions = [], at } = state;
  keepRows($("evictions"), evictions, (one) => [one.at, one.reason, one.tenant, one.cache_priority].join(), (cells, one) => {
    const [least, most] = one.idle.map((value) => seconds(value));
    const age = Math.round(at - one.at);
    setTexts(cells, [age < 1 ? "just now" : `${seconds(age)} ago`, lossWords(one), one.tenant ?? "–", `${number(one.blocks)}${one.more ? " or more" : ""}`,
      `${number(one.tokens)}${one.more ? " or more" : ""}`, least === most ? least : `${least} to ${most}`, `${one.begins ? "" : "…"}${one.words ?? "–"}`]);
  });
  if (!evictions.length) noRows($("evictions"), state.block === "block" ? "No block has been evicted." : "This storage caches no blocks.");
}

$("phases").replaceChildren(...[...Object.values(PHASES), PREEMPTED].flatMap(([name, meaning, kind = "wait"]) =>
  [make("dt", { className: `phase ${kind}` }, name), make("dd", {}, meaning)]));

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
  box.setTemplate(state.has_chat_template);
  drawFigures();
  drawCharts();
  drawMapText();
  drawEvictions();
  if (isAdmin) {
    drawSequences();
    drawSessions(state.sessions ?? [], keepRows, noRows, () => state.at);
    if (message.tree || state.block !== "block") drawTree();
    box.follow([...(state.sequences ?? []), ...(state.waiting ?? [])], state.block);
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
      for (const name of ["owners", "tenants", "sequences", "waiting", "sessions", "tree", "idle", "evictions"]) delete state[name];
      map.owners = map.idle = null;
      for await (const event of events) {
        take(event);
        setStatus("live", "live");
        pause = 500;
      }
      setStatus("the server has stopped", "lost");
    } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        setStatus(errorWords(error), "lost");
        openKey();
        await new Promise((resolve) => connection.signal.addEventListener("abort", resolve));
        continue;
      }
      if (connection.signal.aborted) continue;
      setStatus(error instanceof Refused ? errorWords(error) : "no connection, trying again", "lost");
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(10_000, pause * 2);
  }
}

makeFigures();
showRights();
new ResizeObserver(() => { if (state.rates) drawCharts(); }).observe($("charts"));
watch();
