// Layer-by-time maps: gradient norm, update-to-weight ratio, dead and saturated share, activations. Names beside the rows, a scale above.

const [NONE, ZERO, NONFINITE, MISSING] = [65532, 65533, 65534, 65535];
const CODES = 65000;
const MAP_RAMPS = { grad_norm: "amount", update_ratio: "balance", dead_share: "share", saturated_share: "share" };
const USUAL_RATIO = -3; // decades: most healthy layers have updates of a thousandth of their weights

function layerMap(spec, parent) {
  const chart = { spec, lines: true };
  chart.box = make("div", {
    class: "plot heat",
    tabindex: 0,
    role: "application",
    "aria-roledescription": "heat map",
    "aria-label": `${spec.title}, ${counted(spec.rows.length, spec.id.startsWith("rank_") ? "rank" : "layer")}. Arrow keys move the cursor, plus and minus zoom all charts.`,
  });
  chart.tools = make("div", { class: "tools" });
  chart.names = make("div", { class: "names" });
  chart.until = make("p", { class: "caption until" });
  chart.figure = make(
    "figure",
    { class: "chart map", "data-chart": `map.${spec.id}` },
    make("figcaption", {}, make("h3", {}, spec.title), caption(spec.caption), chart.until, chart.tools),
    make("div", { class: "framed" }, chart.names, chart.box),
  );
  parent.append(chart.figure);
  chart.showTip = (x, y, step, top) => showCellTip(chart, x, y, step, top);
  chart.redraw = () => drawMap(chart, true);
  chart.update = (next) => {
    chart.spec = next;
    drawMap(chart, false);
  };
  drawMap(chart, true);
  view.charts.set(`map.${spec.id}`, chart);
}

function drawMap(chart, fresh) {
  const { spec } = chart;
  chart.codes = unpacked(spec.cells, 16);
  chart.columns = spec.columns;
  chart.rows = spec.rows.length;
  chart.ends = colourEnds(spec);
  const colours = ramp(MAP_RAMPS[spec.id] || "amount");
  const [bad, zero, none] = ["nonfinite", "zero", "none"].map((name) => rgb(theme.colour(name)));
  const wide = spec.columns.length;
  chart.picture = cellPicture(chart.rows, wide, (row, column) => {
    const code = chart.codes[row * wide + column];
    if (code === MISSING) return [0, 0, 0, 0];
    if (code === NONFINITE) return [...bad, 255];
    if (code === ZERO) return [...zero, 255];
    if (code === NONE) return [...none, 255];
    const place = Math.round(within(chart, code) * 255) * 3;
    return [colours[place], colours[place + 1], colours[place + 2], 255];
  });
  if (chart.plot && chart.drawnRows === chart.rows && !fresh) chart.plot.redraw(false);
  else drawMapPlot(chart);
  drawScale(chart);
  drawUntil(chart);
}

// Sampling may stop before the run ends: an empty area is explained.
function drawUntil(chart) {
  const last = chart.columns.length - 1;
  const [first, end] = view.full;
  const ended = last >= 0 && columnEnd(chart.columns, last) < end - 0.05 * (end - first);
  chart.until.textContent = ended ? `Last sampled near step ${whole(chart.columns[last])}.` : "";
}

function drawMapPlot(chart) {
  chart.drawnRows = chart.rows;
  const height = Math.round(Math.min(Math.max(chart.rows * 18, 60), 430)) + 36;
  heatPlot(chart, height);
  drawNames(chart);
}

// The ratio's colours are centred on what is usual, so that blue and red mean the same in every report.
function colourEnds(spec) {
  if (spec.id !== "update_ratio") return spec.colours;
  const reach = Math.max(2, Math.min(4, Math.max(...spec.colours.map((end) => Math.abs(end - USUAL_RATIO)))));
  return [USUAL_RATIO - reach, USUAL_RATIO + reach];
}

function decoded(spec, code) {
  const place = spec.low + (code / CODES) * (spec.high - spec.low);
  return spec.log ? 10 ** place : place;
}

function within(chart, code) {
  const { spec, ends } = chart;
  const place = spec.low + (code / CODES) * (spec.high - spec.low);
  return Math.min(Math.max((place - ends[0]) / (ends[1] - ends[0] || 1), 0), 1);
}

// Names are elements, so that the full name is shown on hover. If there are many rows, only some are labelled.
function drawNames(chart) {
  const rowHeight = plotHeight(chart.plot) / chart.rows;
  const every = Math.max(1, Math.ceil(12 / rowHeight));
  const room = lettersInGutter();
  const shown = [];
  for (let row = 0; row < chart.rows; row += every) {
    const name = chart.spec.rows[row];
    const label = make("span", { title: name }, shortLayer(name, room));
    label.style.top = `${ROOM_ABOVE + (row + 0.5) * rowHeight}px`;
    shown.push(label);
  }
  chart.names.style.width = `${gutter() - 6}px`;
  chart.names.replaceChildren(...shown);
}

function drawScale(chart) {
  const { spec, ends } = chart;
  const bar = make("span", { class: "ramp" });
  bar.style.background = rampCss(MAP_RAMPS[spec.id] || "amount");
  const label = (end) => (spec.log ? number(10 ** end, 1) : percent(end));
  const seen = new Set();
  for (const code of chart.codes) if (code >= NONE) seen.add(code);
  const extra = [
    [NONE, "none", "no gradient"],
    [ZERO, "zero", "exactly 0"],
    [NONFINITE, "nonfinite", "NaN or Inf"],
  ].filter(([code]) => seen.has(code));
  chart.tools.replaceChildren(
    make("span", { class: "scale" }, make("span", {}, label(ends[0])), bar, make("span", {}, label(ends[1]))),
    ...extra.map(([, colour, words]) => {
      const key = make("span", { class: "swatch" });
      key.style.background = theme.colour(colour);
      return make("span", { class: "entry" }, key, words);
    }),
    exportButtons(chart, () => cellRows(chart)),
  );
}

function showCellTip(chart, x, y, step, top) {
  const { spec } = chart;
  const row = Math.min(Math.max(Math.floor((top / plotHeight(chart.plot)) * chart.rows), 0), chart.rows - 1);
  const column = columnAt(chart.columns, step);
  if (column < 0) return hideTip();
  const code = chart.codes[row * chart.columns.length + column];
  const words = { [MISSING]: "not measured", [NONFINITE]: "NaN or Inf", [ZERO]: "0", [NONE]: "no gradient" };
  const value = words[code] || cellValue(spec, code);
  const [first, next] = [chart.columns[column], columnEnd(chart.columns, column)];
  const title = next - first > 1 ? `Steps ${whole(first)} to ${whole(next - 1)}` : `Step ${whole(first)}`;
  return showTip(x, y, title, [[null, spec.rows[row], value]]);
}

function cellValue(spec, code) {
  const value = decoded(spec, code);
  return spec.id.endsWith("_share") ? percent(value) : number(value, 3);
}
