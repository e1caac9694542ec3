"""Pairs: a grammar that agrees with itself, splits that share nothing, batches that are padded."""

import lzma

import pytest
import torch

pytest.importorskip("transformers")

from mercer import data
from mercer.data import grammar


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return data.pairs("embedded", cache_dir=tmp_path_factory.mktemp("cache"))


def test_the_embedded_pairs_are_synthetic_and_say_so(made):
    assert "synthetic" in made.source
    assert [len(made.split(s)) for s in ("train", "valid", "test")] == [20_000, 500, 500]
    assert made.train[0] == made.train.pairs[0]
    assert made.train[:2][1] == made.train[1]


def test_splits_share_no_sentence_of_either_side(made):
    for side in (0, 1):
        sets = [{pair[side] for pair in made.split(s)} for s in ("train", "valid", "test")]
        assert not sets[0] & sets[1]
        assert not sets[0] & sets[2]
        assert not sets[1] & sets[2]


def test_the_grammar_follows_its_seed():
    sizes = {"train": 50, "valid": 5}
    assert grammar.draw_pairs(sizes, 3) == grammar.draw_pairs(sizes, 3)
    assert grammar.draw_pairs(sizes, 3) != grammar.draw_pairs(sizes, 4)


def test_a_sentence_has_one_translation(made):
    pairs = [pair for split in ("train", "valid", "test") for pair in made.split(split)]
    assert len({german for german, _ in pairs}) == len(set(pairs))
    words = {word for german, _ in pairs for word in german.strip(".").replace(",", "").split()}
    assert len(words) > 300


def test_agreement_and_order(made):
    pairs = dict(made.train.pairs)
    # verbs last after a conjunction, second after an adverb, and participles at the end
    for german, english in pairs.items():
        first = german.split()[0]
        assert german.endswith(".")
        assert ",," not in german + english
        if first in ("Heute", "Morgen", "Jetzt"):
            assert english.split()[0] in ("Today", "Tomorrow", "Now")
            assert german.split()[1].islower()
    negated = [english for english in pairs.values() if " does not " in english]
    assert negated
    sample = grammar.Clause("der Hund", "hat", "den Mann nicht", "gesehen", "")
    assert sample.main() == "der Hund hat den Mann nicht gesehen"
    assert sample.last() == "der Hund den Mann nicht gesehen hat"
    assert sample.after("heute") == "heute hat der Hund den Mann nicht gesehen"


def test_encoded_pairs_decode_to_themselves(made):
    encoded = made.encoded("valid")
    assert len(encoded) == 500
    end = made.tokenizer.eos_token_id
    for n in (0, 17, 499):
        item = encoded[n]
        for side, name in enumerate(("input_ids", "labels")):
            assert item[name][-1] == end
            assert made.tokenizer.decode(item[name][:-1]) == made.valid[n][side]
    # the second time from the cache
    assert torch.equal(made.encoded("valid")[3]["labels"], encoded[3]["labels"])


def test_long_pairs_are_left_out(made):
    some = made.encoded("valid", max_length=10)
    assert 0 < len(some) < 500
    assert all(max(len(i["input_ids"]), len(i["labels"])) <= 10 for i in some)
    with pytest.raises(ValueError, match="max_length must let some pairs in"):
        made.encoded("valid", max_length=1)


def test_batches_are_padded(made):
    encoded = made.encoded("valid")
    items = [encoded[n] for n in range(8)]
    batch = made.collate(items)
    for n, item in enumerate(items):
        size, length = len(item["input_ids"]), len(item["labels"])
        assert torch.equal(batch["input_ids"][n, :size], item["input_ids"])
        assert (batch["input_ids"][n, size:] == made.tokenizer.pad_token_id).all()
        assert batch["attention_mask"][n].sum() == size
        assert torch.equal(batch["labels"][n, :length], item["labels"])
        assert (batch["labels"][n, length:] == -100).all()
    ids = {made.tokenizer.convert_tokens_to_ids(t) for t in ("<pad>", "<s>", "</s>")}
    assert ids == {0, 1, 2}


def test_reverse(made, tmp_path):
    back = data.pairs("embedded", tokenizer="bytes", reverse=True, cache_dir=tmp_path)
    assert back.train[5] == made.train[5][::-1]
    assert back.source.endswith("reversed")
    assert back.encoded("valid")[0]["labels"][:-1].tolist() == list(back.valid[0][1].encode())


def write(path, pairs):
    path.write_bytes(lzma.compress("".join(f"{a}\t{b}\n" for a, b in pairs).encode()))


def test_a_folder_of_the_layout(tmp_path):
    folder = tmp_path / "translation"
    folder.mkdir()
    rows = [(f"wort {n}", f"word {n}") for n in range(30)]
    for name in ("one", "two"):
        write(folder / f"{name}-train-small.tsv.xz", rows[:20])
        write(folder / f"{name}-valid.tsv.xz", rows[20:])
    for source in (tmp_path / "one", folder / "one"):
        found = data.pairs(source, tokenizer="bytes", cache_dir=tmp_path / "cache")
        assert (len(found.train), len(found.valid), found.test) == (20, 10, None)
        assert found.train[3] == ("wort 3", "word 3")
    with pytest.raises(ValueError, match="train, valid, got 'test'"):
        found.encoded("test")
    with pytest.raises(data.DataError, match=r"several corpora \(one, two\)"):
        data.pairs(tmp_path, cache_dir=tmp_path / "cache")


def test_train_files_of_other_corpora_are_added(tmp_path):
    folder = tmp_path / "data" / "translation"
    folder.mkdir(parents=True)
    for name, rows in {
        "a-train": 30,
        "a-valid": 3,
        "b-train": 20,
        "b-valid": 4,
        "c-valid": 2,
    }.items():
        text = "".join(f"{name} Satz {n}\t{name} sentence {n}\n" for n in range(rows))
        (folder / f"{name}.tsv").write_text(text)
    given = {"tokenizer": "bytes", "cache_dir": tmp_path / "tokens"}
    for source in (folder / "a", tmp_path / "data" / "a"):
        found = data.pairs(source, more=["b"], **given)
        assert (len(found.train), len(found.valid), found.test) == (50, 3, None)
        assert found.train[30] == ("b-train Satz 0", "b-train sentence 0")
        assert found.source.endswith("a, trained on b, too")
    assert data.pairs(folder / "a", more=["b"], reverse=True, **given).train[30][1][:7] == "b-train"
    # Validation is that of the source, also where it is held out.
    held = data.pairs(folder / "b", more=["a"], **given)
    assert {pair[0][:7] for pair in held.valid} == {"b-valid"}
    for source, more, message in (
        (folder / "a", ["c"], "has no train files of 'c', which is to be added"),
        (folder / "a-train.tsv", "b", "more must be a list of names, got 'b'"),
        ("embedded", ["b"], "more corpora are added to one of a folder, such as data/tatoeba"),
        (tmp_path / "data", ["b"], "folder holds several|holds several corpora"),
    ):
        with pytest.raises(ValueError, match=message):
            data.pairs(source, more=more, **given)


def test_a_single_file_gives_a_valid_and_a_test_split(tmp_path):
    rows = [(f"wort {n}", f"word {n // 2}") for n in range(101)]
    write(tmp_path / "all.tsv.xz", rows)
    found = data.pairs(tmp_path / "all.tsv.xz", tokenizer="bytes", cache_dir=tmp_path / "cache")
    parts = [found.train, found.valid, found.test]
    assert len(found.train) == 91
    targets = [{pair[1] for pair in part} for part in parts]
    assert not targets[0] & targets[1]
    assert not targets[0] & targets[2]
    assert not targets[1] & targets[2]


BROKEN = {
    "no tab": ("a\tb\nc d\n", "a.tsv, line 2: column 2 is missing, there are 1"),
    "empty side": ("a\tb\nc\t\n", "a.tsv, line 2: column 2 is empty"),
    "empty": ("", "a.tsv is empty"),
    "blank": ("\n\n", "a.tsv is empty"),
    "short": ("a\tb\n", "too short to hold out"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tables_are_named(case, tmp_path):
    content, message = BROKEN[case]
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(data.DataError, match=message):
        data.pairs(tmp_path / "a.tsv", cache_dir=tmp_path / "cache")


def test_columns_by_name(tmp_path):
    rows = [(f"w{n}", f"v{n}") for n in range(40)]
    (tmp_path / "a.tsv").write_text("id\ten\tde\n" + "".join(f"1\t{a}\t{b}\n" for a, b in rows))
    (tmp_path / "a.csv").write_text("id,en,de\n" + "".join(f'1,"{a}","{b}"\n' for a, b in rows))
    line = '{{"id": 1, "translation": {{"en": "{}", "de": "{}"}}}}\n'
    (tmp_path / "a.jsonl").write_text("".join(line.format(a, b) for a, b in rows))
    options = {"tokenizer": "bytes", "cache_dir": tmp_path / "cache"}
    for name in ("a.tsv", "a.csv"):
        found = data.pairs(tmp_path / name, columns=("de", "en"), **options)
        assert found.train[0] == ("v0", "w0")
        with pytest.raises(data.DataError, match=rf"{name}, line 1: no column 'fr'; it has id, en"):
            data.pairs(tmp_path / name, columns=("de", "fr"), **options)
    names = ("translation.de", "translation.en")
    assert data.pairs(tmp_path / "a.jsonl", columns=names, **options).train[0] == ("v0", "w0")
    with pytest.raises(data.DataError, match=r"line 1: no column 'translation.fr'"):
        data.pairs(tmp_path / "a.jsonl", columns=("translation.de", "translation.fr"), **options)
    with pytest.raises(data.DataError, match="line 1: column 'id' must be text, but is int"):
        data.pairs(tmp_path / "a.jsonl", columns=("id", "translation.en"), **options)
    (tmp_path / "a.jsonl").write_text('{"a": "x", "b": "y"}\n{"a": \n')
    with pytest.raises(data.DataError, match=r"a.jsonl, line 2: not JSON"):
        data.pairs(tmp_path / "a.jsonl", **options)


def test_the_tokenizer_ends_a_text_as_encoded_does_and_adds_nothing_else(tmp_path):
    """One with its own additions, too; the given tokenizer stays as it is."""
    from tokenizers.processors import TemplateProcessing

    given = data.tokens.spell_bytes({"eos_token": "</s>", "bos_token": "<s>"})
    given.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", given.bos_token_id)]
    )
    made = data.pairs("embedded", tokenizer=given, cache_dir=tmp_path)
    end, (source, target) = given.eos_token_id, made.valid[0]
    item = made.encoded("valid")[0]
    assert made.tokenizer(source)["input_ids"] == item["input_ids"].tolist()
    assert made.tokenizer(text_target=target)["input_ids"] == item["labels"].tolist()
    assert made.tokenizer("ab", "c")["input_ids"] == [97, 98, end, 99, end]
    assert given("a")["input_ids"] == [given.bos_token_id, 97]
    made.tokenizer.save_pretrained(tmp_path / "saved")
    loaded = data.tokens.load(tmp_path / "saved")
    assert loaded(source)["input_ids"] == item["input_ids"].tolist()


def test_lengths_can_be_multiples(made):
    items = [made.encoded("valid")[n] for n in range(3)]
    plain, padded = made.collate(items), made.collate(items, 8)
    for name, x in plain.items():
        assert padded[name].shape[1] % 8 == 0
        assert padded[name].shape[1] - x.shape[1] in range(8)
        assert torch.equal(padded[name][:, : x.shape[1]], x)
    empty = padded["labels"][:, plain["labels"].shape[1] :]
    assert (empty == -100).all()
    assert not padded["attention_mask"][:, plain["attention_mask"].shape[1] :].any()
