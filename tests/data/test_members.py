"""Members of an archive, chosen by name or pattern."""

import io
import tarfile
import zipfile

import pytest

pytest.importorskip("transformers")

from mercer import data
from mercer.data.members import choose_members

TEXT = "line\n" * 40
NOVELS = {
    "Austen_Emma_1815.txt": f"emma {TEXT}",
    "Austen_Persuasion_1817.txt": f"persuasion {TEXT}",
    "Shelley_Frankenstein_1818.txt": f"frankenstein {TEXT}",
    "Austen_portrait.png": "no text",
    "notes.md": f"notes {TEXT}",
}


def make(path, members):
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return path
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w") as archive:
        link = tarfile.TarInfo("aside.link")
        link.type, link.linkname = tarfile.SYMTYPE, "notes.md"
        archive.addfile(link)
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content := content.encode() if isinstance(content, str) else content)
            archive.addfile(entry, io.BytesIO(content))
    return path


@pytest.fixture(params=["novels.zip", "novels.tar", "novels.tar.xz"])
def novels(request, tmp_path):
    return make(tmp_path / request.param, NOVELS)


def read(source, tmp_path, split="train"):
    """The documents of a split."""
    found = data.text(source, tokenizer="bytes", cache_dir=tmp_path / "cache")
    documents = bytes(min(n, 255) for n in found.split(split).ids.tolist()).split(b"\xff")[1:]
    return [document.decode() for document in documents]


def test_one_member_is_a_corpus(novels, tmp_path):
    (text,) = read(f"{novels}::Austen_Emma_1815.txt", tmp_path)
    assert text.startswith("emma line")
    found = data.text(f"{novels}::Austen_Emma_1815.txt", tokenizer="bytes", cache_dir=tmp_path)
    assert found.source == f"{novels}::Austen_Emma_1815.txt"
    assert found.train.num_bytes + found.valid.num_bytes == len(f"emma {TEXT}")
    # a name says exactly what is meant, so any ending is text
    (text,) = read(f"{novels}::notes.md", tmp_path)
    assert text.startswith("notes line")


def test_a_pattern_chooses_the_texts_that_fit(novels, tmp_path):
    texts = read(f"{novels}::*Austen*", tmp_path)
    assert [text.split()[0] for text in texts] == ["emma", "persuasion"]
    texts = read(f"{novels}::*_181[58].txt", tmp_path)
    assert [text.split()[0] for text in texts] == ["emma", "frankenstein"]


def test_every_choice_has_its_own_cache(novels, tmp_path):
    sources = [novels, *(f"{novels}::{name}" for name in ("*", "*Austen*", "*Emma*", "*Frank*"))]
    files = [data.text(s, tokenizer="bytes", cache_dir=tmp_path).train for s in sources[1:]]
    assert len({file.stored.path for file in files}) == 4
    if novels.suffix == ".zip":
        whole = data.text(novels, tokenizer="bytes", cache_dir=tmp_path).train
        assert whole.ids.tolist() == files[0].ids.tolist()


def test_the_last_part_of_a_name_is_enough(tmp_path):
    members = {"a/one.txt": f"one {TEXT}", "b/two.txt": f"two {TEXT}", "b/c/one.txt": TEXT}
    path = make(tmp_path / "a.zip", members)
    assert choose_members(f"{path}::two.txt", (".txt",)).names == ("b/two.txt",)
    assert choose_members(f"{path}::b/*", (".txt",)).names == ("b/c/one.txt", "b/two.txt")
    assert choose_members(f"{path}::on?.txt", (".txt",)).names == ("a/one.txt", "b/c/one.txt")
    with pytest.raises(data.DataError, match=r"several members 'one.txt' \(a/one.txt, b/c/one.txt"):
        choose_members(f"{path}::one.txt", (".txt",))


def test_a_name_with_signs_of_patterns_is_a_name_first(tmp_path):
    path = make(tmp_path / "a.zip", {"a[1].txt": TEXT, "a1.txt": TEXT, "*.txt": TEXT})
    assert choose_members(f"{path}::a[1].txt", (".txt",)).names == ("a[1].txt",)
    assert choose_members(f"{path}::*.txt", (".txt",)).names == ("*.txt",)


def test_chosen_members_say_their_split(tmp_path):
    names = ("big-train.txt", "big-valid.txt", "other-train.txt", "about.txt")
    path = make(tmp_path / "a.zip", {name: name for name in names})
    assert read(f"{path}::big*", tmp_path) == ["big-train.txt"]
    assert read(f"{path}::big*", tmp_path, "valid") == ["big-valid.txt"]
    assert read(f"{path}::*", tmp_path) == ["big-train.txt", "other-train.txt"]
    (text,) = read(f"{path}::big-valid.txt", tmp_path)
    assert "big-valid.txt".startswith(text)


def test_tables_and_pairs_in_an_archive(tmp_path):
    rows = "".join(f"wort {n}\tword {n}\n" for n in range(30))
    more = "".join(f"satz {n}\tsentence {n}\n" for n in range(30))
    members = {"de-en-train.tsv": rows, "de-en-valid.tsv": more, "a.csv": "text\nx\n", "a.txt": "x"}
    path = make(tmp_path / "a.tar.xz", members)
    options = {"tokenizer": "bytes", "cache_dir": tmp_path / "cache"}
    found = data.pairs(f"{path}::de-en*", **options)
    assert (len(found.train), found.valid[0]) == (30, ("satz 0", "sentence 0"))
    found = data.pairs(f"{path}::de-en-train.tsv", **options)
    assert (found.train[0], found.source) == (("wort 0", "word 0"), f"{path}::de-en-train.tsv")
    with pytest.raises(data.DataError, match=r"text and tables \(.csv, .txt\); choose one kind"):
        data.text(f"{path}::a.*", **options)
    make(tmp_path / "b.zip", {"a.tsv": f"{rows}allein\n"})
    with pytest.raises(data.DataError, match=r"b.zip, member a.tsv, line 31: column 2 is missing"):
        data.pairs(f"{tmp_path / 'b.zip'}::a.tsv", **options)


def test_images_of_an_archive(tmp_path):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (4, 4)).save(file, "png")
    names = [f"{s}/{c}/{n}.png" for s in ("train", "test") for c in "ab" for n in (1, 2)]
    path = make(tmp_path / "a.zip", dict.fromkeys((*names, "train/other/1.png"), file.getvalue()))
    found = data.images(f"{path}::*/[ab]/*", cache_dir=tmp_path / "cache")
    assert found.class_names == ("a", "b")
    assert (len(found.train), len(found.valid)) == (4, 4)


WRONG = {
    "a name": ("::Austen_Ema_1815.txt", r"no member 'Austen_Ema_1815.txt'; did you mean 'Austen_E"),
    "another case": ("::austen_emma_1815.TXT", "did you mean 'Austen_Emma_1815.txt'"),
    "a far name": ("::zzz", "no member 'zzz'; it has A.*, .*"),
    "a pattern": ("::*Dickens*", r"no member that fits '\*Dickens\*'; it has "),
    "a misspelt pattern": ("::*Austn*", "no member that fits .*; did you mean 'Austen_"),
    "no text": ("::*.png", r"'\*.png' fits Austen_portrait.png, but none ends in .txt"),
    "nothing": ("::", "must name a member, or a pattern, after ::"),
    "escapes": ("::\x1b[31m", r"no member that fits '\\x1b\[31m'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_there_is_said(case, novels, tmp_path):
    ending, said = WRONG[case]
    with pytest.raises(data.DataError, match=said) as error:
        data.text(f"{novels}{ending}", tokenizer="bytes", cache_dir=tmp_path / "cache")
    assert "\x1b" not in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_other_files_are_no_archives(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    for read in (data.text, data.pairs, data.images):
        with pytest.raises(data.DataError, match=r"a.txt is no archive"):
            read(f"{tmp_path / 'a.txt'}::b.txt", cache_dir=tmp_path / "cache")
        with pytest.raises(data.DataError, match="is a folder; :: chooses members of an archive"):
            read(f"{tmp_path}::b.txt", cache_dir=tmp_path / "cache")
        with pytest.raises(data.DataError, match=r"nowhere.zip does not exist"):
            read("nowhere.zip::*Austen*", cache_dir=tmp_path / "cache")


def test_long_and_strange_names_are_short_in_messages(tmp_path):
    path = make(tmp_path / "a.zip", {"x" * 5000 + ".txt": "", "\x1b[2J.txt": "", **NOVELS})
    with pytest.raises(data.DataError, match="2 more") as error:
        choose_members(f"{path}::?", (".txt",))
    assert "\x1b" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_packed_members_links_and_parquet(tmp_path):
    members = {"a.txt.gz": "x", "b.parquet": "x", "c.txt": f"c {TEXT}"}
    path = make(tmp_path / "a.tar", members)
    options = {"tokenizer": "bytes", "cache_dir": tmp_path / "cache"}
    for name, said in (
        ("a.txt.gz", "member a.txt.gz: packed inside an archive"),
        ("*.gz", "member a.txt.gz: packed inside an archive"),
        ("b.parquet", "b.parquet: a .parquet file inside an archive"),
        ("aside.link", "member aside.link: a link"),
    ):
        with pytest.raises(data.DataError, match=said):
            data.text(f"{path}::{name}", **options)
    # what is not chosen does no harm
    assert data.text(f"{path}::c.txt", **options).train.num_bytes


@pytest.mark.parametrize("place", ["style", "style/published"])
def test_gpt2s_files_are_found_in_the_folder_of_data(tmp_path, monkeypatch, place):
    folder = tmp_path / "tokenizer" / "gpt2"
    folder.mkdir(parents=True)
    (folder / "merges.txt").write_text("")
    (tmp_path / place).mkdir(parents=True)
    path = make(tmp_path / place / "a.zip", {"b/c/d.txt": TEXT})
    asked = []
    monkeypatch.setattr("mercer.data.tokens.load", lambda at: asked.append(at) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        data.text(f"{path}::b/c/*", tokenizer="gpt2", cache_dir=tmp_path / "cache")
    assert asked == [folder]
