// A heat map over steps: rows are layers or bins. One pixel per cell in a separate canvas, scaled when drawn.

// Colour stops with evenly spaced lightness.
const RAMPS = {
  light: {
    amount: ["#ece9e1", "#d9e2df", "#a9cfd0", "#6fb1be", "#3f8aa8", "#2b6190", "#263a6d", "#1d1f47"],
    balance: ["#2f5d9b", "#7fa6cf", "#d5e0ea", "#f3f0ea", "#f2d5c2", "#dd8a6a", "#a8322f"],
    share: ["#ece8de", "#efdcc0", "#e5bd8c", "#d49564", "#b6664a", "#86393a", "#4f1a2b"],
  },
  dark: {
    amount: ["#262e42", "#22375a", "#27567f", "#2f7a97", "#4aa0a4", "#84c3ad", "#c3e2bd", "#f6fbd9"],
    balance: ["#6aa5e8", "#41709f", "#2c4258", "#262a31", "#573c33", "#a3593f", "#f08a63"],
    share: ["#292d38", "#3a2c36", "#623a3e", "#8e4b3f", "#bd6640", "#e08e4f", "#fbcf86"],
  },
};

function ramp(name) {
  const stops = RAMPS[theme.name()][name].map(rgb);
  const table = new Uint8ClampedArray(256 * 3);
  for (let place = 0; place < 256; place += 1) {
    const at = (place / 255) * (stops.length - 1);
    const [from, to] = [stops[Math.floor(at)], stops[Math.min(Math.floor(at) + 1, stops.length - 1)]];
    for (let channel = 0; channel < 3; channel += 1) {
      table[place * 3 + channel] = from[channel] + (to[channel] - from[channel]) * (at - Math.floor(at));
    }
  }
  return table;
}

function rgb(hex) {
  return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
}

function rampCss(name) {
  return `linear-gradient(to right, ${RAMPS[theme.name()][name].join(", ")})`;
}

// `paint(row, column)` gives [red, green, blue, alpha] for a cell; row 0 is drawn at the top.
function cellPicture(rows, columns, paint) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(columns, 1);
  canvas.height = Math.max(rows, 1);
  const image = new ImageData(canvas.width, canvas.height);
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) image.data.set(paint(row, column), (row * columns + column) * 4);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// The plot of a heat map. `chart` has columns, rows (count), picture, axis(plot) and showTip.
function heatPlot(chart, height) {
  if (chart.plot) chart.plot.destroy();
  const ends = [view.full[0], view.full[1]];
  chart.plot = framedPlot(chart, chart.box, height, [ends, [null, null]], {
    scales: { y: { range: () => [0, chart.rows] } },
    axes: [{ size: gutter(), splits: () => [], values: () => [], grid: { show: false }, ticks: { show: false } }],
    series: [{}, {}],
    hooks: { drawAxes: [() => drawPicture(chart)], draw: [() => chart.over && chart.over()] },
  });
}

function drawPicture(chart) {
  const { plot, columns, picture } = chart;
  const { ctx } = plot;
  const { left, top, width, height } = plot.bbox;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.imageSmoothingEnabled = false;
  for (let column = 0; column < columns.length; column += 1) {
    const [start, end] = [columns[column], columnEnd(columns, column)];
    if (end < view.now[0] || start > view.now[1]) continue;
    const x = Math.round(plot.valToPos(start, "x", true));
    const stop = Math.round(plot.valToPos(end, "x", true));
    ctx.drawImage(picture, column, 0, 1, picture.height, x, top, Math.max(stop - x, 1), height);
  }
  const rowHeight = height / chart.rows;
  if (chart.lines && rowHeight >= 9 * devicePixelRatio) {
    ctx.fillStyle = theme.colour("surface");
    for (let row = 1; row < chart.rows; row += 1) {
      ctx.fillRect(left, Math.round(top + row * rowHeight), width, Math.max(1, Math.round(devicePixelRatio)));
    }
  }
  ctx.restore();
}

// A measurement is drawn until the next one; the last is as wide as the one before it.
function columnEnd(columns, column) {
  if (column + 1 < columns.length) return columns[column + 1];
  const before = columns.length > 1 ? columns[column] - columns[column - 1] : 1;
  const end = columns[column] + before;
  return end + before >= view.full[1] ? Math.max(view.full[1], columns[column] + 1) : end;
}

function columnAt(columns, step) {
  const place = lowerBound(columns, step + 1e-9) - 1;
  return place >= 0 && step <= columnEnd(columns, place) ? place : -1;
}
