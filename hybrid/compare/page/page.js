"use strict";
// Draws the page from the JSON in #data. Text of runs is only ever set as textContent.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const styleOf = Object.fromEntries(data.methods.map((method) => [method.name, method]));

const chosen = {
  task: data.tasks[0],
  methods: new Set(data.methods.map((method) => method.name)),
  seeds: new Set(data.seeds),
  metrics: new Set(data.shown_metrics),
  everySeed: false,
  pairedMetric: data.summaries.length ? data.summaries[0].metric : null,
  costMetric: data.summaries.length ? data.summaries[0].metric : null,
  cost: data.costs[0],
  prompt: null,
  credit: "advantages",
};

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function label(metric) {
  return metric.replace(/_at_(\d+)$/, "@$1").replace(/^eval\//, "");
}

function plain(text) { // plotly reads tags in the text that it is given
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
}

function percent(value, digits = 1) {
  return value === null ? "–" : (100 * value).toFixed(digits);
}

function short(value) {
  if (value === null) return "–";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

function runsOf(method, finished = true) {
  return data.runs.filter((run) => run.task === chosen.task && run.method === method && chosen.seeds.has(run.seed)
    && (run.status === "FINISHED") === finished);
}

function visibleMethods() {
  return data.methods.filter((method) => chosen.methods.has(method.name));
}

// ---- choices ---------------------------------------------------------------------------------------------------

function choice(parent, type, name, value, text, checked, changed) {
  const box = make("input");
  Object.assign(box, {type, name, value, checked});
  box.addEventListener("change", () => changed(box.checked));
  const wrapped = make("label");
  wrapped.append(box);
  if (styleOf[value] && name === "method") wrapped.append(key(value));
  wrapped.append(make("span", text));
  parent.append(wrapped);
}

function key(method) {
  const line = make("span", undefined, "key");
  line.style.borderTopColor = styleOf[method].color;
  line.style.borderTopStyle = styleOf[method].dash === "solid" ? "solid" : styleOf[method].dash === "dot" ? "dotted" : "dashed";
  return line;
}

function toggled(set, value) {
  return (checked) => {
    if (checked) set.add(value); else set.delete(value);
    drawCharts();
  };
}

function radios(id, name, values, current, text, changed) {
  byId(id).replaceChildren();
  values.forEach((value) => choice(byId(id), "radio", name, value, text(value), value === current, () => changed(value)));
}

function makeFilters() {
  if (data.tasks.length < 2) byId("task-filter").style.display = "none";
  radios("tasks", "task", data.tasks, chosen.task, (task) => task || "all", (task) => { chosen.task = task; draw(); });
  data.methods.forEach(({name}) => choice(byId("methods"), "checkbox", "method", name, name, true, toggled(chosen.methods, name)));
  data.seeds.forEach((seed) => choice(byId("seeds"), "checkbox", "seed", String(seed), String(seed), true, toggled(chosen.seeds, seed)));
  data.metrics.forEach((metric) => choice(byId("metrics"), "checkbox", "metric", metric, label(metric),
    chosen.metrics.has(metric), toggled(chosen.metrics, metric)));
  byId("show-seeds").addEventListener("change", (event) => { chosen.everySeed = event.target.checked; drawCharts(); });
  const measures = data.summaries.map((summary) => summary.metric);
  radios("paired-metrics", "paired-metric", measures, chosen.pairedMetric, label, (m) => { chosen.pairedMetric = m; drawPaired(); });
  radios("cost-metrics", "cost-metric", measures, chosen.costMetric, label, (m) => { chosen.costMetric = m; drawCost(); });
  radios("cost-kinds", "cost-kind", data.costs, chosen.cost, (cost) => cost, (cost) => { chosen.cost = cost; drawCost(); });
  radios("credit-kinds", "credit-kind", ["advantages", "kl_weights"], chosen.credit,
    (kind) => ({advantages: "advantage", kl_weights: "KL weight"})[kind], (kind) => { chosen.credit = kind; drawAnswers(); });
  byId("prompt-choice").addEventListener("change", (event) => { chosen.prompt = event.target.value; drawAnswers(); });
}

// ---- words and tables ------------------------------------------------------------------------------------------

function drawWords() {
  const failed = data.runs.filter((run) => run.status !== "FINISHED");
  const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
  byId("subtitle").textContent = [plural(data.runs.length, "run"), plural(data.methods.length, "method"),
    plural(data.seeds.length, "seed"), plural(data.tasks.length, "task")].join(" · ") + ` · baseline ${data.baseline}`;
  const main = data.summaries[0];
  byId("sentences").replaceChildren();
  if (main) {
    byId("verdict-note").textContent = `${label(main.metric)} after training, each method paired with ${data.baseline} seed by seed; `
      + "exact sign-flip test, corrected for the number of methods (Holm).";
    main.comparisons.filter((one) => one.task === chosen.task)
      .forEach((one) => byId("sentences").append(make("li", one.sentence)));
  }
  if (!byId("sentences").children.length) byId("verdict-note").textContent = "There is nothing to compare yet: one method, or no evaluation.";
  const named = failed.map((run) => `${run.method} seed ${run.seed}${run.task ? ` (${run.task})` : ""}: ${run.status.toLowerCase()}`);
  byId("failures").textContent = (failed.length ? `${failed.length} of ${data.runs.length} runs did not finish and are in no result: ${named.join("; ")}. ` : "")
    + (data.num_superseded ? `${data.num_superseded} earlier runs of the same method, seed and task are left out.` : "");
}

function estimateCell(estimate, signed = false) {
  const text = (value) => (signed && value > 0 ? "+" : "") + percent(value);
  const cell = make("td", text(estimate.value));
  if (estimate.low !== null) cell.append(make("span", ` ${text(estimate.low)} to ${text(estimate.high)}`, "interval"));
  return cell;
}

function costCell(cost) {
  if (!cost || cost.num_reached + cost.num_censored === 0) return make("td", "–");
  if (cost.median.value === null) return make("td", "not by half");
  const cell = make("td", short(cost.median.value));
  const {low, high, interval} = cost.median;
  if (interval !== "none") cell.append(make("span", ` ${low === null ? "?" : short(low)} to ${high === null ? "?" : short(high)}`, "interval"));
  return cell;
}

function gotThere(row) {
  return make("td", `${Math.max(0, ...Object.values(row.costs).map((cost) => cost.num_reached))} of ${row.num_runs}`);
}

function tableOf(heads, rows) {
  const scroll = make("div", undefined, "scroll");
  const table = make("table");
  [heads.map((text) => make("th", text)), ...rows].forEach((cells) => {
    const line = make("tr");
    line.append(...cells);
    table.append(line);
  });
  scroll.append(table);
  return scroll;
}

function methodCell(method) {
  const cell = make("td");
  cell.append(key(method), make("span", ` ${method}${method === data.baseline ? " (baseline)" : ""}`));
  return cell;
}

function resultRow(row, compared) {
  const runs = make("td", row.num_failed ? `${row.num_runs}, ${row.num_failed} failed` : String(row.num_runs));
  const cells = [methodCell(row.method), runs, ...[row.before, row.after, row.area].map((one) => estimateCell(one))];
  if (!compared) return [...cells, make("td", "–"), make("td", "–"), make("td", "–"), make("td", "–")];
  const {mean, p_holm: p, effect_g: g, cliffs_delta: delta} = compared.found;
  return [...cells, estimateCell(mean, true), ...[p, g, delta].map((number) => make("td", short(number)))];
}

function drawTables() {
  const place = byId("result-tables");
  place.replaceChildren();
  data.summaries.forEach((summary, index) => {
    const rows = summary.results.filter((row) => row.task === chosen.task);
    const compared = (row) => summary.comparisons.find((one) => one.task === row.task && one.method === row.method);
    const block = make("details");
    block.open = index < 2;
    block.append(make("summary", label(summary.metric)));
    block.append(tableOf(["method", "runs", "before %", "after %", "area %", `minus ${data.baseline}`, "p (Holm)", "Hedges g", "Cliff's δ"],
      rows.map((row) => resultRow(row, compared(row)))));
    const target = summary.target_of_task[chosen.task];
    const costs = data.costs.filter((cost) => rows.some((row) => row.costs[cost]));
    if (costs.length) {
      const goal = `cost of reaching ${percent(target)} %${data.target_given ? "" : ` (where ${data.baseline} ended)`}`;
      block.append(tableOf([goal, ...costs, "got there"],
        rows.map((row) => [methodCell(row.method), ...costs.map((cost) => costCell(row.costs[cost])), gotThere(row)])));
    }
    if (summary.across.length) {
      block.append(tableOf(["over all tasks", "interquartile mean %", `chance of beating ${data.baseline} %`], summary.across.map((row) => [
        methodCell(row.method), estimateCell(row.middle), row.improvement ? estimateCell(row.improvement) : make("td", "–"),
      ])));
    }
    place.append(block);
  });
  if (!data.summaries.length) place.append(make("p", "No evaluation (eval/avg_at_k, eval/pass_at_k) was recorded.", "empty"));
}

// ---- charts ----------------------------------------------------------------------------------------------------

const font = {family: 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif', size: 12, color: "#1f2933"};
const axis = {gridcolor: "#e9edf1", zerolinecolor: "#c9d1d9", linecolor: "#c9d1d9", ticks: "outside", tickcolor: "#c9d1d9", automargin: true};
const config = {displayModeBar: false, responsive: true};

function layout(title, x, y, height) {
  return {
    title: {text: title, x: 0.01, xanchor: "left", font: {...font, size: 14}}, font, height, showlegend: false,
    margin: {l: 56, r: 12, t: 38, b: 44}, paper_bgcolor: "#fff", plot_bgcolor: "#fff", hovermode: "closest",
    xaxis: {...axis, zeroline: false, title: {text: x, standoff: 6}}, yaxis: {...axis, title: {text: y, standoff: 6}},
  };
}

function meanAt(points) {
  // points: of several seeds, each [x, y]; NaN is null and is left out of the mean of its step alone
  const finite = points.filter((point) => point[1] !== null && point[0] !== null);
  const count = finite.length;
  if (!count) return null;
  const mean = (index) => finite.reduce((sum, point) => sum + point[index], 0) / count;
  const middle = mean(1);
  const variance = count > 1 ? finite.reduce((sum, point) => sum + (point[1] - middle) ** 2, 0) / (count - 1) : 0;
  const half = count > 1 ? data.t_quantiles[Math.min(count - 2, data.t_quantiles.length - 1)] * Math.sqrt(variance / count) : 0;
  return {x: mean(0), y: middle, half, count};
}

function meanCurve(curves) {
  const at = new Map();
  curves.forEach(([steps, values, xs]) => steps.forEach((step, index) => {
    if (!at.has(step)) at.set(step, []);
    at.get(step).push([(xs || steps)[index], values[index]]);
  }));
  return [...at.keys()].sort((a, b) => a - b).map((step) => meanAt(at.get(step))).filter((point) => point);
}

function faded(color, alpha) {
  const part = (start) => parseInt(color.slice(start, start + 2), 16);
  return `rgba(${part(1)}, ${part(3)}, ${part(5)}, ${alpha})`;
}

function curveTraces(method, metric) {
  const {color, dash} = styleOf[method];
  const finished = runsOf(method).filter((run) => run.curves[metric]);
  const points = meanCurve(finished.map((run) => run.curves[metric]));
  const traces = [];
  if (points.length && points.some((point) => point.half > 0)) {
    traces.push({
      x: [...points.map((p) => p.x), ...points.map((p) => p.x).reverse()],
      y: [...points.map((p) => p.y + p.half), ...points.map((p) => p.y - p.half).reverse()],
      fill: "toself", fillcolor: faded(color, 0.14), line: {width: 0}, mode: "lines", hoverinfo: "skip", name: plain(`${method} band`),
    });
  }
  if (chosen.everySeed) {
    finished.forEach((run) => traces.push({
      x: run.curves[metric][0], y: run.curves[metric][1], mode: "lines", line: {color: faded(color, 0.4), width: 1},
      name: plain(`${method} seed ${run.seed}`), hovertemplate: "%{y:.4~g}<extra>%{fullData.name}</extra>",
    }));
  }
  runsOf(method, false).filter((run) => run.curves[metric]).forEach((run) => traces.push({
    x: run.curves[metric][0], y: run.curves[metric][1], mode: "lines+markers", line: {color: faded(color, 0.8), width: 1.2, dash: "dot"},
    marker: {symbol: "x", color, size: run.curves[metric][0].map((_, i, all) => (i === all.length - 1 ? 8 : 0))},
    name: plain(`${method} seed ${run.seed}, ${run.status.toLowerCase()}`), hovertemplate: "%{y:.4~g}<extra>%{fullData.name}</extra>",
  }));
  if (points.length) {
    traces.push({
      x: points.map((p) => p.x), y: points.map((p) => p.y), mode: points.length > 30 ? "lines" : "lines+markers",
      line: {color, width: 2, dash}, marker: {color, size: 5, symbol: styleOf[method].symbol}, name: plain(method),
      customdata: points.map((p) => [p.half, p.count]),
      hovertemplate: "step %{x}: %{y:.4~g} ± %{customdata[0]:.2~g}, %{customdata[1]} seeds<extra>%{fullData.name}</extra>",
    });
  }
  return traces;
}

function drawGrid(id, metrics) {
  const place = byId(id);
  [...place.children].forEach((chart) => {
    if (!metrics.includes(chart.dataset.metric)) { Plotly.purge(chart); chart.remove(); }
  });
  place.querySelectorAll(".empty").forEach((note) => note.remove());
  const charts = metrics.map((metric, index) => {
    let chart = [...place.children].find((child) => child.dataset.metric === metric);
    if (!chart) {
      chart = make("div", undefined, "chart");
      chart.dataset.metric = metric;
    }
    if (place.children[index] !== chart) place.insertBefore(chart, place.children[index] || null);
    return chart;
  });
  charts.forEach((chart) => { // after all of them stand in the grid, for that decides how wide they are
    const metric = chart.dataset.metric;
    const drawn = layout(plain(label(metric)), "step", plain(data.units[metric] || ""), 300);
    if (data.share_metrics.includes(metric)) drawn.yaxis.tickformat = ".0%";
    Plotly.react(chart, visibleMethods().flatMap(({name}) => curveTraces(name, metric)), drawn, config);
  });
  if (!metrics.length) place.append(make("p", "No metric of this kind was recorded, or none is chosen.", "empty"));
}

function present(metrics) {
  return metrics.filter((metric) => data.runs.some((run) => run.task === chosen.task && run.curves[metric]));
}

function drawPaired() {
  const summary = data.summaries.find((one) => one.metric === chosen.pairedMetric);
  const rows = (summary ? summary.comparisons : []).filter((one) => one.task === chosen.task && chosen.methods.has(one.method)).reverse();
  const traces = rows.flatMap((row, index) => {
    const {color, symbol} = styleOf[row.method];
    const dots = row.seeds.map((seed, i) => [seed, row.differences[i]]).filter(([seed, value]) => value !== null && chosen.seeds.has(seed));
    const mean = row.found.mean;
    return [
      {
        x: dots.map((dot) => 100 * dot[1]), y: dots.map((_, i) => index + 0.1 + 0.18 * (((i * 5) % 7) / 7)), mode: "markers",
        marker: {color: faded(color, 0.55), size: 8}, name: plain(row.method), text: dots.map((dot) => `seed ${dot[0]}`),
        hovertemplate: "%{text}: %{x:+.1f} points<extra>%{fullData.name}</extra>",
      },
      {
        x: mean.value === null ? [] : [100 * mean.value], y: mean.value === null ? [] : [index - 0.12], mode: "markers",
        marker: {color, size: 11, symbol: "diamond"}, name: plain(`${row.method} mean`),
        error_x: mean.low === null ? undefined : {
          type: "data", symmetric: false, array: [100 * (mean.high - mean.value)], arrayminus: [100 * (mean.value - mean.low)], color, thickness: 2, width: 6,
        },
        hovertemplate: `%{x:+.1f} points; p = ${short(row.found.p_holm)}, d = ${short(row.found.effect_dz)}<extra>%{fullData.name}</extra>`,
      },
    ];
  });
  const drawn = layout("", plain(`${summary ? label(summary.metric) : ""}: points above ${data.baseline}`), "", 110 + 64 * Math.max(rows.length, 1));
  drawn.margin.t = 12;
  drawn.yaxis = {...axis, tickvals: rows.map((_, i) => i), ticktext: rows.map((row) => plain(row.method)), range: [-0.6, Math.max(rows.length, 1) - 0.4], zeroline: false};
  drawn.xaxis.zeroline = true;
  drawn.xaxis.zerolinewidth = 2;
  drawn.shapes = [{type: "line", x0: 0, x1: 0, yref: "paper", y0: 0, y1: 1, line: {color: "#8a95a1", width: 1, dash: "dash"}}];
  Plotly.react("paired-chart", traces, drawn, config);
}

function drawCost() {
  const traces = visibleMethods().flatMap(({name, color, dash, symbol}) => {
    const curves = runsOf(name).filter((run) => run.costs[chosen.costMetric] && run.costs[chosen.costMetric][chosen.cost])
      .map((run) => [...run.curves[chosen.costMetric], run.costs[chosen.costMetric][chosen.cost]]);
    const points = meanCurve(curves);
    if (!points.length) return [];
    return [{
      x: points.map((p) => p.x), y: points.map((p) => p.y), mode: "lines+markers", line: {color, width: 2, dash}, marker: {color, size: 6, symbol}, name: plain(name),
      error_y: {type: "data", array: points.map((p) => p.half), color: faded(color, 0.45), thickness: 1, width: 0},
      hovertemplate: `%{x:.4~s} ${chosen.cost}: %{y:.1%}<extra>%{fullData.name}</extra>`,
    }];
  });
  const drawn = layout("", `${chosen.cost} spent`, chosen.costMetric ? plain(label(chosen.costMetric)) : "", 360);
  drawn.margin.t = 12;
  drawn.yaxis.tickformat = ".0%";
  Plotly.react("cost-chart", traces, drawn, config);
}

// ----------------------------------------------------------------------------------------------------------------

function drawCharts() {
  drawGrid("curve-charts", present(data.metrics.filter((metric) => chosen.metrics.has(metric))));
  drawGrid("anatomy-charts", present(data.anatomy_metrics));
  drawPaired();
  drawCost();
  drawAnswers();
}

function draw() {
  drawWords();
  drawTables();
  makePrompts();
  drawCharts();
  document.body.dataset.drawn = "true";
}

makeFilters();
draw();
