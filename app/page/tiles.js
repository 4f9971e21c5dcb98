// The server's numbers, live: one tile each, of /metrics, with a plot of the last minutes.

import { getText } from "./ask.js";
import { parse } from "./metrics.js";
import { Plot } from "./plot.js";

export const PERIOD_MS = 2000;
const SPAN_MS = 3 * 60 * 1000;
const TOKENS = "generation_tokens_total";

const whole = (value) => String(Math.round(value));
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;

// `top` is what the plot's upper edge means, of all values.
const TILES = [
  { name: "rate", label: "Tokens per second", show: whole, top: () => 10, wide: true },
  { name: "num_requests_running", label: "Running", show: whole, top: (v) => v.get("batch_limit") },
  { name: "num_requests_waiting", label: "Waiting", show: whole, top: () => 4 },
  { name: "batch_limit", label: "Batch limit", show: whole, top: () => 4 },
  { name: "kv_cache_usage_ratio", label: "KV cache", show: percent, top: () => 1 },
  { name: "saturation_ratio", label: "Saturation", show: percent, top: () => 1 },
  { name: "engine_busy_ratio", label: "Engine busy", show: percent, top: () => 1 },
];

const note = document.getElementById("tiles-note");
const tiles = TILES.map(make);
let areElsewhere = false; // then each look would count as a refused request
let last = null; // [time, tokens generated so far]

function make(tile) {
  const box = document.createElement("div");
  const name = document.createElement("dt");
  const value = document.createElement("dd");
  const number = document.createElement("span");
  const plot = new Plot(SPAN_MS, 3 * PERIOD_MS);
  box.className = tile.wide ? "tile wide" : "tile";
  box.dataset.name = tile.name;
  name.textContent = tile.label;
  number.className = "number";
  number.textContent = "–";
  value.append(number, plot.element);
  box.append(name, value);
  document.getElementById("tiles").append(box);
  return { ...tile, number, plot };
}

/** Asks once. Returns what /metrics says; {isReachable} alone if that is nothing. */
export async function refresh() {
  if (areElsewhere) return { isReachable: true };
  let text;
  try {
    text = await getText("metrics");
  } catch (error) {
    areElsewhere = error.status === 404;
    blank(why(error));
    return { isReachable: error.status > 0 };
  }
  const told = parse(text);
  if (!told.values.has("num_requests_running")) {
    blank("What this address has under /metrics is not the server's metrics.");
    return { isReachable: true };
  }
  note.hidden = true;
  fill(told.values, performance.now());
  return { ...told, isReachable: true };
}

function fill(values, now) {
  const tokens = values.get(TOKENS) ?? 0;
  if (last !== null && tokens >= last[1]) {
    values.set("rate", (1000 * (tokens - last[1])) / (now - last[0]));
  }
  last = [now, tokens];
  for (const { name, show, top, number, plot } of tiles) {
    const value = values.get(name);
    const isKnown = Number.isFinite(value);
    number.textContent = isKnown ? show(value) : "–";
    if (isKnown) plot.add(now, value);
    plot.draw(now, top(values) ?? 1);
  }
}

function blank(reason) {
  last = null;
  for (const { number } of tiles) number.textContent = "–";
  if (note.textContent !== reason) note.textContent = reason;
  note.hidden = false;
}

function why(error) {
  if (areElsewhere) {
    return "The metrics are not on this port: the server has them on another one (OPS_PORT).";
  }
  return `No metrics. ${error.message}`;
}
