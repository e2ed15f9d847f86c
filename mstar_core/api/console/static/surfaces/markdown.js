// Markdown of answers: parsed to a tree, then built as elements. Text never becomes markup, and no picture is fetched.

import { el } from "../core/dom.js";

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const ROW = /^\s*\|?(.+\|.*?)\|?\s*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|__(?=\S)([\s\S]*?\S)__(?!\w)|(?<![\w*])\*(?=[^\s*])([\s\S]*?[^\s*])\*(?![\w*])|(?<!\w)_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)|~~(?=\S)([\s\S]*?\S)~~|!?\[([^\]\n]*)\]\(([^()\s]*)\)|\\([\\`*_{}[\]()#+.!|>~-])/;
const WEB = /^(https?:|mailto:)/i;
const DEEPEST = 8;

const node = (tag, children, facts = {}) => ({ tag, children, ...facts });

/** Return the blocks of a text as a tree: {tag, children}, strings at its leaves. */
export function parse(text, depth = 0) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let at = 0;
  const take = (fits) => { const from = at; while (at < lines.length && fits(lines[at], at - from)) at++; return lines.slice(from, at); };
  while (at < lines.length) {
    const line = lines[at];
    let found;
    if (!line.trim()) { at++; continue; }
    if ((found = FENCE.exec(line))) {
      at++;
      const mark = found[1];
      const body = take((each) => !each.trim().startsWith(mark));
      at++;
      blocks.push(node("pre", [body.join("\n")], { language: found[2] }));
    } else if ((found = HEADING.exec(line))) {
      at++;
      blocks.push(node(`h${Math.min(6, found[1].length + 2)}`, inline(found[2])));
    } else if (RULE.test(line)) {
      at++;
      blocks.push(node("hr", []));
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      blocks.push(node("blockquote", parse(take((each) => QUOTE.test(each)).map((each) => QUOTE.exec(each)[1]).join("\n"), depth + 1)));
    } else if (ITEM.test(line) && depth < DEEPEST) {
      blocks.push(list(take((each, i) => i === 0 || ITEM.test(each) || /^\s+\S/.test(each)), depth));
    } else if (ROW.test(line) && DIVIDER.test(lines[at + 1] || "")) {
      blocks.push(table(take((each) => ROW.test(each) || DIVIDER.test(each))));
    } else {
      const rest = take((each, i) => i === 0 || (each.trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(each))));
      blocks.push(node("p", rest.flatMap((each, i) => [...(i ? [node("br", [])] : []), ...inline(each.trim())])));
    }
  }
  return blocks;
}

function list(lines, depth) {
  const [, margin, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= margin.length) items.push([found[3]]);
    else items.at(-1).push(line.slice(Math.min(margin.length + 2, line.search(/\S/))));
  }
  const isCounted = /\d/.test(mark);
  return node(isCounted ? "ol" : "ul", items.map((item) => {
    const blocks = parse(item.join("\n"), depth + 1);
    return node("li", blocks[0]?.tag === "p" ? [...blocks[0].children, ...blocks.slice(1)] : blocks);
  }), isCounted ? { start: Number.parseInt(mark, 10) } : {});
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const [head, , ...rows] = lines;
  const row = (line, tag) => node("tr", cells(line).map((cell) => node(tag, cell)));
  return node("table", [node("thead", [row(head, "th")]), node("tbody", rows.map((line) => row(line, "td")))]);
}

/** Return a line's text with its code, emphasis and links. */
export function inline(text, depth = 0) {
  const made = [];
  let rest = text;
  while (rest) {
    const found = depth < DEEPEST ? INLINE.exec(rest) : null;
    if (!found) { made.push(rest); break; }
    if (found.index) made.push(rest.slice(0, found.index));
    const [whole, , code, strong, strongToo, emphasis, emphasisToo, gone, label, target, plain] = found;
    if (code !== undefined) made.push(node("code", [code]));
    else if (strong ?? strongToo) made.push(node("strong", inline(strong ?? strongToo, depth + 1)));
    else if (emphasis ?? emphasisToo) made.push(node("em", inline(emphasis ?? emphasisToo, depth + 1)));
    else if (gone !== undefined) made.push(node("del", inline(gone, depth + 1)));
    else if (plain !== undefined) made.push(plain);
    else if (whole.startsWith("!") || !WEB.test(target)) made.push(label || target);
    else made.push(node("a", inline(label, depth + 1), { target }));
    rest = rest.slice(found.index + whole.length);
  }
  return made;
}

/** Return the elements of a text. */
export function markdown(text) { return parse(text).map(build); }

function build(part) {
  if (typeof part === "string") return part;
  const children = part.children.map(build);
  if (part.tag === "a") return el("a", { href: part.target, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
  if (part.tag === "pre") return el("pre", { tabindex: 0 }, el("code", {}, children));
  if (part.tag === "table") return el("div", { class: "scroll" }, el("table", {}, children));
  return el(part.tag, part.start > 1 ? { start: part.start } : {}, children);
}
