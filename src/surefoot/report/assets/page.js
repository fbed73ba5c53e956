// Draws the page from its data. The same functions draw a written page once and a live page repeatedly.

let data = null;

function begin() {
  startTheme();
  data = JSON.parse(document.getElementById("data").textContent);
  drawSections(Object.keys(data));
  theme.listeners.push(redrawCharts);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // on phones the address bar changes the height; only the width matters here
    width = innerWidth;
    requestAnimationFrame(redrawCharts);
  });
  followLink();
  if (data.live) follow();
  document.documentElement.dataset.drawn = "yes";
}

// Draws only what has changed, so that focus and selection elsewhere are kept.
function drawSections(changed) {
  const has = (...names) => names.some((name) => changed.includes(name));
  if (has("head")) drawHead(data);
  if (has("runs")) drawRuns(data.runs);
  if (has("findings")) drawFindings(data);
  if (has("event_cards", "findings")) drawEventCards(data);
  if (has("experiments")) drawExperiments(data);
  if (has("events", "findings")) setMarkedEvents(data.events.list, data.findings);
  setExtent();
  if (has("charts")) drawTraining(data.charts);
  else if (has("events", "findings")) redrawCharts();
  if (has("maps")) drawMaps();
  if (has("histograms")) drawFolded("histograms", "Histograms", () => drawHistograms(data.histograms), Boolean(data.histograms));
  if (has("device")) drawFolded("device", "Device and memory", () => drawCharts("device", "", data.device), data.device.length > 0);
  if (has("events")) drawEvents(data);
  if (has("facts")) drawFacts(data);
  drawZoomBar();
  drawNavigation();
}

// The loss chart is beside the verdict, the other charts are below.
function drawTraining(charts) {
  const isLead = (chart) => chart.id === "loss";
  drawCharts("lead", "", charts.filter(isLead));
  drawCharts("charts", "Training", charts.filter((chart) => !isLead(chart)));
}

// Beside the verdict, the chart is as tall as the column there.
function leadHeight() {
  if (innerWidth < 620) return 230;
  const column = document.getElementById("verdict").offsetHeight;
  return innerWidth > 1040 ? Math.min(560, Math.max(300, column - 76)) : 300;
}

// A collapsed section. It is drawn when it is opened, because a plot needs a width.
function drawFolded(id, heading, draw, exists) {
  const outer = document.getElementById(`${id}_fold`);
  outer.hidden = !exists;
  if (!exists) return;
  if (!outer.dataset.ready) {
    outer.dataset.ready = "yes";
    outer.prepend(make("summary", {}, make("h2", {}, heading)));
    outer.addEventListener("toggle", () => outer.open && outer.redraw());
  }
  outer.redraw = draw;
  if (outer.open) draw();
}

function setExtent() {
  let [low, high] = [Infinity, -Infinity];
  const take = (first, last) => {
    low = Math.min(low, first);
    high = Math.max(high, last);
  };
  for (const chart of [...data.charts, ...data.device]) {
    for (const series of chart.series) if (series.x.length) take(series.x[0], series.x[series.x.length - 1]);
  }
  for (const map of [...data.maps, ...(data.histograms?.items ?? [])]) take(map.columns[0], map.columns[map.columns.length - 1]);
  if (markedEvents.length) take(markedEvents[0].step, markedEvents[markedEvents.length - 1].step);
  growView(Number.isFinite(low) ? low : 0, Number.isFinite(high) ? high : 1);
}

// Existing charts are updated; others are added or removed.
function drawCharts(id, heading, charts) {
  const place = document.getElementById(id);
  const shown = charts.filter((chart) => chart.flat === undefined);
  const settled = charts.filter((chart) => chart.flat !== undefined);
  keepCharts(place, shown.map((chart) => chart.id));
  place.hidden = !charts.length;
  if (!charts.length) return;
  if (!place.firstChild) place.append(heading ? make("h2", {}, heading) : "", make("p", { class: "settled" }));
  for (const spec of shown) {
    const known = view.charts.get(spec.id);
    if (known) known.update(spec);
    else lineChart(spec, place, spec.id === "loss" ? { marks: true, isLead: true } : {});
  }
  orderCharts(place, shown.map((chart) => chart.id));
  const words = place.querySelector(".settled");
  words.hidden = !settled.length;
  words.replaceChildren(
    ...settled.map((chart) => make("span", {}, `${chart.title} `, make("strong", {}, withUnit(real(chart.flat), chart.unit)), " (constant)")),
  );
  place.append(words);
}

function keepCharts(place, wanted) {
  for (const figure of place.querySelectorAll("figure")) {
    const name = figure.dataset.chart;
    if (wanted.includes(name)) continue;
    view.charts.get(name)?.plot.destroy();
    view.charts.delete(name);
    figure.remove();
  }
}

// A chart that was constant text is inserted in its place when its value changes.
function orderCharts(place, wanted) {
  const there = [...place.querySelectorAll("figure")].map((figure) => figure.dataset.chart);
  if (there.join() === wanted.join()) return;
  for (const name of wanted) place.append(view.charts.get(name).figure);
}

function drawMaps() {
  const place = document.getElementById("maps");
  keepCharts(place, data.maps.map((map) => `map.${map.id}`));
  place.hidden = !data.maps.length;
  if (!data.maps.length) return;
  if (!place.firstChild) place.append(make("h2", {}, data.maps.some((map) => map.id.startsWith("rank_")) ? "Ranks and layers" : "Layers"));
  for (const spec of data.maps) {
    const known = view.charts.get(`map.${spec.id}`);
    if (known) known.update(spec);
    else layerMap(spec, place);
  }
}

function redrawCharts() {
  for (const chart of view.charts.values()) chart.redraw();
  drawZoomBar();
}
