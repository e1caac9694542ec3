// The view of heads: a map of small pictures, one head in full, and a table of all.

const MEASURES = [
  ["neighbours", "Effective neighbourhood", "tokens", "How many tokens a row would look at if it looked at all of them alike: exp of the entropy of its weights, averaged over the rows."],
  ["distance", "Mean distance", "tokens", "How far away the tokens are that a row looks at, weighted by the weights."],
  ["self", "Weight on self", "share", "The share of the weight that a token gives to itself."],
  ["first", "Weight on the first token", "share", "The share of the weight on the first token of the text; much of it often means that the head looks at nothing in particular."],
  ["bandwidth", "Bandwidth", "", "s in the kernel: how far apart a query and a key may lie in feature space and still count."],
  ["start", "Bandwidth at the start", "", "s before training."],
];

// A text about tokens, in the words of the model: an image has patches.
function inWords(model, text) {
  if (model.unit === "tokens") return text;
  const words = { tokens: model.unit, token: "patch", text: "image", "first token": model.first, "first token of the text": model.first };
  return text.replace(/first token( of the text)?|tokens?|text/g, (found) => words[found]);
}

function measures(model) {
  return MEASURES.map(([name, title, unit, help]) => [name, inWords(model, title), inWords(model, unit),
    inWords(model, help) + (name === "distance" && model.unit !== "tokens" ? " Across the image, from centre to centre; a class token has no place in it." : "")]);
}

function viewHeads(model) {
  if (!model.heads.length) return [empty("There is no text to read the heads with: give mercer inspect a text with --text.")];
  const state = { head: 0, measure: 0 };
  const known = measures(model).filter(([name]) => model.heads.some((one) => one[name] !== null));
  const map = el("div", { class: "map" }), detail = el("section", { class: "detail", "aria-live": "polite" });
  const logged = new Map(model.curves.filter((c) => c.name.startsWith("bandwidth ")).map((c) => [c.name, c]));
  const curveOf = (one) => logged.get("bandwidth " + model.layers[one.layer] + " " + one.head);

  const columns = [
    { name: "Layer", value: (one) => one.layer, cell: (one) => el("span", { class: "mono" }, model.layers[one.layer]), help: "The name of the layer in the model" },
    { name: "Head", number: true, value: (one) => one.head, cell: (one) => String(one.head) },
    { name: "By distance", cell: (one) => (one.shares.length ? bars(one.shares, { width: 80, height: 20, label: "share of the weight by distance" }) : "–") },
    ...known.map(([name, title, unit, help]) => ({ name: title, unit, help, number: true, value: (one) => one[name] })),
    ...(logged.size ? [{ name: "Over training", cell: (one) => (curveOf(one) ? spark(points(curveOf(one)), {}) : "–") }] : []),
    { name: "Keys in sight", unit: model.unit, number: true, value: (one) => one.visible, help: inWords(model, "How many tokens a row may look at, on average") },
    { name: "Kernel", value: (one) => one.kernel, cell: (one) => el("span", { class: "mono" }, one.kernel), class: "formula" },
  ];
  const table = sortable({
    label: "All heads", columns, rows: model.heads, most: 48, choose: (one) => { choose(model.heads.indexOf(one)); detail.scrollIntoView({ block: "nearest" }); },
    chosen: (one) => model.heads[state.head] === one,
  });

  function choose(n) {
    state.head = n;
    drawMap();
    drawDetail();
    table.fill();
  }

  function drawMap() {
    const focused = map.contains(document.activeElement);
    const name = known[state.measure][0];
    const layers = [...new Set(model.heads.map((one) => one.layer))];
    map.replaceChildren(...layers.map((layer) => el("div", { class: "layer" },
      el("h3", {}, model.layers[layer]),
      el("div", { class: "cells", role: "group", "aria-label": model.layers[layer] }, model.heads.map((one, n) => one.layer !== layer ? null
        : el("button", { type: "button", class: "cell", "aria-pressed": String(n === state.head), "data-head": n, tabindex: n === state.head ? "0" : "-1",
            "aria-label": headName(model, one) + ", " + known[state.measure][1] + " " + format(one[name]), onclick: () => choose(n) },
            el("span", { class: "name" }, String(one.head)), bars(one.shares, {}), el("span", { class: "value" }, format(one[name]))))))));
    if (focused) map.querySelector("[aria-pressed=true]").focus();
  }
  map.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    choose((state.head + move + model.heads.length) % model.heads.length);
  });

  function drawDetail() {
    const one = model.heads[state.head];
    const same = (other) => other.layer === one.layer && other.head === one.head;
    const spread = model.spreads.find(same), curve = curveOf(one);
    const figures = known.filter(([name]) => one[name] !== null);
    detail.replaceChildren(
      el("h3", {}, headName(model, one)),
      el("p", { class: "kernel" }, el("span", { class: "label" }, "weight of a key k for a query q"), el("code", {}, one.kernel)),
      el("dl", { class: "figures" }, figures.map(([name, title, unit, help]) => el("div", { title: help },
        el("dt", {}, title), el("dd", {}, format(one[name]), unit ? el("span", { class: "unit" }, unit) : null)))),
      el("div", { class: "charts" },
        one.shares.length ? el("figure", {}, el("figcaption", {}, "Where the weight goes: the share of it at each distance."), shares(one, { label: "share of the weight by distance", unit: model.unit })) : null,
        model.positions.filter(same).map((found) => el("figure", {}, el("figcaption", {}, "What positions alone do: log of the factor ", el("code", {}, found.kernel), " by distance, largest = 0", found.spread.some(Boolean) ? ", averaged over queries." : "."), distanceChart(found))),
        curve ? el("figure", {}, el("figcaption", {}, "Its bandwidth over training."), lines({ label: "bandwidth over steps", x: "step", y: "bandwidth", series: [{ name: "bandwidth", points: points(curve) }] })) : null,
        spread ? drawSpread(spread) : null));
  }

  choose(0);
  return [
    el("p", { class: "lead" }, `${whole(model.heads.length)} heads in ${whole(new Set(model.heads.map((one) => one.layer)).size)} layers. Each picture shows where a head's weight goes: near ${model.unit} at the left, far ones at the right. Choose one to read it in full.`),
    el("div", { class: "split" },
      el("section", { "aria-label": "Map of heads" }, chooser("Number below each picture", known.map((m) => m[1]), 0, (n) => { state.measure = n; drawMap(); }), map),
      detail),
    el("h2", {}, "All heads"), table.place,
    explain("What the numbers mean", [...known.map(([, title, unit, help]) => [title + (unit ? ` (${unit})` : ""), help]),
      ["Keys in sight (tokens)", "How many tokens a row may look at, by the filter and its place in the text, on average."].map((text) => inWords(model, text))]),
  ];
}

function points(curve) {
  return curve.steps.map((step, n) => [step, curve.values[n]]).filter((p) => p[1] !== null);
}

function distanceChart(found) {
  const top = Math.max(...found.log);
  const series = [{ name: "log weight", points: found.distances.map((d, n) => [d, (found.log[n] - top) / MILLION]) }];
  return lines({ label: "log weight by distance", x: "distance i − j in tokens", y: "log weight", series });
}

function drawSpread(spread) {
  const [low, quarter, half, three, high] = spread.quantiles;
  const list = (title, words) => el("div", {}, el("h4", {}, title), el("ol", { class: "words" }, words.map(([word, s]) => el("li", {}, token(word), el("span", { class: "unit" }, format(s))))));
  return el("figure", {}, el("figcaption", {}, `Each query computes its own bandwidth: half of them lie between ${format(quarter)} and ${format(three)}, around ${format(half)}; 90 % between ${format(low)} and ${format(high)}.`),
    el("div", { class: "ends" }, list("Widest", spread.widest), list("Narrowest", spread.narrowest)));
}
