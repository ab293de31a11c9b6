// Numbers in readable form, and elements whose content is always text.

export function number(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function bytes(value) {
  if (value < 0) return "–";
  const blocks = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < blocks.length - 1) { value /= 1024; place += 1; }
  return `${number(value, place && value < 100 ? 1 : 0)} ${blocks[place]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${number(value * 1000)} ms`;
  if (value < 120) return `${number(value, value < 10 ? 1 : 0)} s`;
  if (value < 7200) return `${number(value / 60)} min`;
  return `${number(value / 3600, 1)} h`;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${number(100 * value, value < 0.1 && value > 0 ? 1 : 0)} %`;
}

// make("td", { className: "number" }, "text", element, ...)
export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// The rows of a table, changed in place, so that a screen reader keeps its place. A row: the header's text, then each
// cell's; `dress(cell, row, column)` may add more than text to a cell.
export function fillRows(body, rows, dress = () => {}) {
  while (body.children.length > rows.length) body.lastElementChild.remove();
  rows.forEach((texts, r) => {
    const row = body.children[r] ?? body.appendChild(document.createElement("tr"));
    while (row.children.length > texts.length) row.lastElementChild.remove();
    texts.forEach((text, c) => {
      const cell = row.children[c]
        ?? row.appendChild(c ? make("td", { className: "number" }) : make("th", { scope: "row" }));
      if (cell.textContent !== text) cell.textContent = text;
      dress(cell, r, c);
    });
  });
}

// A legend, changed in place: [ink or null, name, count, meaning] for each entry.
export function fillLegend(list, entries) {
  while (list.children.length > entries.length) list.lastElementChild.remove();
  entries.forEach(([ink, name, count, meaning = ""], i) => {
    const about = JSON.stringify([ink, name, count, meaning]);
    const item = list.children[i] ?? list.appendChild(make("li"));
    if (item.dataset.about === about) return;
    item.dataset.about = about;
    const swatch = ink === null ? null : make("i", { className: "swatch" });
    if (swatch) swatch.style.background = `var(${ink})`;
    const more = meaning && make("span", { className: "meaning" }, meaning);
    item.replaceChildren(...[swatch, `${name} ${count}`.trim(), more && " ", more].filter((part) => part));
  });
}

export function runs(list) {
  return list.map(([first, length]) => (length === 1 ? `${first}` : `${first}–${first + length - 1}`)).join(", ");
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function announce(text) {
  document.getElementById("announce").textContent = text;
}
