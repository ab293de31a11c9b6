// The block map: a canvas of cells; a cell is one block or, for a large pool, the shares of many.

import { announce, colour, fillLegend, fillRows, number, percent } from "./format.js";
import { BLOCK_STATES } from "./words.js";

const STATES = Object.keys(BLOCK_STATES);
const NO_OWNER = 255;
const TENANT_COLOURS = 15;
const IDLE_STEPS = ["less than 10 s", "10 s to 1 min", "1 to 10 min", "10 min to 1 h", "1 h or more"]; // as in page_snapshot.py

const decode = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

export class BlockMap {
  // open(first, last): shows the details of blocks
  constructor(canvas, open) {
    this.canvas = canvas;
    this.open = open;
    this.blocks = 0;
    this.perCell = 1;
    this.cells = new Uint8Array(0);
    this.owners = null;
    this.tenants = [];
    this.idle = null; // each cell's step, or NO_OWNER
    this.colours = "state"; // or "tenant", "idle"
    this.marked = new Set(); // cells
    this.markedRuns = [];
    this.cursor = -1;
    this.block = "block";
    canvas.addEventListener("click", (event) => this.#click(event));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => { this.cursor = -1; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  get numCells() { return this.cells.length / 4; }

  update({ map, owners, tenants, idle }) {
    if (map) {
      this.blocks = map.blocks;
      this.perCell = map.per_cell;
      this.cells = decode(map.cells);
      this.#remark();
    }
    if (owners) this.owners = decode(owners);
    if (idle) this.idle = decode(idle);
    if (tenants) this.tenants = tenants;
    this.draw();
  }

  // runs: [[first, length], ...] of blocks to be outlined
  mark(runs) {
    this.markedRuns = runs;
    this.#remark();
    this.draw();
  }

  #remark() {
    this.marked = new Set();
    for (const [first, length] of this.markedRuns)
      for (let at = Math.floor(first / this.perCell); at <= Math.floor((first + length - 1) / this.perCell); at++)
        this.marked.add(at);
  }

  #layout() {
    const width = this.canvas.clientWidth || 600;
    const wanted = Math.sqrt((width * Math.min(320, Math.max(150, width / 2.5))) / Math.max(1, this.numCells));
    const size = Math.max(4, Math.min(20, Math.floor(wanted)));
    const columns = Math.max(1, Math.floor(width / size));
    return { width, size, columns, rows: Math.max(1, Math.ceil(this.numCells / columns)) };
  }

  draw() {
    const { width, size, columns, rows } = this.#layout();
    const ratio = devicePixelRatio || 1;
    const height = rows * size + 2;
    const [pixelsWide, pixelsHigh] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== pixelsWide || this.canvas.height !== pixelsHigh) {
      this.canvas.width = pixelsWide;
      this.canvas.height = pixelsHigh;
      this.canvas.style.height = `${height}px`;
    }
    const paint = this.canvas.getContext("2d");
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint.clearRect(0, 0, width, height);
    const gap = size >= 6 ? 1 : 0;
    const full = size - gap;
    const inks = STATES.map((name) => colour(`--${name}`));
    const idleInks = IDLE_STEPS.map((_, i) => colour(`--i${i}`));
    const tenantInks = Array.from({ length: TENANT_COLOURS }, (_, i) => colour(`--c${i}`));
    for (let at = 0; at < this.numCells; at++) {
      const x = (at % columns) * size + 1;
      const y = Math.floor(at / columns) * size + 1;
      paint.fillStyle = inks[0];
      paint.fillRect(x, y, full, full);
      const [cached, held, in_flight, pinned] = this.cells.subarray(4 * at, 4 * at + 4);
      const owner = this.colours === "tenant" && this.owners ? this.owners[at] : NO_OWNER;
      const idle = this.colours === "idle" && this.idle ? this.idle[at] : NO_OWNER;
      let bottom = y + full;
      for (const [share, state] of [[pinned, 4], [held, 2], [in_flight, 3], [cached, 1]]) {
        if (!share) continue;
        const high = Math.min(bottom - y, Math.max(1, (full * share) / 255));
        paint.globalAlpha = owner !== NO_OWNER && state === 1 ? 0.42 : 1;
        if (state === 1 && this.colours === "idle") paint.fillStyle = idleInks[idle] ?? colour("--gone");
        else paint.fillStyle = owner === NO_OWNER ? inks[state] : tenantInks[Math.min(owner, TENANT_COLOURS - 1)];
        paint.fillRect(x, bottom - high, full, high);
        paint.globalAlpha = 1;
        bottom -= high;
      }
    }
    paint.strokeStyle = colour("--mark");
    paint.lineWidth = 1.5;
    for (const at of this.marked) {
      if (at >= this.numCells) continue;
      paint.strokeRect((at % columns) * size + 1, Math.floor(at / columns) * size + 1, full, full);
    }
    if (this.cursor >= 0) {
      paint.strokeStyle = colour("--accent");
      paint.lineWidth = 3;
      paint.strokeRect((this.cursor % columns) * size, Math.floor(this.cursor / columns) * size, size + 1, size + 1);
    }
  }

  describe(cell) {
    const first = cell * this.perCell;
    const last = Math.min(first + this.perCell, this.blocks) - 1;
    const [cached, held, in_flight, pinned] = this.cells.subarray(4 * cell, 4 * cell + 4);
    const owner = this.owners && this.owners[cell] !== NO_OWNER ? this.tenants[this.owners[cell]]?.name : null;
    const idle = cached && this.idle ? IDLE_STEPS[this.idle[cell]] : undefined;
    const of = (owner ? `, of ${owner}` : "") + (idle ? `, unused for ${idle}` : "");
    if (this.perCell === 1) {
      const state = pinned ? "pinned" : in_flight ? "in_flight" : held ? "held" : cached ? "cached" : "free";
      return `${this.block} ${first}, ${BLOCK_STATES[state][0]}${of}`;
    }
    return `${this.block}s ${first} to ${last}: ${percent(held / 255)} held, ${percent(cached / 255)} cached, ${percent(pinned / 255)} pinned${of}`;
  }

  #click(event) {
    const { size, columns } = this.#layout();
    const column = Math.floor((event.offsetX - 1) / size);
    const cell = Math.floor((event.offsetY - 1) / size) * columns + column;
    if (column >= 0 && column < columns && cell >= 0 && cell < this.numCells) this.#choose(cell);
  }

  #key(event) {
    const { columns } = this.#layout();
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    if (event.key in steps || event.key === "Home" || event.key === "End") {
      event.preventDefault();
      const from = Math.max(0, this.cursor);
      let to = this.cursor < 0 ? 0 : from + (steps[event.key] ?? 0);
      if (event.key === "Home") to = 0;
      if (event.key === "End") to = this.numCells - 1;
      if (to >= 0 && to < this.numCells) this.cursor = to;
      announce(this.describe(this.cursor));
      this.draw();
    } else if ((event.key === "Enter" || event.key === " ") && this.cursor >= 0) {
      event.preventDefault();
      this.#choose(this.cursor);
    }
  }

  #choose(cell) {
    this.open(cell * this.perCell, Math.min((cell + 1) * this.perCell, this.blocks) - 1);
  }
}

export function drawLegend(list, table, counts, tenants, colours) {
  const states = STATES.map((state) => [`--${state}`, BLOCK_STATES[state][0], number(counts[state]), BLOCK_STATES[state][1]]);
  fillLegend(list, {
    state: states,
    tenant: [...tenants.map((one, i) => [`--c${Math.min(i, TENANT_COLOURS - 1)}`, one.name, number(one.blocks)]),
      [null, "", "", "paler: cached, not held"]],
    idle: [...states.filter(([ink]) => ink !== "--cached"),
      ...IDLE_STEPS.map((name, i) => [`--i${i}`, `unused for ${name}`, ""]), ["--gone", "cached, time not known", ""]],
  }[colours]);
  const row = (name, count) => [name, number(count), percent(counts.num_blocks ? count / counts.num_blocks : 0)];
  fillRows(table, [...STATES.map((state) => row(BLOCK_STATES[state][0], counts[state])),
    ...tenants.map((one) => row(`tenant ${one.name}`, one.blocks))]);
}
