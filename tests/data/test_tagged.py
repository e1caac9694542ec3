"""Words with parts of speech and documents with genres, and models that label them."""

import lzma

import pytest

pytest.importorskip("transformers")

from mercer import data
from mercer.train import Settings, run

TEXT = """# newdoc id = reviews-1
# text = Cats sleep.
1	Cats	cat	NOUN	_	_	2	nsubj	_	_
2-3	sleep.	_	_	_	_	_	_	_	_
2	sleep	sleep	VERB	_	_	0	root	_	_
3	.	.	PUNCT	_	_	2	punct	_	_

1	Good	good	ADJ	_	_	0	root	_	_
2	cats	cat	NOUN	_	_	1	x	_	_

# newdoc id = email-2
1	Send	send	VERB	_	_	0	root	_	_
2	cats	cat	NOUN	_	_	1	obj	_	_
"""


@pytest.fixture
def source(tmp_path):
    for split in ("train", "dev"):
        (tmp_path / f"a-{split}.conllu.xz").write_bytes(lzma.compress(TEXT.encode()))
    return tmp_path / "a"


def test_a_label_follows_the_last_piece_of_its_word(source, tmp_path):
    found = data.tagged(source, tokenizer="bytes", cache_dir=tmp_path)
    assert found.names == ("NOUN", "VERB", "ADJ", "PUNCT")
    assert (len(found.train), len(found.valid), found.test) == (3, 3, None)
    item = found.train[0]
    text = found.tokenizer.decode(item["input_ids"][:-1])
    assert text == " Cats sleep ."
    labelled = {n: x for n, x in enumerate(item["labels"].tolist()) if x >= 0}
    # Each stands one place after its word, where a language model predicts it.
    assert labelled == {5: 0, 11: 1, 13: 3}
    assert len(item["labels"]) == len(item["input_ids"]) == 14


def test_a_document_has_one_label_at_its_end(source, tmp_path):
    found = data.tagged(source, what="genre", length=9, tokenizer="bytes", cache_dir=tmp_path)
    assert found.names == ("email", "reviews")
    items = [found.train[n] for n in range(len(found.train))]
    assert [item["labels"].tolist() for item in items] == [[-100] * 8 + [n] for n in (1, 0)]
    assert found.tokenizer.decode(items[0]["input_ids"][:-1]) == " Cats sl"


def test_bad_input_is_one_sentence(source, tmp_path):
    with pytest.raises(ValueError, match="what must be one of tags, genre, got 'word'"):
        data.tagged(source, what="word")
    with pytest.raises(ValueError, match=r"must be CoNLL-U files of train and valid.* got none"):
        data.tagged("embedded")
    (tmp_path / "a-dev.conllu").write_text("1 Cats NOUN\n")
    (tmp_path / "a-dev.conllu.xz").unlink()
    with pytest.raises(ValueError, match=r"a-dev.conllu, line 1: CoNLL-U has 10 columns, got 1"):
        data.tagged(source)


def test_a_model_learns_to_tag(source, tmp_path):
    settings = Settings(
        task="tagging", data=str(source), tokenizer="bytes", steps=25, batch=4, length=32,
        learning_rate=1e-2, device="cpu", cache=str(tmp_path / "cache"), eval_every=25,
    )  # fmt: skip
    result = run(settings)
    assert result.metrics["accuracy"] > result.metrics["most_frequent"] == pytest.approx(3 / 7)
    # Data of another content has another version.
    (tmp_path / "a-train.conllu.xz").unlink()
    (tmp_path / "a-train.conllu").write_text(TEXT.replace("Good", "Fine"))
    again = run(settings.__class__(**{**settings.__dict__, "steps": 1, "eval_every": 1}))
    assert again.environment["data"] != result.environment["data"]
