// The changes that were tried: the outcome of each, and the losses in one chart.

function drawExperiments(data) {
  const place = document.getElementById("experiments");
  const tried = data.experiments;
  place.hidden = !tried;
  if (!tried) return;
  const heads = ["Change", "Cures it?", "Why", "Steps", "Last loss"];
  place.replaceChildren(
    make("h2", {}, "Experiments"),
    make("p", { class: "lead" }, tried.sentence),
    make(
      "div",
      { class: "wide" },
      make(
        "table",
        { class: "grid" },
        make("thead", {}, make("tr", {}, heads.map((words) => make("th", { scope: "col" }, words)))),
        make("tbody", {}, tried.rows.map(experimentRow)),
      ),
    ),
  );
  if (tried.chart) lineChart(tried.chart, place, {});
}

function experimentRow(row) {
  return make(
    "tr",
    {},
    make("td", {}, row.title),
    make("td", { class: row.verdict === "cures" ? "cures" : "" }, row.verdict),
    make("td", {}, row.why),
    make("td", { class: "value" }, row.steps === null ? "" : whole(row.steps)),
    make("td", { class: "value" }, row.loss === null ? "" : number(row.loss)),
  );
}
