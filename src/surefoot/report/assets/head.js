// The top of the page: the run, its verdict, the first fix, and its main numbers.

const VERDICTS = { compared: "Compared", broken: "Broken", unstable: "Unstable", healthy: "Healthy", unknown: "Unknown" };
const STATES = { waiting: "waiting", running: "running", finished: "finished", failed: "failed" };

function drawHead(data) {
  const { head } = data;
  const tone = VERDICTS[head.tone] ? head.tone : "none";
  const toggle = make(
    "button",
    { type: "button", id: "theme", title: "Light or dark theme", "aria-label": "Switch between the light and the dark theme", onclick: theme.toggle },
    "◐",
  );
  const focused = document.activeElement?.id === "theme";
  fill(
    "head",
    make("div", { class: "topline" }, make("span", { class: "brand" }, "surefoot"), runName(head), liveBadge(data), toggle),
  );
  fill(
    "verdict",
    make(
      "div",
      { class: `verdict ${tone}` },
      make(
        "h1",
        {},
        make("span", { class: "word" }, verdictWord(head), head.headline ? ": " : ""),
        head.headline ? make("span", { class: "headline" }, prose(head.headline)) : null,
      ),
      head.lead ? make("p", { class: "lead" }, prose(head.lead)) : null,
      head.state === "running" && !data.live ? make("p", { class: "lead", id: "unfinished" }, UNFINISHED) : null,
    ),
    make("ul", { class: "tiles" }, head.tiles.map(tile)),
    keptIncident(head.incident),
    ranks(head, Object.fromEntries(data.facts).rank),
    problems(head),
  );
  if (focused) toggle.focus();
  document.title = title(data);
}

const UNFINISHED = "The log has no end of the run: the run was killed, or was still running when this page was written.";

// A written page cannot know whether a run without a logged end is still running.
function verdictWord(head) {
  if (VERDICTS[head.verdict]) return VERDICTS[head.verdict];
  return head.state === "running" && !data.live ? "Unfinished" : capital(STATES[head.state]);
}

function title({ head, live }) {
  const word = verdictWord(head);
  const where = live && head.state === "running" ? `step ${whole(Math.max(head.steps - 1, 0))}` : head.headline.replaceAll("`", "");
  return `${word}${where ? `: ${where}` : ""} · ${head.script.split("/").pop()}`;
}

function runName(head) {
  const words = [head.script, ...head.arguments].join(" ");
  return make("span", { class: "script" }, longName(words, 64));
}

function liveBadge({ live, head }) {
  if (!live) return null;
  return make("span", { class: `live ${head.state}`, id: "live", role: "status" }, STATES[head.state]);
}

// A number of the run with its name: `final loss 0.31`.
function tile({ name, value, unit, bad, step }) {
  const shown = step === undefined ? tileValue(real(value), unit) : stepButton(step, tileValue(real(value), unit));
  return make("li", { class: bad ? "bad" : "", "data-tile": name }, make("span", { class: "name" }, name), make("strong", {}, shown));
}

function tileValue(value, unit) {
  if (typeof value === "string") return value;
  if (unit === "seconds") return duration(value);
  if (unit === "share") return percent(value);
  if (unit === "count") return whole(value);
  return number(value, 3);
}

// The captured step, and the command that runs it again.
function keptIncident(incident) {
  if (!incident) return null;
  return make(
    "div",
    { class: "incident" },
    make("p", {}, `${incident.step === null ? "A bad step" : `Step ${whole(incident.step)}`} was captured. To run it again:`),
    make("div", { class: "command" }, make("code", {}, incident.command), copyButton(incident.command)),
  );
}

function copyButton(words) {
  const button = make("button", { type: "button", class: "copy", title: "Copy the command" }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copied(words)) ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
}

// A page opened from a file may not be allowed to use the clipboard: the text is selected instead.
async function copied(words) {
  try {
    await navigator.clipboard.writeText(words);
    return true;
  } catch {
    const selection = getSelection();
    selection.selectAllChildren(document.querySelector(".command code"));
    return document.execCommand("copy");
  }
}

function ranks(head, shown) {
  if (head.ranks.length < 2) return null;
  return make(
    "details",
    { class: "ranks" },
    make("summary", {}, `Charts of ${shown == null ? "one rank" : `rank ${shown}`}; verdicts of all ${head.ranks.length} ranks`),
    make(
      "ul",
      {},
      head.ranks.map((rank) =>
        make("li", {}, make("strong", {}, rank.name), ` ${rank.verdict || "no diagnosis"}`, rank.summary ? `: ${rank.summary}` : ""),
      ),
    ),
  );
}

function problems(head) {
  const said = [...head.problems];
  if (head.dropped) said.unshift(`${counted(head.dropped, "row")} of the log ${head.dropped === 1 ? "was" : "were"} dropped, because training does not wait for the log.`);
  return said.length ? make("ul", { class: "problems" }, said.map((words) => make("li", {}, words))) : null;
}

function drawFacts(data) {
  // A page that compares runs has the value of each run, by its name.
  const shownValue = (value) => (data.runs && value && typeof value === "object" ? evidenceTable(Object.entries(value), true) : evidenceValue(real(value)));
  const shown = data.facts.map(([key, value]) =>
    make("tr", {}, make("th", { scope: "row" }, key.replaceAll("_", " ")), make("td", {}, shownValue(value))),
  );
  const heading = data.runs ? "Differences" : "Run";
  fill("facts", ...(shown.length ? [make("h2", {}, heading), make("div", { class: "wide" }, make("table", { class: "plain" }, make("tbody", {}, shown)))] : []));
  fill("foot", make("p", {}, "Made by surefoot", data.made ? ` on ${data.made}` : "", ". ", KEYS));
}

const KEYS = "Keys on a focused chart: ← → move the cursor, Shift+← → scroll, + − zoom, 0 show all steps.";
