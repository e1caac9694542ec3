"""The study behind `make run`: six systems on the embedded text, in a few minutes on two cores.

A study of your own is a file like this one: copy it, change it, and run `mercer study FILE.py`.
"""

from __future__ import annotations

from mercer.studies import Study, Variant

study = Study(
    name="quick",
    title="Six kinds of attention as a small language model of Python's documentation",
    task="lm",
    systems=[
        "vaswani2017",
        "dai2019",
        "tsai2019",
        # The first with a Gaussian kernel, one learned bandwidth for each head.
        Variant("vaswani2017-rbf", system="vaswani2017", system_options={"kernel": "RBF(heads=4)"}),
        "kundu2026",
        "leng2026",
    ],
    # One budget for all: the same text, tokens, steps and learning rate. Nobody is tuned.
    budget={"data": "embedded", "preset": "tiny", "steps": 200},
    seeds=(0, 1),
    next_steps=[
        ("mercer study quick --seeds 0-4", "more seeds (only the new ones run)"),
    ],
)
