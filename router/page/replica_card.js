// One replica on the line: its live seat map, the static one below it, and what a pointer or key finds there.

import { columnWidth, drawSeats, drawStrip, rowHeight } from "./seat_map.js";
import { StaticTrain } from "./static_train.js";
import { MAX_COLUMNS, Train } from "./train.js";

const PAUSED_COLUMNS = 20000; // kept while somebody looks at a still picture
const SPREAD_MS = 250; // over which the steps of one event are drawn
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const percent = (share) => (share === null ? "–" : `${Math.round(share * 100)}%`);

export class ReplicaCard {
  #pending = []; // reports that are not drawn yet
  #frozenEnd = null;
  #cursor = null;
  #isDirty = true;
  #row = null;
  #static = null;
  #parts = {};

  constructor(name, line) {
    this.name = name;
    this.line = line;
    this.train = new Train();
    this.element = document.getElementById("replica").content.firstElementChild.cloneNode(true);
    for (const part of this.element.querySelectorAll("[data-is]")) this.#parts[part.dataset.is] = part;
    const canvas = this.#parts.seats;
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#moveTo(null));
    canvas.addEventListener("blur", () => this.#moveTo(null));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }

  get end() {
    return this.#frozenEnd ?? this.train.end;
  }

  redraw() {
    this.#isDirty = true;
  }

  setRow(row) {
    this.#row = row;
    const title = this.element.querySelector("h2");
    const state = document.createElement("span");
    state.className = `state ${row.state}`;
    state.textContent = row.state;
    title.replaceChildren(`Replica ${shortName(row.name)} `, state);
    if (!this.#static && row.max_num_seqs) this.#static = new StaticTrain(this.train, row.max_num_seqs, MAX_COLUMNS);
    this.#isDirty = true;
  }

  receive(report) {
    const [cursor, records, riders] = report;
    if (riders) this.#pending.push([cursor, [], riders]);
    for (const record of records) this.#pending.push([cursor, [record], null]);
  }

  pause(isPaused) {
    this.#frozenEnd = isPaused ? this.train.end : null;
    this.#isDirty = true;
  }

  /** Take over what is due by now and draw it. `elapsedMs` since the last call. */
  advance(elapsedMs) {
    const due = Math.ceil((this.#pending.length * elapsedMs) / SPREAD_MS);
    const keep = this.#frozenEnd === null ? MAX_COLUMNS : PAUSED_COLUMNS;
    for (const report of this.#pending.splice(0, due)) {
      this.train.take(report, keep);
      this.#isDirty = true;
    }
    if (this.#isDirty && this.#row && this.element.checkVisibility()) this.#draw();
  }

  #draw() {
    this.#isDirty = false;
    const { seats, strip } = this.#parts;
    const numSeats = this.#row.max_num_seqs;
    const view = { numSeats, end: this.end, rankOf: (tier) => this.line.rankOf(tier) };
    drawSeats(seats, this.train.rides, { ...view, cursor: this.#cursor });
    const columns = this.train.columns.slice(0, this.end - this.train.first);
    drawStrip(strip, columns, this.line.targetMs);
    if (this.#static) drawSeats(this.#parts.static, this.#static.rides, view);
    this.#tell(columns.at(-1), numSeats);
    if (this.element.querySelector("details").open) this.#fillTable();
  }

  #tell(column, numSeats) {
    const { batch, waiting, step, kv, seats } = this.#parts;
    const isIdle = this.#row.num_running === 0 && this.#frozenEnd === null;
    const busy = isIdle || !column ? this.#row.num_running : column.busy;
    batch.replaceChildren(`${busy}`, small(` of ${numSeats} seats`));
    waiting.textContent = `${column && !isIdle ? column.waiting : this.#row.num_waiting}`;
    const target = this.line.targetMs;
    const ms = column?.ms ?? this.#row.step_ms;
    step.replaceChildren(`${ms.toFixed(1)} ms`, small(target ? ` of ${target} ms` : " (no ITL target)"));
    step.classList.toggle("over", Boolean(target && ms > target));
    const used = column?.used ?? this.#row.num_used_blocks;
    kv.replaceChildren(percent(this.#row.num_blocks ? used / this.#row.num_blocks : 0), small(` of ${this.#row.num_blocks} blocks`));
    const live = this.train.idleShare(numSeats);
    const still = this.#static?.idleShare() ?? null;
    this.#parts["live-idle"].replaceChildren(
      `${count(this.train.numChunked, "prompt")} in chunks, ${count(this.train.numPreemptions, "preemption")}, idle seats `,
      bold(percent(live)),
    );
    const behind = this.#static?.numBehind ?? 0;
    this.#parts["static-idle"].replaceChildren(
      behind ? `${count(behind, "request")} behind, ` : "", "idle seats ", bold(percent(still)),
    );
    const label = `Seat map: ${busy} of ${numSeats} seats taken, idle seats ${percent(live)}. Arrow keys read single seats.`;
    if (seats.ariaLabel !== label) seats.ariaLabel = label;
    this.#parts.static.ariaLabel = `Static batching of the same requests: idle seats ${percent(still)}`;
    const data = this.element.dataset;
    data.columns = this.train.end;
    if (column) data.lagMs = Math.round(Date.now() - column.at * 1000);
    data.pending = this.#pending.length;
  }

  #point(event) {
    const canvas = event.currentTarget;
    const box = canvas.getBoundingClientRect();
    const column = this.end - Math.ceil((box.right - event.clientX) / columnWidth(canvas));
    const seat = Math.floor((event.clientY - box.top) / rowHeight(this.#row?.max_num_seqs));
    this.#moveTo({ column, seat }, event.clientX, event.clientY);
  }

  #key(event) {
    const [across, down] =
      { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
    if (across === undefined || !this.#row) return;
    event.preventDefault();
    const { column, seat } = this.#cursor ?? { column: this.end - 1, seat: 0 };
    const next = {
      column: Math.min(this.end - 1, Math.max(this.train.first, column + across)),
      seat: Math.min(this.#row.max_num_seqs - 1, Math.max(0, seat + down)),
    };
    const box = event.currentTarget.getBoundingClientRect();
    const x = box.right - (this.end - next.column) * columnWidth(event.currentTarget);
    this.#moveTo(next, x, box.top + (next.seat + 1) * rowHeight(this.#row.max_num_seqs));
  }

  #moveTo(cursor, x, y) {
    this.#cursor = cursor;
    this.#isDirty = true;
    const ride = cursor && this.train.rideAt(cursor.seat, cursor.column);
    this.line.tell(cursor && (ride ? this.#life(ride, cursor) : [`Seat ${cursor.seat + 1}: empty`]), x, y);
  }

  #life({ rider, segments }, { seat, column }) {
    const segment = segments.find((s) => s.from <= column && column < s.to);
    const chunk = segment?.kind === "prefill" ? `, prompt chunk of ${segment.tokens} tokens` : "";
    const ended = { stop: "finished", length: "finished", abort: "left by its client", error: "failed", preempted: "preempted, waits for a seat" };
    const lines = [
      `${rider.id || `request ${rider.key}`}`,
      `Seat ${seat + 1}, ${this.line.tierName(rider.tier)}${chunk}`,
      `prompt ${rider.prompt} tokens, ${rider.cached} cached, ${count(rider.chunks, "chunk")}`,
      `answer ${rider.output} of at most ${rider.maxOutput} tokens`,
      `waited ${rider.waitedMs} ms for its seat`,
    ];
    if (rider.firstTokenAt !== null && rider.startedAt !== null)
      lines.push(`first token ${Math.round((rider.firstTokenAt - rider.startedAt) * 1000)} ms later`);
    if (rider.preemptions) lines.push(`preempted ${count(rider.preemptions, "time")}`);
    lines.push(ended[rider.reason] ?? "running");
    return lines;
  }

  #fillTable() {
    const rows = [...this.train.seated].sort(([a], [b]) => a - b).map(([seat, { rider, segments }]) => {
      const row = document.createElement("tr");
      const kind = { prefill: "prompt", decode: "answering", idle: "idle" }[segments.at(-1)?.kind] ?? "starts";
      const cells = [seat + 1, rider.id || rider.key, this.line.tierName(rider.tier), kind, rider.prompt, rider.output, `${rider.waitedMs} ms`];
      cells.forEach((text, index) => {
        const cell = row.insertCell();
        cell.textContent = text;
        if (index > 3) cell.className = "n";
      });
      return row;
    });
    this.#parts.rows.replaceChildren(...rows);
  }
}

/** Serve's names are application#deployment#id. */
export const shortName = (name) => name.split("#").at(-1);

function small(text) {
  const element = document.createElement("small");
  element.textContent = text;
  return element;
}

function bold(text) {
  const element = document.createElement("b");
  element.textContent = text;
  return element;
}
