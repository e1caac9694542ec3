"""Token-Wise Kernels (Leng et al. 2026): causality, parts of speech, and use as a bias.

Kernels have size 3, on values, in the first layer, shared by its heads, as the authors train them.
The rest has their rate of 5e-5. Their rate of kernels, 5e-3, moves few kernels in hundreds of
steps, so studies have a higher one, and that of causality has both. All start from one language
model of 82 novels, in GPT-2's shape but smaller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mercer.studies import Metric, Study, Trained, Variant, roughen
from mercer.studies.leak import published_boundary

PUBLISHED = "style/twikers-published"
TREEBANK = [f"style/ud-ewt-{part}.conllu.xz" for part in ("train", "dev", "test")]
# The parts of speech that the paper names.
NAMED = ("DET", "CCONJ", "PRON", "ADP", "NOUN", "VERB")
SHAPE = {
    "num_layers": 6, "d_model": 384, "num_heads": 6, "context_length": 512, "dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip
OPTIONS = {"base": "vaswani2017", "size": 3, "on": "v", "layers": 1}


def lm_budget(size: str, steps: int) -> dict[str, Any]:
    """The shape of all models here, and a number of steps."""
    if size == "small":
        return {"preset": "tiny", "tokenizer": "bpe:1024", "batch": 8, "length": 128,
                "steps": max(20, steps // 20), "eval_items": 10_000}  # fmt: skip
    return {"preset": "gpt2-small", "tokenizer": "gpt2", "batch": 16, "length": 512,
            "steps": steps, "dtype": "bfloat16", "overrides": SHAPE}  # fmt: skip


def backbone(size: str) -> dict[str, Any]:
    """The language model that all jobs start from."""
    data = "embedded" if size == "small" else "style/novels.zip"
    return {"system": "vaswani2017", "data": data, **lm_budget(size, 4000),
            "learning_rate": 3e-3 if size == "small" else 1e-3}  # fmt: skip


# The authors' rate of the kernels, and one at which they leave the Dirac in hundreds of steps.
AUTHORS, FAST = 5e-3, 0.1
SLOW = "At the authors' rate of 0.005 kernels hardly move in so few steps; fast rows have 0.1."


def tune_kernels(size: str, steps: int = 750) -> dict[str, Any]:
    """The kernels learn, the rest hardly moves: the authors' learning rate."""
    if size == "small":
        few = {"steps": steps // 5, "learning_rate": 5e-5, "token_rate": 0.3}
        return {**lm_budget(size, steps), **few}
    return {**lm_budget(size, steps), "learning_rate": 5e-5, "token_rate": FAST}


def measure_kernels(trained: Trained) -> Mapping[str, float | None]:
    """What the kernels of a model say: deviation by part of speech, alone and beyond frequency."""
    from mercer import inspect

    tokens = trained.model.token_kernels
    found: dict[str, float | None] = {"strict_loss": trained.evaluate()["eval_loss"]}
    if tokens is None:
        return found
    found["deviation"] = float(tokens.deviation().mean())
    if tokens.temperature is not None and tokens.on == "v":
        # In the published code each hidden tap has the logit 0.
        logits = (tokens.weight.detach().double() / tokens.temperature).clone()
        hidden = logits.clone()
        middle = tokens.size // 2
        hidden[..., :middle] = hidden[..., middle + 1 :] = 0
        future = hidden.softmax(-1)[..., middle + 1 :].sum(-1)
        leaks = trained.settings.get("alter") == published_boundary.__name__
        found["future"] = float(future.max()) if leaks else 0.0
    files = [file for place in TREEBANK if (file := trained.file(place)) is not None]
    if not files:
        return found
    tagger = inspect.read_conllu(*files)
    ids = trained.task.text.train.ids
    words = inspect.words_of(trained.task.tokenizer.get_vocab())
    counts = inspect.count_ids(ids, tokens.vocab_size)
    seen = {id: word for id, word in words.items() if counts[id] >= 5}
    rows = inspect.by_tag(tokens.deviation(), seen, tagger)
    found |= {f"deviation_{row.tag}": row.mean for row in rows}
    effect = inspect.tag_effect(tokens.deviation().cpu(), counts, seen, tagger, permutations=199)
    found |= {
        "tags_beyond_frequency": effect.tags_beyond, "p_tags": effect.p_tags,
        "frequency_alone": effect.r2_frequency,
    }  # fmt: skip
    corpus = Path(trained.settings["data"]).name.partition(".")[0]
    if (table := trained.file(f"{PUBLISHED}/{corpus}.distance.json")) is not None:
        theirs = {
            name.upper(): float(x)
            for name, x in json.loads(table.read_text(encoding="utf-8")).items()
        }
        ours = {row.tag: row.mean for row in rows}
        found["rank_published"] = inspect.rank_correlation(ours, theirs)
    return found


COLUMNS = (
    Metric("strict_loss", "loss without the leak", True),
    Metric("deviation", "deviation", False, 4),
    Metric("future", "most on the future", True, 4),
    *(Metric(f"deviation_{tag}", tag, False, 4) for tag in NAMED),
    Metric("rank_published", "rank correlation with the paper", False, 2),
    Metric("tags_beyond_frequency", "tags beyond frequency", False, 2),
)
LOSS = Metric("eval_loss", "loss as trained", True, 4)


def make_causality(size: str) -> Study:
    """The published boundary and ours, on both of the authors' corpora, at two rates."""
    small = size == "small"
    rates: dict[str, dict[str, Any]] = {"": {}} if small else {
        "": {"token_rate": AUTHORS}, "-fast": {"token_rate": FAST},
    }  # fmt: skip
    corpora = {"docs": "embedded"} if small else {
        name: f"{PUBLISHED}/{name}.eval.txt.xz" for name in ("shakes", "victorian")
    }  # fmt: skip
    systems = [
        Variant(
            f"{kind}-{name}{fast}", system="leng2026", system_options=OPTIONS, alter=alter,
            budget={"data": data, **rate},
        )
        for fast, rate in rates.items()
        for name, data in corpora.items()
        for kind, alter in (("strict", None), ("published", published_boundary))
    ]  # fmt: skip
    return Study(
        title="Token kernels with and without the future",
        question="Do the findings on token kernels survive strict causality?",
        cost="3 minutes on two cores, by estimate"
        if small
        else "about 15 minutes on one H200, by estimate",
        systems=systems,
        budget=tune_kernels(size),
        backbone=backbone(size),
        differ=("data", "token_rate"),
        seeds=(0, 1, 2),
        corpus="" if small else "style/novels.zip",
        main=LOSS,
        measure=measure_kernels,
        columns=COLUMNS,
        remark="" if small else SLOW,
    )


def make_speech(size: str) -> Study:
    """Sizes, targets and layers, on the Victorian text."""
    small = size == "small"
    kinds: dict[str, dict[str, Any]] = {
        f"{on}-{taps}": {"size": taps, "on": on} for taps in (3, 5) for on in ("v", "k", "kv")
    }
    kinds["v-3-each-layer"] = {"size": 3, "on": "v", "layers": 2 if small else 6}
    systems = [
        Variant(name, system="leng2026", system_options={**OPTIONS, **options})
        for name, options in kinds.items()
    ]
    data = "embedded" if small else f"{PUBLISHED}/victorian.eval.txt.xz"
    return Study(
        title="Token kernels by part of speech",
        question="Do kernels follow the part of speech of a word, or its frequency?",
        cost="5 minutes on two cores, by estimate"
        if small
        else "about 15 minutes on one H200, by estimate",
        systems=systems,
        budget={**tune_kernels(size), "data": data},
        backbone=backbone(size),
        seeds=(0, 1, 2),
        corpus="" if small else "style/novels.zip",
        main=LOSS,
        measure=measure_kernels,
        columns=tuple(column for column in COLUMNS if column.key not in ("future", "strict_loss")),
    )


BIASES = {"none": None, "keys": "k", "values": "v", "both": "kv"}


def vary_bias() -> list[Variant]:
    """Plain attention, and token kernels on keys, values and both, in every layer."""
    systems = []
    for name, on in BIASES.items():
        parts: dict[str, Any] = {"system": "vaswani2017"}
        if on is not None:
            own = {**OPTIONS, "on": on, "layers": None, "temperature": None}
            parts = {"system": "leng2026", "system_options": own}
        systems.append(Variant(name, **parts))
    return systems


def make_tagging(what: str, size: str) -> Study:
    """Parts of speech of words, or genres of documents, of the English Web Treebank."""
    small, tags = size == "small", what == "tags"
    shape: dict[str, Any] = (
        {"preset": "tiny", "steps": 100, "batch": 16, "eval_items": 200}
        if small else
        # About eight passes over the 12544 sentences, and thirty over the 540 documents.
        {"preset": "gpt2-small", "steps": 1600 if tags else 500, "batch": 64 if tags else 32,
         "dtype": "bfloat16", "learning_rate": 1e-3, "overrides": {**SHAPE, "dropout": 0.1}}
    )  # fmt: skip
    return Study(
        title=f"Token kernels as a bias, on {'parts of speech' if tags else 'genres'}",
        question="Do token kernels help to tell the part of speech of a word?"
        if tags
        else "Do token kernels help to tell the genre of a text?",
        cost="10 minutes on two cores, with --data, by estimate"
        if small
        else f"about {8 if tags else 5} minutes on one H200, by estimate",
        task="tagging",
        systems=vary_bias(),
        budget={**shape, "length": 128 if tags else 512, "tokenizer": "bpe:4096",
                "data_options": {"what": what}},
        seeds=(0, 1, 2),
        corpus="style/ud-ewt",
        columns=(Metric("most_frequent", "always the most frequent", False),),
        remark=(
            "A causal model: a word is tagged from itself and the words to its left."
            if tags
            else "Two documents in three are reviews, so accuracy alone says little."
        ),
    )  # fmt: skip


def make_bias(task: str, size: str) -> Study:
    """Models from scratch with and without token kernels; curves over steps and over seconds."""
    small, lm = size == "small", task == "lm"
    systems = vary_bias()
    if lm:
        budget = {**lm_budget(size, 4000), "learning_rate": 3e-3 if small else 1e-3}
    elif small:
        budget = {"preset": "tiny", "steps": 150, "batch": 32, "tokenizer": "bpe:512",
                  "eval_items": 60, "beams": 2}  # fmt: skip
    else:
        budget = {"preset": "iwslt", "tokenizer": "bpe:8000", "batch": 256, "length": 128,
                  "steps": 2000, "warmup": 0.2, "betas": (0.9, 0.98), "dtype": "bfloat16",
                  "beams": 5}  # fmt: skip
    if small:
        budget["data"] = "embedded"
    return Study(
        title=f"Token kernels as a bias, on {'language models' if lm else 'Multi30k'}",
        question="Do token kernels help a model from scratch, at equal steps and at equal time?",
        cost="5 minutes on two cores, by estimate"
        if small
        else "about 15 minutes on one H200, by estimate",
        task=task,
        systems=systems,
        budget=budget,
        seeds=(0, 1, 2),
        corpus="" if small else "lm/wikipedia" if lm else "translation/multi30k",
    )


def make_pretrained() -> Study:
    """Token kernels in a trained model of transformers, which learns on with and without them."""
    systems = [
        Variant(
            name,
            kernel="Exponential()",
            token_kernels=None if on is None else f'TokenKernels(on="{on}", layers=[0])',
        )
        for name, on in BIASES.items()
    ]
    return Study(
        title="Token kernels as a bias, in a pretrained model",
        question="Do token kernels help a model that is already trained?",
        cost="about 20 minutes on one H200, by estimate",
        systems=systems,
        budget={"init": "HuggingFaceTB/SmolLM2-135M", "batch": 16, "length": 512, "steps": 750,
                "dtype": "bfloat16"},
        seeds=(0, 1, 2),
        corpus="lm/wikipedia",
    )  # fmt: skip


def _sizes(
    make: Callable[..., Study], *given: str, **rough: Any
) -> Mapping[str, Callable[[], Study]]:
    return {
        "full": lambda: make(*given, "full"),
        "rough": lambda: roughen(make(*given, "full"), **rough),
        "small": lambda: make(*given, "small"),
    }


BACKBONE = {"steps": 1500}


studies: dict[str, Mapping[str, Callable[[], Study]]] = {
    "twikers-causality": _sizes(make_causality, steps=300, backbone=BACKBONE),
    "twikers-speech": _sizes(make_speech, steps=300, backbone=BACKBONE),
    "twikers-bias": _sizes(make_bias, "lm", steps=800),
    "twikers-bias-translation": _sizes(make_bias, "translation", steps=600),
    "twikers-bias-pretrained": {
        "full": make_pretrained,
        "rough": lambda: roughen(make_pretrained(), steps=100),
    },
    "twikers-bias-tags": _sizes(make_tagging, "tags", steps=500),
    "twikers-bias-genre": _sizes(make_tagging, "genre", steps=200),
}
