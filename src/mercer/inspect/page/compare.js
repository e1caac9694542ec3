// The view of several models: their numbers beside each other, and their distances as a tree.

function viewCompare(models, distances) {
  const mean = (model, name) => {
    const some = model.heads.map((one) => one[name]).filter((x) => x !== null);
    return some.length ? some.reduce((a, b) => a + b, 0) / some.length : null;
  };
  const last = (model, name) => {
    const curve = model.curves.find((one) => one.name === name);
    return curve ? curve.values[curve.values.length - 1] : null;
  };
  const deviation = (model) => (model.tokens ? model.tokens.deviation.reduce((a, b) => a + b, 0) / model.tokens.deviation.length / MILLION : null);
  const columns = [
    { name: "Model", value: (model) => model.title },
    { name: "Heads", number: true, value: (model) => model.heads.length },
    ...measures(models[0]).map(([name, title, unit, help]) => ({ name: title, unit: unit && unit + ", mean", help, number: true, value: (model) => mean(model, name) })),
    { name: "Mean deviation", unit: "token kernels", number: true, value: deviation },
    { name: "Validation loss", unit: lossUnit(models[0]), number: true, value: (model) => last(model, "eval_loss") },
  ].filter((column) => !column.number || models.some((model) => column.value(model) !== null));
  return [
    el("p", { class: "lead" }, `${models.length} models. Numbers of heads are means over all heads of a model.`),
    sortable({ label: "Models", columns, rows: models }).place,
    distances ? [el("h2", {}, "Distances of token kernels"), el("p", {}, "The root of the mean squared difference of all taps. The nearest models are joined first, groups by their mean distance."), dendrogram(distances), matrix(distances)]
      : empty("There are no distances: the models do not all have token kernels of one shape."),
    commonTags(models),
  ];
}

function commonTags(models) {
  const tags = [...new Set(models.flatMap((model) => model.tags.map((one) => one.tag)))];
  if (!tags.length) return null;
  const value = (model, tag) => model.tags.find((one) => one.tag === tag)?.mean ?? null;
  const columns = [{ name: "Part of speech", value: (tag) => tag }, ...models.map((model) => ({ name: model.title, number: true, value: (tag) => value(model, tag) }))];
  return [el("h2", {}, "Mean deviation by part of speech"), sortable({ label: "Mean deviation by part of speech", columns, rows: tags, by: 1 }).place];
}

function matrix({ names, matrix }) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Distances" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "From"), names.map((name) => el("th", { scope: "col", class: "number" }, name)))),
    el("tbody", {}, names.map((name, n) => el("tr", {}, el("th", { scope: "row" }, name), matrix[n].map((x) => el("td", { class: "number" }, format(x))))))));
}

function dendrogram({ names, joins }) {
  const step = 26, height = names.length * step + 40;
  // The leaves in the order in which the tree has them.
  const children = new Map(joins.map(([a, b], n) => [names.length + n, [a, b]]));
  const leaves = (n) => (children.has(n) ? children.get(n).flatMap(leaves) : [n]);
  const order = joins.length ? leaves(names.length + joins.length - 1) : names.map((_, n) => n);
  const top = Math.max(...joins.map((j) => j[2]), 1e-9);
  const draw = (width) => {
    const room = Math.min(200, width * 0.4), inner = width - room - 20;
    const across = (h) => 10 + (1 - h / top) * inner;
    const at = new Map(order.map((leaf, n) => [leaf, { x: across(0), y: n * step + 16 }]));
    const paths = joins.map(([a, b, h], n) => {
      const [one, two] = [at.get(a), at.get(b)], x = across(h);
      at.set(names.length + n, { x, y: (one.y + two.y) / 2 });
      return svg("path", { class: "line s0", d: `M${one.x},${one.y} H${x} V${two.y} H${two.x}` });
    });
    const labels = order.map((leaf) => svg("text", { class: "tick strong", x: across(0) + 8, y: at.get(leaf).y + 4 }, names[leaf].length > 26 ? names[leaf].slice(0, 25) + "…" : names[leaf]));
    const axis = ticks(0, top, 4).map((v) => svg("text", { class: "tick", x: across(v), y: height - 18, "text-anchor": "middle" }, format(v)));
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "Tree of the distances; the table below has its numbers" }, paths, labels, axis,
      svg("text", { class: "axis", x: 10 + inner / 2, y: height - 2, "text-anchor": "middle" }, "distance"));
  };
  return fluid(draw, { class: "chart" });
}
