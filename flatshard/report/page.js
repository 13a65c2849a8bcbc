"use strict";
// The script of a report. What it draws stands in #data; docs/guides/report.md
// describes that JSON. Charts are SVG whose colors are variables of page.css,
// so light and dark need no drawing of their own.

const report = JSON.parse(document.getElementById("data").textContent);
const runs = (report.runs || []).map((data, index) => ({
  ...data,
  index,
  color: `var(--s${index % 8})`,
  shown: true,
  begin: data.starts.length ? data.starts[0].time : firstOf(data.training.columns.time),
}));
const single = runs.length === 1;
const main = runs[0];

// What the tools above the charts say.
const view = { smoothing: 0, x: "step", zoom: null, hover: null };

// ---- Small helpers -------------------------------------------------------

function firstOf(values) {
  return values && values.length ? values[0] : 0;
}

// Makes an element; text is always text, never markup.
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") element.style.cssText = value;
    else if (typeof value === "boolean") element[key] = value;
    else if (value !== undefined && value !== null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function draw(name, attributes = {}, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const byId = (id) => document.getElementById(id);
const sum = (values) => values.reduce((all, value) => all + value, 0);

function median(values) {
  const sorted = values.filter(isNumber).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

// Without the first value, which has the warm-up, where there are others.
const steadyMedian = (values) => median((values || []).slice(1)) ?? median(values || []);

// ---- Numbers as people read them -----------------------------------------

// 1234567 -> "1.235M", 2048 -> "2,048"; digits counts significant ones.
function count(value, digits = 4) {
  if (!isNumber(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e4) return value.toLocaleString("en-US");
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]]) {
    if (Math.abs(value) >= size * 0.9995) return trim((value / size).toPrecision(digits)) + letter;
  }
  return plain(value, digits);
}

function plain(value, digits = 4) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) {
    return trim(value.toExponential(Math.min(digits - 1, 3)).replace("e+", "e"));
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return trim(value.toPrecision(digits));
}

// "0.500" -> "0.5", "1.20e-5" -> "1.2e-5"
function trim(text) {
  return text.replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "");
}

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

function clock(time) {
  return time ? new Date(time * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : "–";
}

const GIB = 2 ** 30;

// ---- Where a row lies on the x axis --------------------------------------

// Hours, minutes or seconds: what leaves the longest run a readable number.
function timeUnit() {
  const longest = Math.max(0, ...runs.map((run) => run.last_time - run.begin));
  if (longest > 2 * 86400) return { name: "days", seconds: 86400 };
  if (longest > 2 * 3600) return { name: "hours", seconds: 3600 };
  return longest > 120 ? { name: "minutes", seconds: 60 } : { name: "seconds", seconds: 1 };
}
const time = timeUnit();

// Tokens seen at a step: of the logged steps around it.
function tokensAt(run, step) {
  const { step: steps, columns } = run.training;
  const tokens = columns.tokens;
  if (!tokens || !steps.length) return null;
  const after = steps.findIndex((other) => other >= step);
  if (after < 0) return tokens[tokens.length - 1];
  if (after === 0) return (tokens[0] * step) / Math.max(1, steps[0]);
  const share = (step - steps[after - 1]) / (steps[after] - steps[after - 1]);
  return tokens[after - 1] + share * (tokens[after] - tokens[after - 1]);
}

function xOf(run, step, at) {
  if (view.x === "step") return step;
  if (view.x === "time") return (at - run.begin) / time.seconds;
  return tokensAt(run, step);
}

function xValues(run, table) {
  if (view.x === "step") return table.step;
  if (view.x === "tokens" && table.columns.tokens) return table.columns.tokens;
  return table.step.map((step, i) => xOf(run, step, table.columns.time[i]));
}

const xLabel = () => ({ step: "step", tokens: "tokens", time: time.name })[view.x];

// ---- Series --------------------------------------------------------------

// An exponential moving average without the bias of its beginning.
function smooth(values, weight) {
  if (weight === 0) return values;
  let average = 0;
  let norm = 0;
  return values.map((value) => {
    if (!isNumber(value)) return value;
    average = weight * average + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return average / norm;
  });
}

const DASHES = ["", "6 4", "2 3", "9 3 2 3", "1 4"];

// The lines of a chart: each column of each run that has it. With one run a
// column has a color, with several the run has it, and columns differ by dash.
function linesOf(spec) {
  const lines = [];
  for (const run of runs.filter((each) => each.shown)) {
    spec.columns.forEach((column, place) => {
      const table = run[column.table || "training"];
      const values = table.columns[column.name];
      if (!values || !values.some(isNumber)) return;
      const scale = column.scale || 1;
      const scaled = (list) => list && list.map((value) => (isNumber(value) ? value * scale : null));
      lines.push({
        run,
        label: column.label,
        color: single ? `var(--s${(column.color ?? place) % 8})` : run.color,
        dash: single ? "" : DASHES[place % DASHES.length],
        x: xValues(run, table),
        raw: scaled(values),
        y: column.rough === false ? scaled(values) : smooth(scaled(values), view.smoothing),
        min: table.min && scaled(table.min[column.name]),
        max: table.max && scaled(table.max[column.name]),
        step: table.step,
        time: table.columns.time,
        last: isNumber(table.last[column.name]) ? table.last[column.name] * scale : null,
        dots: values.length <= 24,
        format: column.format || spec.format,
      });
    });
  }
  return lines;
}

// ---- Axes ----------------------------------------------------------------

function niceStep(span, parts) {
  const rough = span / parts;
  const power = 10 ** Math.floor(Math.log10(rough));
  const digit = rough / power;
  return power * (digit > 5 ? 10 : digit > 2 ? 5 : digit > 1 ? 2 : 1);
}

function linearTicks(low, high, parts) {
  const step = niceStep(high - low || 1, parts);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) ticks.push(i * step || 0); // never -0
  return ticks;
}

// 1, 2 and 5 of each decade while there is room, else powers of ten.
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const digits = decades < 1 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : decades < 3 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / 6));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); ++power) {
    if (power % every !== 0) continue;
    for (const digit of digits) {
      const tick = digit * 10 ** power;
      if (tick >= low * 0.9999 && tick <= high * 1.0001) ticks.push(tick);
    }
  }
  return ticks.length > 1 ? ticks : linearTicks(low, high, 4).filter((tick) => tick > 0);
}

// ---- Charts --------------------------------------------------------------

// What report.charts[].reference_* name: a line across, with its label.
function referenceOf(run, { reference_key: key, reference_metric: metric, reference_label: label, columns }) {
  if (key) return run.config[key] > 0 ? [run.config[key], key] : null;
  const { last } = run.training;
  const { name, scale } = columns[columns.length - 1];
  return last[name] > last[metric] / 3 ? [last[metric] * scale, label] : null;
}

const charts = [];

// Logged steps from which on a run is long.
const LONG_RUN = 200;

class Chart {
  constructor(spec) {
    this.spec = { format: spec.counts ? count : plain, ...spec };
    this.legend = make("ul", { class: "legend" });
    this.svg = draw("svg", { class: "plot", role: "img", "aria-label": `${spec.title}, ${spec.unit}` });
    const head = make("header", {}, make("h2", {}, spec.title), make("span", { class: "unit" }, spec.unit), this.legend);
    if (spec.log !== undefined) {
      const box = make("input", { type: "checkbox" });
      box.addEventListener("change", () => {
        this.spec.log = box.checked;
        this.render();
      });
      head.append(make("label", { class: "log" }, box, "log scale"));
    }
    this.card = make("article", { class: `card chart${spec.wide ? " wide" : ""}` }, head, this.svg);
    this.listen();
  }

  // The plot's inside, in pixels.
  frame() {
    const width = Math.max(200, this.svg.clientWidth || 400);
    const height = this.spec.wide ? (width > 700 ? 320 : 250) : 190;
    return { left: 50, right: width - 12, top: 12, bottom: height - 34, width, height };
  }

  render() {
    const { spec, svg } = this;
    const replaced = runs.every((run) => (run.training.columns[spec.without] || []).some(isNumber));
    this.lines = replaced ? [] : linesOf(spec);
    this.card.hidden = this.lines.length === 0;
    if (this.card.hidden) return;
    const frame = (this.frame_ = this.frame());
    svg.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    svg.setAttribute("height", frame.height);
    svg.replaceChildren();
    this.drawLegend();
    this.scale(frame);
    this.drawAxes(frame);
    const clip = `clip${charts.indexOf(this)}`;
    const clipPath = draw("clipPath", { id: clip });
    clipPath.append(draw("rect", { x: frame.left - 4, y: frame.top - 6, width: frame.right - frame.left + 8, height: frame.bottom - frame.top + 12 }));
    const inside = draw("g", { "clip-path": `url(#${clip})` });
    svg.append(clipPath, inside);
    this.drawEvents(inside, frame);
    for (const line of this.lines) this.drawLine(inside, line);
    this.cross = draw("g");
    this.brush = draw("rect", { class: "brush", y: frame.top, height: frame.bottom - frame.top, width: 0 });
    svg.append(this.cross, this.brush);
    this.drawCross();
  }

  drawLegend() {
    const several = this.lines.length > 1 || !single;
    this.legend.replaceChildren(
      ...this.lines.map((line) => {
        const mark = draw("svg", { viewBox: "0 0 16 10", "aria-hidden": "true" });
        const stroke = draw("path", { d: "M1 5h14", "stroke-width": 2.5, "stroke-dasharray": line.dash ? "4 2" : "none" });
        stroke.style.stroke = line.color;
        mark.append(stroke);
        const name = [single ? "" : line.run.name, this.spec.columns.length > 1 || single ? line.label : ""].filter(Boolean).join(", ");
        return make("li", {}, several ? mark : null, several ? name : "", make("b", {}, line.format(line.last)));
      }),
    );
  }

  // From values to pixels; sets this.px and this.py.
  scale(frame) {
    const { spec, lines } = this;
    let [left, right] = view.zoom || [Infinity, -Infinity];
    if (!view.zoom) {
      // All charts have one range, that of everything that is shown.
      for (const run of runs.filter((each) => each.shown)) {
        for (const table of [run.training, run.validation]) {
          const xs = xValues(run, table).filter(isNumber);
          if (xs.length) {
            left = Math.min(left, xs[0]);
            right = Math.max(right, xs[xs.length - 1]);
          }
        }
      }
      if (left > right) [left, right] = [0, 1];
      if (left === right) [left, right] = [left - 1, right + 1];
    }
    let low = Infinity;
    let high = -Infinity;
    // In a long run the first steps would leave the others no room: their line leaves
    // the plot. A short run is shown whole.
    const isLong = lines.some((line) => line.x.length >= LONG_RUN);
    const from = spec.settles && isLong && !spec.log && !view.zoom ? left + (right - left) * 0.02 : left;
    for (const line of lines) {
      for (let i = 0; i < line.x.length; ++i) {
        if (line.x[i] < from || line.x[i] > right) continue;
        for (const value of [line.raw[i], line.y[i], line.min && line.min[i], line.max && line.max[i]]) {
          if (isNumber(value) && !(spec.log && value <= 0)) {
            low = Math.min(low, value);
            high = Math.max(high, value);
          }
        }
      }
    }
    this.references = [];
    for (const run of spec.reference_key || spec.reference_metric ? runs.filter((each) => each.shown) : []) {
      const found = referenceOf(run, spec);
      // Not where it would squeeze the lines into a corner.
      if (found && found[0] <= high * 3 && !this.references.some(([value]) => value === found[0])) {
        this.references.push(found);
        high = Math.max(high, found[0]);
      }
    }
    if (!isNumber(low)) [low, high] = spec.log ? [1, 10] : [0, 1];
    if (spec.zero && !spec.log) low = Math.min(0, low);
    if (low === high) {
      const room = Math.abs(low) * 0.05 || 1;
      [low, high] = spec.log ? [low / 1.2, high * 1.2] : [spec.zero ? Math.min(0, low) : low - room, high + room];
    } else if (spec.log) {
      [low, high] = [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
    } else {
      const room = (high - low) * 0.05;
      high += room;
      if (!(spec.zero && low === 0)) low -= room;
    }
    this.range = { left, right, low, high };
    const ratio = (value, from, to) => (value - from) / (to - from);
    this.px = (x) => frame.left + ratio(x, left, right) * (frame.right - frame.left);
    this.py = (y) => {
      const share = spec.log ? ratio(Math.log(Math.max(y, low / 10)), Math.log(low), Math.log(high)) : ratio(y, low, high);
      return frame.bottom - share * (frame.bottom - frame.top);
    };
  }

  drawAxes(frame) {
    const { svg, spec, range } = this;
    const ticks = spec.log ? logTicks(range.low, range.high) : linearTicks(range.low, range.high, frame.height > 240 ? 7 : 5);
    const format = spec.format === count ? (value) => count(value, 3) : (value) => axisNumber(value);
    for (const tick of ticks) {
      const y = this.py(tick);
      svg.append(draw("line", { class: "gridline", x1: frame.left, x2: frame.right, y1: y, y2: y }));
      svg.append(draw("text", { x: frame.left - 7, y: y + 4, "text-anchor": "end" }, format(tick)));
    }
    svg.append(draw("line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }));
    const label = xLabel();
    const end = frame.right - label.length * 6 - 14;
    for (const tick of linearTicks(range.left, range.right, Math.max(3, Math.min(9, frame.width / 85)))) {
      const x = this.px(tick);
      svg.append(draw("line", { class: "axis", x1: x, x2: x, y1: frame.bottom, y2: frame.bottom + 4 }));
      if (x < end - 8) svg.append(draw("text", { x, y: frame.bottom + 17, "text-anchor": "middle" }, view.x === "time" ? plain(tick) : count(tick, 3)));
    }
    svg.append(draw("text", { x: frame.right, y: frame.bottom + 17, "text-anchor": "end" }, label));
    for (const [value, name] of this.references) {
      const y = this.py(value);
      svg.append(draw("line", { class: "reference", x1: frame.left, x2: frame.right, y1: y, y2: y }));
      svg.append(draw("text", { x: frame.right, y: y - 4, "text-anchor": "end" }, name));
    }
  }

  drawLine(parent, line) {
    const { spec } = this;
    const usable = (value) => isNumber(value) && !(spec.log && value <= 0);
    const path = (values) => {
      let d = "";
      let pen = "M";
      values.forEach((value, i) => {
        if (!usable(value) || !isNumber(line.x[i])) {
          pen = "M";
          return;
        }
        d += `${pen}${this.px(line.x[i]).toFixed(1)} ${this.py(value).toFixed(1)}`;
        pen = "L";
      });
      return d;
    };
    const add = (name, attributes, paint) => {
      const element = draw(name, attributes);
      element.style[paint] = line.color;
      parent.append(element);
    };
    const smoothed = line.y !== line.raw && view.smoothing > 0 && line.raw.some((value, i) => value !== line.y[i]);
    if (line.min) {
      const back = [];
      line.x.forEach((x, i) => {
        if (usable(line.min[i]) && usable(line.max[i])) back.unshift(`L${this.px(x).toFixed(1)} ${this.py(line.min[i]).toFixed(1)}`);
      });
      add("path", { class: "band", d: `${path(line.max)}${back.join("")}Z` }, "fill");
    } else if (smoothed) {
      add("path", { class: "series raw", d: path(line.raw) }, "stroke");
    }
    add("path", { class: "series", d: path(line.y), "stroke-dasharray": line.dash || "none" }, "stroke");
    if (line.dots) {
      line.y.forEach((value, i) => {
        if (usable(value)) add("circle", { class: "dot", cx: this.px(line.x[i]), cy: this.py(value), r: 3 }, "fill");
      });
    }
  }

  // Restarts in every chart; what happened besides in the one with events.
  drawEvents(parent, frame) {
    this.events = [];
    for (const run of runs.filter((each) => each.shown)) {
      const place = (event) => this.px(xOf(run, event.step, event.time));
      const who = single ? "" : `${run.name}: `;
      for (const start of run.starts.slice(1)) {
        const x = place(start);
        parent.append(draw("line", { class: "restart", x1: x, x2: x, y1: frame.top - 6, y2: frame.bottom }));
        if (this.spec.wide) parent.append(draw("text", { class: "event", x: x + 5, y: frame.top + 4 }, `start ${start.attempt}`));
        this.events.push([x, `${who}start ${start.attempt}, from step ${start.step}`]);
      }
      for (const bad of run.nonfinite) {
        const x = place(bad);
        if (this.spec.events) {
          parent.append(draw("path", { class: "nonfinite", d: `M${x - 4} ${frame.top - 4}l8 8m0 -8l-8 8` }));
        }
        this.events.push([x, `${who}gradient of step ${bad.step} is not finite`]);
      }
      if (!this.spec.events) continue;
      for (const saved of run.checkpoints) {
        const x = place(saved);
        parent.append(draw("path", { class: "checkpoint", d: `M${x} ${frame.bottom - 6}l4 6h-8z` }));
        this.events.push([x, `${who}checkpoint of step ${saved.step}`]);
      }
    }
  }

  nearest(line, x) {
    let best = -1;
    let distance = Infinity;
    line.x.forEach((other, i) => {
      const away = Math.abs(other - x);
      if (away < distance && isNumber(line.y[i])) {
        distance = away;
        best = i;
      }
    });
    return best;
  }

  // The line below the pointer, which all charts have at the same x.
  drawCross() {
    if (!this.cross) return;
    this.cross.replaceChildren();
    const { hover } = view;
    if (hover === null || this.card.hidden || hover < this.range.left || hover > this.range.right) return;
    const x = this.px(hover);
    this.cross.append(draw("line", { class: "cross", x1: x, x2: x, y1: this.frame_.top, y2: this.frame_.bottom }));
    for (const line of this.lines) {
      const i = this.nearest(line, hover);
      if (i < 0 || line.x[i] < this.range.left || line.x[i] > this.range.right || (this.spec.log && line.y[i] <= 0)) continue;
      const dot = draw("circle", { class: "dot", cx: this.px(line.x[i]), cy: this.py(line.y[i]), r: 4 });
      dot.style.fill = line.color;
      this.cross.append(dot);
    }
  }

  listen() {
    let begin = null;
    const xAt = (event) => {
      const box = this.svg.getBoundingClientRect();
      const { left, right } = this.frame_;
      const pixel = Math.min(right, Math.max(left, event.clientX - box.left));
      return this.range.left + ((pixel - left) / (right - left)) * (this.range.right - this.range.left);
    };
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      begin = xAt(event);
      this.svg.setPointerCapture(event.pointerId);
      showTooltip(this, begin, event);
    });
    this.svg.addEventListener("pointermove", (event) => {
      const x = xAt(event);
      hoverAt(x);
      showTooltip(this, x, event);
      if (begin === null) return;
      const [from, to] = [this.px(begin), this.px(x)].sort((a, b) => a - b);
      this.brush.setAttribute("x", from);
      this.brush.setAttribute("width", to - from);
    });
    const end = (event) => {
      if (begin === null) return;
      const x = xAt(event);
      const wide = Math.abs(this.px(x) - this.px(begin)) > 8;
      const range = [begin, x].sort((a, b) => a - b);
      begin = null;
      this.brush.setAttribute("width", 0);
      if (wide && event.type === "pointerup") zoomTo(range);
    };
    this.svg.addEventListener("pointerup", end);
    this.svg.addEventListener("pointercancel", end);
    this.svg.addEventListener("pointerleave", () => {
      hoverAt(null);
      byId("tooltip").hidden = true;
    });
    this.svg.addEventListener("dblclick", () => zoomTo(null));
  }
}

// Ticks are round: few digits, and no exponent before it is needed.
function axisNumber(value) {
  return value !== 0 && Math.abs(value) < 1e-3 ? trim(value.toExponential(1)) : plain(value, 6);
}

// Mixtures have a loss for each corpus, whose names only the data has.
function withParts(spec) {
  if (!spec.parts) return spec;
  const names = new Set(runs.flatMap((run) => Object.keys(run.validation.columns).filter((name) => name.startsWith(spec.parts))));
  const parts = [...names].map((name) => ({ name, table: "validation", label: name.slice(spec.parts.length), rough: false }));
  // A single line is in the chart of the loss already.
  return { ...spec, columns: single && !parts.length ? [] : [...spec.columns.map((column) => ({ ...column, color: undefined })), ...parts] };
}

function hoverAt(x) {
  if (view.hover === x) return;
  view.hover = x;
  for (const chart of charts) chart.drawCross();
}

function zoomTo(range) {
  view.zoom = range;
  byId("reset").hidden = range === null;
  renderCharts();
}

function renderCharts() {
  for (const chart of charts) chart.render();
}

function showTooltip(chart, x, event) {
  const tip = byId("tooltip");
  const rows = [];
  let head = "";
  for (const line of chart.lines) {
    const i = chart.nearest(line, x);
    if (i < 0) continue;
    if (!head) {
      const at = [`Step ${line.step[i].toLocaleString("en-US")}`];
      const tokens = tokensAt(line.run, line.step[i]);
      if (tokens) at.push(`${count(tokens, 3)} tokens`);
      if (line.time) at.push(duration(line.time[i] - line.run.begin));
      head = at.join(" · ");
    }
    const name = [single ? "" : line.run.name, line.label].filter(Boolean).join(", ");
    const off = line.step[i].toLocaleString("en-US");
    const swatch = make("span", { class: "swatch", style: `background:${line.color}` });
    let value = line.format(line.y[i]);
    if (line.min && line.min[i] !== line.max[i]) value += ` (${line.format(line.min[i])} to ${line.format(line.max[i])})`;
    else if (line.y[i] !== line.raw[i]) value += ` (raw ${line.format(line.raw[i])})`;
    rows.push(make("tr", {}, make("td", {}, swatch), make("td", {}, head.startsWith(`Step ${off} `) || head === `Step ${off}` ? name : `${name}, step ${off}`), make("td", {}, value)));
  }
  const near = chart.events.filter(([at]) => Math.abs(at - chart.px(x)) < 7).map(([, text]) => make("p", {}, text));
  tip.replaceChildren(make("strong", {}, head), make("table", {}, make("tbody", {}, ...rows)), ...near.slice(0, 4));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = event.clientX + 16 + box.width < innerWidth;
  tip.style.left = `${Math.max(6, right ? event.clientX + 16 : event.clientX - 16 - box.width)}px`;
  tip.style.top = `${Math.max(6, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
}

// ---- Head and summary ----------------------------------------------------

const lastStart = (run) => run.starts[run.starts.length - 1]?.start;
const totalSteps = (run) => lastStart(run)?.steps ?? run.config["training.steps"];

function stateOf(run) {
  if (run.ended) return ["finished", ""];
  const last = run.nonfinite[run.nonfinite.length - 1];
  if (last && last.goes_on_after === undefined && last.step >= (run.training.last.step || 0)) return ["stopped: not finite", "bad"];
  return ["not finished", "open"];
}

function aboutOf(run) {
  const start = lastStart(run);
  const parts = [run.folder];
  if (start) {
    parts.push(`${count(start.parameters, 3)} parameters`);
    parts.push(start.ranks === 1 ? start.device : `${start.ranks} × ${start.device}`);
  }
  const strategy = run.config["parallelism.strategy"];
  if (strategy) parts.push(strategy);
  parts.push(`last row ${clock(run.last_time)}`);
  return parts.join(" · ");
}

function fillHead() {
  const [words, kind] = stateOf(main);
  byId("title").append(single ? main.name : `${runs.length} runs`);
  if (single) byId("title").append(make("span", { class: `state ${kind}` }, words));
  byId("about").append(single ? aboutOf(main) : runs.map((run) => run.folder).join(" · "));
  byId("runs").hidden = single;
  for (const run of single ? [] : runs) {
    const box = make("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      run.shown = box.checked;
      renderCharts();
    });
    byId("runs").append(make("li", {}, make("label", { style: `--run:${run.color}` }, box, make("span", { class: "swatch", style: `background:${run.color}` }), run.name)));
  }
  byId("made").append(`Made by flatshard report, ${clock(report.made)}.`);
  const warnings = runs.flatMap((run) => run.warnings);
  byId("warnings").hidden = warnings.length === 0;
  byId("warnings").append(...warnings.map((text) => make("p", {}, text)));
}

function bestValidation(run) {
  const { step, columns, min } = run.validation;
  const losses = (min || columns).validation_loss || [];
  let best = null;
  losses.forEach((loss, i) => {
    if (isNumber(loss) && (best === null || loss < best.loss)) best = { loss, step: step[i] };
  });
  return best;
}

// How often the run reads its dataset, where it has only one.
function epochTexts(run) {
  const data = lastStart(run)?.data || [];
  const done = run.training.last.step || 0;
  return data.length === 1 ? [`${plain(done / data[0].steps_per_epoch, 2)} epochs`] : [];
}

// What one wants to know first, of a run: [name, value, unit, more].
function factsOf(run) {
  const last = run.training.last;
  const { columns } = run.training;
  const best = bestValidation(run);
  const total = totalSteps(run);
  const speed = steadyMedian(columns.tokens_per_s);
  const mfu = median(columns.mfu || []);
  const tflops = steadyMedian(columns.tflops_per_rank);
  const peak = last.memory_reserved_bytes / GIB;
  const share = last.memory_total_bytes ? (100 * last.memory_reserved_bytes) / last.memory_total_bytes : null;
  const done = last.step || 0;
  return [
    ["Training loss", plain(last.loss), "nats", `at step ${done.toLocaleString("en-US")}`],
    ["Best validation", best ? plain(best.loss) : "–", best ? "nats" : "", best ? `at step ${best.step.toLocaleString("en-US")}` : "no validation"],
    ["Steps", count(done), total ? `of ${count(total)}` : "", [`${count(last.tokens, 3)} tokens`, ...epochTexts(run)].join(", ")],
    ["Throughput", count(speed, 3), "tokens/s", "median, all ranks"],
    mfu !== null ? ["MFU", plain(100 * mfu, 3), "%", `${plain(tflops, 3)} TFLOP/s per rank`] : ["Model FLOP/s", plain(tflops, 3), "TFLOP/s", "per rank, median"],
    ["Peak memory", plain(peak, 3), "GiB", share !== null ? `${plain(share, 3)} % of the device` : ""],
    ["Time", duration(run.last_time - run.begin), "", run.starts.length > 1 ? `${run.starts.length} starts` : "one start"],
  ];
}

function fillSummary() {
  const section = byId("summary");
  if (single) {
    section.className = "tiles";
    section.append(
      ...factsOf(main).map(([name, value, unit, more]) =>
        make("dl", { class: "card tile" }, make("dt", {}, name), make("dd", {}, value, unit ? make("small", {}, unit) : null), make("p", { title: more }, more)),
      ),
    );
    return;
  }
  section.className = "card";
  const names = factsOf(main).map(([name]) => name);
  const head = make("tr", {}, make("th", {}, "Run"), ...names.map((name) => make("th", { class: "number" }, name)));
  const rows = runs.map((run) =>
    make("tr", {},
      make("td", {}, make("span", { class: "swatch", style: `background:${run.color}` }), ` ${run.name} `, make("span", { class: "note" }, stateOf(run)[0])),
      ...factsOf(run).map(([, value, unit]) => make("td", { class: "number" }, `${value} ${unit}`)),
    ),
  );
  section.append(make("div", { class: "scroll" }, make("table", { class: "list" }, make("thead", {}, head), make("tbody", {}, ...rows))));
}

// ---- Where a step's time goes --------------------------------------------

// A bar of parts [name, ms, color]; the whole is as wide as `of` ms.
function bar(parts, of) {
  const all = sum(parts.map(([, ms]) => ms));
  const shown = parts.filter(([, ms]) => ms > all * 1e-4);
  const line = make("div", { class: "bar", role: "img", "aria-label": shown.map(([name, ms]) => `${name} ${plain(ms, 3)} ms`).join(", ") });
  for (const [name, ms, color] of shown) {
    line.append(make("span", { style: `width:${(100 * ms) / of}%;background:${color}`, title: `${name}: ${plain(ms, 3)} ms` }));
  }
  const legend = make("ul", { class: "legend bar-legend" });
  for (const [name, ms, color] of shown) {
    legend.append(make("li", {}, make("span", { class: "swatch", style: `background:${color}` }), make("span", { class: "name", title: name }, name), make("b", {}, `${plain(ms, 3)} ms`), `${plain((100 * ms) / all, 3)} %`));
  }
  return [line, legend];
}

// "autograd::engine::evaluate_function: torch::autograd::CppNode<a::b::F>" is
// the backward of F.
function operatorName(name) {
  const backward = name.match(/^autograd::engine::evaluate_function: (.*)$/);
  if (!backward) return name;
  return `backward of ${backward[1].replace(/^.*<|>$/g, "").replace(/^.*::/, "")}`;
}

function colored(times) {
  return Object.entries(times).map(([name, ms], i) => [operatorName(name), ms, name === "other" ? "var(--s7)" : i < 7 ? `var(--s${i})` : `color-mix(in srgb, var(--s${i % 7}) 55%, var(--card))`]);
}

// The median of logged steps, by what the host measured.
function measuredParts(run) {
  const of = (name) => steadyMedian(run.training.columns[name]) ?? 0;
  const data = of("data_ms");
  const comm = of("exposed_comm_ms");
  const tokens = of("experts.exposed_exchange_ms");
  return [
    ["computing", Math.max(0, of("step_ms") - data - comm - tokens), "var(--s0)"],
    ["waiting for communication", comm, "var(--s1)"],
    ["waiting for tokens of experts", tokens, "var(--s3)"],
    ["waiting for data", data, "var(--s4)"],
  ];
}

function fillTime() {
  const section = byId("time");
  const known = runs.filter((run) => run.training.step.length);
  const parts = known.map(measuredParts);
  const longest = Math.max(0, ...parts.map((each) => sum(each.map(([, ms]) => ms))));
  section.hidden = longest === 0;
  known.forEach((run, i) => {
    section.append(make("h3", {}, `${single ? "" : `${run.name}: `}median of logged steps, ${plain(sum(parts[i].map(([, ms]) => ms)), 3)} ms`), ...bar(parts[i], longest));
  });
  for (const run of known) {
    for (const row of run.profiles.slice(-1)) {
      const who = `${single ? "" : `${run.name}: `}trace of step ${row.step}`;
      const { profile } = row;
      if (profile.operators_ms) {
        const ms = sum(Object.values(profile.operators_ms));
        section.append(make("h3", {}, `${who}, the host's time by operator, ${plain(ms, 3)} ms`), ...bar(colored(profile.operators_ms), ms));
        continue;
      }
      const spans = [["compute", profile.compute_ms, "var(--s0)"], ["only communication", profile.exposed_ms, "var(--s1)"], ["idle", profile.idle_ms, "var(--s7)"]];
      if (!profile.classes_ms) continue;
      const kernels = sum(Object.values(profile.classes_ms));
      section.append(
        make("h3", {}, `${who}, the GPU's time, ${plain(profile.span_ms, 3)} ms`), ...bar(spans, profile.span_ms),
        make("h3", {}, `${who}, kernels by kind (kernels that run in parallel count twice)`), ...bar(colored(profile.classes_ms), kernels),
      );
    }
  }
  if (!known.some((run) => run.profiles.length)) {
    section.append(make("p", { class: "note" }, "A run with --profile adds what one step's kernels or operators took."));
  }
}

// ---- Starts and checkpoints ----------------------------------------------

// A bar for each start over time, marks for checkpoints.
function timeline(run) {
  const svg = draw("svg", { class: "timeline", role: "img", "aria-label": `Starts and checkpoints of ${run.name} over time` });
  const width = Math.max(240, byId("history").clientWidth - 34);
  const span = Math.max(1, run.last_time - run.begin);
  const px = (at) => ((at - run.begin) / span) * (width - 2) + 1;
  const ends = run.starts.map((start, i) => {
    // The last row before the next start.
    const next = run.starts[i + 1]?.time ?? Infinity;
    const events = [...run.checkpoints, ...run.nonfinite].map((event) => event.time);
    const rows = [...(run.training.columns.time || []), ...(run.validation.columns.time || []), ...events].filter((at) => at >= start.time && at < next);
    return next === Infinity ? run.last_time : Math.max(start.time, ...rows);
  });
  run.starts.forEach((start, i) => {
    const x = px(start.time);
    const block = draw("rect", { x, y: 8, width: Math.max(3, px(ends[i]) - x), height: 18, rx: 4, opacity: i % 2 ? 0.65 : 0.9 });
    block.style.fill = run.color;
    block.append(draw("title", {}, `Start ${start.attempt}, from step ${start.step}, ${clock(start.time)}`));
    svg.append(block);
  });
  for (const saved of run.checkpoints) {
    const mark = draw("path", { d: `M${px(saved.time)} 29l4 7h-8z` });
    mark.style.fill = "var(--soft)";
    mark.append(draw("title", {}, `Checkpoint of step ${saved.step}, written in ${plain(saved.checkpoint_s, 3)} s`));
    svg.append(mark);
  }
  svg.append(draw("text", { x: 0, y: 52 }, clock(run.begin)));
  svg.append(draw("text", { x: width, y: 52, "text-anchor": "end" }, `+ ${duration(span)}`));
  svg.setAttribute("viewBox", `0 0 ${width} 58`);
  return svg;
}

function startRows(run) {
  return run.starts.map((start) => {
    const found = start.start;
    return make("tr", {},
      make("td", { class: "number" }, String(start.attempt)),
      make("td", { class: "number" }, start.step === 0 ? "the beginning" : `step ${start.step.toLocaleString("en-US")}`),
      make("td", {}, clock(start.time)),
      make("td", {}, `${found.ranks} × ${found.device}`),
      make("td", { class: "number" }, `${count(found.tokens_per_step)} tokens`),
    );
  });
}

function fillHistory() {
  const section = byId("history");
  for (const run of runs) {
    if (!single) section.append(make("h3", {}, run.name));
    if (run.starts.length) {
      section.append(timeline(run));
      const head = ["Start", "From", "At", "Ranks", "Each step"].map((name, i) => make("th", { class: i < 2 || i === 4 ? "number" : "" }, name));
      section.append(make("div", { class: "scroll" }, make("table", { class: "list" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...startRows(run)))));
    }
    for (const data of lastStart(run)?.data || []) {
      section.append(make("p", { class: "note" }, `${data.path}: an epoch has ${count(data.samples)} samples and takes ${count(data.steps_per_epoch, 3)} steps; the run has ${plain(data.epochs, 3)} epochs.`));
    }
    const seconds = run.checkpoints.map((saved) => saved.checkpoint_s);
    const saved = run.checkpoints.length;
    const texts = [
      saved ? `${saved} checkpoint${saved === 1 ? "" : "s"}, the last of step ${run.checkpoints[saved - 1].step.toLocaleString("en-US")}; written in ${plain(median(seconds), 3)} s (median).` : "No checkpoint was written.",
      ...run.checkpoint_errors.map((error) => `The checkpoint of step ${error.step} failed: ${error.checkpoint_error}`),
      ...run.nonfinite.map((bad) => `The gradient of step ${bad.step} was not finite: ${bad.nonfinite}`),
    ];
    section.append(...texts.slice(0, 8).map((text) => make("p", { class: "note" }, text)));
    if (texts.length > 8) section.append(make("p", { class: "note" }, `and ${texts.length - 8} more of these`));
  }
}

// ---- Config and environment ----------------------------------------------

const shownValue = (value) => (value === undefined ? "–" : typeof value === "string" ? value || '""' : typeof value === "object" ? JSON.stringify(value) : String(value));

function fillConfig() {
  const section = byId("config");
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  section.hidden = keys.length === 0;
  const differs = (key) => runs.some((run) => shownValue(run.config[key]) !== shownValue(main.config[key]));
  const changed = new Set(runs.flatMap((run) => run.changed));
  const choices = [["changed", "set by the run"], ["all", "all keys"]];
  if (!single) choices.unshift(["differs", "differences"]);
  let choice = choices[0][0];
  const search = make("input", { type: "search", placeholder: "Find a key or value", "aria-label": "Find a key or value" });
  const radios = make("fieldset", {}, ...choices.map(([value, words]) => make("label", {}, make("input", { type: "radio", name: "keys", value, checked: value === choice }), make("span", {}, words))));
  const body = make("div");
  const keysToShow = () => {
    const wanted = search.value.trim().toLowerCase();
    if (wanted) return keys.filter((key) => [key, ...runs.map((run) => shownValue(run.config[key]))].some((text) => text.toLowerCase().includes(wanted)));
    return keys.filter((key) => choice === "all" || (choice === "changed" ? changed.has(key) : differs(key)));
  };
  const row = (key) =>
    make("tr", { class: choice !== "differs" && differs(key) ? "differs" : "" },
      make("td", {}, make("code", {}, key.slice(key.indexOf(".") + 1))),
      ...runs.map((run) => make("td", {}, make("code", {}, shownValue(run.config[key])))));
  const render = () => {
    const groups = new Map();
    for (const key of keysToShow()) {
      const name = `[${key.split(".")[0]}]`;
      groups.set(name, [...(groups.get(name) || []), row(key)]);
    }
    if (!groups.size) {
      body.replaceChildren(make("p", { class: "note" }, choice === "differs" && !search.value ? "The runs have the same config." : "There is no such key."));
    } else if (single) {
      body.replaceChildren(make("div", { class: "groups" }, ...[...groups].map(([name, rows]) => make("section", {}, make("h3", {}, name), make("table", { class: "list" }, make("tbody", {}, ...rows))))));
    } else {
      const head = make("tr", {}, make("th", {}, "Key"), ...runs.map((run) => make("th", {}, make("span", { class: "swatch", style: `background:${run.color}` }), ` ${run.name}`)));
      const rows = [...groups].flatMap(([name, found]) => [make("tr", { class: "section" }, make("td", { colspan: runs.length + 1 }, name)), ...found]);
      body.replaceChildren(make("div", { class: "scroll" }, make("table", { class: "list" }, make("thead", {}, head), make("tbody", {}, ...rows))));
    }
  };
  radios.addEventListener("change", (event) => {
    choice = event.target.value;
    search.value = "";
    render();
  });
  search.addEventListener("input", render);
  section.append(make("div", { class: "bar-tools" }, radios, search), body);
  render();
}

function fillEnvironment() {
  const section = byId("environment");
  const found = runs.map((run) => lastStart(run)?.environment || {});
  const names = [...new Set(found.flatMap((facts) => Object.keys(facts)))];
  section.hidden = names.length === 0;
  const rows = names.map((name) => {
    const values = found.map((facts) => shownValue(facts[name]));
    const differs = values.some((value) => value !== values[0]);
    return make("tr", { class: differs ? "differs" : "" }, make("td", { class: "note" }, name), ...values.map((value) => make("td", {}, value)));
  });
  const head = single ? null : make("thead", {}, make("tr", {}, make("th", {}, ""), ...runs.map((run) => make("th", {}, run.name))));
  section.append(make("div", { class: "scroll" }, make("table", { class: "list" }, head, make("tbody", {}, ...rows))));
}

// ---- All of it -----------------------------------------------------------

function listenToTools() {
  const slider = byId("smoothing");
  const output = byId("smoothing-value");
  const take = () => {
    view.smoothing = Number(slider.value);
    output.textContent = view.smoothing === 0 ? "off" : view.smoothing.toFixed(2);
  };
  slider.addEventListener("input", () => {
    take();
    renderCharts();
  });
  byId("x-axis").addEventListener("change", (event) => {
    view.x = event.target.value;
    zoomTo(null);
  });
  if (!runs.some((run) => run.training.columns.tokens)) byId("x-axis").querySelector('[value="tokens"]').parentElement.hidden = true;
  byId("reset").addEventListener("click", () => zoomTo(null));
  take();
}

function start() {
  if (!main) return; // the template itself, without data
  fillHead();
  fillSummary();
  for (const spec of report.charts.map(withParts)) {
    const chart = new Chart(spec);
    charts.push(chart);
    byId("charts").append(chart.card);
  }
  listenToTools();
  renderCharts();
  fillTime();
  fillHistory();
  fillConfig();
  fillEnvironment();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    requestAnimationFrame(renderCharts);
  });
}

start();
