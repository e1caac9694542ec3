"""Text as token files: exact tokens, exact bytes, every token predicted once."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from mercer import data
from mercer.data import cache, corpus, embedded, encode, tokens

ROOT = Path(__file__).parents[2]


def find_shared():
    """The folder of real corpora that may lie beside a checkout."""
    for parent in ROOT.parents:
        if (parent / "shared" / "data" / "tokenizer").is_dir():
            return parent / "shared" / "data"
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def docs(folder):
    return data.text("embedded", tokenizer="bpe:1024", cache_dir=folder)


def test_the_embedded_splits_share_no_passage():
    from pydoc_data.topics import topics

    train, valid = embedded.split_topics(topics)
    assert not set(train) & set(valid)
    runs = []
    for names in (train, valid):
        words = [topics[name].split() for name in names]
        runs.append({tuple(w[i : i + 10]) for w in words for i in range(len(w) - 9)})
    assert not runs[0] & runs[1]
    sizes = [sum(len(topics[name]) for name in names) for names in (train, valid)]
    assert 0.07 < sizes[1] / sum(sizes) < 0.15
    # a split does not depend on the order in which topics come
    backwards = dict(sorted(topics.items(), reverse=True))
    assert embedded.split_topics(backwards) == (train, valid)


def test_embedded_text_decodes_to_itself(docs):
    read = embedded.read_documentation()
    for split in ("train", "valid"):
        text = "".join(block.text for block in read.splits[split].read())
        file = docs.split(split)
        assert file.num_bytes == len(text.encode())
        assert file.ids[0] == docs.tokenizer.eos_token_id
        assert docs.tokenizer.decode(file.ids[1:].tolist()) == text
        assert file.ids.dtype == np.uint16
        assert isinstance(file.ids, np.memmap)
    assert len(docs.tokenizer) == 1024
    assert "Python" in docs.source
    assert docs.train.fingerprint != docs.valid.fingerprint


def test_bytes_are_their_own_ids(folder):
    found = data.text("embedded", tokenizer="bytes", cache_dir=folder)
    text = next(embedded.read_documentation().splits["valid"].read()).text
    assert bytes(found.valid.ids[1:].tolist()) == text.encode()
    assert len(found.valid) == found.valid.num_bytes + 1
    assert found.tokenizer("hé")["input_ids"] == list("hé".encode())
    assert found.tokenizer.decode(list("hé".encode())) == "hé"


def test_training_a_bpe_again_gives_the_same(docs, tmp_path):
    again = data.text("embedded", tokenizer="bpe:1024", cache_dir=tmp_path)
    assert encode.identify(again.tokenizer) == encode.identify(docs.tokenizer)
    assert again.train.fingerprint == docs.train.fingerprint
    assert np.array_equal(again.train.ids, docs.train.ids)


def test_blocks(docs):
    blocks = docs.blocks("train", 100)
    assert len(blocks) == len(docs.train) // 100
    item = blocks[3]
    assert item["input_ids"].dtype == torch.int64
    assert item["input_ids"].tolist() == docs.train.ids[300:400].tolist()
    assert torch.equal(item["labels"], item["input_ids"])
    assert torch.equal(blocks[-1]["labels"], blocks[len(blocks) - 1]["labels"])
    with pytest.raises(IndexError):
        blocks[len(blocks)]
    for length in (1, len(docs.train) + 1):
        with pytest.raises(ValueError, match="length must be"):
            docs.blocks("train", length)
    with pytest.raises(ValueError, match="train, valid, got 'test'"):
        docs.blocks("test", 8)


@pytest.mark.parametrize(
    ("length", "stride"), [(64, 17), (64, 63), (2, 1), (100, 1), (10**6, 5)], ids=str
)
def test_windows_predict_every_token_once(docs, length, stride):
    file = data.TokenFile(cache.Stored(path=Path(), array=np.arange(731), notes={"num_bytes": 731}))
    windows = data.Windows(file, length, stride)
    seen = []
    for n in range(len(windows)):
        item = windows[n]
        assert len(item["input_ids"]) == min(length, 731)
        # the model shifts: the first label of a window is never used, so it must not count
        assert item["labels"][0] == -100
        known = item["labels"] != -100
        assert torch.equal(item["labels"][known], item["input_ids"][known])
        seen += item["labels"][known].tolist()
    assert seen == list(range(1, 731))


def test_windows_refuse_what_would_skip_tokens(docs):
    for length, stride in ((8, 8), (8, 0), (1, 1)):
        with pytest.raises(ValueError, match="stride"):
            docs.windows("valid", length, stride)


def test_batches_depend_on_seed_and_epoch_alone(docs):
    def first(**options):
        return next(docs.batches("train", 32, 4, **options))["input_ids"]

    assert first().shape == (4, 32)
    assert torch.equal(first(), first())
    assert not torch.equal(first(), first(epoch=1))


def test_a_dataset_travels_to_a_worker_without_its_tokens(docs):
    blocks = docs.blocks("train", 64)
    packed = pickle.dumps(blocks)
    assert len(packed) < 1000
    assert torch.equal(pickle.loads(packed)[7]["labels"], blocks[7]["labels"])


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=" \n\t\r'.,aéß字1\u2028\u00a0\x1c", max_size=120))
def test_pieces_have_the_tokens_of_the_whole(text):
    tokenizer = test_pieces_have_the_tokens_of_the_whole.tokenizer
    pieces, left = encode.cut(text, 3)
    pieces.append(left)
    assert "".join(pieces) == text
    # without a good place for it, a cut may be anywhere
    if all(re.match(r"[ \n\t\r]\S", after) for after in pieces[1:]):
        found = [i for piece in pieces for i in tokenizer(piece)["input_ids"]]
        assert found == tokenizer(text)["input_ids"]


test_pieces_have_the_tokens_of_the_whole.tokenizer = tokens.train(
    ["aé a\n\n a. ß, 字 1\n\r\n  'a \t\t\n.,\n"] * 4, 300
)


def test_a_text_without_any_space_is_cut_too():
    pieces, left = encode.cut("x" * 100, 10)
    assert max(map(len, [*pieces, left])) <= 20
    assert "".join([*pieces, left]) == "x" * 100


def test_a_special_token_inside_a_text_is_text(tmp_path):
    text = "one <|endoftext|> two\n" * 50
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "valid.txt").write_text("three\n")
    for spec in ("bytes", "bpe:300"):
        found = data.text(tmp_path, tokenizer=spec, cache_dir=tmp_path / "cache")
        end = found.tokenizer.eos_token_id
        assert np.flatnonzero(found.train.ids == end).tolist() == [0]
        assert found.tokenizer.decode(found.train.ids[1:].tolist()) == text


def test_documents_begin_with_the_end_token(tmp_path):
    for name in ("a.txt", "b.txt", "c-valid.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "a.txt").rename(tmp_path / "a-train-1.txt")
    (tmp_path / "b.txt").rename(tmp_path / "a-train-2.txt")
    found = data.text(tmp_path, tokenizer="bytes", cache_dir=tmp_path / "cache")
    assert found.train.ids.tolist() == [256, *b"a.txt", 256, *b"b.txt"]
    assert found.train.num_bytes == 10


def test_a_large_corpus_goes_through_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BATCH", 2000)
    monkeypatch.setattr(encode, "PIECE", 100)
    text = next(embedded.read_documentation().splits["train"].read()).text[:30_000]
    monkeypatch.setattr("mercer.data.files.BLOCK", 1000)
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "valid.txt").write_text("x")
    said = []
    found = data.text(
        tmp_path,
        tokenizer="bpe:400",
        cache_dir=tmp_path / "cache",
        on_progress=lambda what, done: said.append((what, done)),
    )
    assert found.train.ids[1:].tolist() == found.tokenizer(text)["input_ids"]
    shares = [done for what, done in said if what == "tokenising train"]
    assert shares == sorted(shares)
    assert len(shares) > 10
    assert shares[-1] == 1


def test_the_width_follows_the_vocabulary():
    class Sized:
        def __init__(self, size):
            self.size = size

        def __len__(self):
            return self.size

    assert encode.width(Sized(65_536)) == "uint16"
    assert encode.width(Sized(65_537)) == "uint32"


def test_a_tokenizer_is_saved_and_loaded(docs, tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    assert isinstance(docs.tokenizer, PreTrainedTokenizerFast)
    docs.tokenizer.save_pretrained(tmp_path)
    text = "def f(x):\n\n    return x  # ünïcode"
    expected = docs.tokenizer(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == expected
    assert tokens.load(tmp_path)(text)["input_ids"] == expected
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[:100])
    with pytest.raises(data.DataError, match="holds no tokenizer that can be read"):
        tokens.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(data.DataError, match=r"tokenizer.json is not a tokenizer"):
        tokens.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(whole)
    again = tokens.load(tmp_path)
    assert again(text)["input_ids"] == expected
    assert again.eos_token_id == docs.tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bpe:", "named like"),
        ("bpe:12", "257 tokens or more"),
        (12, "fast tokenizers"),
    ],
    ids=str,
)
def test_a_wrong_tokenizer_raises(spec, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        data.text("embedded", tokenizer=spec, cache_dir=tmp_path)


def write_gpt2(folder, merges):
    import json

    letters = [*encode.SPELLING, "ab", "abc", tokens.END]
    vocabulary = {letter: n for n, letter in enumerate(letters)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text(merges)


def test_gpt2_files(tmp_path):
    write_gpt2(tmp_path, "#version: 0.2\na b\nab c\n")
    found = tokens.load(tmp_path)
    assert found("abcab")["input_ids"] == [257, 256]
    assert found.eos_token_id == 258
    write_gpt2(tmp_path, "#version: 0.2\na b\nab x\n")
    with pytest.raises(data.DataError, match=r"merges.txt, line 3: no two tokens"):
        tokens.load(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(data.DataError, match=r"vocab.json is not JSON"):
        tokens.load(tmp_path)
    with pytest.raises(data.DataError, match="holds no tokenizer"):
        tokens.load(tmp_path.parent)


@pytest.mark.skipif(find_shared() is None, reason="no folder shared/data beside the checkout")
def test_gpt2_equals_that_of_transformers(tmp_path):
    from transformers import GPT2TokenizerFast

    files = find_shared() / "tokenizer" / "gpt2"
    theirs = GPT2TokenizerFast(vocab=str(files / "vocab.json"), merges=str(files / "merges.txt"))
    text = next(embedded.read_documentation().splits["valid"].read()).text
    text += "\n\n\n Füße, 字; it's  we'll \t\r\n 12345  \n"
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "gpt2").symlink_to(files)
    (tmp_path / "a.txt").write_text(text, newline="")
    found = data.text(tmp_path / "a.txt", tokenizer="gpt2", cache_dir=tmp_path / "cache")
    ids = [*found.train.ids[1:].tolist(), *found.valid.ids[1:].tolist()]
    assert found.tokenizer(text)["input_ids"] == theirs(text)["input_ids"]
    assert found.tokenizer.decode(ids) == text.replace("\r\n", "\n")
    assert len(found.tokenizer) == 50_257
    assert found.tokenizer.eos_token_id == 50_256


def test_blocks_of_a_corpus_are_read_anew():
    read = embedded.read_documentation().splits["valid"]
    assert isinstance(read, corpus.Documents)
    assert list(read.read()) == list(read.read())
