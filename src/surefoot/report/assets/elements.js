// Elements are created with DOM functions, and text is inserted as text nodes: no string of the run reaches the HTML parser.

function make(tag, options, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("aria-")) element.setAttribute(name, String(value)); // "false" is a value there
    else if (value === false) continue;
    else if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === undefined || child === null || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

function fill(id, ...children) {
  const place = document.getElementById(id);
  place.replaceChildren(...children.flat().filter(Boolean));
  place.hidden = place.childNodes.length === 0;
  return place;
}

// A button that looks like a link in running text.
function stepButton(step, words) {
  return make(
    "button",
    { class: "step", type: "button", title: "Zoom the charts to this step", onclick: () => visitStep(step) },
    words || `step ${whole(step)}`,
  );
}

// Findings quote code in backticks.
function prose(words) {
  return String(words)
    .split(/`([^`]+)`/)
    .map((piece, place) => (place % 2 ? make("code", {}, piece) : piece));
}

// A long name: shortened in the middle, complete in the tooltip and for screen readers.
function longName(name, most, tag = "code") {
  const short = shortened(name, most);
  return make(tag, short === name ? {} : { title: name, "aria-label": name }, short);
}
