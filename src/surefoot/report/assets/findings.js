// Findings as cards: what is wrong, confidence, location, fixes, and evidence.

const SEVERITIES = { error: "Error", warning: "Warning", info: "Note" };

function drawFindings(data) {
  const open = openDetails("findings");
  const serious = data.findings.filter((finding) => finding.severity !== "info");
  const remarks = data.findings.filter((finding) => finding.severity === "info");
  const cards = serious.map((finding, place) => findingCard(finding, place === 0));
  const rest = remarks.length
    ? make(
        "details",
        { class: "remarks", "data-key": "remarks" },
        make("summary", {}, counted(remarks.length, "note"), make("span", { class: "soft" }, ": consequences and other observations")),
        remarks.map((finding) => findingCard(finding, false)),
      )
    : null;
  fill("findings", ...(cards.length || rest ? [make("h2", {}, "Findings"), ...cards, rest] : []));
  reopen("findings", open);
}

function findingCard(finding, first) {
  const severity = SEVERITIES[finding.severity] ? finding.severity : "info";
  return make(
    "article",
    { class: `card ${severity}${first ? " first" : ""}`, "data-cause": finding.cause },
    make(
      "header",
      {},
      make("span", { class: "severity" }, SEVERITIES[severity]),
      make("h3", {}, capital(finding.title || finding.cause)),
      make("code", { class: "cause" }, finding.cause),
      typeof finding.confidence === "number" ? confidence(finding.confidence) : null,
    ),
    make("p", { class: "summary" }, prose(finding.summary)),
    place(finding),
    source(finding),
    fixes(finding.fixes || []),
    evidence(finding),
  );
}

function capital(words) {
  return words ? words[0].toUpperCase() + words.slice(1) : "";
}

function confidence(share) {
  return make("span", { class: "confidence", title: "From 0 to 1" }, `confidence ${share.toFixed(2)}`);
}

function place(finding) {
  const where = (finding.where || []).map((name) => longName(String(name), 60));
  const step = typeof finding.step === "number" ? [stepButton(finding.step)] : [];
  return step.length + where.length ? make("p", { class: "where" }, step, where) : null;
}

function fixes(list) {
  if (!list.length) return null;
  return make("div", { class: "fixes" }, make("h4", {}, "How to fix it"), make("ol", {}, list.map((fix) => make("li", {}, prose(fix)))));
}

function evidence(finding) {
  const entries = Object.entries(finding.evidence || {}).filter(([key]) => key !== "source"); // shown below the place
  if (!entries.length) return null;
  return make(
    "details",
    { class: "evidence", "data-key": `evidence ${finding.cause}` },
    make("summary", {}, "Evidence"),
    evidenceTable(entries),
  );
}

function evidenceTable(entries, asNamed = false) {
  const rows = entries.map(([key, value]) =>
    make("tr", {}, make("th", { scope: "row" }, asNamed ? key : key.replaceAll("_", " ")), make("td", {}, evidenceValue(real(value)))),
  );
  return make("table", { class: "plain" }, make("tbody", {}, rows));
}

const MOST_ROWS = 12;

// Evidence is anything that a rule measured: numbers, names, lists, tables.
function evidenceValue(value) {
  if (typeof value === "number") return number(value, 4);
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (value === null || value === undefined) return "none";
  if (Array.isArray(value)) return evidenceList(value);
  if (typeof value === "object") return Object.keys(value).length ? evidenceTable(Object.entries(value).slice(0, MOST_ROWS * 2)) : "none";
  return String(value);
}

function evidenceList(values) {
  if (!values.length) return "none";
  const shown = values.slice(0, MOST_ROWS);
  const more = values.length > MOST_ROWS ? make("p", { class: "soft" }, `… ${whole(values.length)} in total`) : null;
  const isTable = shown.every((value) => value && typeof value === "object" && !Array.isArray(value));
  if (!isTable) {
    const parts = shown.flatMap((value, place) => [place ? ", " : "", evidenceValue(real(value))]);
    return make("span", {}, parts, more);
  }
  if (values.length === 1) return evidenceTable(Object.entries(shown[0]).filter(([, value]) => value !== "")); // one row is too wide
  const columns = [...new Set(shown.flatMap(Object.keys))];
  const head = make("tr", {}, columns.map((column) => make("th", { scope: "col" }, column.replaceAll("_", " "))));
  const rows = shown.map((row) => make("tr", {}, columns.map((column) => make("td", {}, column in row ? evidenceValue(real(row[column])) : ""))));
  return make("div", { class: "wide" }, make("table", { class: "grid" }, make("thead", {}, head), make("tbody", {}, rows)), more);
}

// Cards of events, for a run without a diagnosis, and for rollbacks and halts.
function drawEventCards(data) {
  const diagnosed = data.findings.some((finding) => finding.severity !== "info");
  const shown = diagnosed ? data.event_cards.filter((card) => card.kind === "rollback" || card.kind === "halt") : data.event_cards;
  const cards = shown.map((card) =>
    make(
      "article",
      { class: `card ${card.severity}`, "data-kind": card.kind },
      make(
        "header",
        {},
        make("span", { class: "severity" }, SEVERITIES[card.severity]),
        make("h3", {}, card.title),
        card.causes.map((cause) => make("code", { class: "cause" }, cause)),
      ),
      make("p", { class: "summary" }, card.count > 1 ? "First: " : "", prose(card.summary)),
      make("p", { class: "where" }, card.steps.map((step) => stepButton(step)), card.count > card.steps.length ? "…" : ""),
    ),
  );
  fill("event_cards", ...(cards.length ? [make("h2", {}, "What happened"), ...cards] : []));
}

// A live page redraws its cards; opened details stay open.
function openDetails(id) {
  return new Set([...document.querySelectorAll(`#${id} details[open]`)].map((details) => details.dataset.key));
}

function reopen(id, keys) {
  for (const details of document.querySelectorAll(`#${id} details`)) if (keys.has(details.dataset.key)) details.open = true;
}
