// Draws rides on a canvas: rows are seats, columns are steps, the newest at the right edge.

import { palette, tierClass } from "./palette.js";

export const columnWidth = (canvas) => (canvas.clientWidth < 500 ? 4 : 6);

/** Make the canvas as large as it is shown; returns its context in CSS pixels. */
export function prepare(canvas, height) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    if (canvas.classList.contains("seats")) canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export const rowHeight = (numSeats) => Math.max(5, Math.min(16, Math.floor(300 / Math.max(1, numSeats))));

/** Draw the rides of a Train or StaticTrain with their last column, `end` - 1, at the right edge. */
export function drawSeats(canvas, rides, { numSeats, end, rankOf, cursor }) {
  const row = rowHeight(numSeats);
  const { context, width } = prepare(canvas, Math.max(1, numSeats) * row + 2);
  const step = columnWidth(canvas);
  const colours = palette();
  const x = (column) => width - (end - column) * step;
  context.fillStyle = colours.rail;
  for (let seat = 0; seat < numSeats; seat++) context.fillRect(0, seat * row + row / 2, width, 1);
  for (const ride of rides) {
    const last = ride.heldTo === undefined ? ride.to : ride.heldTo;
    if (ride.from >= end || (last !== null && x(last) < -step)) continue;
    drawRide(context, ride, { row, step, end, x, colours, fill: colours[tierClass(rankOf(ride.rider.tier))] });
  }
  if (cursor) {
    context.strokeStyle = colours.ink;
    context.strokeRect(x(cursor.column) - 0.5, cursor.seat * row + 0.5, step, row);
  }
}

function drawRide(context, ride, { row, step, end, x, colours, fill }) {
  const top = ride.seat * row + 1;
  const head = row - 1;
  const body = Math.max(2, Math.round(row * 0.42));
  context.fillStyle = fill;
  for (const { kind, from, to } of ride.segments) {
    if (from >= end || kind === "idle") continue;
    const left = Math.max(-step, x(from));
    const right = x(Math.min(to, end));
    if (right < 0) continue;
    if (kind === "prefill") context.fillRect(left + 0.5, top, right - left - 1, head);
    else context.fillRect(left, top + (head - body) / 2, right - left, body);
  }
  if (ride.to === null || ride.to > end) return;
  if (ride.heldTo !== undefined) {
    // Its seat is bound until the batch ends.
    context.globalAlpha = 0.16;
    context.fillStyle = fill;
    const left = Math.max(0, x(ride.to));
    context.fillRect(left, top, x(Math.min(ride.heldTo ?? end, end)) - left, head);
    context.globalAlpha = 1;
  }
  if (ride.reason === null) return;
  const at = x(ride.to) - step / 2;
  const middle = top + head / 2;
  const size = Math.min(4.5, head / 2);
  if (ride.reason === "preempted") drawCross(context, at, middle, size, colours);
  else {
    context.fillStyle = ride.reason === "error" ? colours.bad : colours.ink;
    context.beginPath();
    context.arc(at, middle, Math.max(1.5, size * 0.7), 0, 7);
    context.fill();
  }
}

function drawCross(context, x, y, size, colours) {
  for (const [stroke, lineWidth] of [[colours.card, 4], [colours.bad, 2]]) {
    context.strokeStyle = stroke;
    context.lineWidth = lineWidth;
    context.beginPath();
    context.moveTo(x - size, y - size);
    context.lineTo(x + size, y + size);
    context.moveTo(x + size, y - size);
    context.lineTo(x - size, y + size);
    context.stroke();
  }
  context.lineWidth = 1;
}

/** Draw a bar per step against the target, on the same columns. */
export function drawStrip(canvas, columns, targetMs) {
  const { context, width, height } = prepare(canvas, 46);
  const step = columnWidth(canvas);
  const colours = palette();
  const shown = columns.slice(-Math.ceil(width / step));
  const longest = Math.max(1, ...shown.map((column) => column.ms));
  // A single long step must not press all others flat.
  const top = (targetMs ? Math.min(Math.max(longest, targetMs), 2.5 * targetMs) : longest) * 1.15;
  shown.forEach((column, index) => {
    const tall = Math.max(1, Math.min(1, column.ms / top) * (height - 2));
    context.fillStyle = targetMs && column.ms > targetMs ? colours.bad : colours.quiet;
    context.fillRect(width - (shown.length - index) * step + 0.5, height - tall, step - 1, tall);
  });
  context.fillStyle = colours.ink;
  context.strokeStyle = colours.ink;
  context.font = "11px system-ui, sans-serif";
  if (targetMs) {
    const y = Math.round(height - (targetMs / top) * (height - 2)) + 0.5;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
    context.setLineDash([]);
  }
  const label = targetMs ? `step time; dashed: ITL target ${targetMs} ms` : `step time; highest ${longest.toFixed(1)} ms`;
  const wide = context.measureText(label).width;
  context.fillStyle = colours.card;
  context.fillRect(0, 0, wide + 10, 16);
  context.fillStyle = colours.quiet;
  context.fillText(label, 2, 12);
}
