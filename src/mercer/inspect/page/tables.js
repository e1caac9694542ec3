// Tables that sort by every column and show some rows at a time.

function sortable({ label, columns, rows, by = null, down = true, most = 50, choose = null, chosen = null }) {
  const state = { by, down, shown: most, rows };
  const body = el("tbody", {});
  const more = el("button", { class: "more", type: "button", onclick: () => { state.shown += 4 * most; fill(); } });
  const count = el("p", { class: "count", role: "status" });
  const headers = columns.map((column, n) => {
    const button = el("button", { type: "button", title: column.help, onclick: () => order(n) },
      column.name, column.unit ? el("span", { class: "unit" }, column.unit) : null,
      el("span", { class: "arrow", "aria-hidden": "true" }));
    return el("th", { scope: "col", class: column.number ? "number" : null },
      column.value ? button : el("span", { class: "plain" }, column.name));
  });
  const table = el("table", {}, el("caption", { class: "hidden" }, label),
    el("thead", {}, el("tr", {}, headers)), body);

  function order(n) {
    // Numbers begin with the largest, names with the first.
    state.down = state.by === n ? !state.down : Boolean(columns[n].number);
    state.by = n;
    state.shown = most;
    fill();
  }

  function fill() {
    let sorted = state.rows;
    if (state.by !== null) {
      const value = columns[state.by].value;
      const turn = state.down ? -1 : 1;
      sorted = [...state.rows].sort((a, b) => {
        const x = value(a), y = value(b);
        if (x === null || y === null) return (x === null) - (y === null);
        return turn * (typeof x === "string" ? (x < y ? -1 : x > y ? 1 : 0) : x - y);
      });
    }
    headers.forEach((header, n) => {
      if (n === state.by) header.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
    const some = sorted.slice(0, state.shown);
    body.replaceChildren(...some.map((row) => {
      const line = el("tr", { class: chosen && chosen(row) ? "chosen" : null },
        columns.map((column, n) => {
          const cell = column.cell ? column.cell(row) : column.number ? format(column.value(row)) : column.value(row);
          const inner = n === 0 && choose
            ? el("button", { type: "button", class: "pick", "aria-pressed": String(Boolean(chosen && chosen(row))), onclick: () => choose(row) }, cell)
            : cell;
          return el(n === 0 ? "th" : "td", { scope: n === 0 ? "row" : null, class: column.number ? "number" : column.class }, inner);
        }));
      return line;
    }));
    const left = sorted.length - some.length;
    more.textContent = "Show " + whole(Math.min(left, 4 * most)) + " more";
    more.hidden = left <= 0;
    count.textContent = sorted.length === 0 ? "No row." : left > 0
      ? whole(some.length) + " of " + whole(sorted.length) + " rows" : whole(sorted.length) + (sorted.length === 1 ? " row" : " rows");
  }

  fill();
  const place = el("div", { class: "table" },
    el("div", { class: rows.length <= 24 ? "scroll whole" : "scroll", tabindex: "0", role: "region", "aria-label": label }, table),
    el("div", { class: "below" }, count, more));
  return { place, fill, show: (some) => { state.rows = some; state.shown = most; fill(); } };
}
