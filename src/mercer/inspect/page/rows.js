// The view of rows: a token of the text, and what it looks at, head by head.

function viewRows(model) {
  const rows = model.rows;
  if (!rows) return [empty(model.ids.length ? "No rows were read of this model." : "There is no text: give mercer inspect a text with --text.")];
  const slot = new Map(rows.places.map((place, n) => [place, n]));
  const end = Math.min(model.context || model.ids.length, model.ids.length);
  const state = { layer: 0, head: 0, place: rows.places[rows.places.length - 1] };
  const word = (place) => model.words[model.ids[place]] ?? "";
  const text = el("div", { class: "text", role: "group", "aria-label": "The text; arrow keys move the token that looks" });
  const answer = el("section", { class: "answer", "aria-live": "polite" }), grid = el("div", { class: "map small" });
  const nodes = [];
  for (let place = 0; place < end; place++) {
    const can = slot.has(place);
    const node = el("span", { class: can ? "t can" : "t", "data-place": place, role: can ? "button" : null, "aria-label": can ? plain(word(place)) + ", token " + place : null }, running(word(place)));
    nodes.push(node);
  }
  text.append(...nodes);
  text.addEventListener("click", (event) => {
    const node = event.target.closest(".can");
    if (!node) return;
    look(Number(node.dataset.place));
    node.focus({ preventScroll: true });
  });
  text.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (!move) return;
    event.preventDefault();
    const n = Math.max(0, Math.min(rows.places.length - 1, slot.get(state.place) + move));
    look(rows.places[n]);
    nodes[state.place].focus();
  });
  const row = (layer, head) => {
    const flat = rows.layers[layer].heads[head][slot.get(state.place)];
    const pairs = [];
    for (let n = 0; n + 1 < flat.length; n += 2) pairs.push([flat[n], flat[n + 1] / MILLION]);
    return { pairs, rest: flat[flat.length - 1] / MILLION };
  };
  const layerName = (n) => model.layers[rows.layers[n].layer];
  const layers = chooser("Layer", rows.layers.map((_, n) => layerName(n)), 0, (n) => { state.layer = n; state.head = Math.min(state.head, rows.layers[n].heads.length - 1); draw(); });
  let painted = [];

  function look(place) {
    for (const node of [nodes[state.place], nodes[place]]) { node.classList.remove("self"); node.tabIndex = -1; node.removeAttribute("aria-pressed"); }
    state.place = place;
    nodes[place].classList.add("self");
    nodes[place].tabIndex = 0;
    nodes[place].setAttribute("aria-pressed", "true");
    draw();
  }

  function draw() {
    const { pairs, rest } = row(state.layer, state.head);
    for (const node of painted) { node.style.removeProperty("--w"); node.classList.remove("seen"); node.removeAttribute("title"); }
    const top = Math.max(...pairs.map((p) => Math.abs(p[1])), 1e-9);
    painted = pairs.map(([key, weight]) => {
      const node = nodes[key];
      node.classList.add("seen");
      node.style.setProperty("--w", (12 + 48 * Math.abs(weight) / top).toFixed(1) + "%");
      node.title = "weight " + format(weight);
      return node;
    });
    layers.querySelector("select").value = state.layer;
    const total = Math.max(...pairs.map((p) => Math.abs(p[1])), 1e-9);
    answer.replaceChildren(
      el("h3", {}, token(word(state.place)), " ", el("span", { class: "unit" }, "token " + whole(state.place))),
      el("p", {}, "looks, in ", el("strong", {}, layerName(state.layer) + ", head " + state.head), ", at:"),
      el("table", { class: "looks" }, el("caption", { class: "hidden" }, "The largest weights of the row"),
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Token"), el("th", { scope: "col", class: "number" }, "Before it", el("span", { class: "unit" }, "tokens")), el("th", { scope: "col", class: "number" }, "Weight", el("span", { class: "unit" }, "share")), el("th", { scope: "col" }, el("span", { class: "hidden" }, "Picture")))),
        el("tbody", {}, pairs.map(([key, weight]) => el("tr", {}, el("th", { scope: "row" }, token(word(key), 20)),
          el("td", { class: "number" }, key === state.place ? "itself" : whole(state.place - key)), el("td", { class: "number" }, format(weight)), el("td", { class: "wide" }, bar(weight / total)))))),
      el("p", { class: "unit" }, `All other tokens together: ${format(rest)}.`));
    drawGrid();
  }

  // Near keys at the right, as in the text, by powers of two.
  function profile(layer, head) {
    const bins = new Array(12).fill(0);
    for (const [key, weight] of row(layer, head).pairs) bins[11 - Math.min(11, Math.floor(Math.log2(Math.abs(state.place - key) + 1)))] += Math.abs(weight);
    return bins;
  }

  function drawGrid() {
    const focused = grid.contains(document.activeElement);
    grid.replaceChildren(el("div", { class: "cells", role: "group", "aria-label": "Heads of " + layerName(state.layer) }, rows.layers[state.layer].heads.map((_, h) => {
      const best = row(state.layer, h).pairs[0];
      return el("button", { type: "button", class: "cell", "aria-pressed": String(h === state.head), tabindex: h === state.head ? "0" : "-1",
        "aria-label": "head " + h + ", most at " + (best ? plain(word(best[0])) + ", weight " + format(best[1]) : "nothing"), onclick: () => { state.head = h; draw(); } },
        el("span", { class: "name" }, String(h)), bars(profile(state.layer, h), {}), el("span", { class: "value" }, best ? token(word(best[0]), 9) : "–"));
    })));
    if (focused) grid.querySelector("[aria-pressed=true]").focus();
  }
  grid.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const count = rows.layers[state.layer].heads.length;
    state.head = (state.head + move + count) % count;
    draw();
  });

  look(state.place);
  const first = rows.places[0], last = rows.places[rows.places.length - 1];
  requestAnimationFrame(() => { text.scrollTop = nodes[state.place].offsetTop - text.clientHeight / 2; });
  return [
    el("p", { class: "lead" }, `Choose a token with a line below it (${whole(first)} to ${whole(last)}) to see which tokens it looks at. The stronger the shade, the larger the weight. The weights are exact; up to ${rows.most} of each row are here, the largest.`),
    el("div", { class: "controls" }, layers),
    grid,
    el("div", { class: "split reading" }, text, answer),
    explain("What the numbers mean", [
      ["Weight (share)", "The share of a token's value in the output of this head at the chosen token. With ordinary kernels the weights of a row sum to 1."],
      ["Before it (tokens)", "How many tokens back in the text; negative for tokens after it."],
      ["Small pictures", "A head each: its largest weights by distance, far tokens at the left and near ones at the right, in powers of two; below, the token it looks at most."]]),
  ];
}

function bar(share) {
  return svg("svg", { class: "hbar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { class: "bar", x: 0, y: 1, height: 8, width: (100 * Math.min(1, Math.abs(share))).toFixed(1) }));
}
