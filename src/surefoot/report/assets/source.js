// The lines of the script around each place that a finding names, as they were during the run, coloured as code.

const CODE = /(#.*$)|((?:\b[rbuf]{1,2})?(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\])*(?:"|$)|'(?:\\.|[^'\\])*(?:'|$)))|\b(\d[\w.]*)\b|\b(False|None|True|and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield)\b/gi;
const CODE_CLASSES = ["comment", "string", "digits", "keyword"];

function source(finding) {
  const lines = finding.evidence?.source;
  if (!lines || typeof lines !== "object") return null;
  const named = new Set(finding.where || []);
  const blocks = sourceBlocks(Object.entries(lines).map(([place, text]) => sourceLine(place, String(text), named)));
  return blocks.length ? make("div", { class: "sources" }, blocks.slice(0, 4).map(sourceBlock)) : null;
}

function sourceLine(place, text, named) {
  const split = place.lastIndexOf(":");
  return { file: place.slice(0, split), number: Number(place.slice(split + 1)), text, isNamed: named.has(place) };
}

// Lines of one file that follow each other, or are separated by one empty line.
function sourceBlocks(lines) {
  lines.sort((a, b) => (a.file < b.file ? -1 : a.file > b.file ? 1 : a.number - b.number));
  const blocks = [];
  for (const line of lines) {
    const block = blocks[blocks.length - 1];
    const before = block?.[block.length - 1];
    if (before && before.file === line.file && line.number - before.number <= 3) {
      for (let empty = before.number + 1; empty < line.number; empty += 1) block.push({ ...line, number: empty, text: "", isNamed: false });
      block.push(line);
    } else blocks.push([line]);
  }
  return blocks.filter((block) => block.some((line) => line.isNamed));
}

function sourceBlock(block) {
  const indents = block.filter((line) => line.text.trim()).map((line) => line.text.length - line.text.trimStart().length);
  const shared = Math.min(...indents);
  const digits = String(block[block.length - 1].number).length;
  const row = (line) =>
    make(
      "div",
      { class: line.isNamed ? "line named" : "line" },
      make("span", { class: "number" }, String(line.number).padStart(digits)),
      coloured(line.text.slice(shared)),
    );
  return make(
    "figure",
    { class: "source" },
    make("figcaption", {}, longName(block[0].file, 60)),
    make("pre", { tabindex: 0, "aria-label": `Lines of ${block[0].file}` }, block.map(row)),
  );
}

// Strings, comments, numbers and keywords of Python.
function coloured(text) {
  const pieces = [];
  let end = 0;
  for (const found of text.matchAll(CODE)) {
    const kind = CODE_CLASSES[found.slice(1).findIndex((piece) => piece !== undefined)];
    if (kind === "keyword" && found[0] !== found[0].toLowerCase() && !["False", "None", "True"].includes(found[0])) continue;
    pieces.push(text.slice(end, found.index), make("span", { class: kind }, found[0]));
    end = found.index + found[0].length;
  }
  return [...pieces, text.slice(end)];
}
