"""The four tables of Tsai et al. 2019, each on translation and on language modelling.

Translation has fairseq's shape and recipe for IWSLT'14, on Tatoeba's German to English. All rows
train until three evaluations in a row, one every 250 steps, have no better validation loss. The
model of the best one is tested; its step stands in the table.

Language models have Transformer-XL's blocks, with a memory, on Wikipedia. Position-wise parts,
data, budget and grid are the same for all rows of both tasks. Rows that stand in several tables run
once.

In cross-attention, positions of two sentences have no i - j. So rows with a table or a relative
product have no positions there; the direct sum and Eq. 9 have them, as in the paper's Table 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mercer.studies import Claim, Metric, Paper, Study, Trained, Variant, roughen

PERPLEXITY = Metric("perplexity", "perplexity", True, 2)
# Other texts, of the model as it was saved.
STREAM = Metric("stream_perplexity", "as one text", True, 2)
WIKITEXT = Metric("wikitext_perplexity", "WikiText valid", True, 2)
# Of test data; the curve, and the choice of rates, are of validation data.
BLEU = Metric("test_bleu", "test BLEU", False, 2, PERPLEXITY)
# The paper's own validation data, tokenised and in lower case.
IWSLT = "translation/iwslt14-valid.tsv.xz"
IWSLT_BLEU = Metric("iwslt_bleu", "BLEU, IWSLT'14 valid", False, 2, PERPLEXITY)
BEST = Metric("best_step", "best step", True, 0)
SIZES = ("full", "rough", "small")
EQ9 = {"kernel": "Exponential()", "position": "ProductKernel()"}
SYMMETRIC: dict[str, Any] = {"symmetric": True}


def _translator(name: str, self_attention: Mapping[str, Any], cross: Mapping[str, Any]) -> Variant:
    shape = {"cross_attention": dict(cross)} if cross else {}
    return Variant(name, **self_attention, overrides=shape)


def _own(position: str, value: str = "content", **options: Any) -> dict[str, Any]:
    """An exponential kernel with a position, and the options of its layer."""
    given = {"system_options": options} if options else {}
    return {"kernel": "Exponential()", "position": position, "value": value, **given}


WITH, WITHOUT = "content+position", "content"
# Table 4 has every position with both value functions; Table 1 is its better column but for the
# direct sum, whose original has positions in its values.
POSITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "direct-sum": ("DirectSum()", {}),
    "look-up": ("LookupTable(16)", {}),
    "product-eq5": ("RelativeSinusoid()", {}),
    "product-eq9": ("ProductKernel()", SYMMETRIC),
}
CROSS: dict[str, dict[str, Any]] = {
    "direct-sum": {"kernel": "Exponential()", "position": "DirectSum()", "value": WITH},
    "product-eq9": {**EQ9, "value": WITHOUT, "system_options": SYMMETRIC},
}
VALUES = {"direct-sum": WITH, "look-up": WITHOUT, "product-eq5": WITHOUT, "product-eq9": WITHOUT}
KERNELS = {
    "linear": "Linear(signed=True)",
    "polynomial": "Polynomial(2)",
    "exponential": "Exponential()",
    "rbf": "RBF(trainable=False)",
}


def _position_rows(task: str, names: Sequence[str], values: Mapping[str, str]) -> list[Variant]:
    rows = []
    for name in names:
        position, options = POSITIONS[name]
        attention = _own(position, values[name], **options)
        if task == "translation":
            rows.append(_translator(name, attention, CROSS.get(name, {})))
        else:
            rows.append(Variant(name, **attention))
    return rows


def _kernel_rows(task: str) -> list[Variant]:
    """The configuration of Vaswani et al. for translation, of Dai et al. for language models."""
    rows = []
    base = "direct-sum" if task == "translation" else "product-eq5"
    position, value = POSITIONS[base][0], VALUES[base]
    for symmetric in (False, True):
        for name, kernel in KERNELS.items():
            options = {"system_options": SYMMETRIC} if symmetric else {}
            own: dict[str, Any] = {
                "kernel": kernel,
                "position": position,
                "value": value,
                **options,
            }
            called = f"{name}-symmetric" if symmetric else name
            if task == "lm":
                rows.append(Variant(called, **own))
            else:
                rows.append(_translator(called, own, CROSS[base] | {"kernel": kernel} | options))
    return rows


def _order_rows(task: str) -> list[Variant]:
    none = _own("NoPosition()", **SYMMETRIC)
    if task == "lm":
        return [
            *_position_rows(task, ("direct-sum", "product-eq9"), VALUES),
            Variant("none", **none),
        ]
    both = _position_rows(task, ("product-eq9",), VALUES)[0]
    nowhere = {"kernel": "Exponential()", "position": "NoPosition()", "system_options": SYMMETRIC}
    encoder = Variant(
        "in-a-b", **both.parts | {"overrides": both.parts["overrides"] | {
            "decoder_attention": {"position": "NoPosition()"}}},
    )  # fmt: skip
    return [
        Variant("in-a-b-c", **both.parts), encoder, _translator("none", none, nowhere),
    ]  # fmt: skip


def _value_rows(task: str) -> list[Variant]:
    rows = []
    for value, letter in ((WITH, "I"), (WITHOUT, "II")):
        for row in _position_rows(task, list(POSITIONS), dict.fromkeys(POSITIONS, value)):
            parts = dict(row.parts)
            cross = parts.get("overrides", {}).get("cross_attention")
            if cross:
                parts["overrides"] = {"cross_attention": {**cross, "value": value}}
            rows.append(Variant(f"{row.name}-{letter}", **parts))
    return rows


def measure_text(trained: Trained) -> dict[str, float | None]:
    """Perplexity where memory never ends, and of WikiText's valid part.

    The figure of the table is of texts as long as in training. In one long text absolute positions
    go beyond all that were trained; positions i - j do not.
    """
    found = {STREAM.key: trained.evaluate(evaluate_by="memory", eval_items=120_000)["perplexity"]}
    if (file := trained.file("lm/wikitext-valid.txt.xz")) is not None:
        found[WIKITEXT.key] = trained.evaluate(file)["perplexity"]
    return found


def measure_iwslt(trained: Trained) -> dict[str, float | None]:
    """BLEU of IWSLT'14 valid."""
    file = trained.file(IWSLT)
    assert file is not None
    found = trained.evaluate(file)
    return {IWSLT_BLEU.key: found["bleu"], "iwslt_perplexity": found["perplexity"]}


def _budget(task: str, size: str) -> dict[str, Any]:
    """What all rows share: shape, data, steps."""
    if size == "small":
        shared = {
            "preset": "tiny", "data": "embedded", "steps": 120, "eval_every": 40, "warmup": 0.1,
            "eval_items": 60 if task == "translation" else 20_000,
        }  # fmt: skip
        if task == "translation":
            return {**shared, "batch": 32, "tokenizer": "bpe:512", "beams": 2, "split": "test",
                    "patience": 2, "schedule": "inverse-sqrt"}  # fmt: skip
        return {**shared, "batch": 8, "length": 128, "tokenizer": "bpe:1024",
                "overrides": {"memory_length": 64, "segment_length": 64}}  # fmt: skip
    if task == "translation":
        # About 7,500 tokens of each side in a step, twice as many as fairseq has.
        return {
            "preset": "tiny", "tokenizer": "bpe:10000", "batch": 768, "length": 128,
            "steps": 4000, "patience": 3, "eval_every": 250, "schedule": "inverse-sqrt",
            "warmup": 400, "betas": (0.9, 0.98), "weight_decay": 1e-4, "smoothing": 0.1,
            "beams": 5, "dtype": "bfloat16", "split": "test", "overrides": FAIRSEQ,
        }  # fmt: skip
    return {
        "preset": "tiny", "tokenizer": "bpe:16384", "batch": 32, "length": 1024, "steps": 800,
        "warmup": 0.1, "weight_decay": 0.01, "dtype": "bfloat16", "eval_every": 200,
        "overrides": XL,
    }  # fmt: skip


# Every number of the shapes, so that no change of a preset changes what a result means:
# fairseq's transformer_iwslt_de_en, and Transformer-XL's blocks.
FAIRSEQ: dict[str, Any] = {
    "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "num_heads": 4, "d_ff": 1024,
    "context_length": 1024, "pre_norm": False, "bias": True, "dropout": 0.3,
    "tie_word_embeddings": True,
}  # fmt: skip
XL: dict[str, Any] = {
    "d_model": 512, "num_layers": 8, "num_heads": 8, "d_ff": 2048, "context_length": 512,
    "segment_length": 512, "memory_length": 512, "pre_norm": True, "activation": "relu",
    "bias": True, "dropout": 0.1, "activation_dropout": 0.1, "embedding_scale": True,
    "initializer_range": 0.02, "tie_word_embeddings": True,
}  # fmt: skip
# Fewer data in more steps for each token.
ROUGH: dict[str, dict[str, Any]] = {
    "translation": {"batch": 384, "steps": 800, "eval_every": 200, "warmup": 200,
                    "eval_items": 1000, "trials": {"steps": 200, "warmup": 100}},
    "lm": {"batch": 16, "steps": 300, "eval_every": 100, "trials": {"steps": 100}},
}  # fmt: skip
RATES = {
    ("translation", "full"): (5e-4, 1.5e-3),
    ("lm", "full"): (1e-3, 2e-3),
    ("translation", "small"): (3e-3, 1e-2),
    ("lm", "small"): (3e-3, 1e-2),
}
# Table 1's figures by task; Table 4 and 3 repeat some of them.
ONE = {
    "translation": (33.98, 34.12, 33.62, 34.71),
    "lm": (30.97, 27.56, 24.10, 24.28),
}
TWO = {
    "translation": (None, 32.72, 33.98, 34.26, None, 32.43, 33.78, 34.14),
    "lm": (None, 25.91, 24.10, 24.13, None, 26.25, 24.01, 24.21),
}
THREE = {"translation": (34.71, 34.49, 14.47), "lm": (30.97, 24.28, 30.92)}
FOUR = {
    "translation": (33.98, 34.04, 33.32, 34.60, 34.02, 34.12, 33.62, 34.71),
    "lm": (30.97, 27.56, 24.18, 24.42, 30.50, 27.45, 24.10, 24.28),
}
# Differences that the paper calls small: in BLEU, and in perplexity.
CLOSE = {"translation": 0.5, "lm": 0.5}


def _claims(table: int, task: str) -> list[Claim]:
    close = CLOSE[task]
    if table == 1:
        return [
            Claim("A look-up table is better than the direct sum", "look-up", "direct-sum"),
            Claim("A product kernel (Eq. 9) is better than the direct sum", "product-eq9",
                  "direct-sum"),
            Claim("A product kernel (Eq. 9) is better than a look-up table", "product-eq9",
                  "look-up"),
            Claim("Eq. 9 does as well as Eq. 5, with a third fewer weights", "product-eq9",
                  "product-eq5", margin=close),
        ]  # fmt: skip
    if table == 2:
        infinite = [
            Claim(f"An infinite feature space is better: {one} above polynomial", one, "polynomial")
            for one in ("exponential", "rbf")
        ]
        alike = [
            Claim(f"A symmetric {one} kernel does as well", f"{one}-symmetric", one, margin=close)
            for one in ("polynomial", "exponential", "rbf")
        ]
        linear = [
            Claim(f"The {one} kernel does not converge", one)
            for one in ("linear", "linear-symmetric")
        ]
        return [*linear, *infinite, *alike]
    if table == 3 and task == "lm":
        return [
            Claim("Without positions Eq. 9 loses much", "product-eq9", "none"),
            Claim("A decoder without positions does as well as with a direct sum", "none",
                  "direct-sum", margin=close),
        ]  # fmt: skip
    if table == 3:
        return [
            Claim("The decoder's self-attention hardly needs positions", "in-a-b", "in-a-b-c",
                  margin=close),
            Claim("Without any positions translation breaks down", "in-a-b", "none"),
        ]  # fmt: skip
    return [
        Claim(f"Positions in the values gain nothing: {name}", f"{name}-II", f"{name}-I",
              margin=close)
        for name in POSITIONS
    ]  # fmt: skip


TABLES: dict[int, tuple[str, str, Callable[[str], list[Variant]], Any]] = {
    1: ("positions", "How should positions enter the kernel?",
        lambda task: _position_rows(task, list(POSITIONS), VALUES), ONE),
    2: ("kernels", "Which kernel, and may it be symmetric?", _kernel_rows, TWO),
    3: ("order", "Does a decoder need positions at all?", _order_rows, THREE),
    4: ("values", "Do values need positions?", _value_rows, FOUR),
}  # fmt: skip


def make(table: int, task: str, size: str) -> Study:
    """The study of one table on one task, in one size."""
    if size == "rough":
        return roughen(make(table, task, "full"), **ROUGH[task])
    _, question, rows, figures = TABLES[table]
    lm, small = task == "lm", size == "small"
    takes = "10 minutes on two cores" if small else "about 20 minutes on one H200"
    systems = rows(task)
    names = [variant.name for variant in systems]
    budget = _budget(task, size)
    return Study(
        title=f"Tsai et al. 2019, Table {table}, on {'language models' if lm else 'translation'}",
        question=question,
        cost=f"{takes}, by estimate",
        task=task,
        systems=systems,
        budget=budget,
        tune={"learning_rate": RATES[task, size]},
        # A trial is judged by its loss, so its translations are made fast.
        tune_budget={"steps": budget["steps"] // (2 if small else 3)}
        | ({} if lm else {"beams": 1}),
        seeds=(0, 1, 2) if small or table > 2 else (0, 1, 2, 3, 4),
        corpus="" if small else "lm/wikipedia" if lm else "translation/tatoeba",
        main=PERPLEXITY if lm else BLEU,
        measure=measure_text if lm else None,
        columns=(WIKITEXT, STREAM) if lm else (BEST,),
        paper=Paper(
            source=f"Tsai et al. 2019, Table {table}",
            data="WikiText-103" if lm else "IWSLT'14 De-En",
            metric="perplexity" if lm else "BLEU",
            figures=dict(zip(names, figures[task], strict=True)),
            claims=_claims(table, task),
        ),
    )


def make_iwslt(size: str) -> Study:
    """Table 1 with its own validation data, by models of three corpora."""
    if size == "rough":
        return roughen(make_iwslt("full"), **ROUGH["translation"])
    study = make(1, "translation", size)
    if size == "small":
        return replace(study, title=f"{study.title}, as for IWSLT'14")
    return replace(
        study,
        title=f"{study.title}, IWSLT'14",
        question="How should positions enter the kernel, on the paper's own validation data?",
        budget={**study.budget, "data_options": {"more": ["iwslt14", "multi30k"]}},
        needs=(IWSLT,),
        main=IWSLT_BLEU,
        measure=measure_iwslt,
        columns=(replace(BLEU, title="Tatoeba test BLEU"), BEST),
        remark=(
            "Trained on Tatoeba, Multi30k and the 13,835 pairs of IWSLT'14 that could be had, of "
            "about 160,000. IWSLT'14 valid is tokenised and in lower case; the figure is "
            "sacrebleu's of that text."
        ),
    )


def _named(table: int, task: str) -> str:
    return f"tsai-{TABLES[table][0]}" + ("-lm" if task == "lm" else "")


def _sizes(table: int, task: str) -> dict[str, Callable[[], Study]]:
    return {size: partial(make, table, task, size) for size in SIZES}


studies = {
    _named(table, task): _sizes(table, task) for table in TABLES for task in ("translation", "lm")
} | {"tsai-positions-iwslt": {size: partial(make_iwslt, size) for size in SIZES}}
