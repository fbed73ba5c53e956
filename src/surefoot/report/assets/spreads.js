// Histograms over time of one layer at a time: which values its weights, gradients and activations have.

const spread = { chart: null, layer: null, kind: null };

function drawSpreads(data) {
  const place = document.getElementById("spreads");
  if (!data) return void fill("spreads");
  const kinds = [...new Set(data.items.map((item) => item.kind))];
  if (!kinds.includes(spread.kind)) [spread.kind] = kinds;
  const layers = layersOf(data, spread.kind);
  if (!layers.includes(spread.layer)) [spread.layer] = layers;
  if (!spread.chart) buildSpreads(place);
  place.hidden = false;
  spread.chart.data = data;
  offerChoices(data, kinds, layers);
  drawSpread(spread.chart);
  return undefined;
}

function layersOf(data, kind) {
  return data.items.filter((item) => item.kind === kind).map((item) => data.layers[item.layer]);
}

function buildSpreads(place) {
  const chart = { lines: false };
  chart.box = make("div", {
    class: "plot heat",
    tabindex: 0,
    role: "application",
    "aria-roledescription": "heat map",
    "aria-label": "Histogram over time. Arrow keys read values, plus and minus zoom all charts.",
  });
  chart.names = make("div", { class: "names" });
  chart.odd = make("p", { class: "caption odd", role: "status" });
  chart.layers = make("select", { "aria-label": "Layer", onchange: () => choose("layer", chart.layers.value) });
  chart.kinds = make("div", { class: "kinds", role: "group", "aria-label": "Histogram of" });
  chart.figure = make(
    "figure",
    { class: "chart map", "data-chart": "spread" },
    make("figcaption", {}, make("h3", {}, "Values over time"), make("div", { class: "tools" }, chart.kinds, chart.layers)),
    chart.odd,
    make("div", { class: "framed" }, chart.names, chart.box),
  );
  place.replaceChildren(make("h2", {}, "Histograms"), chart.figure);
  chart.tell = (x, y, step, top) => tellSpread(chart, x, y, step, top);
  chart.redraw = () => drawSpread(chart);
  spread.chart = chart;
  view.charts.set("spread", chart);
}

function choose(what, value) {
  spread[what] = value;
  drawSpreads(spread.chart.data);
}

function offerChoices(data, kinds, layers) {
  const { chart } = spread;
  const options = layers.map((name) => make("option", { value: name, selected: name === spread.layer }, shortened(name, 48)));
  chart.layers.replaceChildren(...options);
  chart.layers.value = spread.layer;
  const focused = document.activeElement && document.activeElement.dataset.kind;
  chart.kinds.replaceChildren(
    ...kinds.map((kind) =>
      make(
        "button",
        { type: "button", class: "toggle", "data-kind": kind, "aria-pressed": kind === spread.kind, onclick: () => choose("kind", kind) },
        `${kind}s`,
      ),
    ),
  );
  if (focused) chart.kinds.querySelector(`[data-kind="${spread.kind}"]`)?.focus();
}

function drawSpread(chart) {
  const { data } = chart;
  chart.item = data.items.find((item) => item.kind === spread.kind && data.layers[item.layer] === spread.layer);
  const { item } = chart;
  chart.cells = unpacked(item.cells, 8);
  chart.columns = item.columns;
  chart.rows = item.bins;
  const wide = item.columns.length;
  const colours = ramp("amount");
  chart.picture = cellPicture(item.bins, wide, (row, column) => {
    const share = chart.cells[(item.bins - 1 - row) * wide + column];
    if (!share) return [0, 0, 0, 0];
    const place = Math.round(Math.sqrt(share / 255) * 255) * 3; // a few values among many must be seen too
    return [colours[place], colours[place + 1], colours[place + 2], 255];
  });
  heatPlot(chart, 260);
  drawBinNames(chart);
  drawOdd(chart);
}

function drawBinNames(chart) {
  const { data, item } = chart;
  const rowHeight = plotHeight(chart.plot) / chart.rows;
  const labels = [];
  let last = -Infinity;
  for (let bin = item.bins - 1; bin >= 0; bin -= 1) {
    const [low, high] = [data.edges[item.first + bin], data.edges[item.first + bin + 1]];
    const zero = low < 0 && high > 0;
    const y = ROOM_ABOVE + (item.bins - bin - (zero ? 0.5 : 0)) * rowHeight;
    const nearZero = Math.abs(item.first + bin - (data.edges.length - 2) / 2) * rowHeight < 15;
    if (!zero && (y - last < 22 || nearZero)) continue;
    const label = make("span", {}, zero ? "0" : number(low, 2));
    label.style.top = `${y}px`;
    labels.push(label);
    last = y;
  }
  chart.names.style.width = `${gutter() - 6}px`;
  chart.names.replaceChildren(...labels);
}

const ODD_WORDS = { nan: "NaN", positive_inf: "+Inf", negative_inf: "−Inf" };

function drawOdd(chart) {
  const { item } = chart;
  const said = Object.entries(item.odd || {})
    .map(([name, counts]) => [ODD_WORDS[name], Math.max(...counts), item.columns[counts.findIndex((count) => count > 0)]])
    .filter(([, most]) => most > 0)
    .map(([word, most, step]) => `${word}: up to ${counted(most, "value")}, first at step ${whole(step)}`);
  chart.odd.textContent = said.join(" · ");
  chart.odd.classList.toggle("bad", said.length > 0);
  chart.odd.hidden = !said.length;
  chart.over = () => drawOddColumns(chart);
  chart.plot.redraw(false);
}

// A stretch in which something was not finite has a line along its top.
function drawOddColumns(chart) {
  const { plot, item, columns } = chart;
  if (!item.odd) return;
  plot.ctx.save();
  plot.ctx.fillStyle = theme.colour("nonfinite");
  for (let column = 0; column < columns.length; column += 1) {
    if (!Object.values(item.odd).some((counts) => counts[column] > 0)) continue;
    const x = plot.valToPos(columns[column], "x", true);
    const end = plot.valToPos(columnEnd(columns, column), "x", true);
    const [from, to] = [Math.max(x, plot.bbox.left), Math.min(end, plot.bbox.left + plot.bbox.width)];
    if (to > from) plot.ctx.fillRect(from, plot.bbox.top, Math.max(to - from, 1), 5 * devicePixelRatio);
  }
  plot.ctx.restore();
}

function tellSpread(chart, x, y, step, top) {
  const { data, item } = chart;
  const column = columnAt(chart.columns, step);
  if (column < 0) return hideTip();
  const row = Math.min(Math.max(Math.floor((top / plotHeight(chart.plot)) * chart.rows), 0), chart.rows - 1);
  const bin = item.bins - 1 - row;
  const [low, high] = [data.edges[item.first + bin], data.edges[item.first + bin + 1]];
  const name = low < 0 && high > 0 ? "exactly 0" : `${number(low, 2)} to ${number(high, 2)}`;
  const rows = [[null, name, percent(chart.cells[bin * chart.columns.length + column] / 255)]];
  for (const [odd, counts] of Object.entries(item.odd || {})) {
    if (counts[column]) rows.push([theme.colour("nonfinite"), ODD_WORDS[odd], whole(counts[column])]);
  }
  return showTip(x, y, `Step ${whole(chart.columns[column])}`, rows, spread.layer);
}
