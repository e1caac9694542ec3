"""The study behind `make run`: six kinds of attention in a few minutes on two cores.

A study of your own is a file like this one: copy it, change it, and run `mercer study FILE.py`.
"""

from __future__ import annotations

from mercer.studies import Study, Variant

study = Study(
    name="quick",
    title="Six kinds of attention as small language models of Python's documentation",
    question="Which attention learns fast as a small language model?",
    cost="under four minutes on two cores",
    task="lm",
    systems=[
        "vaswani2017",
        "dai2019",
        "tsai2019",
        # vaswani2017 with a Gaussian kernel, one learned bandwidth per head.
        Variant("vaswani2017-rbf", system="vaswani2017", system_options={"kernel": "RBF(heads=2)"}),
        "kundu2026",
        "leng2026",
    ],
    # The same for all: text, tokens, steps, learning rate. No system is tuned.
    budget={
        "data": "embedded",
        "tokenizer": "bpe:1024",
        "preset": "tiny",
        "steps": 160,
        "batch": 8,
        "length": 128,
        "learning_rate": 3e-3,
        "eval_every": 20,
        "save_every": 40,
    },
    seeds=(0, 1),
    remark=(
        "So short a run shows which system learns fast, not which is best in the end. leng2026 "
        "stays close to vaswani2017, its base: token kernels start as published, at the identity, "
        "and need far more steps to leave it."
    ),
    next_steps=[
        ("mercer study quick --seeds 0-4", "More seeds; only the new ones run:"),
        (
            "mercer study quick --source > mine.py",
            "A study of your own, from the file of this one:",
        ),
        (
            "mercer train lm --kernel 'RBF(2.0) * Exponential(on=\"position\")' --steps 500",
            "A kernel of your own, trained for longer:",
        ),
    ],
)
