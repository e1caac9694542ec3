"""Data that needs no download: text and digits. (`grammar.py` makes pairs.)

The text is Python's own documentation from `pydoc_data`, a part of CPython. Much of it occurs twice
(the topic `specialnames` repeats `attribute-access` and others word by word). So a topic that
repeats another is left out, and topics that share ten words in a row are in the same split.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .corpus import Block, Corpus, Documents
from .errors import DataError, need

SHARED_WORDS = 10
VALID_SHARE = 0.1


def read_documentation() -> Corpus:
    """The topics of Python's documentation, in a train and a valid split that share no passage."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise DataError(
            "this Python has no pydoc_data.topics, the module with its documentation; "
            "give a text file or a folder instead of 'embedded'"
        ) from None
    train, valid = split_topics(topics)
    return Corpus(
        source=f"embedded: documentation topics of Python {platform.python_version()}",
        splits={
            "train": _join([topics[name] for name in train]),
            "valid": _join([topics[name] for name in valid]),
        },
    )


def split_topics(topics: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Names of the train and the valid topics; no ten words in a row are in both."""
    words = {name: text.split() for name, text in topics.items()}
    runs = {
        name: {tuple(text[i : i + SHARED_WORDS]) for i in range(len(text) - SHARED_WORDS + 1)}
        for name, text in words.items()
    }
    owner: dict[tuple[str, ...], str] = {}
    group: dict[str, str] = {}

    def find(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    # the longest first, so that the repeated parts are the ones left out
    for name in sorted(topics, key=lambda name: (-len(words[name]), name)):
        shared = [run for run in runs[name] if run in owner]
        if 2 * len(shared) > len(runs[name]):
            continue
        group[name] = name
        for run in shared:
            group[find(owner[run])] = find(name)
        owner.update(dict.fromkeys(runs[name], name))

    groups: dict[str, list[str]] = {}
    for name in sorted(group):
        groups.setdefault(find(name), []).append(name)
    sizes = {head: sum(len(topics[name]) for name in names) for head, names in groups.items()}
    wanted = VALID_SHARE * sum(sizes.values())
    valid: list[str] = []
    taken = 0
    # ordered by a hash of the name, which is independent of the content
    for head in sorted(groups, key=lambda head: hashlib.sha256(groups[head][0].encode()).digest()):
        if taken < wanted and sizes[head] < wanted / 2:
            valid += groups[head]
            taken += sizes[head]
    train = sorted(set(group) - set(valid))
    return train, sorted(valid)


def _join(texts: list[str]) -> Documents:
    """Texts one after the other, as one document."""
    text = "\n".join(texts)

    def read() -> Iterator[Block]:
        yield Block(text, True, 1.0)

    return Documents(read=read, fingerprint=hashlib.sha256(text.encode()).hexdigest())


def read_digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Scikit-learn's digits, [N, 8, 8, 1], their classes, and how many are for training.

    The last fifth, in the order of the library, is for validation.
    """
    digits = need("sklearn.datasets").load_digits()
    # their values go from 0 to 16
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int64)
    return pixels, labels, len(labels) * 4 // 5
