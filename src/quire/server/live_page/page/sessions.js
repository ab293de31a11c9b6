// The sessions: each turn as a bar of tokens hit, prepared and computed, and in words why no more were found.

import { fillLegend, make, number, seconds } from "./format.js";
import { missWords } from "./words.js";

const $ = (id) => document.getElementById(id);
const PARTS = [["hit", "--cached", "hit"], ["prepared", "--c2", "prepared while idle"], ["computed", "--held", "computed"]];

const sum = (counts) => Object.values(counts).reduce((all, count) => all + count, 0);
export const partsOf = (turn) => ({ hit: sum(turn.found) - turn.prepared, prepared: turn.prepared, computed: turn.computed });

function turnWords(turn, place, now) {
  const { hit, prepared, computed } = partsOf(turn);
  const tiers = Object.entries(turn.found).filter(([name, count]) => name !== "memory" && count)
    .map(([name, count]) => `${number(count)} from the tier ${name}`);
  const found = [`${number(hit)} hit${tiers.length ? ` (${tiers.join(", ")})` : ""}`, `${number(prepared)} prepared`,
    `${number(computed)} computed`];
  return `Turn ${number(place)}, ${seconds(Math.max(0, now - turn.at))} ago: ${number(turn.prompt)} tokens, ${found.join(", ")}. `
    + missWords(turn);
}

// A bar for each turn, as high as its prompt next to the session's longest. One of them is in the tab order; the arrow
// keys move along.
function bars(row, now) {
  const longest = Math.max(...row.turns.map((turn) => turn.prompt));
  const first = row.num_turns - row.turns.length + 1;
  const list = make("div", { className: "turns", role: "toolbar" });
  list.setAttribute("aria-label", `Turns of ${row.session}`);
  row.turns.forEach((turn, i) => {
    const bar = make("button", { type: "button", className: "turn" });
    for (const [name, ink] of PARTS) {
      const part = make("i");
      part.style.height = `${(100 * partsOf(turn)[name]) / longest}%`;
      part.style.background = `var(${ink})`;
      bar.prepend(part);
    }
    bar.tabIndex = i === row.turns.length - 1 ? 0 : -1;
    const tell = () => {
      const text = turnWords(turn, first + i, now());
      bar.setAttribute("aria-label", text);
      $("turn-about").textContent = `${row.session}: ${text}`;
    };
    bar.setAttribute("aria-label", turnWords(turn, first + i, now()));
    bar.addEventListener("focus", tell);
    bar.addEventListener("mouseenter", tell);
    list.append(bar);
  });
  list.addEventListener("keydown", (event) => {
    const all = [...list.children], at = all.indexOf(document.activeElement);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined || !all[to]) return;
    event.preventDefault();
    all[at].tabIndex = -1;
    all[to].tabIndex = 0;
    all[to].focus();
  });
  return list;
}

// keepRows, noRows: of main.js. now: the server's time in seconds.
export function drawSessions(rows, keepRows, noRows, now) {
  fillLegend($("sessions-legend"), PARTS.map(([, ink, words]) => [ink, words, ""]));
  $("sessions-count").textContent = rows.length ? "those with the newest turns; the numbers are of the newest turn" : "";
  keepRows($("sessions"), rows, (one) => JSON.stringify([one.tenant, one.session]), ([name, tenant, turns, ...counts], row) => {
    const last = row.turns[row.turns.length - 1], about = JSON.stringify([row.num_turns, last]);
    if (name.dataset.about === about) return;
    name.dataset.about = about;
    name.textContent = row.session;
    tenant.textContent = row.tenant;
    const had = turns.contains(document.activeElement);
    turns.replaceChildren(bars(row, now));
    if (had) turns.querySelector("[tabindex='0']").focus();
    [last.prompt, ...Object.values(partsOf(last))].forEach((count, i) => { counts[i].textContent = number(count); });
  });
  if (!rows.length) noRows($("sessions"), "No request has named a session.");
}
