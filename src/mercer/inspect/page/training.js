// The view of training: losses, rates and bandwidths over steps.

const CURVES = {
  loss: ["Loss", "How badly the next token was predicted, on the batches of training and on held-out text; lower is better."],
  bits_per_byte: ["Bits per byte", "How many bits a byte of held-out text costs; it does not depend on the tokenizer."],
  perplexity: ["Perplexity", "exp of the loss: among how many equally likely tokens the model would choose."],
  accuracy: ["Accuracy", "The share of right answers on held-out data."],
  bleu: ["BLEU", "How close translations are to the references, from 0 to 100."],
  learning_rate: ["Learning rate", "The size of the steps of the optimiser."],
  grad_norm: ["Gradient norm", "The length of the gradient before it is clipped."],
  tokens_per_second: ["Speed", "How many tokens were read in a second."],
};

// The same where they are of images.
const IMAGES = {
  loss: "How badly the class was predicted, on the batches of training and on held-out images; lower is better.",
  tokens_per_second: "How many patches were read in a second.",
};

function viewTraining(model) {
  if (!model.curves.length) return [empty("There is no journal of a training beside this model. The folder of a run, runs/NAME, has one.")];
  const byName = new Map(model.curves.map((curve) => [curve.name, curve]));
  const figures = [];
  const add = (title, text, unit, series) => figures.push(el("figure", {}, el("h3", {}, title), el("figcaption", {}, text),
    lines({ label: title + " over steps", x: "step", y: unit, series, log: true })));
  const series = (names) => names.filter((n) => byName.has(n)).map((n) => ({ name: LABELS[n] ?? n.replaceAll("_", " "), points: points(byName.get(n)) }));
  const done = new Set();
  for (const [name, [title, text]] of Object.entries(CURVES)) {
    const names = name === "loss" ? ["loss", "eval_loss", "unigram_loss"] : [name];
    const some = series(names);
    names.forEach((n) => done.add(n));
    if (some.length) add(title, model.unit === "tokens" ? text : IMAGES[name] ?? text, byName.get(names.find((n) => byName.has(n))).unit || title.toLowerCase(), some);
  }
  const widths = model.curves.filter((curve) => curve.name.startsWith("bandwidth "));
  if (widths.length) {
    const layers = [...new Set(widths.map((curve) => curve.name.split(" ").slice(1, -1).join(" ")))];
    const place = el("div", {});
    const show = (n) => place.replaceChildren(lines({ label: "bandwidths over steps", x: "step", y: "bandwidth", log: true,
      series: widths.filter((curve) => n === 0 || curve.name.startsWith("bandwidth " + layers[n - 1] + " ")).map((curve) => ({ name: curve.name.slice(10).replace(/ (\d+)$/, ", head $1"), points: points(curve) })) }));
    show(layers.length > 1 ? 1 : 0);
    figures.push(el("figure", {}, el("h3", {}, "Bandwidths"), el("figcaption", {}, "How far each head looks in feature space, a line for each head."),
      chooser("Layer", ["all layers", ...layers], layers.length > 1 ? 1 : 0, show), place));
  }
  for (const curve of model.curves)
    if (!done.has(curve.name) && !curve.name.startsWith("bandwidth ") && curve.steps.length > 1)
      add(curve.name.replaceAll("_", " "), "As the run has logged it.", curve.unit, series([curve.name]));
  const last = series(["loss", "eval_loss"]).map((one) => `${one.name} ${format(one.points[one.points.length - 1][1])}`).join(", ");
  const steps = Math.max(...model.curves.flatMap((curve) => curve.steps));
  return [el("p", { class: "lead" }, `${whole(steps)} steps${last ? "; at the end " + last + " " + lossUnit(model) : ""}.`), el("div", { class: "charts" }, figures)];
}

function lossUnit(model) {
  return model.unit === "tokens" ? "nats per token" : "nats per image";
}

const LABELS = { loss: "training", eval_loss: "validation", unigram_loss: "token frequencies alone" };
