"""What a site must not have: dead links, requests to other hosts, and formulas taken for tags."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser loads by itself, in contrast to links that a reader follows.
LOADED = {("script", "src"), ("img", "src"), ("source", "src"), ("iframe", "src"), ("link", "href")}
NAVIGATION = {"canonical", "prev", "next", "alternate"}
# Tags of HTML and SVG have letters, digits and hyphens alone.
LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


class Page(HTMLParser):
    """The links of a page, the names that links may end with, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.strange: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if not set(tag) <= LETTERS:
            self.strange.append(tag)
        if "id" in given:
            self.names.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        for name in ("src", "href"):
            used = not NAVIGATION & set(given.get("rel", "").split())
            if (tag, name) in LOADED and name in given and used:
                self.loaded.append(given[name])


def check(site: Path) -> list[str]:
    """What is wrong, as sentences."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        here = path.relative_to(site)
        wrong += [f"{here}: <{tag}> is no tag" for tag in page.strange]
        wrong += [f"{here}: loads {url}" for url in page.loaded if is_outside(url)]
        if here.name == "404.html":
            # Its links are absolute, since any address may show it.
            continue
        for url in [*page.links, *page.loaded]:
            if not is_outside(url) and (reason := dead(url, path, site, pages)):
                wrong.append(f"{here}: {url} {reason}")
    for path in sorted(site.rglob("*.css")):
        if "url(http" in path.read_text() or "@import" in path.read_text():
            wrong.append(f"{path.relative_to(site)}: loads from another host")
    return wrong


def is_outside(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.netloc) or parts.scheme in ("http", "https", "mailto")


def dead(url: str, path: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    """Why a link inside the site leads nowhere, or None."""
    parts = urlsplit(url)
    if parts.scheme:
        return None if parts.scheme == "data" else "has a strange scheme"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.exists() or not target.is_relative_to(site.resolve()):
        return "leads nowhere"
    anchor = unquote(parts.fragment)
    named = pages.get(target) or pages.get(site / target.relative_to(site.resolve()))
    if anchor and named is not None and anchor not in named.names:
        return "names no place of that page"
    return None
