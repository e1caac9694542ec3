"""Token kernels by part of speech, and the published ones against their published table."""

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest
import torch

import mercer as mc
from mercer import inspect

SENTENCE = """# text = The cat 's run
1-2\tThe cat\t_\t_\t_\t_\t_\t_\t_\t_
1\tThe\tthe\tDET\tDT\t_\t2\tdet\t_\t_
2\tcat\tcat\tNOUN\tNN\t_\t0\troot\t_\t_
2.1\tghost\tghost\tNOUN\tNN\t_\t_\t_\t_\t_
3\trun\trun\tVERB\tVB\t_\t2\tdep\t_\t_

1\tthe\tthe\tDET\tDT\t_\t2\tdet\t_\t_
2\trun\trun\tNOUN\tNN\t_\t0\troot\t_\t_
3\trun\trun\tNOUN\tNN\t_\t0\troot\t_\t_

"""
VOCABULARY = {"\u0120the": 0, "The": 1, "\u0120cat": 2, "run": 3, "\u0120'": 4, "\u0120dog": 5}


@pytest.mark.parametrize("suffix", ["conllu", "conllu.gz", "conllu.xz"])
def test_a_word_has_its_most_frequent_tag_or_all_with_their_shares(tmp_path, suffix):
    path = tmp_path / f"words.{suffix}"
    opened = {"gz": gzip.open, "xz": lzma.open}.get(suffix.split(".")[-1], open)
    with opened(path, "wt", encoding="utf-8") as file:
        file.write(SENTENCE)
    tags = inspect.read_conllu(path)
    assert [tags(word) for word in ("The", "the", "THE", "run", "cat")] == [
        "DET", "DET", "DET", "NOUN", "NOUN",
    ]  # fmt: skip
    assert tags("ghost") is None
    assert tags("Thecat") is None
    assert tags.shares("run") == {"VERB": 1 / 3, "NOUN": 2 / 3}


def test_a_file_without_words_is_refused(tmp_path):
    (tmp_path / "empty.conllu").write_text("nothing\n")
    with pytest.raises(ValueError, match=r"no tagged word in .*empty\.conllu"):
        inspect.read_conllu(tmp_path / "empty.conllu")


def test_words_are_tokens_of_letters_and_a_text_chooses_among_them(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps(VOCABULARY))
    words = inspect.words_of(tmp_path / "vocab.json")
    assert words == {0: "the", 1: "The", 2: "cat", 3: "run", 5: "dog"}
    assert inspect.words_in("The cat's run", VOCABULARY) == {1: "The", 2: "cat"}


def test_means_by_tag_from_a_table_or_any_callable():
    values = torch.tensor([0.3, 0.5, 0.1, 0.2, 9.0, 0.0])
    words = inspect.words_of(VOCABULARY)
    table = {"the": "DET", "The": "DET", "cat": "NOUN", "run": "VERB", "dog": "NOUN"}
    rows = inspect.by_tag(values, words, table, minimum=2)
    assert [(row.tag, row.tokens) for row in rows] == [("DET", 2), ("NOUN", 2)]
    assert [row.mean for row in rows] == pytest.approx([0.4, 0.05])
    (row,) = inspect.by_tag(values, words, lambda word: {"A": 0.25, "B": 0.75}, merge={"B": "A"})
    assert (row.tag, row.tokens) == ("A", 10)
    assert row.mean == pytest.approx(1.1 / 5)
    with pytest.raises(ValueError, match="'dog' has the id 5, but there are 3 values"):
        inspect.by_tag(values[:3], {5: "dog"}, table)


def test_rank_correlation_is_spearmans():
    a = {"x": 1.0, "y": 2.0, "z": 3.0, "w": 10.0}
    assert inspect.rank_correlation(a, {n: v**3 for n, v in a.items()}) == pytest.approx(1)
    assert inspect.rank_correlation(a, {n: -v for n, v in a.items()}) == pytest.approx(-1)
    # by hand: ranks 0 1 2 3 and 0.5 0.5 2 3
    tied = inspect.rank_correlation(a, {"x": 5.0, "y": 5.0, "z": 6.0, "w": 7.0, "other": 0.0})
    assert tied == pytest.approx(0.9486833)
    with pytest.raises(ValueError, match="two names in common"):
        inspect.rank_correlation(a, {"x": 1.0})


DATA = Path(os.environ.get("MERCER_DATA", Path(__file__).parents[3] / "shared" / "data"))
STYLE = DATA / "style"
published = pytest.mark.skipif(
    not (STYLE / "twikers-published").is_dir(),
    reason="the published weights are not here; MERCER_DATA may name the folder that has them",
)
# Symbols, and what has no tag, mean different things to the two taggers.
NO_PART_OF_SPEECH = {"X", "SYM", "PUNCT"}


@pytest.fixture(scope="module")
def treebank():
    return inspect.read_conllu(*(STYLE / f"ud-ewt-{s}.conllu.xz" for s in ("train", "dev", "test")))


def compare(corpus, tagger):
    """Means by tag, those published, and the rank correlation."""
    folder = STYLE / "twikers-published"
    tokens = mc.nn.TokenKernels.load_published(folder / f"{corpus}.pt")
    assert tokens.weight.shape == (50257, 1, 1, 1, 3)
    with lzma.open(folder / f"{corpus}.eval.txt.xz", "rt", encoding="utf-8") as file:
        words = inspect.words_in(file.read(), DATA / "tokenizer" / "gpt2" / "vocab.json")
    rows = inspect.by_tag(tokens.deviation(), words, tagger, merge={"PART": "ADP"})
    theirs = json.loads((folder / f"{corpus}.distance.json").read_text())
    # What they call "prop" is adpositions and particles.
    theirs = {{"prop": "ADP"}.get(tag, tag.upper()): mean for tag, mean in theirs.items()}
    ours = {row.tag: row.mean for row in rows if row.tag not in NO_PART_OF_SPEECH}
    return ours, theirs, inspect.rank_correlation(ours, theirs)


@published
@pytest.mark.parametrize("corpus", ["shakes", "victorian"])
@pytest.mark.parametrize("kind", ["shares", "most frequent"])
def test_the_published_kernels_have_the_published_order(corpus, kind, treebank):
    ours, _, correlation = compare(corpus, treebank.shares if kind == "shares" else treebank)
    assert correlation >= 0.95
    function_words = min(ours[tag] for tag in ("DET", "CCONJ", "PRON", "ADP"))
    assert function_words > 5 * max(ours[tag] for tag in ("NOUN", "VERB", "PROPN"))


@published
def test_determiners_deviate_as_published(treebank):
    ours, theirs, _ = compare("shakes", treebank.shares)
    assert theirs["DET"] == pytest.approx(0.052, abs=5e-4)
    assert ours["DET"] == pytest.approx(theirs["DET"], rel=0.03)
