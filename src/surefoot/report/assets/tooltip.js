// One tooltip for the whole page. Rows are [colour, name, value]; everything in it is text.

function showTip(x, y, title, rows, note) {
  const tip = document.getElementById("tip");
  const lines = rows.map(([colour, name, value]) => {
    const dot = make("span", { class: "dot" });
    if (colour) dot.style.background = colour;
    else dot.classList.add("none");
    return make("tr", {}, make("td", {}, dot, name), make("td", { class: String(value).length < 30 ? "value short" : "value" }, value));
  });
  tip.replaceChildren(
    make("div", { class: "title" }, title),
    ...(lines.length ? [make("table", {}, make("tbody", {}, lines))] : []),
    ...(note ? [make("div", { class: "note" }, note)] : []),
  );
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth - 8 ? Math.max(8, x - box.width - 16) : x + 16;
  const top = Math.min(Math.max(8, y - box.height / 2), innerHeight - box.height - 8);
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}
