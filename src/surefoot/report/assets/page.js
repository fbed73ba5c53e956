// From data to page. The same functions draw a written page once and a live one again and again.

let data = null;

function begin() {
  startTheme();
  data = JSON.parse(document.getElementById("data").textContent);
  drawAll();
  theme.listeners.push(redrawCharts);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes; only the width matters here
    width = innerWidth;
    requestAnimationFrame(redrawCharts);
  });
  if (data.live) follow();
  document.documentElement.dataset.drawn = "yes";
}

function drawAll() {
  drawHead(data);
  drawFindings(data);
  drawTold(data);
  setHappenings(data.events.list, data.findings);
  setExtent();
  drawCharts("charts", "Training", data.charts);
  drawMaps();
  drawSpreads(data.spreads);
  drawCharts("device", "Device and memory", data.device);
  drawEvents(data);
  drawFacts(data);
  drawZoomBar();
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
  for (const map of data.maps) take(map.columns[0], map.columns[map.columns.length - 1]);
  if (happenings.length) take(happenings[0].step, happenings[happenings.length - 1].step);
  growView(Number.isFinite(low) ? low : 0, Number.isFinite(high) ? high : 1);
}

// Charts that are there already take the new data in; new ones are added, so that a live page does not jump.
function drawCharts(id, heading, charts) {
  const place = document.getElementById(id);
  const shown = charts.filter((chart) => chart.flat === undefined);
  const settled = charts.filter((chart) => chart.flat !== undefined);
  place.hidden = !charts.length;
  if (!charts.length) return;
  if (!place.firstChild) place.append(make("h2", {}, heading), make("p", { class: "settled" }));
  for (const spec of shown) {
    const known = view.charts.get(spec.id);
    if (known) known.update(spec);
    else lineChart(spec, place, spec.id === "loss" ? { marks: true, height: innerWidth < 620 ? 230 : 280 } : {});
  }
  const words = place.querySelector(".settled");
  words.hidden = !settled.length;
  words.replaceChildren(
    ...settled.map((chart) => make("span", {}, `${chart.title} `, make("strong", {}, withUnit(real(chart.flat), chart.unit)), " throughout")),
  );
  place.append(words);
}

function drawMaps() {
  const place = document.getElementById("maps");
  place.hidden = !data.maps.length;
  if (!data.maps.length) return;
  if (!place.firstChild) place.append(make("h2", {}, "Layers"));
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
