"""Files in place: every packing reads the same, and errors name file and line."""

import gzip
import io
import json
import lzma
import tarfile
import zipfile

import numpy as np
import pytest

pytest.importorskip("transformers")

from mercer import data
from mercer.data import corpus, layout
from mercer.data.files import read_blocks, read_lines, read_members

TEXT = "".join(f"line {n} of a small text, ünïcode\n" for n in range(400))


def pack(path, content, member="a/text.txt"):
    """Write bytes, packed as the name's suffix says."""
    name = path.name
    if name.endswith(".zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, content)
    elif ".tar" in name:
        with tarfile.open(path, "w:xz" if name.endswith("xz") else "w:gz") as archive:
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    elif name.endswith(".xz"):
        path.write_bytes(lzma.compress(content))
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)
    return path


PACKINGS = ["a.txt", "a.txt.xz", "a.txt.gz", "a.zip", "a.tar.xz", "a.tar.gz"]


@pytest.mark.parametrize("name", PACKINGS)
def test_every_packing_reads_the_same(name, tmp_path):
    path = pack(tmp_path / name, TEXT.encode())
    found = data.text(path, tokenizer="bytes", cache_dir=tmp_path / "cache")
    ids = np.concatenate([found.train.ids[1:], found.valid.ids[1:]])
    assert bytes(ids.tolist()) == TEXT.encode()
    # the end is held out, from the beginning of a line
    assert bytes(found.train.ids[-1:].tolist()) == b"\n"
    assert 0.02 < found.valid.num_bytes / len(TEXT.encode()) < 0.06
    assert not [path for path in tmp_path.rglob("*") if path.name == "text.txt"]


def test_names_in_an_archive_are_never_paths_on_disk(tmp_path):
    path = tmp_path / "inner" / "a.tar.xz"
    path.parent.mkdir()
    pack(path, TEXT.encode(), "../../evil.txt")
    data.text(path, tokenizer="bytes", cache_dir=tmp_path / "cache")
    assert not list(tmp_path.parent.glob("evil.txt"))
    assert not list(tmp_path.rglob("evil.txt"))


def test_members_of_an_archive_say_their_split(tmp_path):
    path = tmp_path / "wiki.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wiki/wiki.{split}.raw", f"{split} text")
        archive.writestr("wiki/readme.md", "about")
    found = data.text(path, tokenizer="bytes", cache_dir=tmp_path / "cache")
    for split in ("train", "valid", "test"):
        assert bytes(found.split(split).ids[1:].tolist()) == f"{split} text".encode()


def test_a_folder_of_the_layout(tmp_path):
    folder = tmp_path / "lm"
    folder.mkdir()
    pack(folder / "big-train.txt.xz", b"train")
    pack(folder / "other-valid.txt.gz", b"valid")
    (folder / "README.txt").write_text("not data")
    for source in (tmp_path, folder, str(folder)):
        found = data.text(source, tokenizer="bytes", cache_dir=tmp_path / "cache")
        assert bytes(found.train.ids[1:].tolist()) == b"train"
        assert bytes(found.valid.ids[1:].tolist()) == b"valid"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tatoeba-train.tsv.xz", ("tatoeba", "train")),
        ("iwslt14-train-small.tsv.xz", ("iwslt14", "train")),
        ("ud-ewt-dev.conllu.xz", ("ud-ewt", "valid")),
        ("wiki.valid.raw", ("wiki", "valid")),
        ("train.txt", ("", "train")),
        ("Validation.txt", ("", "valid")),
        ("latest.txt", ("latest", None)),
        ("trainer_manual.txt", ("trainer_manual", None)),
        ("novels.zip", ("novels", None)),
    ],
)
def test_names_say_the_split(name, expected):
    assert layout.read_split(name) == expected


def test_several_corpora_must_be_named(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}-train.txt").write_text(f"{name} train")
        (tmp_path / f"{name}-valid.txt").write_text(f"{name} valid")
    with pytest.raises(data.DataError, match=r"several corpora \(one, two\)"):
        data.text(tmp_path, tokenizer="bytes", cache_dir=tmp_path / "cache")
    found = data.text(tmp_path / "two", tokenizer="bytes", cache_dir=tmp_path / "cache")
    assert bytes(found.valid.ids[1:].tolist()) == b"two valid"


def test_many_documents_are_held_out_whole(tmp_path):
    for n in range(40):
        (tmp_path / f"book{n:02d}.txt").write_text(f"{n:02d}\n" * 100)
    found = data.text(tmp_path, tokenizer="bytes", cache_dir=tmp_path / "cache")
    assert np.count_nonzero(found.train.ids == 256) == 38
    assert bytes(found.valid.ids[1:4].tolist()) == b"38\n"
    assert np.count_nonzero(found.valid.ids == 256) == 2


@pytest.mark.parametrize("text", ["ab", "one line without an end", "a\n" * 3, "long\n" + "x" * 99])
def test_short_files_still_have_two_splits(text, tmp_path):
    (tmp_path / "a.txt").write_text(text)
    found = data.text(tmp_path / "a.txt", tokenizer="bytes", cache_dir=tmp_path / "cache")
    assert found.train.num_bytes
    assert found.valid.num_bytes
    assert bytes([*found.train.ids[1:], *found.valid.ids[1:]]) == text.encode()


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    pack(tmp_path / "train.txt", b"\xef\xbb\xbfabc")
    pack(tmp_path / "valid.txt", b"abc")
    found = data.text(tmp_path, tokenizer="bytes", cache_dir=tmp_path / "cache")
    assert found.train.num_bytes == found.valid.num_bytes == 3


BROKEN = {
    "latin-1": ("a.txt", "eins\nzwei\nfünf\n".encode("latin-1"), "a.txt, line 3: byte 0xfc is not"),
    "utf-16": ("a.txt", "eins\n".encode("utf-16"), "a.txt, line 1: byte 0xff is not UTF-8"),
    "zero": ("a.txt", b"one\ntwo\0\n", "a.txt, line 2: a zero byte"),
    "empty": ("a.txt", b"", "a.txt is empty"),
    "cut letter": ("a.txt", "eins\nfü".encode()[:-1], "a.txt, line 2: byte 0xc3 is not UTF-8"),
    "cut xz": ("a.txt.xz", lzma.compress(TEXT.encode())[:-40], "a.txt.xz, after line"),
    "no xz": ("a.txt.xz", b"plain", "a.txt.xz, after line 1: damaged"),
    "cut gz": ("a.txt.gz", gzip.compress(TEXT.encode())[:-40], "a.txt.gz, after line"),
    "no zip": ("a.zip", b"plain", "a.zip is damaged"),
    "no tar": ("a.tar.xz", b"plain", "a.tar.xz is damaged"),
    "one letter": ("a.txt", b"x", "too short to hold out"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named(case, tmp_path):
    name, content, message = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(data.DataError, match=message):
        data.text(tmp_path / name, tokenizer="bytes", cache_dir=tmp_path / "cache")
    # and nothing half-made is left
    assert not list((tmp_path / "cache").glob("*.arr"))
    assert not list((tmp_path / "cache").glob(".*.tmp"))


def test_an_error_late_in_a_file_has_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr("mercer.data.files.BLOCK", 7)
    content = "zeile ü\n".encode() * 500 + b"\xff\n"
    path = pack(tmp_path / "a.txt.xz", content)
    with pytest.raises(data.DataError, match="line 501: byte 0xff"):
        list(read_lines(path))


def test_archives_without_text(tmp_path):
    path = pack(tmp_path / "a.zip", b"data", "a.bin")
    with pytest.raises(data.DataError, match="holds no text files"):
        data.text(path, tokenizer="bytes", cache_dir=tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(data.DataError, match="must hold files that end in"):
        data.text(tmp_path / "empty", cache_dir=tmp_path / "cache")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "valid.txt").write_text("x")
    with pytest.raises(data.DataError, match="none with train in its name"):
        data.text(tmp_path / "half", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("source", ["./missing.txt", "missing.txt.xz", "a/b/c"])
def test_a_missing_file_is_not_looked_for_on_the_hub(source, tmp_path):
    with pytest.raises(data.DataError, match="does not exist"):
        data.text(source, cache_dir=tmp_path)


def test_an_empty_source_is_not_the_current_folder(tmp_path):
    for read in (data.text, data.pairs, data.images):
        with pytest.raises(data.DataError, match="source must not be empty"):
            read("", cache_dir=tmp_path)


def test_rows_of_tables_are_documents(tmp_path):
    rows = [f"document {n}" for n in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": r, "n": 1}) + "\n" for r in rows))
    (tmp_path / "b.csv").write_text("n,text\n" + "".join(f'1,"{r}"\n' for r in rows))
    for name in ("a.jsonl", "b.csv"):
        found = data.text(tmp_path / name, tokenizer="bytes", cache_dir=tmp_path / "cache")
        assert np.count_nonzero(found.train.ids == 256) == 29
        assert bytes(found.valid.ids[1:12].tolist()) == b"document 29"
    with pytest.raises(data.DataError, match=r"a.jsonl, line 1: no column 'body'; it has text, n"):
        data.text(tmp_path / "a.jsonl", column="body", cache_dir=tmp_path / "cache")
    with pytest.raises(data.DataError, match=r"b.csv, line 1: no column 'body'; it has n, text"):
        data.text(tmp_path / "b.csv", column="body", cache_dir=tmp_path / "cache")


def test_a_tail_is_cut_at_a_line_wherever_blocks_end(tmp_path, monkeypatch):
    path = pack(tmp_path / "a.txt", TEXT.encode())
    found = layout.find_files(path, "lm", corpus.TEXT)
    cuts = set()
    for size in (7, 100, 10**6):
        monkeypatch.setattr("mercer.data.files.BLOCK", size)
        splits = corpus.read_text(found).splits
        parts = ["".join(b.text for b in splits[s].read()) for s in ("train", "valid")]
        assert "".join(parts) == TEXT
        assert parts[0].endswith("\n")
        cuts.add(len(parts[0]))
    assert len(cuts) == 1


def test_members_come_in_the_order_of_their_names(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("b.txt", "a.txt"):
            archive.writestr(name, name)
    assert [member.name for member in read_members(path)] == ["a.txt", "b.txt"]


RETURNS = {"lf": "\n", "crlf": "\r\n", "cr": "\r"}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("end", RETURNS.values(), ids=RETURNS)
def test_line_ends_are_those_of_python_wherever_blocks_end(end, size, tmp_path, monkeypatch):
    monkeypatch.setattr("mercer.data.files.BLOCK", size)
    text = "ein\n\nzweiü\n \ndrei\n".replace("\n", end)
    path = pack(tmp_path / "a.txt.gz", text.encode())
    with gzip.open(path, "rt", encoding="utf-8") as file:
        expected = file.read()
    assert "".join(block for _, block in read_blocks(path)) == expected
    assert list(read_lines(path)) == list(enumerate(expected.split("\n")[:-1], 1))
    # a return that ends the file is a line end, too
    assert list(read_lines(pack(tmp_path / "b.txt", b"a\r\rb\r"))) == [(1, "a"), (2, ""), (3, "b")]


@pytest.mark.parametrize("size", [1, 2, 5, 1 << 20])
@pytest.mark.parametrize("end", RETURNS.values(), ids=RETURNS)
def test_lines_of_errors_are_counted_by_any_line_end(end, size, tmp_path, monkeypatch):
    monkeypatch.setattr("mercer.data.files.BLOCK", size)
    head = "eins\nzwei\n\n".replace("\n", end).encode()
    for bad, said in ((b"\xff", "line 4: byte 0xff"), (b"xy\0", "line 4: a zero byte")):
        with pytest.raises(data.DataError, match=said):
            list(read_lines(pack(tmp_path / "a.txt", head + bad)))


def test_no_token_is_a_carriage_return(tmp_path):
    plain = pack(tmp_path / "plain.txt", TEXT.encode())
    returns = pack(tmp_path / "returns.zip", TEXT.replace("\n", "\r\n").encode())
    row = {"text": TEXT.replace("\n", "\r\n")}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 30)
    files = [
        data.text(path, tokenizer="bytes", cache_dir=tmp_path / "cache").train
        for path in (plain, returns, tmp_path / "rows.jsonl")
    ]
    assert np.array_equal(files[0].ids, files[1].ids)
    assert files[0].num_bytes == files[1].num_bytes == len(files[0].ids) - 1
    assert not [file for file in files if (file.ids == ord("\r")).any()]
    assert (files[2].ids == ord("\n")).sum() == 29 * TEXT.count("\n")


def test_a_cache_with_carriage_returns_is_not_read_again(tmp_path, monkeypatch):
    path = pack(tmp_path / "a.txt", b"a\r\nb\r\n" * 9)
    with monkeypatch.context() as older:
        older.setattr("mercer.data.corpus.READING", 1)
        before = data.text(path, tokenizer="bytes", cache_dir=tmp_path / "cache").train
    after = data.text(path, tokenizer="bytes", cache_dir=tmp_path / "cache").train
    assert after.stored.path != before.stored.path
