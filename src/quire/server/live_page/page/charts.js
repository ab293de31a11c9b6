// Lines over time with both axes, as SVG: numbers at the ticks, the unit next to the title.

import { bytes, number, seconds } from "./format.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const LEAST_SPAN_S = 30;
const STEPS_S = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200];

const nice = (least) => {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].find((factor) => factor * power >= least * 0.999) * power;
};
const niceOf2 = (least) => 2 ** Math.ceil(Math.log2(least) - 1e-9);

// A scale by the highest value: its unit, the unit's size in values, and a round step between ticks of at least `least`
// units, on an axis of `most` units.
export const SCALES = {
  rate: () => ({ unit: "tokens/s", size: 1, step: (least) => Math.max(1, nice(least)) }),
  seconds: (highest) => (highest < 1 ? { unit: "ms", size: 0.001, step: (least) => Math.max(1, nice(least)) } : { unit: "s", size: 1, step: nice }),
  share: () => ({ unit: "% of prompt tokens", size: 0.01, step: (least) => [25, 50, 100].find((step) => step >= least) ?? 100 }),
  bytes: (highest) => {
    const unit = bytes(Math.max(1, highest)).split(" ")[1];
    return { unit, size: 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].indexOf(unit), step: (least, most) => [niceOf2(least), nice(least)].find((step) => (most / step) % 1 < 0.01) ?? niceOf2(least) };
  },
};

const ago = (seconds) => (seconds === 0 ? "now" : seconds < 60 ? `−${seconds} s` : seconds < 3600 ? `−${seconds / 60} min` : `−${seconds / 3600} h`);

function shape(name, attributes, ...children) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// figure: with an h3, its .unit, and an svg. times: of the points, seconds. series: [{values, ink, fill}], null values
// leave a gap. top: the highest value of the axis, if fixed. label: a text in place of the picture.
export function drawChart(figure, times, series, { scale, top = null, label }) {
  const svg = figure.querySelector("svg");
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  if (!width || !times.length) return;
  const em = parseFloat(getComputedStyle(svg).fontSize);
  const known = series.flatMap((one) => one.values).filter((value) => value !== null && value !== undefined);
  const highest = Math.max(0, ...known);
  const { unit, size, step } = SCALES[scale](top ?? highest);
  const wanted = Math.max(top ?? highest, size) / size;
  const yStep = step(wanted / Math.max(1, Math.min(4, Math.floor(height / (2.4 * em)))), wanted);
  const most = top ?? Math.ceil(wanted / yStep) * yStep * size;
  const yTicks = [];
  for (let at = 0; at <= (most / size) * 1.001; at += yStep) yTicks.push(at);
  const write = (value) => number(value, yStep < 1 ? 1 : 0);
  const left = Math.max(...yTicks.map((tick) => write(tick).length)) * 0.6 * em + 0.5 * em;
  const [right, upper, lower] = [0.3 * em, 0.7 * em, height - 1.7 * em];
  const end = times[times.length - 1];
  const span = Math.max(LEAST_SPAN_S, end - times[0]);
  const x = (time) => width - right - ((end - time) / span) * (width - left - right);
  const y = (value) => lower - (Math.min(value, most) / most) * (lower - upper);
  const xMost = Math.max(1, Math.min(4, Math.floor((width - left) / (4.6 * em))));
  const xStep = STEPS_S.find((one) => span / one <= xMost) ?? Math.ceil(span / xMost / 3600) * 3600;
  const drawn = [];
  for (const tick of yTicks) {
    drawn.push(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(tick * size), y2: y(tick * size) }));
    drawn.push(shape("text", { class: "tick y", x: left - 0.4 * em, y: y(tick * size) + 0.35 * em }, write(tick)));
  }
  for (let at = 0; at <= span; at += xStep) {
    const place = x(end - at);
    if (at && place < left + 1.6 * em) break;
    drawn.push(shape("line", { class: "mark", x1: place, x2: place, y1: lower, y2: lower + 0.3 * em }));
    drawn.push(shape("text", { class: at ? "tick x" : "tick x last", x: at ? place : width, y: height - 0.3 * em }, ago(at)));
  }
  for (const { values, ink, fill } of series) {
    let begun = -1;
    const close = (stop) => {
      if (begun < 0) return;
      const points = [];
      for (let i = begun; i < stop; i++) points.push(`${x(times[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`);
      const area = fill ? `L${x(times[stop - 1]).toFixed(1)} ${lower}L${x(times[begun]).toFixed(1)} ${lower}Z` : "";
      const path = shape("path", { class: fill ? "area" : "line", d: `M${points.join("L")}${area}` });
      path.style[fill ? "fill" : "stroke"] = `var(${ink})`;
      drawn.push(path);
      begun = -1;
    };
    values.forEach((value, i) => {
      if (value === null || value === undefined) close(i);
      else if (begun < 0) begun = i;
    });
    close(values.length);
  }
  svg.replaceChildren(...drawn);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", `${label}, in the last ${seconds(Math.round(span))}`);
  const place = figure.querySelector(".unit");
  if (place.textContent !== unit) place.textContent = unit;
}
