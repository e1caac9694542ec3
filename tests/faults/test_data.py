"""Damaged and hostile data: read rightly, or refused with a sentence that names the file."""

import bz2
import gzip
import io
import json
import lzma
import stat
import struct
import subprocess
import sys
import tarfile
import warnings
import zipfile
import zlib

import numpy as np
import pytest

pytest.importorskip("transformers")

from PIL import Image

from mercer import data
from mercer.data import cache, hub, tokens
from mercer.data.files import read_blocks

GOOD = "a line of text\n" * 30
PAIRS = "".join(f"wort {n}\tword {n}\n" for n in range(30))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def zipped(*members):
    """A .zip with these (name, content) pairs, in this order, twice the same name or not."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()


def tarred(*members, links=()):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for name, target, kind in links:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            archive.addfile(entry)
    return file.getvalue()


def picture(kind="PNG", size=(8, 8), mode="RGB", colour=0):
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, kind)
    return file.getvalue()


def png(width, height, depth=8, colour=0, body=b"\0\0"):
    """A .png with any header, also one that no program would write."""

    def chunk(kind, content):
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(body)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def rows(*objects):
    return "".join(json.dumps(one) + "\n" for one in objects).encode()


T = [{"text": f"document {n}"} for n in range(30)]
G = GOOD.encode()

# name of the file, its bytes, and what is said of it; None: it is read
TEXTS = {
    "empty": ("a.txt", b"", "a.txt is empty"),
    "one letter": ("a.txt", b"x", "too short"),
    "white space": ("a.txt", b" \n\t\r\n" * 9, "a.txt holds only white space"),
    "one line without an end": ("a.txt", b"ab", None),
    "zero bytes": ("a.txt", G + b"\0" * 9, "a.txt, line 31: a zero byte"),
    "all zeros": ("a.txt", bytes(1000), "a.txt, line 1: a zero byte"),
    "utf-16": ("a.txt", GOOD.encode("utf-16"), "a.txt, line 1: byte 0xff is not UTF-8"),
    "utf-16 without a mark": ("a.txt", GOOD.encode("utf-16-le"), "a.txt, line 1: a zero byte"),
    "utf-32": ("a.txt", GOOD.encode("utf-32-be"), "a.txt, line 1: a zero byte"),
    "latin-1": ("a.txt", G + "ü\n".encode("latin-1"), "a.txt, line 31: byte 0xfc is not UTF-8"),
    "utf-7 and other ascii": ("a.txt", GOOD.encode("utf-7"), None),
    "a mark of byte order": ("a.txt", b"\xef\xbb\xbf" + G, None),
    "a mark alone": ("a.txt", b"\xef\xbb\xbf", "a.txt is empty"),
    "carriage returns": ("a.txt", G.replace(b"\n", b"\r\n"), None),
    "old Mac": ("a.txt", G.replace(b"\n", b"\r"), None),
    "latin-1 after returns": (
        "a.txt", G.replace(b"\n", b"\r\n") + b"\xfc\r\n", "a.txt, line 31: byte 0xfc is not UTF-8",
    ),
    "latin-1 on an old Mac": (
        "a.txt", G.replace(b"\n", b"\r") + b"\xfc\r", "a.txt, line 31: byte 0xfc is not UTF-8",
    ),
    "zero bytes after returns": (
        "a.txt", G.replace(b"\n", b"\r") + b"x\r\n\0", "a.txt, line 32: a zero byte",
    ),
    "one huge line": ("a.txt", b"word " * 300_000, None),
    "one huge word": ("a.txt", b"x" * 1_500_000, None),
    "control characters": ("a.txt", b"\x1b[31mred\x07\n" * 9, None),
    "a surrogate": ("a.txt", G + b"\xed\xa0\x80\n", "a.txt, line 31: byte 0xed is not UTF-8"),
    "an overlong form": ("a.txt", G + b"\xc0\xaf\n", "a.txt, line 31: byte 0xc0 is not UTF-8"),
    "an image": ("a.txt", picture(), "a.txt, line 1: byte 0x89 is not UTF-8"),
    "a program": ("a.txt", b"\x7fELF\x02\x01\x01" + bytes(99), "a.txt, line 1: a zero byte"),
    "packed in secret": ("a.txt", gzip.compress(G), "a.txt, line 1: byte 0x8b is not UTF-8"),
    "packed twice": ("a.txt.gz", gzip.compress(gzip.compress(G)), "a.txt.gz, line 1: byte 0x8b"),
    "nothing, packed": ("a.txt.gz", gzip.compress(b""), "a.txt.gz is empty"),
    "two parts": ("a.txt.gz", gzip.compress(G) * 2, None),
    "junk after gz": ("a.txt.gz", gzip.compress(G) + b"junk", "a.txt.gz, after line .*damaged"),
    "junk after xz": ("a.txt.xz", lzma.compress(G) + b"junk", "a.txt.xz, after line .*damaged"),
    "a wrong checksum": ("a.txt.gz", gzip.compress(G)[:-8] + bytes(8), "a.txt.gz, after line"),
    "the wrong name": ("a.txt.xz", gzip.compress(G), "a.txt.xz, after line 1: damaged"),
    "an empty archive": ("a.zip", zipped(), "a.zip holds no text files"),
    "an archive without text": ("a.zip", zipped(("a.bin", b"x")), "a.zip holds no text files"),
    "only folders": ("a.zip", zipped(("a/", b""), ("b/", b"")), "a.zip holds no text files"),
    "names that climb": ("a.zip", zipped(("../../a.txt", G), ("/etc/b.txt", G)), None),
    "one name twice": ("a.zip", zipped(("a.txt", G), ("a.txt", G)), None),
    "an archive in an archive": (
        "a.zip", zipped(("a.txt", G), ("b.zip", zipped(("b.txt", G)))),
        r"a.zip, member b.zip: packed inside an archive",
    ),
    "a packed file in an archive": (
        "a.tar", tarred(("a.txt", G), ("b.txt.gz", gzip.compress(G))),
        r"a.tar, member b.txt.gz: packed inside an archive",
    ),
    "a member in latin-1": (
        "a.zip", zipped(("a.txt", G), ("b.txt", b"\xfc")), "member b.txt, line 1: byte 0xfc",
    ),
    "a member with escapes in its name": (
        "a.zip", zipped(("\x1b[31m.txt", b"\xfc")), r"member '\\x1b\[31m.txt', line 1: byte 0xfc",
    ),
    "an empty member": ("a.zip", zipped(("a.txt", G), ("b.txt", b"")), None),
    "a link to a member": (
        "a.tar", tarred(("a.txt", G), links=[("b.txt", "a.txt", tarfile.LNKTYPE)]),
        "a.tar, member b.txt: a link",
    ),
    "a link to the outside": (
        "a.tar", tarred(("a.txt", G), links=[("b.txt", "/etc/passwd", tarfile.SYMTYPE)]),
        "a.tar, member b.txt: a link",
    ),
    "a device": ("a.tar", tarred(("a.txt", G), links=[("b.txt", "", tarfile.CHRTYPE)]), None),
    "half an archive": ("a.tar", tarred(("a.txt", G * 99))[:2000], "a.tar.* damaged"),
    "a table without rows": ("a.jsonl", b"\n\n", "a.jsonl is empty"),
    "a blank line": ("a.jsonl", b"\n".join([rows(*T), rows(*T)]), None),
    "a table with a mark": ("a.jsonl", b"\xef\xbb\xbf" + rows(*T), None),
    "a lone surrogate": (
        "a.jsonl", rows(*T, {"text": "\ud800"}), "a.jsonl, line 31: .*lone surrogate",
    ),
    "a whole pair": ("a.jsonl", rows(*T, {"text": "\U0001f600"}), None),
    "no object": ("a.jsonl", rows(*T, ["text"]), "a.jsonl, line 31: .*object, but is list"),
    "deep": (
        "a.jsonl", rows(*T) + b'{"text": ' + b"[" * 100_000, "a.jsonl, line 31: nested too deeply",
    ),
    "a long number": ("a.jsonl", rows(*T) + b"9" * 5000, "a.jsonl, line 31: not JSON"),
    "no column": ("a.jsonl", rows(*T, {"body": "x"}), "line 31: no column 'text'; it has body"),
    "a number": ("a.jsonl", rows(*T, {"text": 3}), "line 31: column 'text' must be text"),
    "null": ("a.jsonl", rows(*T, {"text": None}), "line 31: column 'text' must be text"),
    "no text": ("a.jsonl", rows(*T, {"text": " "}), "line 31: column 'text' is empty"),
    "half a line": ("a.jsonl", rows(*T)[:-9], "a.jsonl, line 30: not JSON"),
    "a list of all": ("a.jsonl", json.dumps(T, indent=1).encode(), "a.jsonl, line 1: not JSON"),
    "a header alone": ("a.csv", b"text,n\n", "a.csv is empty"),
    "no header": ("a.csv", b"one\ntwo\n", "a.csv, line 1: no column 'text'; it has one"),
    "a name twice": ("a.csv", b"text,text\na,b\n", "a.csv, line 1: .*'text' is there twice"),
    "a comma too many": (
        "a.csv", b"text,n\none,1\ntwo, and more,2\n", "a.csv, line 3: 3 cells, but .* 2 columns",
    ),
    "a quote that is open": ("a.csv", b'text\none\n"two\nthree\n', "a.csv, line 4: "),
    "a quote inside": ("a.csv", b'text\none\n"two" x\n', "a.csv, line 3: "),
    "lines inside quotes": ("a.csv", b'text\n"one\ntwo"\nthree\n', None),
    "csv with returns": ("a.csv", b"text\r\none\r\ntwo\r\n", None),
    "zeros in a table": ("a.csv", b"text\none\0\n", "a.csv, line 2: a zero byte"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
def test_strange_text(case, tmp_path):
    name, content, said = TEXTS[case]
    (tmp_path / name).write_bytes(content)

    def read():
        return data.text(tmp_path / name, tokenizer="bytes", cache_dir=tmp_path / "cache")

    if said is None:
        found = read()
        assert min(found.train.num_bytes, found.valid.num_bytes) > 0
        return
    with pytest.raises(data.DataError, match=said):
        read()
    assert not list((tmp_path / "cache").glob("*.arr"))


@pytest.mark.parametrize("kind", ["xz", "bz2"])
def test_packed_streams_one_after_the_other(kind, tmp_path):
    pack = {"xz": lzma.compress, "bz2": bz2.compress}[kind]
    file = tmp_path / f"a.txt.{kind}"

    def read():
        return "".join(text for _, text in read_blocks(file))

    file.write_bytes(pack(G) + bytes(8) + pack(b"end") + bytes(4))
    assert read() == GOOD + "end"
    damaged = bytearray(pack(G) + pack(b"end"))
    damaged[len(pack(G))] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(data.DataError, match="damaged"):
        read()


def test_a_line_of_a_table_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("mercer.data.files.LONGEST", 1000)
    monkeypatch.setattr("mercer.data.files.BLOCK", 500)
    (tmp_path / "a.jsonl").write_bytes(rows(*T, {"text": "x" * 5000}))
    with pytest.raises(data.DataError, match=r"a.jsonl, line 31: longer than 1000 characters"):
        data.text(tmp_path / "a.jsonl", tokenizer="bytes", cache_dir=tmp_path / "cache")


TABLES = {
    "one column": ("a.tsv", PAIRS.encode() + b"alone\n", "a.tsv, line 31: column 2 is missing"),
    "a third column": ("a.tsv", PAIRS.replace("\n", "\tCC-BY\n").encode(), None),
    "an empty side": ("a.tsv", PAIRS.encode() + b"wort\t\n", "a.tsv, line 31: column 2 is empty"),
    "spaces for tabs": ("a.tsv", PAIRS.replace("\t", " ").encode(), "line 1: column 2 is missing"),
    "the same pair always": ("a.tsv", b"a\tb\n" * 30, "too short to hold out"),
    "one pair": ("a.tsv", b"a\tb\n", "too short to hold out"),
    "quotes": ("a.tsv", PAIRS.replace("wort", '"wort').encode(), None),
    "a huge cell": ("a.tsv", PAIRS.encode() + b"x" * 200_000 + b"\ty\n", "a.tsv, line 31: field"),
    "returns": ("a.tsv", PAIRS.replace("\n", "\r\n").encode(), None),
    "utf-16": ("a.tsv", PAIRS.encode("utf-16"), "a.tsv, line 1: byte 0xff"),
    "half a surrogate": (
        "a.jsonl", rows({"a": "x", "b": "y"}, {"a": "\udc00", "b": ""}),
        "a.jsonl, line 2: column 'a' has the lone surrogate",
    ),
    "one key": ("a.jsonl", rows({"a": "x"}), "a.jsonl, line 1: 2 columns are needed, but it has a"),
    "an empty object": ("a.jsonl", rows({}), "a.jsonl, line 1: 2 columns are needed"),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLES)
def test_strange_pairs(case, tmp_path):
    name, content, said = TABLES[case]
    (tmp_path / name).write_bytes(content)

    def read():
        return data.pairs(tmp_path / name, tokenizer="bytes", cache_dir=tmp_path / "cache")

    if said is None:
        assert len(read().encoded("train")) == 28
        return
    with pytest.raises(data.DataError, match=said):
        read()


IMAGES = {
    "empty": (b"", "is empty"),
    "text": (b"<html>not found</html>", "is not an image that can be read"),
    "zeros": (bytes(1000), "is not an image that can be read"),
    "a program for Ghostscript": (EPS, "is not an image that can be read"),
    "a vector image": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image"),
    "an icon": (picture("ICO", (16, 16)), "is not an image that can be read"),
    "a document": (picture("PDF"), "is not an image that can be read"),
    "cut": (picture(size=(64, 64))[:60], "is not an image that can be read"),
    "a header alone": (picture()[:33], "is not an image that can be read"),
    "width 0": (png(0, 8), "is not an image that can be read"),
    "width and height 0": (png(0, 0), "is not an image that can be read"),
    "a bomb": (png(60_000, 60_000), "is not an image that can be read"),
    "too few pixels": (png(8, 8), "is not an image that can be read"),
    "another size": (picture(size=(9, 9)), "is 9x9x3 and the first image 8x8x3"),
    "not a square": (picture(size=(8, 9)), "is 8x9, not a square"),
    "one pixel": (picture(size=(1, 1)), "is 1x1x3 and the first image 8x8x3"),
    "numbers of 32 bits": (picture("TIFF", mode="I", colour=70_000), "has pixels of more than 8"),
    "fractions": (picture("TIFF", mode="F", colour=0.5), "has pixels of more than 8 bits"),
    "numbers of 16 bits": (picture("PNG", mode="I;16", colour=300), "has pixels of more than 8"),
    "jpeg by another name": (picture("JPEG"), None),
    "a palette": (picture("GIF", mode="P"), None),
    "transparent": (picture(mode="RGBA", colour=(1, 2, 3, 0)), None),
    "cyan and others": (picture("JPEG", mode="CMYK"), None),
    "junk at the end": (picture() + b"junk", None),
}


@pytest.fixture
def no_processes(monkeypatch):
    """No program is started: Pillow would run Ghostscript for EPS."""
    from PIL import EpsImagePlugin

    started = []

    def refuse(*arguments, **options):
        started.append(arguments)
        raise OSError("no program is started here")

    for name in ("Popen", "call", "check_call", "check_output", "run"):
        monkeypatch.setattr(subprocess, name, refuse)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", refuse)
    yield
    assert not started


@pytest.mark.parametrize("case", IMAGES)
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_strange_images(case, packed, tmp_path, no_processes):
    content, said = IMAGES[case]
    files = [(f"train/{name}/0.png", picture()) for name in ("cat", "dog")]
    files += [(f"valid/{name}/0.png", picture()) for name in ("cat", "dog")]
    files.append(("train/cat/1.png", content))
    where = tmp_path / "images.tar" if packed else tmp_path / "images"
    if packed:
        where.write_bytes(tarred(*files))
    for name, one in [] if packed else files:
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_bytes(one)

    def read():
        found = data.images(where, channels=3, cache_dir=tmp_path / "cache")
        return [found.train[n] for n in range(len(found.train))]

    if said is None:
        assert len(read()) == 3
        return
    with pytest.raises(data.DataError, match=rf"train.cat.1\.png.* {said}"):
        read()


def test_images_of_one_pixel_are_images(tmp_path):
    content = picture(size=(1, 1))
    names = ("train/a/0.png", "valid/a/0.png")
    (tmp_path / "a.zip").write_bytes(zipped(*((name, content) for name in names)))
    assert data.images(tmp_path / "a.zip", cache_dir=tmp_path / "cache").image_size == 1


ARCHIVES = {
    "a class with a name of dots": ([("train/../0.png", picture())], "has no class"),
    "an archive inside": ([("train/a.tar", tarred())], "packed inside an archive"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_strange_archives_of_images(case, tmp_path):
    members, said = ARCHIVES[case]
    whole = [(f"{split}/a/0.png", picture()) for split in ("train", "valid")]
    (tmp_path / "a.zip").write_bytes(zipped(*whole, *members))
    with pytest.raises(data.DataError, match=said):
        data.images(tmp_path / "a.zip", cache_dir=tmp_path / "cache")


# --- datasets, decoded by us and not by `datasets`


@pytest.fixture
def datasets():
    found = pytest.importorskip("datasets")
    found.disable_progress_bars()
    yield found
    found.enable_progress_bars()


def write_table(datasets, path, column, kind=None):
    kind = kind or datasets.Value("int64")
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    table = datasets.Dataset.from_list(
        [{"image": {"bytes": content, "path": None}, "label": label} for content, label in column],
        features=features,
    )
    table.to_parquet(str(path))


def test_images_of_the_hub_start_no_program(datasets, tmp_path, no_processes, monkeypatch):
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: load(str(tmp_path / "d"), cache_dir=str(tmp_path))
    )
    monkeypatch.setattr(hub, "_ask", lambda path: None)
    (tmp_path / "d").mkdir()
    for split in ("train", "test"):
        column = [(picture(), 0), (EPS, 1)]
        write_table(datasets, tmp_path / "d" / f"{split}.parquet", column)
    found = data.images("owner/name", cache_dir=tmp_path / "cache")
    assert found.train[0]["labels"] == 0
    with pytest.raises(data.DataError, match="row 2 is not an image that can be read"):
        found.train[1]


def test_a_column_of_images_is_no_text(datasets, tmp_path, no_processes):
    write_table(datasets, tmp_path / "a.parquet", [(EPS, n) for n in range(4)])
    with pytest.raises(data.DataError, match="row 1: column 'image' must be text, but is dict"):
        data.text(tmp_path / "a.parquet", column="image", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("strange", [None, float("nan"), 1.5])
def test_labels_must_be_whole_numbers_or_text(strange, datasets, tmp_path, monkeypatch):
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: load(str(tmp_path / "d"), cache_dir=str(tmp_path))
    )
    monkeypatch.setattr(hub, "_ask", lambda path: None)
    (tmp_path / "d").mkdir()
    for split in ("train", "test"):
        column = [(picture(), 0.0), (picture(), strange)]
        write_table(
            datasets, tmp_path / "d" / f"{split}.parquet", column, datasets.Value("float64")
        )
    with pytest.raises(data.DataError, match=r"row \d: column 'label' must be .* or text"):
        data.images("owner/name", cache_dir=tmp_path / "cache")


# --- tokenizers


def tokenizer(**parts):
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
    }  # fmt: skip
    rest = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    whole = {"version": "1.0", "added_tokens": [], "model": model, **dict.fromkeys(rest)}
    return whole | parts


def vocabulary(**ids):
    return tokenizer() | {
        "model": tokenizer()["model"] | {"vocab": {"a": 0, "b": 1, "ab": 2} | ids}
    }


ADDED = {
    "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
    "special": True,
}  # fmt: skip
TOKENIZERS = {
    "a huge id": (vocabulary(b=4_000_000_000), "an id must be from 0 to 16777215, got 4000000000"),
    "an id below 0": (vocabulary(b=-1), "an id must be from 0"),
    "a huge added id": (tokenizer(added_tokens=[ADDED | {"id": 4_000_000_000}]), "an id must be"),
    "words": (
        tokenizer(model={"type": "WordLevel", "unk_token": "a", "vocab": {"a": 4_000_000_000}}),
        "an id must be from 0 to",
    ),
    "an id twice": (vocabulary(b=0), "is not a tokenizer"),
    "a list": ([], "is not a tokenizer"),
    "no model": ({"version": "1.0"}, "is not a tokenizer"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_strange_tokenizers(case, tmp_path):
    content, said = TOKENIZERS[case]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(data.DataError, match=rf"tokenizer\.json.*{said}"):
            tokens.load(source)


def test_a_huge_id_in_other_files_of_a_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer()))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert len(tokens.load(tmp_path)) == 3
    config["added_tokens_decoder"] = {"4000000000": ADDED}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(data.DataError, match=r"tokenizer_config\.json: an id must be"):
        tokens.load(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "vocab.json").write_text('{"a": 4000000000}')
    (tmp_path / "b" / "merges.txt").write_text("")
    with pytest.raises(data.DataError, match=r"vocab\.json: an id must be"):
        tokens.load(tmp_path / "b")


def test_a_deep_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(data.DataError, match=r"tokenizer\.json is nested too deeply"):
        tokens.load(tmp_path)


def test_a_vocabulary_with_holes(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary(b=70_000)))
    (tmp_path / "a.txt").write_text("b\n" * 30)
    with pytest.raises(ValueError, match=r"gives the id 70000.*without holes"):
        data.text(tmp_path / "a.txt", tokenizer=tmp_path, cache_dir=tmp_path / "cache")


# --- caches


def test_a_bit_that_flips_in_a_cached_tokenizer_is_noticed(tmp_path):
    def choose():
        found = tokens.choose("bpe:260", lambda: "x", lambda: [GOOD], tmp_path)
        return found.backend_tokenizer.to_str()

    first = choose()
    (file,) = tmp_path.glob("bpe-*")
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    for place in random.integers(0, 8 * len(whole), 60):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << (place % 8)
        file.write_bytes(damaged)
        assert choose() == first


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask")
def test_files_of_a_cache_follow_the_umask(tmp_path):
    cache.load(tmp_path / "a.arr", lambda writer: writer.append(np.arange(9)), dtype="uint16")
    (tmp_path / "plain").write_bytes(b"")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.arr", "plain")]
    assert modes[0] == modes[1]


# --- saved weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    from mercer import models

    folder = tmp_path_factory.mktemp("model")
    models.KernelLM(models.presets.lm("tiny", vocab_size=20, num_layers=1)).save_pretrained(folder)
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask")
def test_saved_weights_follow_the_umask(saved):
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in saved.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_a_tensor_that_is_missing_is_an_error(saved, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from mercer import models

    shutil.copytree(saved, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    weights = load_file(file)
    assert models.KernelLM.from_pretrained(tmp_path / "m") is not None
    name = "blocks.0.attention.out.weight"
    del weights[name]
    save_file(weights, file, {"format": "pt"})
    for kind in (models.KernelLM, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=f"lack the tensor '{name}'"):
            kind.from_pretrained(tmp_path / "m")
    model, told = models.KernelLM.from_pretrained(
        tmp_path / "m", ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert set(told["missing_keys"]) == {name}
    assert model.num_parameters() > 0


def test_a_deep_config(saved, tmp_path):
    import shutil

    from mercer import models

    shutil.copytree(saved, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is nested too deeply"):
        models.KernelLM.from_pretrained(tmp_path / "m")


@pytest.mark.parametrize("kind", ["pairs", "images"])
def test_columns_of_data_without_names_are_refused(kind, tmp_path):
    with pytest.raises(ValueError, match=r"embedded has no columns .* got columns=\('a', 'b'\)"):
        getattr(data, kind)("embedded", columns=("a", "b"), cache_dir=tmp_path)
