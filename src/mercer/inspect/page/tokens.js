// The view of token kernels: all tokens, parts of speech, and the text by deviation.

function viewTokens(model) {
  const found = model.tokens;
  if (!found) return [empty("This model has no token kernels. Systems with token kernels, such as leng2026, have one for each token of the vocabulary.")];
  const size = found.size, p = (size - 1) / 2, { width, low, decimals } = found;
  const all = model.words.map((text, id) => {
    const taps = Array.from({ length: size }, (_, n) => (Number(found.taps.substr((id * size + n) * width, width)) + low) / 10 ** decimals);
    const side = taps.slice(p + 1).reduce((a, b) => a + b, 0) - taps.slice(0, p).reduce((a, b) => a + b, 0);
    return { id, text, taps, side, deviation: found.deviation[id] / MILLION, count: found.count ? found.count[id] : null, tag: found.tag && found.tag[id] >= 0 ? found.tags[found.tag[id]] : null };
  });
  const columns = [
    { name: "Token", value: (one) => one.text.trim().toLowerCase(), cell: (one) => token(one.text) },
    { name: "Number", number: true, value: (one) => one.id, cell: (one) => String(one.id), help: "The id of the token in the vocabulary" },
    ...(found.count ? [{ name: "Count", unit: "in the text", number: true, value: (one) => one.count }] : []),
    ...(found.tag ? [{ name: "Part of speech", value: (one) => one.tag ?? "\uffff", cell: (one) => one.tag ?? "–" }] : []),
    { name: "Deviation", number: true, value: (one) => one.deviation, help: "|kernel − Dirac|: 0 where the token's value stays its own" },
    { name: "Direction", number: true, value: (one) => one.side, cell: (one) => direction(one.side), help: "Taps to the right minus taps to the left" },
    { name: "Kernel", cell: (one) => strip(one.taps) },
    { name: "Taps", cell: (one) => el("span", { class: "mono" }, one.taps.map((x) => x.toFixed(Math.min(decimals, 4))).join("  ")), class: "taps" },
  ];
  const start = columns.findIndex((c) => c.name === "Deviation");
  const table = sortable({ label: "All tokens", columns, rows: all, by: start, most: 40 });
  const state = { text: "", tag: -1, used: false };
  function filter() {
    const wanted = state.text.toLowerCase();
    table.show(all.filter((one) => (!wanted || one.text.toLowerCase().includes(wanted)) && (state.tag < 0 || one.tag === found.tags[state.tag]) && (!state.used || one.count > 0)));
  }
  const search = el("label", { class: "control" }, el("span", {}, "Search"), el("input", { type: "search", placeholder: "part of a token", autocomplete: "off", spellcheck: "false", oninput: (event) => { state.text = event.target.value; filter(); } }));
  const tag = found.tags.length ? chooser("Part of speech", ["all", ...found.tags], 0, (n) => { state.tag = n - 1; filter(); }) : null;
  const used = found.count ? el("label", { class: "control check" }, el("input", { type: "checkbox", onchange: (event) => { state.used = event.target.checked; filter(); } }), el("span", {}, "only tokens of the text")) : null;
  const moved = all.filter((one) => one.deviation > 0.01).length;
  return [
    el("p", { class: "lead" }, `Each token has a small kernel of ${size} taps that mixes its ${size === 3 ? "neighbours" : p + " neighbours on each side"} into it. ${whole(moved)} of ${whole(all.length)} tokens deviate by more than 0.01 from a kernel that changes nothing.`),
    model.tags.length ? [el("h2", {}, "Parts of speech"), drawTags(model)] : null,
    el("h2", {}, "All tokens"),
    el("div", { class: "controls" }, search, tag, used), table.place,
    model.ids.length ? [el("h2", {}, "In the text"), inText(model, all)] : null,
    explain("What the numbers mean", [
      ["Deviation", "The distance between the kernel and a Dirac, which leaves the token as it is: the root of the summed squares of their differences."],
      ["Direction", "Taps to the right minus taps to the left. Below 0 the token takes more from the tokens before it, above 0 more from those after it."],
      ["Taps", `From ${-p} tokens (to the left) to +${p} tokens (to the right); the middle one is the token itself.`],
      ...(model.tags.length ? [["Mean and spread", "Of the deviations of the tokens with this part of speech; the spread is their standard deviation."]] : [])]),
  ];
}

function direction(side) {
  if (Math.abs(side) < 5e-4) return "–";
  return el("span", { class: side < 0 ? "left" : "right" }, side < 0 ? "\u2190 " : "\u2192 ", format(Math.abs(side)));
}

function drawTags(model) {
  const top = Math.max(...model.tags.map((one) => Math.max(one.mean, one.published ?? 0)), 1e-9);
  const some = (words) => el("span", { class: "few" }, words.slice(0, 6).map((word) => token(word, 16)));
  const columns = [
    { name: "Part of speech", value: (one) => one.tag, cell: (one) => el("abbr", { title: TAGS[one.tag] ?? one.tag }, one.tag) },
    { name: "Tokens", number: true, value: (one) => one.tokens },
    { name: "Mean deviation", number: true, value: (one) => one.mean },
    { name: "Spread", unit: "std.", number: true, value: (one) => one.spread },
    ...(model.corpus ? [{ name: "Published", unit: model.corpus, number: true, value: (one) => one.published }] : []),
    { name: "Picture", cell: (one) => meanDot(one, top) },
    { name: "Direction", number: true, value: (one) => one.direction, cell: (one) => direction(one.direction) },
    { name: "Most", cell: (one) => some(one.most) },
    { name: "Least", cell: (one) => some(one.least) },
  ];
  return sortable({ label: "Parts of speech", columns, rows: model.tags, by: 2 }).place;
}

const TAGS = { ADJ: "adjective", ADP: "adposition", ADV: "adverb", AUX: "auxiliary", CCONJ: "coordinating conjunction", DET: "determiner", INTJ: "interjection", NOUN: "noun", NUM: "numeral", PART: "particle", PRON: "pronoun", PROPN: "proper noun", PUNCT: "punctuation", SCONJ: "subordinating conjunction", SYM: "symbol", VERB: "verb", X: "other" };

// The mean as a disc, and the published one as a ring.
function meanDot(one, top) {
  const at = (x) => (6 + (x / top) * 88).toFixed(1);
  return svg("svg", { class: "dots", width: 100, height: 16, viewBox: "0 0 100 16", role: "img", "aria-label": "mean " + format(one.mean) + (one.published === null ? "" : ", published " + format(one.published)) },
    svg("line", { class: "grid", x1: 6, x2: 94, y1: 8, y2: 8 }),
    one.published === null ? null : svg("circle", { class: "ring", cx: at(one.published), cy: 8, r: 5 }),
    svg("circle", { class: "dot s0", cx: at(one.mean), cy: 8, r: 3.2 }));
}

function inText(model, all) {
  const text = el("div", { class: "text deviations", tabindex: "0", role: "region", "aria-label": "The text, coloured by deviation" });
  // A kernel that has hardly moved stays pale.
  const top = Math.max(0.01, ...model.ids.map((id) => all[id].deviation));
  const state = { shown: 0 };
  const more = el("button", { class: "more", type: "button", onclick: () => add() });
  function add() {
    const part = model.ids.slice(state.shown, state.shown + 2000);
    text.append(...part.map((id) => {
      const one = all[id], node = el("span", { class: "t" }, running(one.text));
      if (one.deviation > top * 0.02) {
        node.classList.add("seen");
        node.style.setProperty("--w", (8 + 52 * one.deviation / top).toFixed(1) + "%");
        node.title = `deviation ${format(one.deviation)}, taps ${one.taps.map(format).join(", ")}`;
      }
      return node;
    }));
    state.shown += part.length;
    more.hidden = state.shown >= model.ids.length;
    more.textContent = `Show ${whole(Math.min(2000, model.ids.length - state.shown))} more tokens`;
  }
  add();
  return el("div", {}, el("p", { class: "unit" }, `The stronger the shade, the more a token's kernel deviates; the strongest stands for ${format(top)}.`), text, more);
}
