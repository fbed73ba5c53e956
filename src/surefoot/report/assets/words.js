// Formatting of numbers and names.

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

// JSON has no NaN: strings for non-finite values are converted back to numbers.
function real(value) {
  if (value === "nan") return NaN;
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return value;
}

function powerOfTen(exponent) {
  const digits = String(Math.abs(exponent)).split("").map((digit) => SUPERSCRIPTS[digit]);
  return `10${exponent < 0 ? "⁻" : ""}${digits.join("")}`;
}

// Four significant digits, no trailing zeros, powers of ten for very large and very small numbers.
function number(value, digits = 4) {
  if (value === null || value === undefined) return "not measured";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (Number.isInteger(value) && size < 1e6) return sign + whole(size);
  if (size >= 1e5 || size < 1e-3) {
    let exponent = Math.floor(Math.log10(size));
    let front = Number((size / 10 ** exponent).toPrecision(Math.min(digits, 3)));
    if (front >= 10) [front, exponent] = [front / 10, exponent + 1];
    return `${sign}${front === 1 ? "" : `${front} × `}${powerOfTen(exponent)}`;
  }
  return sign + String(Number(size.toPrecision(digits)));
}

function whole(value) {
  return Math.round(value).toLocaleString("en-US");
}

function counted(count, one, many) {
  return `${whole(count)} ${count === 1 ? one : many || `${one}s`}`;
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function bytes(value) {
  let size = Math.abs(value);
  let unit = 0;
  while (size >= 1024 && unit < BYTE_UNITS.length - 1) [size, unit] = [size / 1024, unit + 1];
  return `${Number(size.toPrecision(3))} ${BYTE_UNITS[unit]}`;
}

function percent(share) {
  const value = share * 100;
  return `${value > 0 && value < 1 ? "<1" : Math.round(value)}%`;
}

function withUnit(value, unit) {
  if (!Number.isFinite(value)) return number(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "share") return percent(value);
  return unit ? `${number(value)} ${unit}` : number(value);
}

function duration(seconds) {
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// Layers that differ in the number of their block must look different: outer modules are reduced to their first letter before
// anything is omitted. If that is still too long, only the first one, the number and what follows it remain.
function shortLayer(name, most) {
  if (name.length <= most) return name;
  const pieces = name.split(".");
  const isNumber = (piece) => /^\d+$/.test(piece);
  let short = name;
  for (let place = 0; place < pieces.length - 2 && short.length > most; place += 1) {
    if (!isNumber(pieces[place])) pieces[place] = pieces[place].slice(0, 1);
    short = pieces.join(".");
  }
  const block = pieces.findIndex(isNumber);
  if (short.length <= most || most > 16 || block < 1) return shortened(short, most);
  const last = { weight: "w", bias: "b" }[pieces[pieces.length - 1]] ?? pieces[pieces.length - 1];
  return shortened([pieces[0][0] + pieces[block], ...pieces.slice(block + 1, -1), last].join("."), most);
}

// The end of a name is the most informative part.
function shortened(name, most) {
  if (name.length <= most) return name;
  const tail = Math.ceil((most - 1) * 0.6);
  return `${name.slice(0, most - 1 - tail)}…${name.slice(name.length - tail)}`;
}

function unpacked(text, kind) {
  const raw = atob(text);
  const array = new Uint8Array(raw.length);
  for (let place = 0; place < raw.length; place += 1) array[place] = raw.charCodeAt(place);
  return kind === 16 ? new Uint16Array(array.buffer) : array;
}
