// The list of events, which can be filtered by kind. Consecutive events of one kind share a row; long lists are shown in parts.

const PIECE = 100;
const eventList = { hidden: new Set(), shown: PIECE };

function drawEvents(data) {
  const { total } = data.events;
  const list = inOrder(data.events.list);
  if (list.every((event) => event.event === "end" && event.severity === "info")) return void fill("events");
  const kinds = new Map();
  for (const event of list) kinds.set(kindOf(event), (kinds.get(kindOf(event)) || 0) + 1);
  const wanted = list.filter((event) => !eventList.hidden.has(kindOf(event)));
  const acted = list.some((event) => event.action);
  const groups = groupedEvents(wanted);
  const rows = groups.slice(0, eventList.shown).map((group) => eventRow(group, acted));
  const left = groups.length - rows.length;
  fill(
    "events",
    make("h2", {}, "Events ", make("span", { class: "soft" }, whole(total))),
    make("div", { class: "kinds", role: "group", "aria-label": "Kinds of events shown" }, [...kinds].map((kind) => kindButton(data, kind))),
    make(
      "div",
      { class: "wide" },
      make("table", { class: "grid events" }, make("thead", {}, eventHead(acted)), make("tbody", {}, rows)),
    ),
    left > 0
      ? make("button", { type: "button", class: "more", onclick: () => showMore(data) }, `Show ${whole(Math.min(left, PIECE * 5))} more of ${whole(left)}`)
      : null,
    total > list.length ? make("p", { class: "soft" }, `${whole(list.length)} of ${whole(total)} events are in this page; all are in events.jsonl.`) : null,
  );
  return undefined;
}

// Some events are logged a few steps late. After a rollback the same steps come again, so the order of the log is kept.
function inOrder(list) {
  if (list.some((event) => event.event === "rollback")) return list;
  return startsIn(list).flatMap((events) => {
    const last = events.filter((event) => event.event === "end");
    return [...events.filter((event) => event.event !== "end").sort((a, b) => (a.step ?? -1) - (b.step ?? -1)), ...last];
  });
}

// The events of each start of the run: it ends before the next is resumed, or by an event.
function startsIn(list) {
  const starts = [[]];
  for (const event of list) {
    const events = starts[starts.length - 1];
    const before = events[events.length - 1];
    if (before && event.event !== "end" && (event.event === "resume" || before.event === "end")) starts.push([event]);
    else events.push(event);
  }
  return starts;
}

// A captured step is logged as an alarm, but it is not counted as one.
function kindOf(event) {
  return event.cause === "incident" ? "incident" : event.event;
}

function eventHead(acted) {
  const heads = ["Step", "Event", "Details"].map((words) => make("th", { scope: "col" }, words));
  return make("tr", {}, heads, acted ? make("th", { scope: "col", class: "done" }, "Action") : null);
}

// Consecutive events of one kind, cause, part and action.
function groupedEvents(list) {
  const groups = [];
  const key = (event) => [kindOf(event), event.severity, event.cause, event.part, event.action, event.evidence?.incident].join("|");
  for (const event of list) {
    const last = groups[groups.length - 1];
    if (last && key(last[0]) === key(event)) last.push(event);
    else groups.push([event]);
  }
  return groups;
}

const MOST_LISTED = 200;

function eventRow(group, acted) {
  const [event] = group;
  const last = group[group.length - 1];
  const times = group.length > 1 ? make("span", { class: "soft times" }, ` × ${whole(group.length)}`) : "";
  return make(
    "tr",
    { class: event.severity },
    make("td", { class: "value" }, eventStep(event), last.step !== event.step ? [" to ", eventStep(last)] : ""),
    make("td", {}, make("span", { class: `kind ${event.severity}` }, kindOf(event)), times, event.part ? make("span", { class: "soft" }, ` ${event.part}`) : ""),
    make("td", {}, prose(event.summary), event.cause && event.cause !== kindOf(event) ? make("code", { class: "cause" }, event.cause) : "", keptStep(event), otherEvents(group)),
    acted ? make("td", { class: "done" }, event.action || "") : null,
  );
}

function eventStep(event) {
  return event.step === null || event.step === undefined ? "" : stepButton(event.step, whole(event.step));
}

function otherEvents(group) {
  if (group.length < 2) return "";
  const rest = group.slice(1, MOST_LISTED);
  const more = group.length > MOST_LISTED ? make("li", {}, `and ${whole(group.length - MOST_LISTED)} more`) : null;
  return make(
    "details",
    { class: "others" },
    make("summary", {}, `${whole(group.length - 1)} more`),
    make("ul", {}, rest.map((event) => make("li", {}, eventStep(event), " ", prose(event.summary))), more),
  );
}

// The folder of the captured step, and the command that runs it again.
function keptStep(event) {
  const { incident, replay } = event.evidence || {};
  if (!incident) return "";
  const command = replay ? [" · to run it again: ", make("code", {}, replay)] : [];
  return make("div", { class: "soft kept" }, "captured in ", make("code", {}, incident), ...command);
}

function kindButton(data, [kind, count]) {
  const shown = !eventList.hidden.has(kind);
  const flip = () => {
    if (shown) eventList.hidden.add(kind);
    else eventList.hidden.delete(kind);
    drawEvents(data);
    document.querySelector(`#events [data-kind="${CSS.escape(kind)}"]`)?.focus();
  };
  return make("button", { type: "button", class: "toggle", "data-kind": kind, "aria-pressed": shown, onclick: flip }, `${kind} ${whole(count)}`);
}

function showMore(data) {
  eventList.shown += PIECE * 5;
  drawEvents(data);
}
