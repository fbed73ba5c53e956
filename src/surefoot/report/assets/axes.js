// Shared by all charts: the plot, its axes, the shared cursor, zoom by drag, keys.

const FONT = "11px system-ui, -apple-system, Segoe UI, Roboto, sans-serif";

// All charts but the one beside the verdict have the same gutter, so that steps are aligned.
function gutter(chart) {
  if (chart?.isLead && innerWidth >= 620) return 64;
  return innerWidth < 620 ? 84 : 150;
}

let letterWidth = 0;

// How many letters of a name fit beside a plot, in the system's font.
function lettersInGutter() {
  if (!letterWidth) {
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = FONT;
    letterWidth = pen.measureText("blocks.0.feed_forward.weight").width / 28;
  }
  return Math.floor((gutter() - 18) / (innerWidth < 620 ? letterWidth * 0.92 : letterWidth));
}

const [ROOM_ABOVE, ROOM_BELOW, ROOM_RIGHT] = [10, 26, 12];

// The plot is laid out later, so sizes are computed from the size that it was given.
function plotWidth(plot) {
  return plot.width - gutter() - ROOM_RIGHT;
}

function plotHeight(plot) {
  return plot.height - ROOM_ABOVE - ROOM_BELOW;
}

function niceStep(span, most) {
  const rough = span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const front = rough / power;
  return (front <= 1 ? 1 : front <= 2 ? 2 : front <= 5 ? 5 : 10) * power;
}

function ticksBetween(low, high, most) {
  const step = niceStep(high - low, most);
  const ticks = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) ticks.push(place * step || 0) /* no −0 */;
  return ticks;
}

// Round numbers of bytes are round in their own unit.
function unitTicks(low, high, most, unit) {
  if (unit !== "bytes") return ticksBetween(low, high, most);
  const size = 1024 ** Math.max(0, Math.floor(Math.log2(Math.max(Math.abs(high), 1)) / 10));
  return ticksBetween(low / size, high / size, most).map((tick) => tick * size);
}

// Ticks of a logarithmic axis whose scale is in decades: powers of ten, or round numbers where there is less than that.
function logTicks(low, high, most) {
  if (high - low >= most) {
    return ticksBetween(low, high, most).filter((tick) => Math.abs(tick - Math.round(tick)) < 1e-6);
  }
  for (const fronts of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = Math.floor(low); power <= high; power += 1) {
      for (const front of fronts) ticks.push(power + Math.log10(front));
    }
    const within = ticks.filter((tick) => tick >= low && tick <= high);
    const spaced = within.every((tick, place) => !place || ((tick - within[place - 1]) / (high - low)) * most >= 0.6);
    if (spaced && within.length >= 3) return within;
  }
  return ticksBetween(10 ** low, 10 ** high, most) // less than a decade: round numbers
    .filter((value) => value > 0)
    .map(Math.log10);
}

// All labels of an axis have the same format.
function tickLabels(values, unit) {
  if (unit === "bytes") return byteLabels(values);
  if (unit === "share") return values.map((value) => `${Number((value * 100).toPrecision(4))}%`);
  const gap = values.length > 1 ? Math.abs(values[1] - values[0]) : Math.abs(values[0]) || 1;
  const largest = Math.max(...values.map(Math.abs));
  if (largest >= 1e6 || (largest > 0 && largest < 1e-3)) return values.map((value) => number(value, 3));
  const places = Math.min(8, Math.max(0, -Math.floor(Math.log10(gap) + 1e-9)));
  return values.map((value) => (Math.abs(value) < gap * 1e-6 ? "0" : fixed(value, places)));
}

function byteLabels(values) {
  const power = Math.max(0, Math.floor(Math.log2(Math.max(...values.map(Math.abs), 1)) / 10));
  const scaled = tickLabels(values.map((value) => value / 1024 ** power));
  return scaled.map((label) => (label === "0" ? label : `${label} ${BYTE_UNITS[power]}`));
}

function fixed(value, places) {
  const options = { minimumFractionDigits: places, maximumFractionDigits: places };
  return value.toLocaleString("en-US", options).replace("-", "−");
}

function stepAxis() {
  return {
    stroke: () => theme.colour("faint"),
    font: FONT,
    size: ROOM_BELOW,
    gap: 4,
    grid: { stroke: () => theme.colour("grid"), width: 1 },
    ticks: { show: false },
    splits: (plot, axis, low, high) =>
      ticksBetween(low, high, plotWidth(plot) / (innerWidth < 620 ? 64 : 90)).filter((tick) => Math.abs(tick - Math.round(tick)) < 1e-6),
    values: (plot, ticks) => ticks.map((tick) => whole(tick)),
  };
}

// The common frame of a chart. `options` adds scales, series, axes and hooks to it.
function framedPlot(chart, box, height, data, options) {
  const plot = new uPlot(
    {
      width: box.clientWidth,
      height,
      padding: [ROOM_ABOVE, ROOM_RIGHT, 0, 0],
      legend: { show: false },
      scales: { x: { time: false, min: view.now[0], max: view.now[1] }, ...options.scales },
      axes: [stepAxis(), ...options.axes],
      series: options.series,
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false },
        // The cursor position is shared by all charts; selecting and zooming use the shared view instead.
        sync: { key: "step", setSeries: false, scales: ["x", null], filters: { pub: onlyMoves, sub: onlyMoves } },
        bind: { dblclick: () => () => (showAll(), null) },
      },
      hooks: {
        ...options.hooks,
        draw: [...(options.hooks?.draw ?? []), () => drawMoment(chart)],
        setCursor: [(plot) => cursorMoved(chart, plot)],
        setSelect: [(plot) => selected(plot)],
      },
    },
    data,
    box,
  );
  plot.setScale("x", { min: view.now[0], max: view.now[1] });
  listen(chart, plot, box);
  return plot;
}

function onlyMoves(kind) {
  return kind === "mousemove" || kind === "mouseleave";
}

function selected(plot) {
  const { left, width } = plot.select;
  if (width < 4) return;
  const [low, high] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  zoomTo(low, high);
}

function cursorMoved(chart, plot) {
  const { left } = plot.cursor;
  chart.at = left >= 0 ? plot.posToVal(left, "x") : null;
  const mine = chart.hovered || document.activeElement === chart.box;
  if (!mine) return;
  if (chart.at === null) return hideTip();
  const frame = plot.over.getBoundingClientRect();
  chart.showTip(frame.left + left, frame.top + Math.max(plot.cursor.top, 0), chart.at, plot.cursor.top);
}

function listen(chart, plot, box) {
  plot.over.addEventListener("pointerenter", () => (chart.hovered = true));
  plot.over.addEventListener("pointerleave", () => {
    chart.hovered = false;
    hideTip();
  });
  // A plain wheel scrolls the page; with Ctrl or Shift it zooms.
  plot.over.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      const turn = event.deltaY || event.deltaX;
      zoomBy(turn > 0 ? 1.3 : 1 / 1.3, plot.posToVal(event.clientX - plot.over.getBoundingClientRect().left, "x"));
    },
    { passive: false },
  );
  if (box.dataset.keyed) return;
  box.dataset.keyed = "yes"; // the box outlives its plots
  box.addEventListener("keydown", (event) => {
    if (event.target === box && zoomKey(event, chart)) event.preventDefault();
  });
  box.addEventListener("blur", hideTip);
}
