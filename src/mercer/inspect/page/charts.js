// Pictures as SVG. Each has a title, axes with units, and its numbers for those who do not see it.

const PAD = { left: 52, right: 14, top: 12, bottom: 38 };

function ticks(low, high, number) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / Math.max(number, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let n = Math.floor(Math.log10(low)); n <= Math.ceil(Math.log10(high)); n++)
    for (const m of [1, 2, 5]) {
      const x = m * 10 ** n;
      if (x >= low * 0.999 && x <= high * 1.001) found.push(x);
    }
  return found.length > 7 ? found.filter((x) => /^1/.test(x.toExponential())) : found;
}

// Lines over a common axis. series: [{ name, points: [[x, y], …] }]
function lines({ label, x, y, series, log = false, height = 230 }) {
  const all = series.flatMap((one) => one.points);
  if (!all.length) return empty("Nothing was logged.");
  const [left, right] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  let [low, high] = [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  const logs = log && low > 0 && high / low > 20;
  if (!logs) {
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    [low, high] = [low - (low >= 0 && low < room ? low : room), high + room];
  }
  const draw = (width) => {
    const inner = { w: Math.max(width - PAD.left - PAD.right, 40), h: height - PAD.top - PAD.bottom };
    const across = (v) => PAD.left + ((v - left) / (right - left || 1)) * inner.w;
    const scale = (v) => (logs ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
    const along = (v) => PAD.top + (1 - scale(v)) * inner.h;
    const rows = (logs ? logTicks(low, high) : ticks(low, high, 4)).map((v) => [
      svg("line", { class: "grid", x1: PAD.left, x2: PAD.left + inner.w, y1: along(v), y2: along(v) }),
      svg("text", { class: "tick", x: PAD.left - 6, y: along(v) + 4, "text-anchor": "end" }, format(v)),
    ]);
    const columns = ticks(left, right, Math.max(2, Math.floor(inner.w / 90))).map((v) =>
      svg("text", { class: "tick", x: across(v), y: height - 20, "text-anchor": "middle" }, format(v)));
    const paths = series.map((one, n) => {
      const thin = series.length > 8;
      const points = one.points.map((p) => across(p[0]).toFixed(1) + "," + along(p[1]).toFixed(1));
      return [
        svg("polyline", { class: "line s" + (n % 8) + (thin ? " thin" : ""), points: points.join(" ") }, svg("title", {}, one.name)),
        ...(one.points.length < 12 ? one.points.map((p) => svg("circle", { class: "dot s" + (n % 8), cx: across(p[0]), cy: along(p[1]), r: 2.5 })) : []),
      ];
    });
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label },
      rows, columns,
      svg("text", { class: "axis", x: PAD.left + inner.w / 2, y: height - 4, "text-anchor": "middle" }, x), paths);
  };
  const legend = series.length > 1 && series.length <= 8
    ? el("ul", { class: "legend" }, series.map((one, n) =>
        el("li", {}, svg("svg", { width: 26, height: 10, "aria-hidden": "true" }, svg("line", { class: "line s" + n, x1: 1, x2: 25, y1: 5, y2: 5 })), one.name)))
    : null;
  return el("div", { class: "chart" }, el("p", { class: "axis-y" }, y), fluid(draw), legend, numbers(x, series));
}

// The numbers of a picture as a table that opens.
function numbers(x, series) {
  const place = el("details", { class: "numbers" }, el("summary", {}, "Numbers"));
  place.addEventListener("toggle", () => {
    if (!place.open || place.children.length > 1) return;
    const steps = [...new Set(series.flatMap((one) => one.points.map((p) => p[0])))].sort((a, b) => a - b);
    const every = Math.max(1, Math.ceil(steps.length / 100));
    const some = steps.filter((_, n) => n % every === 0 || n === steps.length - 1);
    const maps = series.slice(0, 32).map((one) => new Map(one.points));
    place.append(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Numbers of the picture" },
      el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col", class: "number" }, x),
        series.slice(0, 32).map((one) => el("th", { scope: "col", class: "number" }, one.name)))),
      el("tbody", {}, some.map((step) => el("tr", {}, el("th", { scope: "row", class: "number" }, format(step)),
        maps.map((map) => el("td", { class: "number" }, map.has(step) ? format(map.get(step)) : "")))))))); 
  });
  return place;
}

// The share of the weight by distance: a bar for each bin. Weights may be below 0.
function shares(one, { label, unit, height = 190 }) {
  const values = one.shares.map((n) => n / MILLION);
  const top = Math.max(...values.map(Math.abs), 1e-9);
  const names = one.far.map((d, n) => {
    const next = one.far[n + 1];
    return next === undefined ? d + "+" : next - d === 1 ? String(d) : d + "–" + (next - 1);
  });
  const draw = (width) => {
    const inner = { w: width - PAD.left - PAD.right, h: height - PAD.top - PAD.bottom };
    const step = inner.w / values.length;
    const every = Math.ceil(46 / step);
    const rows = ticks(0, top, 3).map((v) => {
      const y = PAD.top + (1 - v / top) * inner.h;
      return [svg("line", { class: "grid", x1: PAD.left, x2: PAD.left + inner.w, y1: y, y2: y }),
        svg("text", { class: "tick", x: PAD.left - 6, y: y + 4, "text-anchor": "end" }, format(v))];
    });
    const bars = values.map((v, n) => [
      svg("rect", { class: v < 0 ? "bar minus" : "bar", x: PAD.left + n * step + 1, width: Math.max(step - 2, 1), y: PAD.top + (1 - Math.abs(v) / top) * inner.h, height: (Math.abs(v) / top) * inner.h },
        svg("title", {}, names[n] + " " + unit + " away: " + format(v))),
      n % every === 0 ? svg("text", { class: "tick", x: PAD.left + (n + 0.5) * step, y: height - 20, "text-anchor": "middle" }, names[n]) : null,
    ]);
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, rows, bars,
      svg("text", { class: "axis", x: PAD.left + inner.w / 2, y: height - 4, "text-anchor": "middle" }, "distance in " + unit));
  };
  const title = "share of the weight" + (values.some((v) => v < 0) ? ", orange below 0" : "");
  return el("div", { class: "chart" }, el("p", { class: "axis-y" }, title), fluid(draw));
}

// Small bars, without axes.
function bars(values, { width = 64, height = 26, label = null }) {
  const top = Math.max(...values.map(Math.abs), 1e-9);
  const step = width / Math.max(values.length, 1);
  return svg("svg", { class: "mini", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: label ? "img" : null, "aria-label": label, "aria-hidden": label ? null : "true" },
    values.map((v, n) => svg("rect", { class: v < 0 ? "bar minus" : "bar", x: (n * step + 0.4).toFixed(2), width: Math.max(step - 0.8, 0.5).toFixed(2), y: ((1 - Math.abs(v) / top) * height).toFixed(2), height: Math.max((Math.abs(v) / top) * height, v ? 0.8 : 0).toFixed(2) })));
}

// A line without axes: how a number went.
function spark(points, { width = 72, height = 20 }) {
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const [a, b, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const text = points.map(([x, y]) => (1 + ((x - a) / (b - a || 1)) * (width - 2)).toFixed(1) + "," + (height - 2 - ((y - low) / (high - low || 1)) * (height - 4)).toFixed(1));
  return svg("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "from " + format(ys[0]) + " to " + format(ys[ys.length - 1]) },
    svg("polyline", { class: "line s0", points: text.join(" ") }));
}

// The taps of a token kernel as a strip; the middle is the token itself.
function strip(taps) {
  const size = 18, p = (taps.length - 1) / 2;
  const top = Math.max(...taps.map(Math.abs), 1e-9);
  return svg("svg", { class: "strip", width: size * taps.length, height: size, role: "img",
    "aria-label": "taps from " + -p + " to " + p + ": " + taps.map(format).join(", ") },
    taps.map((tap, n) => [
      svg("rect", { class: "cell", x: n * size + 0.5, y: 0.5, width: size - 1, height: size - 1 }),
      svg("rect", { class: tap < 0 ? "fill minus" : "fill", x: n * size + 0.5, width: size - 1, y: size - 0.5 - (Math.abs(tap) / top) * (size - 1), height: (Math.abs(tap) / top) * (size - 1) },
        svg("title", {}, (n - p > 0 ? "+" : "") + (n - p) + ": " + format(tap))),
    ]));
}
