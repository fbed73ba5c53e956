// Comparison of runs: one column each, and the findings of each run.

function drawRuns(runs) {
  const names = [...new Set(runs.flatMap((run) => run.tiles.map((tile) => tile.name)))];
  const head = make("tr", {}, make("th", { scope: "col" }, ""), runs.map((run) => make("th", { scope: "col" }, longName(run.name, 40, "span"))));
  const row = (name, cells) => make("tr", {}, make("th", { scope: "row" }, name), cells);
  const body = [
    row("verdict", runs.map((run) => make("td", { class: `said ${run.verdict}` }, VERDICTS[run.verdict] || "not diagnosed"))),
    row("main finding", runs.map((run) => make("td", {}, prose(run.headline)))),
    ...names.map((name) => row(name, runs.map((run) => make("td", {}, runValue(run, name))))),
  ];
  fill(
    "runs",
    make("h2", {}, "Runs"),
    make("div", { class: "wide" }, make("table", { class: "grid compared" }, make("thead", {}, head), make("tbody", {}, body))),
    runs.map(runFindings),
  );
}

function runValue(run, name) {
  const found = run.tiles.find((tile) => tile.name === name);
  if (!found) return "";
  const words = tileValue(real(found.value), found.unit);
  return make("span", { class: found.bad ? "bad" : "" }, words, found.step !== undefined && name === "lowest loss" ? ` at step ${whole(found.step)}` : "");
}

function runFindings(run) {
  const serious = run.findings.filter((finding) => finding.severity !== "info");
  if (!serious.length) return null;
  return make(
    "details",
    { class: "remarks", "data-key": `findings ${run.name}` },
    make("summary", {}, `${counted(serious.length, "finding")} of ${run.name}`),
    serious.map((finding) => findingCard(finding, false)),
  );
}
