// The visible range of steps, shared by all charts.

const view = {
  full: [0, 1],
  now: [0, 1],
  charts: new Map(), // by name; each has plot, redraw()
};

function zoomed() {
  return view.now[0] > view.full[0] || view.now[1] < view.full[1];
}

function zoomTo(low, high) {
  const [first, last] = view.full;
  const least = Math.min(last - first, 4);
  const span = Math.min(Math.max(high - low, least), last - first);
  const start = Math.min(Math.max((low + high - span) / 2, first), last - span);
  view.now = [start, start + span];
  applyView();
}

function zoomBy(factor, centre = (view.now[0] + view.now[1]) / 2) {
  const [low, high] = view.now;
  zoomTo(centre - (centre - low) * factor, centre + (high - centre) * factor);
}

function panBy(share) {
  const [low, high] = view.now;
  const move = (high - low) * share;
  zoomTo(low + move, high + move);
}

function showAll() {
  zoomTo(...view.full);
}

// Zoom to a step: a fiftieth of the run on either side, at least 12 steps.
function visitStep(step) {
  const reach = Math.max((view.full[1] - view.full[0]) / 50, 12);
  zoomTo(step - reach, step + reach);
  const lead = document.getElementById("lead");
  (lead.hidden ? document.getElementById("charts") : lead).scrollIntoView({ block: "center", behavior: "smooth" });
}

function applyView() {
  for (const chart of view.charts.values()) chart.plot.setScale("x", { min: view.now[0], max: view.now[1] });
  drawZoomBar();
  keepLink();
}

// The visible steps are part of the address, so that a link opens the same view.
function keepLink() {
  if (!view.linked) return;
  clearTimeout(view.linking); // browsers limit how often a page may change its address
  view.linking = setTimeout(() => {
    const [low, high] = view.now.map(Math.round);
    history.replaceState(null, "", zoomed() ? `#steps=${low}-${high}` : location.pathname + location.search);
  }, 150);
}

function followLink() {
  const found = /^#steps=(\d+)-(\d+)$/.exec(location.hash);
  if (found) zoomTo(Number(found[1]), Number(found[2]));
  view.linked = true;
}

// New data may extend the run: a view that shows all steps is extended, a zoomed view stays.
function growView(low, high) {
  const stay = zoomed();
  view.full = [low, Math.max(high, low + 1)];
  if (!stay) view.now = [...view.full];
  applyView();
}

function drawZoomBar() {
  const bar = document.getElementById("zoombar");
  if (!view.charts.size) return void (bar.hidden = true);
  if (!bar.firstChild) buildZoomBar(bar);
  bar.hidden = false;
  const [low, high] = view.now.map(Math.round);
  bar.querySelector(".range").textContent = zoomed()
    ? `Steps ${whole(low)} to ${whole(high)} of ${whole(view.full[1])}`
    : `All steps, ${whole(low)} to ${whole(high)}`;
  bar.querySelector(".reset").disabled = !zoomed();
  const thumb = bar.querySelector(".thumb");
  const width = view.full[1] - view.full[0];
  thumb.style.left = `${((view.now[0] - view.full[0]) / width) * 100}%`;
  thumb.style.width = `${Math.max(((view.now[1] - view.now[0]) / width) * 100, 0.5)}%`;
}

function buildZoomBar(bar) {
  const button = (label, title, action, name) =>
    make("button", { type: "button", class: name, title, "aria-label": title, onclick: action }, label);
  bar.append(
    make("span", { class: "range", role: "status" }),
    make("span", { class: "track", "aria-hidden": "true" }, make("span", { class: "thumb" })),
    make(
      "span",
      { class: "buttons", role: "group", "aria-label": "Zoom all charts" },
      button("◀", "Earlier steps (Shift+←)", () => panBy(-0.5), "earlier"),
      button("▶", "Later steps (Shift+→)", () => panBy(0.5), "later"),
      button("−", "Zoom out (−)", () => zoomBy(2), "out"),
      button("+", "Zoom in (+)", () => zoomBy(0.5), "in"),
      button("All", "Show all steps (0)", showAll, "reset"),
    ),
    make("nav", { id: "sections", "aria-label": "Sections" }),
  );
}

// Links to the sections that the page has.
function drawNavigation() {
  const bar = document.getElementById("sections");
  if (!bar) return;
  const places = [...document.querySelectorAll("main > section:not([hidden]), main > details:not([hidden])")];
  const links = places.filter((place) => place.querySelector("h2")).map((place) => make("a", { href: `#${place.id}`, onclick: (event) => visitSection(event, place) }, place.querySelector("h2").firstChild.textContent.trim()));
  bar.replaceChildren(...links);
}

function visitSection(event, place) {
  event.preventDefault(); // the address contains the visible steps
  if (place.tagName === "DETAILS") place.open = true;
  place.scrollIntoView({ block: "start", behavior: "smooth" });
}

// Keys of a focused chart. Returns whether the key was one of them.
function zoomKey(event, chart) {
  if (event.ctrlKey || event.metaKey || event.altKey) return false;
  const actions = {
    "+": () => zoomBy(0.5, chart.at ?? undefined),
    "=": () => zoomBy(0.5, chart.at ?? undefined),
    "-": () => zoomBy(2, chart.at ?? undefined),
    0: showAll,
    Home: () => moveCursor(chart, view.now[0]),
    End: () => moveCursor(chart, view.now[1]),
    ArrowLeft: () => (event.shiftKey ? panBy(-0.25) : stepCursor(chart, -1)),
    ArrowRight: () => (event.shiftKey ? panBy(0.25) : stepCursor(chart, 1)),
    Escape: () => leaveCursor(chart),
  };
  const action = actions[event.key];
  if (action) action();
  return Boolean(action);
}

function stepCursor(chart, direction) {
  const stride = Math.max((view.now[1] - view.now[0]) / 60, 1);
  const from = chart.at ?? (view.now[0] + view.now[1]) / 2;
  moveCursor(chart, Math.min(Math.max(Math.round(from + direction * stride), view.now[0]), view.now[1]));
}

function moveCursor(chart, step) {
  chart.plot.setCursor({ left: chart.plot.valToPos(step, "x"), top: chart.plot.over.clientHeight / 2 });
}

function leaveCursor(chart) {
  chart.plot.setCursor({ left: -10, top: -10 });
}
