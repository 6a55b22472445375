// The board: tiers and replicas as tables.

import { tierClass } from "./palette.js";
import { shortName } from "./replica_card.js";
import { fill } from "./table.js";
import { Window } from "./window.js";

const ms = (value) => (value === null || value === undefined ? null : value >= 1000 ? `${(value / 1000).toFixed(1)} s` : `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`);
const element = (id) => document.getElementById(id);

function tierName(rank, name) {
  const label = document.createElement("span");
  const swatch = document.createElement("span");
  swatch.className = `swatch ${tierClass(rank)}`;
  label.append(swatch, name);
  return label;
}

function stateName(state) {
  const label = document.createElement("span");
  label.className = `state ${state}`;
  label.textContent = state;
  return label;
}

const percent = (share) => (share === null ? null : `${(100 * share).toFixed(share > 0.999 ? 0 : 1)}%`);

/** A latency beside what was promised. */
function against(value, target) {
  if (value === null) return null;
  return { text: ms(value), over: target !== null && value > target };
}

const TIERS = [
  { title: "Tier", of: (row) => tierName(row.rank, row.name) },
  { title: "Promise kept", of: (row) => ({ text: percent(row.attainment), over: row.attainment !== null && row.attainment < 0.99 }), isNumber: true },
  { title: "TTFT P99", of: (row) => against(row.ttft, row.ttft_target_ms), isNumber: true },
  { title: "target", of: (row) => ms(row.ttft_target_ms), isNumber: true },
  { title: "ITL P99", of: (row) => against(row.itl, row.itl_target_ms), isNumber: true },
  { title: "target", of: (row) => ms(row.itl_target_ms), isNumber: true },
  { title: "Running", of: (row) => row.num_running, isNumber: true },
  { title: "Waiting", of: (row) => row.num_waiting + row.num_queued, isNumber: true },
  { title: "Oldest", of: (row) => (row.num_queued ? ms(1000 * row.oldest_queued_s) : null), isNumber: true },
  { title: "Refused", of: (row) => row.refused, isNumber: true },
];

const REPLICAS = [
  { title: "Replica", of: (row) => shortName(row.name) },
  { title: "State", of: (row) => stateName(row.state) },
  { title: "Running", of: (row) => `${row.num_running} of ${row.max_num_seqs}`, isNumber: true },
  { title: "Waiting", of: (row) => row.num_waiting, isNumber: true },
  { title: "KV in use", of: (row) => (row.num_blocks ? `${Math.round((100 * row.num_used_blocks) / row.num_blocks)}%` : null), isNumber: true },
  { title: "Last step", of: (row) => `${row.step_ms.toFixed(1)} ms`, isNumber: true },
  { title: "ITL budget", of: (row) => (row.overloaded ? { text: "overrun", over: true } : "kept"), isNumber: true },
];

const left = (rest, limit) => (limit === null ? null : `${Math.floor(rest).toLocaleString("en")} of ${limit.toLocaleString("en")}`);

const LIMITS = [
  { title: "Tenant", of: (row) => row.name },
  { title: "Tier", of: (row) => row.tier },
  { title: "Requests left this minute", of: (row) => left(row.requests_left, row.rpm), isNumber: true },
  { title: "Tokens left this minute", of: (row) => left(row.tokens_left, row.tpm), isNumber: true },
  { title: "At a time", of: (row) => row.max_concurrent, isNumber: true },
];

const DECISIONS = [
  { title: "At", of: (note) => new Date(note.at * 1000).toLocaleTimeString() },
  { title: "Running", of: (note) => note.running, isNumber: true },
  { title: "Wanted", of: (note) => note.target, isNumber: true },
  { title: "Because", of: (note) => note.reasons.join("; "), wraps: true },
];

const minute = new Window();

export function showBoard(board) {
  const { model, replicas } = board;
  minute.add(board, performance.now());
  element("model").textContent = model ?? "no model";
  fill(element("tier-head"), element("tier-rows"), TIERS, minute.tiers());
  fill(element("replica-head"), element("replica-rows"), REPLICAS, replicas);
  fill(element("limit-head"), element("limit-rows"), LIMITS, board.limits);
  const states = Object.entries(board.scaling.states).map(([state, count]) => `${count} ${state}`);
  element("states").textContent = states.length ? `Ray Serve counts ${states.join(", ")}.` : "";
  fill(element("scaling-head"), element("scaling-rows"), DECISIONS, board.scaling.notes);
  element("scaling").hidden = board.scaling.notes.length === 0;
  element("no-scaling").hidden = board.scaling.notes.length > 0;
  element("limits").hidden = board.limits.length === 0;
  element("no-limits").hidden = board.limits.length > 0;
}
