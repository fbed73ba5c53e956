// Light and dark theme: the system's setting, unless the reader changes it. Charts are canvases, so they read colours here.

const theme = {
  listeners: [],
  name() {
    const chosen = document.documentElement.dataset.theme;
    return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  },
  colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  },
  // Colours differ in lightness as well as in hue. Parts and sources use them in order.
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

// Storage may not be available, in particular for a page opened from a file: settings are then lost when the page is closed.
function remember(name, value) {
  try {
    localStorage.setItem(`surefoot.${name}`, value);
  } catch {
    // the setting is not stored
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
