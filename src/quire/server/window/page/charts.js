// Lines over time on a canvas. series: [{values, ink, fill}], all of one length; null values leave a gap.

import { colour } from "./format.js";

export function drawLines(canvas, series, { top = null, grid = false, label = null } = {}) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const paint = canvas.getContext("2d");
  paint.scale(ratio, ratio);
  const known = series.flatMap((one) => one.values).filter((value) => value !== null && value !== undefined);
  const most = top ?? Math.max(1e-9, ...known) * 1.08;
  const count = Math.max(2, ...series.map((one) => one.values.length));
  const x = (i) => (i / (count - 1)) * (width - 2) + 1;
  const y = (value) => height - 1.5 - (Math.min(value, most) / most) * (height - 4);
  paint.strokeStyle = colour("--line");
  paint.lineWidth = 1;
  for (const share of grid ? [0, 0.25, 0.5, 0.75, 1] : [0]) {
    paint.beginPath();
    paint.moveTo(0, y(share * most));
    paint.lineTo(width, y(share * most));
    paint.stroke();
  }
  for (const { values, ink, fill } of series) {
    paint.strokeStyle = colour(ink);
    paint.fillStyle = colour(ink);
    paint.lineWidth = 1.6;
    let begun = -1;
    const close = (end) => {
      if (begun < 0) return;
      paint.beginPath();
      for (let i = begun; i < end; i++) paint.lineTo(x(i + count - values.length), y(values[i]));
      if (fill) {
        paint.lineTo(x(end - 1 + count - values.length), y(0));
        paint.lineTo(x(begun + count - values.length), y(0));
        paint.globalAlpha = fill;
        paint.fill();
        paint.globalAlpha = 1;
      } else paint.stroke();
      begun = -1;
    };
    values.forEach((value, i) => {
      if (value === null || value === undefined) close(i);
      else if (begun < 0) begun = i;
    });
    close(values.length);
  }
  if (label !== null) canvas.setAttribute("aria-label", label);
}
