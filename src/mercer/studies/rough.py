"""A rough version of a study: the same rows, models and data, on a fraction of the budget.

It says in minutes of one GPU what the full study may find. Its models are far from trained, so it
gives no verdict on a paper's claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from .study import Study, Variant

COST = "a few minutes on one H200, by estimate"


def roughen(
    study: Study,
    *,
    cost: str = COST,
    share: float | None = None,
    trials: Mapping[str, Any] | None = None,
    backbone: Mapping[str, Any] | None = None,
    **budget: Any,
) -> Study:
    """The study with a smaller budget, and three seeds at most.

    Args:
        study: the full one.
        cost: what it costs, for `mercer study list`.
        share: of the steps that variants have of their own.
        trials: changed settings of the trials of the tuning.
        backbone: changed settings of the run that all jobs start from.
        budget: changed settings of all runs.
    """
    changed = [
        f"{name.replace('_', ' ')} {value} for {study.budget[name]}"
        for name, value in budget.items()
        if study.budget.get(name) is not None
    ]
    changed += [f"{share:.0%} of the steps"] if share else []
    changed += [
        f"{name} {value} for {study.backbone[name]} of the model that all start from"
        for name, value in (backbone or {}).items()
    ]
    remark = f"A rough version: {', '.join(changed)} of the full study."
    paper = study.paper
    if paper is not None and paper.claims:
        paper = replace(paper, claims=[])
        remark += " That is too little for a verdict on the paper's claims."
    return replace(
        study,
        title=f"{study.title}: a rough version",
        systems=[_cut(variant, share) for variant in study.variants],
        cost=cost,
        budget={**study.budget, **budget},
        tune_budget={**study.tune_budget, **(trials or {})},
        backbone={**study.backbone, **(backbone or {})},
        seeds=tuple(study.seeds)[:3],
        paper=paper,
        remark=f"{remark} {study.remark}".strip(),
    )


def _cut(variant: Variant, share: float | None) -> Variant:
    if share is None or "steps" not in variant.budget:
        return variant
    cut = copy(variant)
    cut.budget = {**variant.budget, "steps": max(1, round(share * variant.budget["steps"]))}
    return cut
