// Prometheus' text as numbers by name. Labels are kept where they tell a model; else samples of one
// name add up.

const SAMPLE = /^(\w+)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const PREFIX = "phi_serve_";

/** {values: Map of name without prefix -> number, model: its labels or null}. */
export function parse(text) {
  const values = new Map();
  let model = null;
  for (const line of text.split("\n")) {
    const found = SAMPLE.exec(line);
    if (!found?.[1].startsWith(PREFIX)) continue;
    const name = found[1].slice(PREFIX.length);
    if (name === "model_info") model = labels(found[2] ?? "");
    values.set(name, (values.get(name) ?? 0) + Number(found[3]));
  }
  return { values, model };
}

function labels(text) {
  const found = [...text.matchAll(LABEL)];
  return Object.fromEntries(found.map(([, name, value]) => [name, unescaped(value)]));
}

function unescaped(value) {
  return value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
}
