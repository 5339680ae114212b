// Markdown as elements. Text becomes text nodes and never markup, and nothing is loaded: an image is a link to it.
// Time grows with the length of the text, whatever a model writes: nothing is searched twice, and depth has a limit.

const MAX_DEPTH = 8, LINK = /^(https?:\/\/|mailto:)/i;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/, HEADING = /^(#{1,6})\s+(.*)$/, RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/, QUOTE = /^ {0,3}> ?/, TABLE_RULE = /^[\s|:-]+$/;

/** An element of children, and of arrays of them: there may be more than a call takes arguments. */
export function make(name, className, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  for (const child of children.flat()) element.append(child);
  return element;
}

/** Show a text that grows: only blocks that changed are made again, so that a selection in others stays. */
export function showMarkdown(element, text) {
  const sources = blocks(text.split("\n")), shown = [...element.children];
  sources.forEach((lines, i) => {
    const source = lines.join("\n");
    if (shown[i]?.source === source) return;
    const made = block(lines, 0);
    made.source = source;
    shown[i] ? shown[i].replaceWith(made) : element.append(made);
  });
  for (const old of shown.slice(sources.length)) old.remove();
}

/** Lines in groups, one for each block. */
function blocks(lines) {
  const out = [];
  for (let i = 0; i < lines.length; ) {
    const from = i, line = lines[i++], fence = FENCE.exec(line);
    if (!line.trim()) continue;
    if (fence) {
      while (i < lines.length && !closes(lines[i], fence[1])) i++;
      i++;
    } else if (ITEM.test(line) && !RULE.test(line)) {
      for (let open = null; i < lines.length; i++) { // a fence within an item may hold empty lines
        const inner = FENCE.exec(lines[i].trim());
        if (open) open = closes(lines[i].trim(), open) ? null : open;
        else if (inner) open = inner[1];
        else if (!lines[i].trim() ? !/^(\s+\S|\s*([-*+]|\d{1,9}[.)])\s)/.test(lines[i + 1] ?? "") : starts(lines[i]) && !ITEM.test(lines[i])) break;
      }
    } else if (QUOTE.test(line)) {
      while (i < lines.length && QUOTE.test(lines[i])) i++;
    } else if (!HEADING.test(line) && !RULE.test(line)) {
      while (i < lines.length && lines[i].trim() && !starts(lines[i])) i++;
    }
    out.push(lines.slice(from, i));
  }
  return out;
}

const closes = (line, fence) => line.trim().length >= fence.length && line.trim() === fence[0].repeat(line.trim().length);
const starts = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
const within = (lines, depth) => (depth >= MAX_DEPTH ? [make("p", "", lines.join("\n"))]
  : blocks(lines).map((each) => block(each, depth + 1)));

function block(lines, depth) {
  const first = lines[0], fence = FENCE.exec(first), heading = HEADING.exec(first);
  if (fence) {
    const closed = lines.length > 1 && closes(lines.at(-1), fence[1]);
    return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), fence[2]);
  }
  if (heading) return make("h" + Math.min(6, heading[1].length + 2), "", inline(heading[2].trimEnd().replace(/\s#+$/, "")));
  if (RULE.test(first)) return make("hr");
  if (QUOTE.test(first)) return make("blockquote", "", within(lines.map((line) => line.replace(QUOTE, "")), depth));
  if (ITEM.test(first)) return list(lines, depth);
  if (lines.length > 1 && first.includes("|") && TABLE_RULE.test(lines[1]) && /\|/.test(lines[1]) && /-/.test(lines[1])) return table(lines);
  return make("p", "", inline(lines.join("\n")));
}

export function codeBlock(code, language) {
  const button = make("button", "copy", "Copy"), text = make("code", "", code);
  button.type = "button";
  return make("div", "code", make("div", "bar", make("span", "", language || "text"), button), make("pre", "", text));
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]), items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push([item[3]]);
    else items.at(-1).push(line.replace(/^(\t| {1,4})/, ""));
  }
  const element = make(/\d/.test(mark) ? "ol" : "ul", "", items.map((each) => {
    const inner = within(each, depth);
    if (inner[0]?.tagName === "P") inner[0] = [...inner[0].childNodes]; // an item's first line is no paragraph
    return make("li", "", inner.flat());
  }));
  if (/\d/.test(mark)) element.start = parseInt(mark);
  return element;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").slice(0, 64);
  const row = (line, name) => make("tr", "", cells(line).map((cell) => make(name, "", inline(cell.trim()))));
  return make("div", "scroll", make("table", "", make("thead", "", row(lines[0], "th")),
    make("tbody", "", lines.slice(2).map((line) => row(line, "td")))));
}

/** Nodes of a text in one line or several. */
function inline(text) {
  const out = [], open = new Map(), missing = new Set(); // marks that are open, by where they stand in `out`; ends not found
  const special = /\\([\\`*_{}\[\]()#+.!|~>-])|(`+)|(\*\*|__|~~|\*|_)|!?\[([^\[\]\n]{0,500})\]\(([^()\s]{1,2000})\)|(https?:\/\/[^\s<>"'`]{1,2000})|\n/g;
  let at = 0, found;
  while ((found = special.exec(text))) {
    if (found.index > at) out.push(text.slice(at, found.index));
    at = special.lastIndex;
    const [all, escaped, ticks, mark, label, target, bare] = found;
    if (escaped) out.push(escaped);
    else if (ticks) {
      const end = missing.has(ticks) ? -1 : closing(text, ticks, at);
      if (end < 0) missing.add(ticks), out.push(ticks);
      else out.push(make("code", "", text.slice(at, end).trim())), (at = special.lastIndex = end + ticks.length);
    } else if (mark) {
      emphasis(out, open, mark, text[found.index - 1] ?? " ", text[at] ?? " ");
    } else if (bare) {
      const url = bare.replace(/[.,;:!?)\]]+$/, "");
      out.push(link(url, url));
      at = special.lastIndex = found.index + url.length;
    } else if (target) out.push(LINK.test(target) ? link(target, label || target) : all);
    else out.push(make("br"));
  }
  if (at < text.length) out.push(text.slice(at));
  return out;
}

/** Where so many backticks and no more stand next. */
function closing(text, ticks, from) {
  for (let at = text.indexOf(ticks, from); at >= 0; ) {
    let end = at;
    while (text[end] === "`") end++;
    if (end - at === ticks.length) return at;
    at = text.indexOf(ticks, end);
  }
  return -1;
}

function emphasis(out, open, mark, before, after) {
  const inWord = mark[0] === "_" && /\w/.test(before) && /\w/.test(after);
  if (open.has(mark) && /\S/.test(before) && !inWord) {
    const from = open.get(mark), inner = out.splice(from).slice(1);
    for (const [other, at] of open) if (at >= from) open.delete(other);
    out.push(make({ "**": "strong", __: "strong", "~~": "s" }[mark] ?? "em", "", inner));
  } else {
    if (!open.has(mark) && /\S/.test(after) && !inWord) open.set(mark, out.length);
    out.push(mark);
  }
}

function link(url, text) {
  const element = make("a", "", text);
  Object.assign(element, { href: url, target: "_blank", rel: "noopener noreferrer nofollow" });
  return element;
}
