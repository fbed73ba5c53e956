// Events above the loss: one dot each; dense events share a dot. Dots are buttons: hover, focus, click.

const GRAVITY = { error: 2, warning: 1, info: 0 };
const CROWD = 60; // with more events than this, dots need space for three characters

let markedEvents = []; // every event with a step, and every finding, in order of steps

function setMarkedEvents(events, findings) {
  const found = events.filter((event) => event.step !== null && event.step !== undefined);
  const diagnosed = findings
    .filter((finding) => typeof finding.step === "number" && finding.severity !== "info")
    .map((finding) => ({ ...finding, event: "finding" }));
  const already = new Set(found.filter((one) => one.event === "finding").map((one) => `${one.cause}|${one.step}`));
  markedEvents = [...found, ...diagnosed.filter((one) => !already.has(`${one.cause}|${one.step}`))];
  markedEvents.sort((a, b) => a.step - b.step);
}

// The step of the first serious finding: a dashed line in every chart, with its number in the chart of the loss.
function theMoment() {
  const finding = data.findings.find((one) => one.severity !== "info" && typeof one.step === "number");
  return finding && finding.step > view.full[0] ? finding.step : null;
}

function drawMoment(chart) {
  const step = theMoment();
  if (step === null || step < view.now[0] || step > view.now[1]) return;
  const { ctx, bbox } = chart.plot;
  const ratio = devicePixelRatio || 1;
  const x = Math.round(chart.plot.valToPos(step, "x", true));
  ctx.save();
  ctx.strokeStyle = theme.colour("error");
  ctx.lineWidth = Math.max(1, Math.round(ratio));
  ctx.setLineDash([5 * ratio, 4 * ratio]);
  ctx.beginPath();
  ctx.moveTo(x + 0.5, bbox.top); // the middle of a pixel, so that the line is sharp
  ctx.lineTo(x + 0.5, bbox.top + bbox.height);
  ctx.stroke();
  if (chart.marks) {
    const isLate = x > bbox.left + bbox.width * 0.8;
    ctx.font = FONT.replace("11px", `${Math.round(11 * ratio)}px`);
    ctx.fillStyle = theme.colour("error");
    ctx.textAlign = isLate ? "right" : "left";
    ctx.fillText(`step ${whole(step)}`, x + (isLate ? -5 : 5) * ratio, bbox.top + bbox.height - 8 * ratio);
  }
  ctx.restore();
}

function eventsNear(step) {
  const reach = (view.now[1] - view.now[0]) / 200;
  return markedEvents.filter((event) => Math.abs(event.step - step) <= reach && event.severity !== "info").slice(0, 3);
}

// The width of a dot in pixels, with the space to the next one.
function roomFor(group, crowded) {
  if (crowded) return 32;
  return group.events.length > 9 ? 24 : group.events.length > 1 ? 19 : 16;
}

function placeMarks(chart) {
  if (!chart.lane) return;
  const groups = [];
  const seen = markedEvents.filter((event) => event.step >= view.now[0] && event.step <= view.now[1]);
  for (const event of seen) {
    const x = chart.plot.valToPos(event.step, "x");
    const last = groups[groups.length - 1];
    if (last && x - last.x < roomFor(last, seen.length > CROWD)) last.events.push(event);
    else groups.push({ x, events: [event] });
  }
  const offset = gutter(chart);
  chart.lane.replaceChildren(...groups.map((group) => mark(group, offset)));
  chart.lane.hidden = markedEvents.length === 0;
}

function mark(group, offset) {
  const { events } = group;
  const worst = events.reduce((a, b) => (GRAVITY[b.severity] > GRAVITY[a.severity] ? b : a));
  const label = events.length === 1 ? `${worst.event}, step ${worst.step}: ${worst.summary}` : groupWords(events);
  const button = make(
    "button",
    {
      type: "button",
      class: `mark ${worst.severity}${events.length > 1 ? " many" : ""}${worst.event === "finding" ? " flag" : ""}`,
      "aria-label": label,
      "data-count": events.length,
      onclick: () => visitEvents(events),
      onpointerenter: () => showMarkTip(button, events),
      onpointerleave: hideTip,
      onfocus: () => showMarkTip(button, events),
      onblur: hideTip,
    },
    events.length > 1 ? (events.length > 99 ? "99+" : events.length) : "",
  );
  button.style.left = `${offset + group.x}px`;
  return button;
}

function visitEvents(events) {
  const [first, last] = [events[0].step, events[events.length - 1].step];
  hideTip();
  if (first === last) return visitStep(first);
  const room = Math.max((last - first) * 0.3, 3);
  return zoomTo(first - room, last + room);
}

function groupWords(events) {
  const counts = new Map();
  for (const event of events) counts.set(event.event, (counts.get(event.event) || 0) + 1);
  const words = [...counts].map(([kind, count]) => `${whole(count)} × ${kind}`);
  return `${words.join(", ")}, steps ${whole(events[0].step)} to ${whole(events[events.length - 1].step)}`;
}

function showMarkTip(button, events) {
  const box = button.getBoundingClientRect();
  const ordered = [...events].sort((a, b) => GRAVITY[b.severity] - GRAVITY[a.severity]);
  const rows = ordered
    .slice(0, 6)
    .map((event) => [theme.colour(event.severity), `step ${whole(event.step)}`, `${event.event}: ${event.summary}`]);
  const title = events.length === 1 ? events[0].event : groupWords(events);
  const more = events.length > 6 ? `and ${whole(events.length - 6)} more` : "";
  showTip(box.right, box.top + 8, title, rows, more);
}
