"""Classify corpora by their style: leave one out, with p-values by permutations of the labels."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from ..names import suggest
from .style import Distances, Features, distances

Method = Literal["nearest", "logistic"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class Score:
    """How many corpora were classified rightly.

    Attributes:
        what: what was compared, as `compare` names it.
        method: "nearest" or "logistic".
        accuracy: the share that is right.
        chance: the mean accuracy with permuted labels.
        p: the share of permutations that are as good, with (1 + n) / (1 + N).
        predicted: the label that each corpus got.
    """

    what: str = ""
    method: str
    accuracy: float
    chance: float
    p: float
    predicted: dict[str, str]


def classify(
    given: Features | Distances,
    labels: Mapping[str, str],
    *,
    method: Method = "nearest",
    groups: Mapping[str, str] | None = None,
    strength: float = 1.0,
    permutations: int = 999,
    seed: int = 0,
) -> Score:
    """Each corpus by the others: by the nearest one, or by logistic regression.

    Args:
        given: features (by Euclidean distance for "nearest"), or distances.
        labels: the label of each corpus, such as its author, period or genre.
        method: "nearest"; or "logistic", which needs features: centred and scaled by their mean
            norm, both of the training part.
        groups: corpora of one group are left out together, so that a period is not recognised by
            its authors. If every group has one label, labels are permuted among groups.
        strength: the inverse of the L2 penalty of the logistic regression.
        permutations: of the labels; each is a whole cross-validation again. With "logistic" that
            is one fit of some milliseconds for each group: 99 do for p = 0.01.
        seed: of the permutations.
    """
    if method not in METHODS:
        raise ValueError(f"no method {method!r}; {suggest(str(method), METHODS)}")
    if permutations < 1:
        raise ValueError(f"permutations must be at least 1, got {permutations}")
    names = given.names
    owners = [str(n) for n in range(len(names))] if groups is None else _pick(groups, names)
    truth = _pick(labels, names)
    _check(truth, owners)
    if method == "logistic":
        if not isinstance(given, Features):
            raise ValueError("logistic regression needs features, but distances are given")
        predict = _logistic(given, owners, strength)
    else:
        matrix = distances(given) if isinstance(given, Features) else given
        predict = _nearest(matrix, owners)
    predicted = predict(truth)
    right = _count(truth, predicted)
    generator = random.Random(seed)
    reached = []
    for _ in range(permutations):
        dealt = _permute(truth, owners, generator)
        reached.append(_count(dealt, predict(dealt)))
    return Score(
        method=method,
        accuracy=right / len(names),
        chance=sum(reached) / len(names) / permutations,
        p=(1 + sum(n >= right for n in reached)) / (1 + permutations),
        predicted=dict(zip(names, predicted, strict=True)),
    )


def compare(
    given: Mapping[str, Features | Distances],
    labels: Mapping[str, str],
    *,
    groups: Mapping[str, str] | None = None,
    strength: float = 1.0,
    permutations: int = 999,
    seed: int = 0,
) -> list[Score]:
    """`classify` of each: by the nearest, and by logistic regression where there are features.

    Give token kernels beside `word_frequencies` and `ngram_distances`. All see the same
    permutations.
    """
    return [
        replace(
            classify(
                one, labels, method=method, groups=groups, strength=strength,
                permutations=permutations, seed=seed,
            ),
            what=what,
        )
        for what, one in given.items()
        for method in (METHODS if isinstance(one, Features) else METHODS[:1])
    ]  # fmt: skip


Predict = Callable[[Sequence[str]], list[str]]


def _nearest(given: Distances, owners: Sequence[str]) -> Predict:
    matrix = given.matrix.clone()
    for n, owner in enumerate(owners):
        matrix[n, [m for m, other in enumerate(owners) if other == owner]] = float("inf")
    # Of equal distances the first; the neighbours do not depend on the labels.
    near: list[int] = matrix.argmin(1).tolist()
    return lambda labels: [labels[n] for n in near]


def _logistic(given: Features, owners: Sequence[str], strength: float) -> Predict:
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    if not strength > 0:
        raise ValueError(f"strength must be positive, got {strength}")
    # A rotation changes neither products nor the L2 penalty: N columns instead of F.
    u, s, _ = torch.linalg.svd(given.values.double(), full_matrices=False)
    rows = (u * s).numpy()
    folds: list[tuple[Any, Any]] = []
    for owner in dict.fromkeys(owners):
        out = np.array([other == owner for other in owners])
        mean = rows[~out].mean(0)
        scale = np.sqrt(((rows[~out] - mean) ** 2).sum(1).mean()) or 1.0
        folds.append((out, (rows - mean) / scale))

    def predict(labels: Sequence[str]) -> list[str]:
        truth = np.array(labels)
        found = truth.copy()
        for out, x in folds:
            if len(set(truth[~out])) == 1:
                found[out] = truth[~out][0]
                continue
            model = LogisticRegression(C=strength, max_iter=5000)
            found[out] = model.fit(x[~out], truth[~out]).predict(x[out])
        return [str(label) for label in found]

    return predict


def _pick(given: Mapping[str, str], names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in given:
            raise ValueError(f"{name!r} has no label or group; {suggest(name, given)}")
    return [str(given[name]) for name in names]


def _check(truth: Sequence[str], owners: Sequence[str]) -> None:
    if len(set(truth)) < 2:
        raise ValueError(f"two labels or more are needed, got {', '.join(set(truth)) or 'none'}")
    for label in dict.fromkeys(truth):
        holders = {owner for owner, one in zip(owners, truth, strict=True) if one == label}
        if len(holders) < 2:
            raise ValueError(
                f"the label {label!r} is in one group (or one corpus) alone, so it can never be "
                "predicted without it: leave it out"
            )


def _permute(truth: Sequence[str], owners: Sequence[str], generator: random.Random) -> list[str]:
    label_of = dict(zip(owners, truth, strict=True))
    if any(label_of[o] != label for o, label in zip(owners, truth, strict=True)):
        return generator.sample(list(truth), len(truth))
    # Groups of one label: deal the labels to the groups.
    dealt = generator.sample(list(label_of.values()), len(label_of))
    new = dict(zip(label_of, dealt, strict=True))
    return [new[owner] for owner in owners]


def _count(truth: Sequence[str], predicted: Sequence[str]) -> int:
    return Counter(a == b for a, b in zip(truth, predicted, strict=True))[True]
