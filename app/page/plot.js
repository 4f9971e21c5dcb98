// A small plot of one number over the last minutes, as SVG.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 30;
const WIDTH = 100;
const MIN_SPAN_MS = 30_000; // a first point or two are no plot yet
const LINE = 1.5; // room for its thickness at top and bottom

export class Plot {
  /** Its width shows what there is, up to `spanMs`; a gap longer than `gapMs` breaks the line. */
  constructor(spanMs, gapMs) {
    this.spanMs = spanMs;
    this.gapMs = gapMs;
    this.points = []; // [time in ms, value], oldest first
    this.element = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
    this.element.setAttribute("aria-hidden", "true"); // the number beside it says it
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.element.append(this.area, this.line);
  }

  add(at, value) {
    this.points.push([at, value]);
    while (this.points[0][0] < at - this.spanMs) this.points.shift();
  }

  /** `top` is the value at the upper edge; more than that raises it. */
  draw(now, top) {
    const most = Math.max(top, ...this.points.map(([, value]) => value)) || 1;
    const span = Math.max(MIN_SPAN_MS, now - (this.points[0]?.[0] ?? now));
    const place = ([at, value]) => {
      const x = WIDTH * (1 - (now - at) / span);
      const y = HEIGHT - LINE - (value / most) * (HEIGHT - 2 * LINE);
      return [x.toFixed(2), y.toFixed(2)];
    };
    const runs = this.runs().map((run) => run.map(place));
    const lines = runs.map((run) => `M${run.map((point) => point.join(" ")).join("L")}`);
    this.line.setAttribute("d", lines.join(""));
    const areas = runs.map(
      (run, i) => `${lines[i]}L${run.at(-1)[0]} ${HEIGHT}L${run[0][0]} ${HEIGHT}Z`,
    );
    this.area.setAttribute("d", areas.join(""));
  }

  runs() {
    const runs = [];
    let last = -Infinity;
    for (const point of this.points) {
      if (point[0] - last > this.gapMs) runs.push([]);
      runs.at(-1).push(point);
      last = point[0];
    }
    return runs;
  }
}

function svg(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
