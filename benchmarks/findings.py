"""The findings in docs/findings.md and README.md, from the committed results of the studies.

    python benchmarks/findings.py              # write the pages anew
    python benchmarks/findings.py runs         # first merge the results in runs/, then write
    python benchmarks/findings.py --check      # write nothing; 1 if a page and the results differ

Each study has a block in docs/findings.md, from `<!-- study: NAME -->` to `<!-- end of study -->`:
question, setting, tables, verdicts and picture. A study that has results for the first time gets
a section before "Not there yet"; what the figures say is written below its block by hand. Where a
study has been run only in its rough version, the block is of that one, `NAME-rough`.

A figure in a sentence is `<!-- cell: STUDY | ROW | COLUMN -->34.26<!-- end -->`, a cell of a table
in results/studies/STUDY/table.md, where a row is told by its first cells, `A / B`. The difference
of two rows in the first figure is `<!-- difference: STUDY | A | B -->0.28<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mercer import studies
from mercer.studies.load import NAMES

ROOT = Path(__file__).parent.parent
FINDINGS, README = "docs/findings.md", "README.md"
BLOCK = re.compile(r"(<!-- study: ([\w-]+) -->\n).*?(\n<!-- end of study -->)", re.S)
# The title of a study.
HEAD = re.compile(r"^## [^\n]*\n\n(?=<!-- study: )", re.M)
MISSING = re.compile(r"(<!-- missing -->\n).*?(\n<!-- end of missing -->)", re.S)
FIGURE = re.compile(r"(<!-- (cell|difference): ([^>]*?) -->)(.*?)(<!-- end -->)", re.S)
TABLE = re.compile(r"<!-- table: [\w-]+ -->.*?<!-- end of table -->", re.S)
NAME = re.compile(r"[A-Za-z][\w'-]*\d[\w.-]*|(?:Tables?|Eq\.|depth|size|degree) \d+(?: to \d+)?")
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
# Longer tables stand in table.md alone.
MOST_ROWS = 24
NEXT = "## Not there yet"
ROUGH = "-rough"


def folder_of(root: Path, name: str) -> Path:
    return root / "results" / "studies" / name


def load(name: str) -> studies.Study:
    """A study of the package, in full or rough by its name."""
    full = name.removesuffix(ROUGH)
    return studies.load(full) if name == full else studies.load(full, "rough")


def published(root: Path) -> list[str]:
    """The studies that have committed results, in the order of `mercer study list`.

    One that has them in full does not stand there as a rough version, too.
    """
    found = []
    for name in NAMES:
        both = (name, name + ROUGH)
        found += [one for one in both if (folder_of(root, one) / "about.json").exists()][:1]
    return found


def merge(runs: Path, root: Path) -> Iterator[str]:
    """Publish every study of the package that has results in a folder of runs; what was done."""
    for name in (one for full in NAMES for one in (full, full + ROUGH)):
        if any((runs / name).glob("results*.jsonl")):
            place = folder_of(root, name)
            try:
                studies.publish(load(name), runs / name, place)
                yield f"{name}: merged into {place}"
            except ValueError as error:
                yield f"{name}: not merged: {error}"


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a Markdown text: rows of cells, the header first."""
    found: list[list[list[str]]] = [[]]
    for line in text.split("\n"):
        if line.startswith("|---"):
            continue
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            found[-1].append([cell.strip().replace("\\|", "|") for cell in cells])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def short(text: str) -> str:
    """A text whose tables have at most `MOST_ROWS` rows; the headings are one level lower."""
    parts = re.split(r"((?:^\|.*\n?)+)", text, flags=re.M)
    for n, part in enumerate(parts):
        if part.startswith("|") and part.count("\n") > MOST_ROWS + 2:
            parts[n] = f"A table of {part.count(chr(10)) - 2} rows: see the whole table.\n"
    return re.sub(r"^(#+ )", r"#\1", "".join(parts), flags=re.M)


def block(name: str, root: Path) -> str:
    """What stands in the page for a study."""
    place = folder_of(root, name)
    about = json.loads((place / "about.json").read_text())
    versions = [f"{n} {' and '.join(found)}" for n, found in about["versions"].items() if found]
    shown = {n.replace("_", " "): x for n, x in about["budget"].items() if n != "data"}
    budget = ", ".join(f"{name} {x}" for name, x in shown.items())
    days = " to ".join(dict.fromkeys((about["from"], about["to"])))
    tuned = "; ".join(f"{n.replace('_', ' ')} {x}" for n, x in about["tuned"].items())
    setting = [
        f"Data: {', '.join(about['data'][:4])}{', …' if len(about['data']) > 4 else ''}.",
        f"The same for all: {budget}.",
        f"Tuned alike for all: {tuned}." if tuned else "",
        f"{about['jobs']} runs, seeds {', '.join(map(str, about['seeds']))}, "
        f"{about['hours']:g} hours in all on {' and '.join(about['devices'])}, "
        f"{days}; {', '.join(versions)}; "
        f"commit {' and '.join(about['commits'])}.",
    ]
    # The title is the heading, and the budget is in the setting.
    text = (place / "table.md").read_text().partition("\n")[2]
    text = re.sub(r"^Budget of every system: .*\n", "", text, flags=re.M)
    up = f"../results/studies/{name}"
    pictures = [path.name for path in sorted(place.glob("*.png"))]
    parts = [
        f"*{about['question']}*",
        " ".join(part for part in setting if part),
        about["remark"],
        *(f"**Note:** {note}." for note in about["notes"]),
        short(text).strip(),
        *(f"![{about['title']}: {Path(p).stem}]({up}/{p})" for p in pictures),
        f"`{about['command']}`; [results]({up}/results.jsonl), [the whole table]({up}/table.md).",
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(part for part in parts if part))


def find_cell(name: str, row: str, column: str, root: Path) -> str:
    """A cell of the first table that has it; ValueError if none has."""
    path, wanted = folder_of(root, name) / "table.md", row.split(" / ")
    if not path.exists():
        raise ValueError(f"there are no committed results of {name}")
    for head, *others in tables(path.read_text()):
        for cells in others:
            if column in head and cells[: len(wanted)] == wanted:
                return cells[head.index(column)]
    raise ValueError(f"no table of {name} has the row {row!r} with the column {column!r}")


def figure(kind: str, told: str, said: str, root: Path) -> str:
    """A figure in a sentence: what stands there if it is right, otherwise the figure."""
    given = [word.strip() for word in told.split("|")]
    if len(given) != 3:
        raise ValueError(f"a {kind} needs three parts, STUDY | … | …, got {told!r}")
    if kind == "cell":
        text = find_cell(*given, root)
    else:
        # The first figure of both.
        first = tables((folder_of(root, given[0]) / "table.md").read_text())[0][0][1]
        one, two = (find_cell(given[0], row, first, root).split(" ")[0] for row in given[1:])
        digits = len(one.partition(".")[2])
        text = f"{abs(float(one) - float(two)):.{digits}f}"
    number = NUMBER.match(text)
    if said == text or number is None:
        return text
    if NUMBER.fullmatch(said) and digits_agree(said, number[0]):
        return said
    return number[0]


def digits_agree(said: str, exact: str) -> bool:
    """Whether a number is the other one, rounded to its digits."""
    places = len(said.partition(".")[2])
    return said.replace(",", "") == f"{float(exact.replace(',', '')):.{places}f}"


def loose_numbers(text: str, folder: Path) -> list[str]:
    """Numbers of a page that come from nowhere.

    A number is in a generated block, is a checked figure, stands on a page that its paragraph links
    to, or is a part of a name such as Table 2.
    """
    code = re.compile(r"```.*?```|`[^`]*`|<!--.*?-->", re.S)
    for made in (HEAD, BLOCK, MISSING, FIGURE, TABLE, code):
        text = made.sub(" ", text)
    found = []
    for part in re.split(r"\n\s*\n|\n- ", text):
        links = re.findall(r"\]\(([^)#\s]+)", part)
        cited = [folder / link for link in links if link.endswith((".md", ".jsonl"))]
        there = {n for page in cited if page.exists() for n in NUMBER.findall(page.read_text())}
        plain = NAME.sub(" ", re.sub(r"\]\([^)]*\)", "]", part))
        found += [number for number in NUMBER.findall(plain) if number not in there]
    return found


def head(name: str) -> str:
    """The heading of a study, and the start of its block."""
    return f"## {load(name).title}\n\n<!-- study: {name} -->\n"


def with_findings(page: str, text: str, root: Path) -> str:
    """A page with its blocks and figures written anew."""
    there = published(root)
    if page == FINDINGS:
        known = {found[2] for found in BLOCK.finditer(text)}
        new = ""
        for name in there:
            rough = name + ROUGH
            if rough in known:
                text = text.replace(head(rough), head(name))
            elif name not in known:
                new += f"{head(name)}<!-- end of study -->\n\n"
        text = text.replace(NEXT, new + NEXT)
        text = re.sub(r"(<!-- study: [\w-]+ -->\n)(<!-- end of study -->)", r"\1\n\2", text)
    text = BLOCK.sub(lambda f: f[1] + block(f[2], root) + f[3], text)
    # The first study of the list shows how studies work; no paper asks it.
    todo = [
        f"- `{name}`: {studies.load(name).question}"
        + (" A rough version has been run." if name + ROUGH in there else "")
        for name in NAMES[1:]
        if name not in there
    ]
    text = MISSING.sub(lambda f: f[1] + "\n".join(todo) + f[2], text)
    return FIGURE.sub(lambda f: f[1] + figure(f[2], f[3], f[4], root) + f[5], text)


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="?", help="a folder of studies to merge first")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if pages differ")
    options = parser.parse_args(arguments)
    if options.runs is not None:
        for line in merge(options.runs, root):
            print(line)
    stale = False
    for page in (FINDINGS, README):
        path = root / page
        text = path.read_text()
        new = with_findings(page, text, root)
        if new != text:
            stale = True
            print(f"{page}: {'differs from the results' if options.check else 'written'}")
            if not options.check:
                path.write_text(new)
    return int(stale and options.check)


if __name__ == "__main__":
    sys.exit(main())
