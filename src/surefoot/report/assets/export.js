// Export of a chart as an image (PNG) and as a table (CSV).

function exportButtons(chart, rows) {
  const button = (words, title, action) => make("button", { type: "button", class: "toggle save", title, onclick: action }, words);
  return make(
    "span",
    { class: "exports" },
    button("CSV", "Save the values on this page as CSV", () => save(`${fileName(chart)}.csv`, new Blob([csv(rows())], { type: "text/csv" }))),
    button("PNG", "Save the chart as PNG", () => picture(chart).toBlob((blob) => save(`${fileName(chart)}.png`, blob))),
  );
}

function fileName(chart) {
  const run = data.head.folder || "run";
  return `${run}-${chart.spec.id}`.replace(/[^\w.-]+/g, "_");
}

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function csv(rows) {
  // A cell that begins with one of these characters would be a formula in a spreadsheet.
  const safe = (text) => (/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);
  const cell = (value) => (typeof value === "number" ? String(value) : `"${safe(String(value)).replaceAll('"', '""')}"`);
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

function lineRows(chart) {
  const rows = [["series", "part", "step", "value"]];
  for (const line of chart.lines) line.x.forEach((step, place) => rows.push([line.name, line.part, step, line.y[place]]));
  return rows;
}

function cellRows(chart) {
  const { spec, columns, codes } = chart;
  const words = { [MISSING]: "", [NONFINITE]: "non-finite", [ZERO]: 0, [NONE]: "no gradient" };
  const rows = [["layer", "step", "value"]];
  spec.rows.forEach((name, row) =>
    columns.forEach((step, column) => {
      const code = codes[row * columns.length + column];
      if (code !== MISSING) rows.push([name, step, code in words ? words[code] : decoded(spec, code)]);
    }),
  );
  return rows;
}

// The plot with its title, on the background of the page. Names of layers are elements beside the plot, so they are drawn here.
function picture(chart) {
  const source = chart.plot.ctx.canvas;
  const ratio = devicePixelRatio || 1;
  const above = Math.round(30 * ratio);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [source.width, source.height + above];
  const pen = canvas.getContext("2d");
  pen.fillStyle = theme.colour("surface");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(source, 0, above);
  pen.fillStyle = theme.colour("ink");
  pen.font = FONT.replace("11px", `600 ${Math.round(14 * ratio)}px`);
  pen.fillText(`${chart.spec.title}: ${data.head.script}`, 12 * ratio, 20 * ratio);
  if (chart.names) {
    pen.fillStyle = theme.colour("faint");
    pen.font = FONT.replace("11px", `${Math.round(11 * ratio)}px`);
    [pen.textAlign, pen.textBaseline] = ["right", "middle"];
    for (const label of chart.names.children) pen.fillText(label.textContent, (gutter() - 6) * ratio, above + parseFloat(label.style.top) * ratio);
  }
  return canvas;
}
