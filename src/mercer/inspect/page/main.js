// Unpacks the data and shows one view at a time.

const VIEWS = [["heads", "Heads", viewHeads], ["rows", "Rows", viewRows], ["tokens", "Token kernels", viewTokens], ["training", "Training", viewTraining]];

async function unpack() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function show({ models, distances }) {
  // A model that is read without a text has no rows of it and no words.
  const some = VIEWS.filter(([name]) => !["rows", "tokens"].includes(name) || models.some((m) => m.has_text || m[name]));
  const views = models.length > 1 ? [["compare", "Compare", () => viewCompare(models, distances)], ...some] : some;
  // The view that the address names, else the first that has something to show.
  const named = views.findIndex(([name]) => "#" + name === location.hash);
  const start = models.length > 1 ? "compare" : models[0].heads.length ? "heads" : models[0].tokens ? "tokens" : "training";
  const first = views.findIndex(([name]) => name === start);
  const state = { model: 0, view: named < 0 ? first : named };
  const title = el("h1", {}), facts = el("dl", { class: "facts" }), notes = el("div", {});
  const which = models.length > 1 ? el("div", { class: "controls" }, chooser("Model", models.map((m) => m.title), 0, (n) => { state.model = n; draw(); })) : null;
  const panel = el("div", { id: "view", role: "tabpanel", tabindex: "-1" });
  const tabs = views.map(([name, label], n) => el("button", { type: "button", role: "tab", id: "tab-" + name, "aria-controls": "view", onclick: () => open(n) }, label));
  const bar = el("div", { class: "tabs", role: "tablist", "aria-label": "Views" }, tabs);
  bar.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    open((state.view + move + views.length) % views.length);
    tabs[state.view].focus();
  });

  function open(n) {
    state.view = n;
    history.replaceState(null, "", "#" + views[n][0]);
    draw();
  }

  function draw() {
    const model = models[state.model], [name, , view] = views[state.view], all = name === "compare";
    if (which) which.hidden = all;
    title.textContent = all ? models.length + " models side by side" : model.title;
    facts.replaceChildren(...(all ? [] : model.facts.map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value)))));
    notes.replaceChildren(...(all ? [] : model.notes.map(empty)));
    tabs.forEach((tab, n) => { tab.setAttribute("aria-selected", String(n === state.view)); tab.tabIndex = n === state.view ? 0 : -1; });
    panel.setAttribute("aria-labelledby", "tab-" + name);
    panel.className = "view-" + name;
    panel.replaceChildren(...[view(model)].flat(Infinity).filter(Boolean));
  }

  document.getElementById("header").append(title, facts, notes, ...(which ? [which] : []), bar);
  document.getElementById("main").replaceChildren(panel);
  draw();
}

unpack().then(show, (error) => document.getElementById("main").replaceChildren(empty("The data of this page cannot be read by this browser: " + error.message)));
