"""From a page of the repository to a page of the site: links, formulas, and Markdown's dialect."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

FENCE = re.compile(r"^ *(`{3,})[^\n]*\n.*?^ *\1 *$", re.S | re.M)
CODE = re.compile(FENCE.pattern + r"|(`+)(?!`).+?(?<!`)\2(?!`)", re.S | re.M)
TAGS = "a br div figcaption figure img p span svg"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
ITEM = re.compile(r"^ {0,3}([-*]|\d+\.) ")


def outside(code: re.Pattern[str], text: str, change: Callable[[str], str]) -> str:
    """The text with everything but its code changed."""
    done, end = [], 0
    for found in code.finditer(text):
        done += [change(text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*done, change(text[end:])])


def escape(text: str) -> str:
    """Formulas such as <q, k> as text; Python-Markdown would take them for tags."""
    allowed = "|".join(TAGS.split())
    return re.sub(rf"<(?=[A-Za-z])(?!(?:{allowed})[\s>])", "&lt;", text)


def part_blocks(text: str) -> str:
    """Blank lines before lists and tables, which Python-Markdown needs, and no comments."""
    text = re.sub(r"^<!--.*?-->$", "", text, flags=re.S | re.M)
    lines: list[str] = []
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        starts_list = ITEM.match(line) and not ITEM.match(before) and before[:1] not in (" ", "")
        starts_table = line.startswith("|") and before and not before.startswith("|")
        if starts_list or starts_table:
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def with_links(text: str, source: PurePosixPath, pages: Mapping[str, str], root: Path) -> str:
    """Links between files of the repository as links between pages.

    `pages` says which page of the site a file has become. A file that is no page keeps its name
    without a link; one that does not exist keeps its link, and the build fails.
    """
    here = PurePosixPath(pages[str(source)]).parent

    def change(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        file = normpath(str(source.parent / path))
        if file in pages:
            return f"{picture}[{label}]({relpath(pages[file], here)}{mark}{anchor})"
        return f"{label}" if (root / file).exists() and not picture else found[0]

    return LINK.sub(change, text)


def convert(source: str, pages: Mapping[str, str], root: Path, text: str | None = None) -> str:
    """The text of a page, from its source or, if this is no Markdown, from the text of it."""
    text = (root / source).read_text() if text is None else text
    path = PurePosixPath(source)
    text = outside(FENCE, text, lambda part: with_links(part, path, pages, root))
    return outside(FENCE, outside(CODE, text, escape), part_blocks)
