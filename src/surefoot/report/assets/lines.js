// A line chart: faint raw values, a smoothed line, and marks at the edge for values outside the scale.

const LINE_HEIGHT = 190;

function lineChart(spec, parent, options = {}) {
  const chart = { spec, log: Boolean(spec.log), marks: options.marks, isLead: options.isLead };
  const known = recall(`log.${spec.id}`);
  if (known !== null) chart.log = known === "yes";
  chart.box = make("div", {
    class: "plot",
    tabindex: 0,
    role: "application",
    "aria-roledescription": "chart",
    "aria-label": `${spec.title}. Arrow keys move the cursor, plus and minus zoom all charts, 0 shows all steps.`,
  });
  chart.tools = make("div", { class: "tools" });
  chart.lane = options.marks ? make("div", { class: "lane" }) : null;
  chart.figure = make(
    "figure",
    { class: "chart", "data-chart": spec.id },
    make("figcaption", {}, make("h3", {}, longName(spec.title, 60, "span")), caption(spec.caption), chart.tools),
    chart.lane,
    chart.box,
  );
  parent.append(chart.figure);
  chart.showTip = (x, y, step) => showLineTip(chart, x, y, step);
  chart.redraw = () => drawLines(chart);
  chart.update = (next) => updateLines(chart, next);
  drawLines(chart);
  view.charts.set(spec.id, chart);
  return chart;
}

function caption(words) {
  return words ? make("p", { class: "caption" }, words) : null;
}

function joined(chart) {
  chart.lines = chart.spec.series.map((series, place) => prepared(chart, series, place));
  return uPlot.join(
    chart.lines.map((line) => [line.x, line.drawn]),
    // A step that only another series has is not a gap; a value that cannot be drawn is.
    chart.lines.map(() => [0, 1]),
  );
}

// New data for the same series updates the existing plot, which keeps the reader's cursor.
function updateLines(chart, next) {
  const shape = (spec) => spec.series.map((series) => `${identity(series)} ${series.role}`).join();
  const same = shape(next) === shape(chart.spec);
  chart.spec = next;
  if (!same) return drawLines(chart);
  const data = joined(chart);
  return chart.plot.batch(() => {
    chart.plot.setData(data, false);
    chart.plot.setScale("x", { min: view.now[0], max: view.now[1] });
  });
}

function drawLines(chart) {
  const data = joined(chart);
  if (chart.plot) chart.plot.destroy();
  chart.height = chart.isLead ? leadHeight() : LINE_HEIGHT;
  chart.plot = framedPlot(chart, chart.box, chart.height, data, {
    scales: { y: { range: () => valueRange(chart) } },
    axes: [valueAxis(chart)],
    series: [{}, ...chart.lines.map((line) => line.style)],
    hooks: { draw: [() => drawEdges(chart), () => placeMarks(chart)] },
  });
  drawTools(chart);
}

// The values of a series as numbers, and as the chart draws them.
function prepared(chart, series, place) {
  const y = series.y.map(real);
  const onScale = chart.log ? (value) => value > 0 && Number.isFinite(value) : Number.isFinite;
  const drawn = y.map((value) => (onScale(value) ? (chart.log ? Math.log10(value) : value) : null));
  const colour = seriesColour(chart.spec, series, place);
  const wide = series.role === "smooth" || series.role === "line";
  const style = {
    stroke: series.role === "raw" ? faded(colour) : colour,
    width: wide ? 1.75 : 1,
    dash: series.role === "clipped" ? [] : undefined,
    spanGaps: false,
    points: { show: series.role === "clipped" || drawn.length < 3, size: 4, fill: colour, width: 0 },
  };
  if (series.role === "clipped") style.paths = () => null; // dots only: these are single steps
  return { ...series, y, drawn, colour, style };
}

function seriesColour(spec, series, place) {
  const parts = new Set(spec.series.map((one) => one.part));
  if (series.role === "clipped" && parts.size === 1) return theme.colour("clipped");
  const kinds = [...new Set(spec.series.filter((one) => one.role !== "clipped").map(identity))];
  return theme.series(Math.max(kinds.findIndex((kind) => identity(series) === kind), 0));
}

// A raw series and its smoothed line have the same colour.
function identity(series) {
  return `${series.part}|${series.role === "clipped" ? "gradient norm" : series.name.replace(/, smoothed$/, "")}`;
}

function faded(colour) {
  return `color-mix(in srgb, ${colour} ${theme.name() === "dark" ? 42 : 34}%, transparent)`;
}

// The scale follows the typical values of the visible steps: one value of 1e20 must not flatten the rest.
function valueRange(chart) {
  const seen = [];
  for (const line of chart.lines) {
    const [first, end] = [lowerBound(line.x, view.now[0]), lowerBound(line.x, view.now[1] + 1e-9)];
    // Between two distant readings, only the line that connects them is visible.
    const around = first === end ? 1 : 0;
    for (let place = Math.max(0, first - around); place < Math.min(line.x.length, end + around); place += 1) {
      if (line.drawn[place] !== null) seen.push(line.drawn[place]);
    }
  }
  if (!seen.length) return chart.log ? [-1, 1] : [0, 1];
  seen.sort((a, b) => a - b);
  const at = (share) => seen[Math.min(seen.length - 1, Math.round(share * (seen.length - 1)))];
  const [low, high] = [at(0.02), at(0.98)];
  // Nearly all zero: show the nonzero values.
  if (high === 0 && low === 0) return padded(chart, seen[0], seen[seen.length - 1]);
  const spread = Math.max(high - low, Math.abs(high) * 1e-3, 1e-12);
  const top = seen[seen.length - 1] <= high + 20 * spread ? seen[seen.length - 1] : high + spread;
  const bottom = seen[0] >= low - 20 * spread ? seen[0] : low - spread;
  return padded(chart, bottom, top);
}

function padded(chart, low, high) {
  if (chart.log) {
    const room = Math.max((high - low) * 0.08, 0.02);
    return [low - room, high + room];
  }
  const room = Math.max((high - low) * 0.08, Math.abs(high) * (high > low ? 0.004 : 0.02), 1e-12);
  const floor = low >= 0 && low < (high - low) * 0.5 ? 0 : low - room; // near zero, start at zero
  return [floor, high + room];
}

function lowerBound(values, wanted) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

function valueAxis(chart) {
  return {
    stroke: () => theme.colour("faint"),
    font: FONT,
    size: gutter(chart),
    gap: 6,
    grid: { stroke: () => theme.colour("grid"), width: 1 },
    ticks: { show: false },
    splits: (plot, axis, low, high) => {
      const most = plotHeight(plot) / 36;
      return chart.log ? logTicks(low, high, most) : unitTicks(low, high, most, chart.spec.unit);
    },
    values: (plot, ticks) => {
      if (!chart.log) return ticks.length ? tickLabels(ticks, chart.spec.unit) : [];
      return ticks.map((tick) => logLabel(tick, chart.spec.unit));
    },
  };
}

function logLabel(tick, unit) {
  const value = Number((10 ** tick).toPrecision(9));
  if (unit) return withUnit(value, unit);
  const isPower = Math.abs(tick - Math.round(tick)) < 1e-6;
  return isPower && (value >= 1e4 || value < 1e-2) ? powerOfTen(Math.round(tick)) : number(value, 3);
}

// Non-finite values and values outside the scale are marked at the upper or lower edge of the plot.
function drawEdges(chart) {
  const { plot } = chart;
  const { ctx } = plot;
  const { left, top, width, height } = plot.bbox;
  const [low, high] = [plot.scales.y.min, plot.scales.y.max];
  const ratio = devicePixelRatio || 1;
  let marks = 0;
  ctx.save();
  for (const line of chart.lines) {
    if (line.role !== "raw" && line.role !== "line") continue;
    let [lastAbove, lastBelow] = [-Infinity, -Infinity];
    for (let place = lowerBound(line.x, view.now[0]); place < line.x.length && line.x[place] <= view.now[1]; place += 1) {
      const value = line.y[place];
      const drawn = line.drawn[place];
      const below = drawn !== null ? drawn < low : value === -Infinity || (chart.log && value <= 0);
      const above = drawn !== null ? drawn > high : !below;
      if (!above && !below) {
        if (alone(line.drawn, place)) drawPoint(plot, line, place, ratio);
        continue;
      }
      const x = plot.valToPos(line.x[place], "x", true);
      if (x - (above ? lastAbove : lastBelow) < 7 * ratio) continue;
      if (above) lastAbove = x;
      else lastBelow = x;
      const y = above ? top + 6 * ratio : top + height - 6 * ratio;
      drawEdgeMark(ctx, x, y, ratio, Number.isNaN(value) ? "nan" : above ? "up" : "down", line.colour);
      marks += 1;
    }
  }
  ctx.restore();
  chart.edgeMarks = marks;
}

// A value between two that cannot be drawn has no line: it is drawn as a point.
function alone(drawn, place) {
  return (drawn[place - 1] ?? null) === null && (drawn[place + 1] ?? null) === null;
}

function drawPoint(plot, line, place, ratio) {
  plot.ctx.beginPath();
  plot.ctx.fillStyle = line.colour;
  const [x, y] = [plot.valToPos(line.x[place], "x", true), plot.valToPos(line.drawn[place], "y", true)];
  plot.ctx.arc(x, y, 2.5 * ratio, 0, 2 * Math.PI);
  plot.ctx.fill();
}

function drawEdgeMark(ctx, x, y, ratio, kind, colour) {
  const size = 3.5 * ratio;
  ctx.beginPath();
  if (kind === "nan") {
    ctx.strokeStyle = theme.colour("error");
    ctx.lineWidth = 1.6 * ratio;
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x + size, y - size);
    ctx.lineTo(x - size, y + size);
    ctx.stroke();
    return;
  }
  const direction = kind === "up" ? -1 : 1;
  ctx.fillStyle = kind === "up" ? theme.colour("error") : colour;
  ctx.moveTo(x, y + direction * size);
  ctx.lineTo(x + size, y - direction * size);
  ctx.lineTo(x - size, y - direction * size);
  ctx.fill();
}

function drawTools(chart) {
  const { spec } = chart;
  const shown = spec.series.filter((one) => one.role !== "smooth");
  const many = shown.length > 1;
  const items = chart.lines.filter((line) => line.role !== "smooth");
  const legend = many
    ? items.map((line) => {
        const key = make("span", { class: line.role === "clipped" ? "key dotted" : "key" });
        key.style.background = line.colour;
        return make("span", { class: "entry" }, key, longName(seriesName(line, shown), 32, "span"));
      })
    : [];
  const toggle = make(
    "button",
    { type: "button", class: "toggle log", "aria-pressed": chart.log, title: "Logarithmic scale", onclick: () => toggleLog(chart) },
    "log",
  );
  const positive = !spec.unit && chart.lines.some((line) => line.y.some((value) => value > 0));
  chart.tools.replaceChildren(...legend, ...(positive || chart.log ? [toggle] : []), exportButtons(chart, () => lineRows(chart)));
}

function toggleLog(chart) {
  chart.log = !chart.log;
  remember(`log.${chart.spec.id}`, chart.log ? "yes" : "no");
  drawLines(chart);
  chart.tools.querySelector(".toggle.log").focus();
}

// The shortest name that distinguishes the series.
function seriesName(line, all) {
  const parts = new Set(all.map((one) => one.part));
  const names = new Set(all.map((one) => one.name));
  const part = line.part || "main"; // as in the terminal
  if (parts.size > 1 && names.size > 1) return `${part} ${line.name}`;
  return parts.size > 1 ? part : line.name;
}

function showLineTip(chart, x, y, step) {
  const rows = [];
  let nearest = null;
  for (const line of chart.lines) {
    const place = closest(line.x, step);
    if (place < 0) continue;
    const far = Math.abs(line.x[place] - step) > (view.now[1] - view.now[0]) / 40 + 1;
    if (far) continue;
    if (nearest === null || Math.abs(line.x[place] - step) < Math.abs(nearest - step)) nearest = line.x[place];
    const name = chart.spec.series.length > 1 ? seriesName(line, chart.spec.series) : line.name;
    rows.push([line.colour, name, withUnit(line.y[place], chart.spec.unit)]);
  }
  const happened = chart.marks ? eventsNear(step) : [];
  showTip(x, y, `Step ${whole(nearest ?? step)}`, rows, happened.map((event) => event.summary).join(" "));
}

function closest(values, wanted) {
  if (!values.length) return -1;
  const place = lowerBound(values, wanted);
  if (place === 0) return 0;
  if (place === values.length) return place - 1;
  return wanted - values[place - 1] <= values[place] - wanted ? place - 1 : place;
}
