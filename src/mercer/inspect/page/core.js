"use strict";
// Elements, numbers and tokens. Every text becomes a text node; nothing is read as HTML.

const MILLION = 1e6;

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  set(node, attributes);
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, attributes);
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
}

// Three digits, such as 0.0123, 4.56 and 12,345.
function format(x) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1000) return Math.round(x).toLocaleString("en-US");
  if (size < 1e-4) return x.toExponential(1).replaceAll("-", "\u2212");
  const text = Number(x.toPrecision(3)).toString();
  return text.replace("-", "\u2212");
}

function whole(n) {
  return n.toLocaleString("en-US");
}

// Characters that cannot be seen, or that change the order of others, as signs.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/;

function sign(c) {
  const code = c.codePointAt(0);
  if (c === "\n") return "\u23ce";
  if (c === "\t") return "\u21e5";
  if (code < 32) return String.fromCharCode(0x2400 + code);
  if (code === 127) return "\u2421";
  return "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

// A token by itself: a space at an end is a sign, too.
function token(text, most = 32) {
  const all = Array.from(text);
  const shown = all.length > most ? [...all.slice(0, most - 1), "\u2026"] : all;
  const node = el("bdi", { class: "token", title: all.length > most ? plain(text) : null });
  let run = "";
  const flush = () => { if (run) node.append(run); run = ""; };
  shown.forEach((c, n) => {
    const space = c === " " && (n === 0 || n === shown.length - 1);
    if (!space && !HIDDEN.test(c)) { run += c; return; }
    flush();
    node.append(el("span", { class: "sign" }, space ? "\u2423" : sign(c)));
  });
  flush();
  if (!text) node.append(el("span", { class: "sign" }, "(empty)"));
  return node;
}

// A token as a label for screen readers and titles.
function plain(text) {
  return Array.from(text, (c) => (HIDDEN.test(c) ? sign(c) : c)).join("").trim() || "space";
}

// A token in a running text, where its spaces and line ends act.
function running(text) {
  const node = el("bdi", {});
  let run = "";
  for (const c of text) {
    if (c === "\n") {
      node.append(run, el("span", { class: "sign" }, "\u23ce"), "\n");
      run = "";
    } else if (HIDDEN.test(c)) {
      node.append(run, el("span", { class: "sign" }, sign(c)));
      run = "";
    } else run += c;
  }
  node.append(run);
  return node;
}

// Choose one of several by name.
function chooser(label, names, value, change) {
  const select = el("select", { onchange: (event) => change(Number(event.target.value)) },
    names.map((name, n) => el("option", { value: n, selected: n === value }, name)));
  return el("label", { class: "control" }, el("span", {}, label), select);
}

// A drawing that follows the width of its place.
function fluid(draw, attributes) {
  const place = el("div", attributes);
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.floor(place.clientWidth);
    if (width && width !== last) { last = width; place.replaceChildren(draw(width)); }
  }).observe(place);
  return place;
}

function explain(title, entries) {
  return el("details", { class: "explain" }, el("summary", {}, title),
    el("dl", {}, entries.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])));
}

function empty(text) {
  return el("p", { class: "note" }, text);
}

function headName(model, one) {
  return model.layers[one.layer] + ", head " + one.head;
}
