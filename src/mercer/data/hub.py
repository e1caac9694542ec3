"""Hugging Face `datasets` by name, and .parquet files through the same library.

The usual names are short here: "wikitext-103", "fineweb-edu", "iwslt14", "multi30k", "cifar10",
"imagenet-1k". Any other is a name on the hub, "owner/name" or "owner/name:config", and the columns
to read are arguments. No code of a dataset is run: `datasets` refuses those that need a script.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .corpus import Block, Corpus, Documents
from .errors import DataError, need
from .files import READING, Chosen, hash_files, unify_ends
from .layout import TABLE as TABLE
from .layout import WORDS, Found

ENDINGS = (".txt", ".tsv", ".csv", ".jsonl", ".xz", ".gz", ".zip", ".tar", TABLE)
BATCH = 1000
HELD_OUT = 0.05
MOST_HELD_OUT = 10_000
# Seconds in which the hub must answer.
PATIENCE = 10.0


@dataclass(frozen=True, kw_only=True)
class Name:
    """The name of a dataset on the hub, and what to read of it."""

    path: str
    config: str | None = None
    revision: str | None = None
    columns: tuple[str, ...] = ()
    # rows are lines of one long text, not documents of their own
    lines: bool = False


TEXT = {
    "wikitext-103": Name(
        path="Salesforce/wikitext", config="wikitext-103-raw-v1", columns=("text",), lines=True
    ),
    "wikitext-2": Name(
        path="Salesforce/wikitext", config="wikitext-2-raw-v1", columns=("text",), lines=True
    ),
    "fineweb-edu": Name(path="HuggingFaceFW/fineweb-edu", config="sample-10BT", columns=("text",)),
}
PAIRS = {
    # the hub's own copy as tables: the original needs a script
    "iwslt14": Name(
        path="bbaaaa/iwslt14-de-en",
        revision="refs/convert/parquet",
        columns=("translation.de", "translation.en"),
    ),
    "multi30k": Name(path="bentrevett/multi30k", columns=("de", "en")),
}
IMAGES = {
    "cifar10": Name(path="uoft-cs/cifar10", columns=("img", "label")),
    "cifar100": Name(path="uoft-cs/cifar100", columns=("img", "fine_label")),
    "imagenet-1k": Name(path="ILSVRC/imagenet-1k", columns=("image", "label")),
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """One split of a dataset."""

    rows: Any
    where: str
    fingerprint: str

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, start: int, end: int) -> Table:
        return Table(
            rows=self.rows.select(range(start, end)),
            where=self.where,
            fingerprint=f"{self.fingerprint} {start} {end}",
        )

    def check(self, columns: Sequence[str]) -> None:
        """Raise DataError for a missing column; `a.b` is the key b of the column a."""
        for column in columns:
            head, _, key = column.partition(".")
            has = list(self.rows.column_names)
            if key and head in has:
                has = [f"{head}.{part}" for part in self._parts(head)]
            if column not in has:
                raise DataError(f"{self.where} has no column {column!r}; it has {', '.join(has)}")

    def _parts(self, column: str) -> list[str]:
        """The keys of a column of objects; a column of translations has languages."""
        feature = self.rows.features[column]
        return list(
            getattr(feature, "languages", None) or (feature if isinstance(feature, dict) else ())
        )

    def find_languages(self) -> tuple[str, ...]:
        """Both languages of a column `translation`."""
        languages = self._parts("translation") if "translation" in self.rows.features else []
        if len(languages) != 2:
            has = ", ".join(self.rows.column_names)
            raise DataError(f"{self.where}: name two of its columns ({has}) by columns=(…, …)")
        return tuple(f"translation.{language}" for language in languages)

    def read_texts(self, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """The text of the columns, row by row."""
        self.check(columns)
        heads = list(dict.fromkeys(column.partition(".")[0] for column in columns))
        number = 0
        for table in self._stored(heads).iter(batch_size=BATCH):
            batch = {head: table.column(head) for head in heads}
            for n in range(table.num_rows):
                number += 1
                values = tuple(self._pick(batch, column, n, number) for column in columns)
                for column, value in zip(columns, values, strict=True):
                    if not isinstance(value, str):
                        raise DataError(
                            f"{self.where}, row {number}: column {column!r} must be text, "
                            f"but is {type(value).__name__}"
                        )
                yield tuple(unify_ends(value) for value in values)

    def read_column(self, column: str) -> list[Any]:
        """All values of a column."""
        tables = self._stored([column]).iter(batch_size=BATCH)
        return [value for table in tables for value in table.column(column).to_pylist()]

    def read_value(self, column: str, index: int) -> Any:
        """The value of one row."""
        return self._stored([column])[index].column(column)[0].as_py()

    def _stored(self, columns: list[str]) -> Any:
        """The columns as they are stored; `datasets` would decode images and sounds itself."""
        return self.rows.select_columns(columns).with_format("arrow")

    def _pick(self, batch: Any, column: str, n: int, number: int) -> Any:
        head, _, key = column.partition(".")
        try:
            value = batch[head][n].as_py()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.where}, row {number}: column {column!r} is not UTF-8 ({error.reason})"
            ) from None
        return value.get(key) if key and isinstance(value, dict) else value


def load(name: Name) -> dict[str, Table]:
    """The splits of a dataset on the hub; where it does not answer, those kept by `datasets`."""
    datasets = need("datasets", "data")
    options = {"revision": name.revision} if name.revision else {}
    where = name.path + (f":{name.config}" if name.config else "")
    try:
        silence = _ask(name.path)
        if silence is None:
            loaded = datasets.load_dataset(name.path, name.config, **options)
        else:
            loaded = _load_kept(name, silence)
    # a download fails in many ways: no network, unknown name, licence not accepted
    except Exception as error:
        raise DataError(
            f"{where} could not be loaded from the Hugging Face hub ({_say(error)}). Check the "
            "name and the network; for a dataset whose licence must be accepted, 'hf auth login'; "
            "or download its files and give the folder; 'embedded' needs no download"
        ) from error
    tables = {
        split: Table(rows=rows, where=f"{where}, split {split}", fingerprint=rows._fingerprint)
        for split, rows in loaded.items()
    }
    return _name_splits(tables, where)


def _ask(path: str) -> Exception | None:
    """Why the hub does not answer; None if it does, be it with an error.

    `datasets` would ask six times in half a minute and print each failure.
    """
    client = need("huggingface_hub", "data")
    try:
        # One field, since the whole has a line for each file.
        client.HfApi().dataset_info(path, timeout=PATIENCE, expand=["sha"])
    # An unknown dataset, or a text that cannot be a name: `datasets` says so at once.
    except (client.errors.HfHubHTTPError, ValueError):
        return None
    # Each release of huggingface_hub has other classes for a lost connection.
    except Exception as error:
        return error
    return None


def _load_kept(name: Name, silence: Exception) -> Any:
    """A dataset that `datasets` has kept from an earlier time."""
    kept = need("datasets.packaged_modules.cache.cache", "data")
    try:
        builder = kept.Cache(
            dataset_name=name.path.rpartition("/")[2], repo_id=name.path,
            config_name=name.config, version="auto", hash="auto",
        )  # fmt: skip
    except ValueError:
        raise ConnectionError(f"it does not answer: {_say(silence)}") from None
    builder.download_and_prepare()
    return builder.as_dataset()


def load_files(found: Found, cache_dir: Path) -> dict[str, Table]:
    """The splits of .parquet files."""
    datasets = need("datasets", "data")
    tables = {}
    for split, paths in found.files.items():
        names = ", ".join(map(str, paths))
        for path in paths:
            assert not isinstance(path, Chosen)
            if path.stat().st_size == 0:
                raise DataError(f"{path} is empty")
        try:
            rows = datasets.load_dataset(
                "parquet",
                data_files=[str(path) for path in paths],
                split="train",
                cache_dir=str(cache_dir / "tables"),
            )
        except Exception as error:
            raise DataError(f"{names} could not be read as a table ({_say(error)})") from error
        tables[split] = Table(rows=rows, where=names, fingerprint=hash_files(paths))
    if "all" in tables:
        tables["train"] = tables.pop("all")
    return _name_splits(tables, str(found.where))


def is_table(found: Found) -> bool:
    """Whether `datasets` reads the files; a mixture is an error."""
    paths = [path for part in found.files.values() for path in part]
    tables = [Path(path.name).suffix.lower() == TABLE for path in paths]
    if any(tables) and not all(tables):
        raise DataError(f"{found.where} mixes {TABLE} files with others")
    return all(tables)


def check_source(source: str | os.PathLike[str]) -> str:
    """Raise DataError if the source looks like a path: then a file is missing."""
    text = os.fspath(source)
    looks_like_path = text.startswith((".", "~", os.sep)) or len(Path(text).parts) > 2
    if not isinstance(source, str) or looks_like_path or not text or Path(text).suffix in ENDINGS:
        raise DataError(
            f"{text!r} does not exist: it is not a file, a folder, or a corpus in a folder"
        )
    return text


def find_name(source: str, known: dict[str, Name], columns: tuple[str, ...] | None) -> Name:
    """The dataset that a source names on the hub."""
    if source in known:
        return known[source]
    path, _, config = source.partition(":")
    return Name(path=path, config=config or None, columns=columns or ())


def make_corpus(tables: dict[str, Table], column: str, source: str, lines: bool) -> Corpus:
    """Rows as documents, or as lines of one."""
    splits = {}
    for split, table in hold_out(tables).items():
        table.check([column])
        splits[split] = Documents(
            read=_Rows(table, column, lines),
            fingerprint=f"{table.fingerprint} {column} {lines} {READING}",
        )
    return Corpus(source=source, splits=splits)


def hold_out(tables: dict[str, Table]) -> dict[str, Table]:
    """With a valid split: the last 5 % of the train rows, at most 10,000, where there is none."""
    if "valid" in tables:
        return tables
    train = tables["train"]
    held = max(1, min(int(len(train) * HELD_OUT), MOST_HELD_OUT))
    if len(train) < 2:
        raise DataError(
            f"{train.where} has {len(train)} rows: too few to hold out a part of it for validation"
        )
    cut = len(train) - held
    return {**tables, "train": train.part(0, cut), "valid": train.part(cut, len(train))}


@dataclass(frozen=True)
class _Rows:
    """Blocks of the rows of a table."""

    table: Table
    column: str
    lines: bool

    def __call__(self) -> Iterator[Block]:
        for n, (text,) in enumerate(self.table.read_texts([self.column])):
            yield Block(text, n == 0 or not self.lines, (n + 1) / len(self.table))


def _name_splits(tables: dict[str, Table], where: str) -> dict[str, Table]:
    named = {
        split: tables[word] for split, words in WORDS.items() for word in words if word in tables
    }
    if "train" not in named:
        raise DataError(f"{where} has no train split; it has {', '.join(tables)}")
    for table in named.values():
        if len(table) == 0:
            raise DataError(f"{table.where} is empty")
    return named


def _say(error: BaseException) -> str:
    """The last line of the deepest cause: there `datasets` says what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
