"use strict";
// Draws the report from the JSON in this file. Every text goes into the page as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const WIDTH = 620, HEIGHT = 250, LEFT = 62, RIGHT = 10, TOP = 8, BOTTOM = 34;
  const hidden = new Set();
  const state = { log: false, smooth: false };
  const charts = [];

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function drawn(name, attributes = {}, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  }

  const colour = (run) => `var(--c${run % 8})`;
  const swatch = (run) => element("span", { class: "swatch", style: `border-color: ${colour(run)}` });
  const byId = (name) => document.getElementById(name);

  function shown(value) {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3).replace(/\.?0+e/, "e");
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(5)));
  }

  // --- scales -----------------------------------------------------------------------------------------------------

  function niceTicks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
    const ticks = [];
    for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at++) ticks.push(at * step);
    return ticks;
  }

  function logTicks(low, high) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const factor of [1, 2, 5]) ticks.push(factor * 10 ** power);
    }
    const inside = ticks.filter((tick) => tick >= low && tick <= high);
    const decades = inside.filter((tick) => Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-9);
    if (inside.length < 2) return niceTicks(low, high, 5);
    return inside.length > 9 && decades.length > 1 ? decades : inside;
  }

  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return [low, high];
  }

  function scales(points) {
    let [firstStep, lastStep] = extent(points.flatMap(([steps]) => [steps[0], steps[steps.length - 1]]));
    let [low, high] = [Infinity, -Infinity];
    let positive = Infinity;
    for (const [, values] of points) {
      for (const value of values) {
        low = Math.min(low, value);
        high = Math.max(high, value);
        if (value > 0) positive = Math.min(positive, value);
      }
    }
    if (firstStep === lastStep) [firstStep, lastStep] = [firstStep - 1, lastStep + 1];
    const log = state.log && positive < Infinity && high > 0;
    if (log) low = positive;
    if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    const y = log ? Math.log : (value) => value;
    const margin = (y(high) - y(low)) * 0.04;
    const [bottom, top] = [y(low) - margin, y(high) + margin];
    return {
      log, low, high, firstStep, lastStep,
      x: (step) => LEFT + ((step - firstStep) / (lastStep - firstStep)) * (WIDTH - LEFT - RIGHT),
      y: (value) => HEIGHT - BOTTOM - ((y(Math.max(value, log ? low : -Infinity)) - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM),
      step: (x) => firstStep + ((x - LEFT) / (WIDTH - LEFT - RIGHT)) * (lastStep - firstStep),
    };
  }

  // --- curves -----------------------------------------------------------------------------------------------------

  function smoothed(values) {
    let mean = 0, weight = 0;
    return values.map((value) => {
      mean = 0.9 * mean + 0.1 * value;
      weight = 0.9 * weight + 0.1;
      return mean / weight;
    });
  }

  function path(scale, steps, values) {
    return steps.map((step, at) => `${at ? "L" : "M"}${scale.x(step).toFixed(1)} ${scale.y(values[at]).toFixed(1)}`).join("");
  }

  function curve(svg, scale, run, steps, values, kind) {
    const style = `stroke: ${colour(run)}` + (run >= 8 ? "; stroke-dasharray: 6 3" : "");
    svg.append(drawn("path", { class: `curve ${kind}`, d: path(scale, steps, values), style, "data-run": data.runs[run].name }));
    if (steps.length <= 40 && kind !== "overruled") {
      steps.forEach((step, at) => svg.append(drawn("circle", {
        cx: scale.x(step).toFixed(1), cy: scale.y(values[at]).toFixed(1), r: 2.2, style: `fill: ${colour(run)}`,
      })));
    }
  }

  function axes(svg, scale) {
    const right = WIDTH - RIGHT, bottom = HEIGHT - BOTTOM;
    for (const tick of scale.log ? logTicks(scale.low, scale.high) : niceTicks(scale.low, scale.high, 7)) {
      const y = scale.y(tick);
      svg.append(drawn("line", { class: "tick", x1: LEFT, x2: right, y1: y, y2: y }));
      svg.append(drawn("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, shown(tick)));
    }
    for (const tick of niceTicks(scale.firstStep, scale.lastStep, 7).filter(Number.isInteger)) {
      svg.append(drawn("text", { x: scale.x(tick), y: bottom + 15, "text-anchor": "middle" }, shown(tick)));
      svg.append(drawn("line", { class: "axis", x1: scale.x(tick), x2: scale.x(tick), y1: bottom, y2: bottom + 4 }));
    }
    svg.append(drawn("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom }));
    svg.append(drawn("text", { x: right, y: HEIGHT - 4, "text-anchor": "end" }, "step"));
    if (scale.log) svg.append(drawn("text", { x: LEFT, y: HEIGHT - 4 }, "logarithmic"));
  }

  function marks(svg, scale) {
    data.runs.forEach((run, number) => {
      if (hidden.has(number)) return;
      for (const [step, kind] of run.events) {
        if (!["resume", "restart", "skipped", "loss_spike"].includes(kind) || step < scale.firstStep || step > scale.lastStep) continue;
        const x = scale.x(step);
        svg.append(drawn("line", { class: "mark", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM, style: `stroke: ${colour(number)}` }));
      }
    });
  }

  function chart(description) {
    const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": description.title });
    const values = element("div", { class: "values" });
    const unit = description.unit ? [" ", element("span", { class: "unit" }, description.unit)] : [];
    const figure = element("figure", { id: `chart-${description.key}` }, element("h3", {}, description.title, ...unit), svg, values);
    const made = { description, svg, values, figure, scale: null, cross: null };
    svg.addEventListener("pointermove", (event) => {
      if (!made.scale) return;
      const box = svg.getBoundingClientRect();
      pointAt(made.scale.step(((event.clientX - box.left) / box.width) * WIDTH));
    });
    svg.addEventListener("pointerleave", () => pointAt(null));
    charts.push(made);
    return figure;
  }

  function visible(description) {
    return data.runs.flatMap((run, number) => (hidden.has(number) || !run.series[description.key] ? [] : [number]));
  }

  function redraw() {
    for (const made of charts) {
      const { description, svg } = made;
      svg.replaceChildren();
      const numbers = visible(description);
      const points = numbers.flatMap((number) => {
        const run = data.runs[number];
        return [run.series[description.key], ...(run.overruled[description.key] || [])];
      }).filter(([steps]) => steps.length);
      made.scale = points.length ? scales(points) : null;
      made.values.replaceChildren();
      if (!made.scale) continue;
      axes(svg, made.scale);
      marks(svg, made.scale);
      for (const number of numbers) {
        for (const [steps, values] of data.runs[number].overruled[description.key] || []) {
          curve(svg, made.scale, number, steps, values, "overruled");
        }
      }
      for (const number of numbers) {
        const [steps, values] = data.runs[number].series[description.key];
        if (state.smooth) curve(svg, made.scale, number, steps, values, "raw");
        curve(svg, made.scale, number, steps, state.smooth ? smoothed(values) : values, "");
      }
      made.cross = drawn("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
      svg.append(made.cross);
    }
    pointAt(null);
  }

  function nearest(steps, step) {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
  }

  // The values of all charts at one step; of the last one where the pointer is on none.
  function pointAt(step) {
    for (const made of charts) {
      if (!made.scale) continue;
      made.values.replaceChildren();
      const reach = step === null ? Infinity : (made.scale.lastStep - made.scale.firstStep) / 20 + 1;
      for (const number of visible(made.description)) {
        const [steps, values] = data.runs[number].series[made.description.key];
        if (!steps.length) continue;
        const at = step === null ? steps.length - 1 : nearest(steps, step);
        const text = step !== null && Math.abs(steps[at] - step) > reach ? "none here" : `step ${steps[at]}: ${shown(values[at])}`;
        made.values.append(element("span", {}, swatch(number), ` ${data.runs[number].name} ${text}`));
      }
      const inside = step !== null && step >= made.scale.firstStep && step <= made.scale.lastStep;
      made.cross.setAttribute("visibility", inside ? "visible" : "hidden");
      if (inside) {
        made.cross.setAttribute("x1", made.scale.x(step));
        made.cross.setAttribute("x2", made.scale.x(step));
      }
    }
  }

  // --- expert load ------------------------------------------------------------------------------------------------

  // Viridis, thinned: dark is even, bright is loaded, on light and on dark paper.
  const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

  function heat(share) {
    const place = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1), at = Math.min(Math.floor(place), RAMP.length - 2);
    return RAMP[at].map((low, channel) => Math.round(low + (RAMP[at + 1][channel] - low) * (place - at)));
  }

  function heatMap(run, number, most) {
    const { steps, loads } = run.loads, layers = loads[0].length;
    const canvas = element("canvas", { width: steps.length, height: layers, role: "img", "aria-label": `Expert load of ${run.name}` });
    const context = canvas.getContext("2d"), image = context.createImageData(steps.length, layers);
    loads.forEach((column, x) => column.forEach((load, layer) => {
      image.data.set([...heat((load - 1) / (most - 1 || 1)), 255], 4 * (layer * steps.length + x));
    }));
    context.putImageData(image, 0, 0);
    const readout = element("div", { class: "values" }, "point at the map");
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const x = Math.min(steps.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * steps.length)));
      const layer = Math.min(layers - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * layers)));
      readout.textContent = `step ${steps[x]}, layer with experts ${layer}: ${shown(loads[x][layer])}`;
    });
    const ramp = Array.from({ length: 9 }, (_, at) => `rgb(${heat(at / 8).join(" ")})`).join(", ");
    return element("figure", { class: "heat" },
      element("h3", {}, swatch(number), ` ${run.name}`),
      element("div", { class: "unit" }, `across: steps ${steps[0]} to ${steps[steps.length - 1]}; down: the ${layers} layers with experts, the first on top`),
      canvas, readout,
      element("div", { class: "unit" }, "1 (even) ", element("span", { class: "scale", style: `background: linear-gradient(to right, ${ramp})` }), ` ${shown(most)}`));
  }

  // --- tables -----------------------------------------------------------------------------------------------------

  function table(head, rows, numbersFrom = 1) {
    const cell = (name, at, content) => element(name, at >= numbersFrom ? { class: "number" } : {}, ...[content].flat());
    return element("div", { class: "table" }, element("table", {},
      element("thead", {}, element("tr", {}, ...head.map((text, at) => cell("th", at, text)))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((content, at) => cell(at ? "td" : "th", at, content)))))));
  }

  function heading() {
    const names = data.runs.map((run) => run.name).join(", ");
    document.title = `Training report: ${names}`;
    byId("summary-line").textContent = `${data.runs.length === 1 ? "One run" : `${data.runs.length} runs`}: ${names}. Made by ${data.made_by}.`;
  }

  function controls() {
    const box = (text, change, checked, before = []) => {
      const input = element("input", { type: "checkbox" });
      input.checked = checked;
      input.addEventListener("change", () => { change(input.checked); redraw(); });
      return element("label", {}, input, ...before, text);
    };
    data.runs.forEach((run, number) => byId("controls").append(
      box(run.name, (on) => (on ? hidden.delete(number) : hidden.add(number)), true, [swatch(number)])));
    byId("controls").append(
      box("logarithmic", (on) => { state.log = on; }, false),
      box("smooth (mean of about 10 steps)", (on) => { state.smooth = on; }, false));
  }

  function summary() {
    byId("summary").append(table(["run", ...data.summary.map(([title]) => title)],
      data.runs.map((run, number) => [[swatch(number), ` ${run.name}`], ...data.summary.map(([, values]) => {
        const value = values[number];
        return typeof value === "number" ? shown(value) : value ?? "";
      })])));
    for (const run of data.runs) {
      for (const note of run.notes) byId("summary").append(element("p", { class: "warn" }, `${run.name}: ${note}`));
    }
  }

  function curves() {
    if (!data.charts.length) {
      byId("curves").append(element("p", { class: "note" }, "No run has a finished step."));
      return;
    }
    byId("curves").append(
      element("p", { class: "note" }, "Point at a curve for its values. Dashed curves: steps that a run did again from a checkpoint. Upright lines: continued, restarted, skipped steps and loss spikes, listed below."),
      element("div", { class: "grid" }, ...data.charts.map(chart)));
  }

  function loads() {
    const runs = data.runs.map((run, number) => [run, number]).filter(([run]) => run.loads);
    if (!runs.length) {
      byId("loads").remove();
      return;
    }
    const most = Math.max(...runs.map(([run]) => extent(run.loads.loads.flat())[1]));
    byId("loads").append(
      element("p", { class: "note" }, "Tokens of the busiest expert / the layer's mean, by step and layer; one scale for all runs."),
      element("div", { class: "grid" }, ...runs.map(([run, number]) => heatMap(run, number, most))));
  }

  function settings() {
    byId("settings").append(element("p", { class: "note" }, data.settings_title));
    if (!data.settings.length) return;
    byId("settings").append(table(["setting", ...data.runs.map((run, number) => [swatch(number), ` ${run.name}`])],
      data.settings.map(([name, values]) => [name, ...values]), Infinity));
  }

  function events() {
    const rows = data.runs.flatMap((run, number) => run.events.map(([step, kind, text]) => [step, number, kind, text]));
    if (!rows.length) {
      byId("events").append(element("p", { class: "note" }, "The logs tell of none."));
      return;
    }
    byId("events").append(table(["step", "run", "event", "what"],
      rows.map(([step, number, kind, text]) => [String(step), [swatch(number), ` ${data.runs[number].name}`], kind, text]), Infinity));
    for (const run of data.runs) {
      if (run.events_left_out) byId("events").append(element("p", { class: "warn" }, `${run.name}: ${run.events_left_out} more are not shown`));
    }
  }

  heading();
  controls();
  summary();
  curves();
  loads();
  settings();
  events();
  redraw();
})();
