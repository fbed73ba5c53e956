// Histograms over time of one layer: the values of its weights, gradients and activations.

const histogramView = { chart: null, layer: null, kind: null };

function drawHistograms(data) {
  const place = document.getElementById("histograms");
  if (!data) return void fill("histograms");
  const kinds = [...new Set(data.items.map((item) => item.kind))];
  if (!kinds.includes(histogramView.kind)) [histogramView.kind] = kinds;
  const layers = layersOf(data, histogramView.kind);
  if (!layers.includes(histogramView.layer)) [histogramView.layer] = layers;
  if (!histogramView.chart) buildHistograms(place);
  place.hidden = false;
  histogramView.chart.data = data;
  offerChoices(data, kinds, layers);
  drawHistogram(histogramView.chart);
  return undefined;
}

function layersOf(data, kind) {
  return data.items.filter((item) => item.kind === kind).map((item) => data.layers[item.layer]);
}

function buildHistograms(place) {
  const chart = { lines: false };
  chart.box = make("div", {
    class: "plot heat",
    tabindex: 0,
    role: "application",
    "aria-roledescription": "heat map",
    "aria-label": "Histogram over time. Arrow keys move the cursor, plus and minus zoom all charts.",
  });
  chart.names = make("div", { class: "names" });
  chart.odd = make("p", { class: "caption odd", role: "status" });
  chart.layers = make("select", { "aria-label": "Layer", onchange: () => choose("layer", chart.layers.value) });
  chart.kinds = make("div", { class: "kinds", role: "group", "aria-label": "Histogram of" });
  chart.figure = make(
    "figure",
    { class: "chart map", "data-chart": "histogram" },
    make("figcaption", {}, make("h3", {}, "Values over time"), make("div", { class: "tools" }, chart.kinds, chart.layers)),
    chart.odd,
    make("div", { class: "framed" }, chart.names, chart.box),
  );
  place.replaceChildren(chart.figure);
  chart.showTip = (x, y, step, top) => showHistogramTip(chart, x, y, step, top);
  chart.redraw = () => drawHistogram(chart);
  histogramView.chart = chart;
  view.charts.set("histogram", chart);
}

function choose(what, value) {
  histogramView[what] = value;
  drawHistograms(histogramView.chart.data);
}

function offerChoices(data, kinds, layers) {
  const { chart } = histogramView;
  const options = layers.map((name) => make("option", { value: name, selected: name === histogramView.layer }, shortened(name, 48)));
  chart.layers.replaceChildren(...options);
  chart.layers.value = histogramView.layer;
  const focused = document.activeElement && document.activeElement.dataset.kind;
  chart.kinds.replaceChildren(
    ...kinds.map((kind) =>
      make(
        "button",
        { type: "button", class: "toggle", "data-kind": kind, "aria-pressed": kind === histogramView.kind, onclick: () => choose("kind", kind) },
        `${kind}s`,
      ),
    ),
  );
  if (focused) chart.kinds.querySelector(`[data-kind="${CSS.escape(histogramView.kind)}"]`)?.focus();
}

function drawHistogram(chart) {
  const { data } = chart;
  chart.item = data.items.find((item) => item.kind === histogramView.kind && data.layers[item.layer] === histogramView.layer);
  const { item } = chart;
  chart.cells = unpacked(item.cells, 8);
  chart.edges = data.edges[item.kind];
  chart.columns = item.columns;
  chart.rows = item.bins;
  const wide = item.columns.length;
  const colours = ramp("amount");
  chart.picture = cellPicture(item.bins, wide, (row, column) => {
    const share = chart.cells[(item.bins - 1 - row) * wide + column];
    if (!share) return [0, 0, 0, 0];
    const place = Math.round(Math.sqrt(share / 255) * 255) * 3; // the square root keeps rare values visible
    return [colours[place], colours[place + 1], colours[place + 2], 255];
  });
  heatPlot(chart, 260);
  drawBinNames(chart);
  drawOdd(chart);
}

// Bins are powers of two; labels are powers of ten.
function drawBinNames(chart) {
  const rowHeight = plotHeight(chart.plot) / chart.rows;
  const middle = (chart.rows - 1) / 2;
  const [inner, outer] = [chart.edges[middle + 2], chart.edges[chart.edges.length - 1]];
  const every = Math.max(1, Math.ceil((18 / rowHeight) / Math.log2(10)));
  const labels = [];
  const put = (row, words) => {
    const label = make("span", {}, words);
    label.style.top = `${ROOM_ABOVE + row * rowHeight}px`;
    labels.push(label);
  };
  put(middle + 0.5, "0");
  const highest = Math.floor(Math.log10(outer) + 1e-9);
  for (let power = highest; 10 ** power >= inner; power -= every) {
    const rows = 2 + Math.log2(10 ** power / inner); // from the middle: half of zero's row, then the merged bin
    if ((rows - 0.5) * rowHeight < 16) break;
    put(middle + 0.5 - (rows - 0.5), number(10 ** power, 1));
    put(middle + 0.5 + (rows - 0.5), number(-(10 ** power), 1));
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

// A line at the top marks columns with non-finite values.
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

function showHistogramTip(chart, x, y, step, top) {
  const { item } = chart;
  const column = columnAt(chart.columns, step);
  if (column < 0) return hideTip();
  const row = Math.min(Math.max(Math.floor((top / plotHeight(chart.plot)) * chart.rows), 0), chart.rows - 1);
  const bin = item.bins - 1 - row;
  const [low, high] = [chart.edges[bin], chart.edges[bin + 1]];
  const name = low < 0 && high > 0 ? "exactly 0" : `${number(low, 2)} to ${number(high, 2)}`;
  const rows = [[null, name, percent(chart.cells[bin * chart.columns.length + column] / 255)]];
  for (const [odd, counts] of Object.entries(item.odd || {})) {
    if (counts[column]) rows.push([theme.colour("nonfinite"), ODD_WORDS[odd], whole(counts[column])]);
  }
  return showTip(x, y, `Step ${whole(chart.columns[column])}`, rows, histogramView.layer);
}
