// Light and dark: the system's choice until the reader makes one. Charts are canvases, so they ask for colours here.

const theme = {
  listeners: [],
  name() {
    const chosen = document.documentElement.dataset.theme;
    return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  },
  colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  },
  // Distinct without help from hue alone: lightness differs too. Parts and sources take them in turn.
  series(place) {
    return theme.colour(`series-${(place % 6) + 1}`);
  },
  toggle() {
    document.documentElement.dataset.theme = theme.name() === "dark" ? "light" : "dark";
    remember("theme", document.documentElement.dataset.theme);
    theme.changed();
  },
  changed() {
    for (const listener of theme.listeners) listener();
  },
};

// Storage may be refused, to a page from a file above all: then a choice lasts as long as the page.
function remember(name, value) {
  try {
    localStorage.setItem(`surefoot.${name}`, value);
  } catch {
    // nothing is lost but the memory of it
  }
}

function recall(name) {
  try {
    return localStorage.getItem(`surefoot.${name}`);
  } catch {
    return null;
  }
}

function startTheme() {
  const chosen = recall("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme.changed);
}
