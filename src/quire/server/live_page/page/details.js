// One block or one sequence, after a click. Everything that comes from a model or a prompt is set as text.

import { announce, bytes, make, number, runs } from "./format.js";
import { get } from "./server.js";
import { errorWords } from "./words.js";

const $ = (id) => document.getElementById(id);
const mark = (list) => document.dispatchEvent(new CustomEvent("quire-mark", { detail: list }));
const MOST_LISTED = 64;

function show(title, marked, ...content) {
  $("details-title").textContent = title;
  $("details-body").replaceChildren(...content);
  $("details").hidden = false;
  $("details").focus({ preventScroll: true });
  $("details").scrollIntoView({ block: "nearest" });
  mark(marked);
}

const facts = (...pairs) => make("dl", { className: "facts" },
  ...pairs.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, ...[value].flat())]));

function holderLink(one) {
  const name = one.index ? `${one.id} #${one.index}` : one.id;
  const button = make("button", { type: "button", className: "link" }, `${name} (${one.tenant})`);
  button.addEventListener("click", () => showSequence(one.id, one.index));
  return button;
}

function tokenText(before, texts, tokens) {
  const place = make("div", { className: "tokens", lang: "" });
  if (before) place.append(make("span", { className: "before" }, before.length > 240 ? `…${before.slice(-240)}` : before));
  tokens.forEach((token, i) => place.append(make("span", { title: `token ${token}` }, texts[i] ?? `${token}`)));
  return place;
}

// A cell of the map: one block, or a list of many to choose from; for tokens or pages, the whole range.
export async function showBlocks(first, last, kind = "block") {
  const Kind = kind[0].toUpperCase() + kind.slice(1);
  if (last > first && kind === "block") {
    const blocks = Array.from({ length: Math.min(MOST_LISTED, last - first + 1) }, (_, i) => first + i);
    show(`Blocks ${first} to ${last}`, [[first, last - first + 1]], make("p", {}, "A cell of many blocks; choose one:"),
      make("div", { className: "row" }, ...blocks.map((block) => {
        const button = make("button", { type: "button" }, `${block}`);
        button.addEventListener("click", () => showBlocks(block, block));
        return button;
      })));
    return;
  }
  const title = last > first ? `${Kind}s ${first} to ${last}` : `${Kind} ${first}`;
  try {
    const it = await get(`/window/blocks/${first}${last > first ? `?last=${last}` : ""}`);
    const held = it.holders.length
      ? it.holders.flatMap((one, i) => [i ? ", " : "", holderLink(one)])
      : [it.state === "cached" ? "no request: it may be evicted when room is needed" : "no request"];
    if (it.num_holders > it.holders.length) held.push(` and ${it.num_holders - it.holders.length} more`);
    const rows = [["State", it.state], ["Held by", held]];
    if (it.tenant !== null) rows.push(["Tenant", it.tenant]);
    if (it.first_position !== null)
      rows.push(["Tokens", `${it.tokens.length}, from position ${number(it.first_position)}`]);
    if (it.place) rows.push(["Its sequence's place", `${kind}s ${runs([it.place])}`]);
    rows.push(["Memory", bytes(it.bytes)]);
    show(title, [it.place ?? [it.block, 1]], facts(...rows),
      it.tokens.length ? tokenText(it.before, it.texts, it.tokens) : make("p", { className: "muted" }, "No known content."));
  } catch (error) {
    announce(errorWords(error));
    show(title, [], make("p", {}, errorWords(error)));
  }
}

export async function showSequence(id, index) {
  try {
    const it = await get(`/window/sequences/${encodeURIComponent(id)}/${index}`);
    show(`Sequence ${id}${index ? ` #${index}` : ""}`, it.runs,
      facts(["Tenant", it.tenant], ["Tokens", number(it.num_tokens)], ["Block table", runs(it.runs)]),
      tokenText(it.num_tokens > it.tokens.length ? "…" : "", it.texts, it.tokens));
  } catch (error) {
    announce(errorWords(error));
    show(`Sequence ${id}`, [], make("p", {}, errorWords(error)));
  }
}
