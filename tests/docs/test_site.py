"""The documentation site: it builds, names everything, has no dead link, and asks no other host."""

import http.server
import re
import shutil
import sys
import threading
from functools import partial
from pathlib import Path, PurePosixPath

import pytest

from mercer.filters import FILTERS
from mercer.kernels import KERNELS

pytest.importorskip("zensical", reason="zensical builds the site: pip install 'mercer[docs]'")
ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "dev" / "site"))
import build as builder  # noqa: E402
import check as checker  # noqa: E402
import docstrings  # noqa: E402
import pages  # noqa: E402
import reference  # noqa: E402

sys.path.remove(str(ROOT / "dev" / "site"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "site"
    assert builder.build(ROOT, folder) == []
    return folder


def names_in(page):
    return checker.Page(page.read_text()).names


def test_the_reference_has_every_public_name(site):
    found = set().union(*map(names_in, (site / "reference").glob("*.html")))
    wanted = {f"mercer.{name}" for name, _ in reference.names_of("")}
    for module in reference.PUBLIC:
        for part in reference.parts_of(module):
            wanted |= {f"mercer.{part}.{name}" for name, _ in reference.names_of(part)}
    assert {
        "mercer.smooth",
        "mercer.RBF",
        "mercer.nn.KernelAttention",
        "mercer.train.run",
    } <= wanted
    assert not wanted - found


def test_functions_are_there_and_not_modules_of_their_names(site):
    assert reference.directive("train", "Settings") == "::: mercer.train.Settings"
    for name in ("inspect.heads", "use.generate", "train.run", "explain"):
        page = site / "reference" / f"{name.split('.')[0]}.html"
        found = names_in(page if page.exists() else page.with_stem("mercer"))
        assert f"mercer.{name}.{name.split('.')[-1]}" in found
    for page in (site / "reference").glob("*.html"):
        assert "doc-symbol-heading doc-symbol-module" not in page.read_text(), page.name


def test_every_module_is_public_or_inside():
    there = {path.stem for path in reference.PACKAGE.iterdir() if path.suffix in ("", ".py")}
    known = {name.split(".")[0] for name in (*reference.PUBLIC, *reference.INSIDE)}
    assert {name for name in there if not name.startswith("__")} <= known


def test_the_lists_are_those_of_the_code(site):
    table = (site / "reference" / "table.html").read_text()
    for kind in (*KERNELS, *FILTERS):
        assert f">{kind.__name__}</" in table, kind
    command = names_in(site / "reference" / "command.html")
    assert {"mercer-train-lm", "mercer-study", "mercer-explain", "mercer-kernels"} <= command


def test_examples_and_the_tour_are_pages(site):
    examples = {f"{path.stem}py" for path in (ROOT / "examples").glob("*.py")}
    assert examples <= names_in(site / "examples.html")
    tour = (site / "tour.html").read_text()
    assert 'src="tour-3.png"' in tour
    assert 'href="own-kernel.html"' in tour


def test_formulas_are_text(site):
    assert "exp(scale &lt;q, k&gt;)" in (site / "kernels.html").read_text()
    assert "&lt;q, k&gt;^degree" in (site / "reference" / "kernels.html").read_text()
    text = "Sum <q, k>.\n\n    code <q, k>\n\nArgs:\n    q: of <q, k>, `<q, k>`."
    assert docstrings.with_formulas(text) == (
        "Sum &lt;q, k>.\n\n    code <q, k>\n\nArgs:\n    q: of &lt;q, k>, `<q, k>`."
    )


def test_links_between_files_are_links_between_pages():
    known = {"docs/a.md": "a.md", "README.md": "start.md", "dev/LOG.md": "log.md"}
    text = "[a `b`](../dev/LOG.md#c) [d](a.md) [e](../Makefile) [f](../none.md) [g](https://h.i)"
    assert pages.with_links(text, PurePosixPath("docs/a.md"), known, ROOT) == (
        "[a `b`](log.md#c) [d](a.md) e [f](../none.md) [g](https://h.i)"
    )
    assert pages.part_blocks("a:\n- b\n- c") == "a:\n\n- b\n- c"


@pytest.mark.parametrize("link", ["[a](nowhere.md)", "[a](#nowhere)", "![a](nowhere.png)"])
def test_a_dead_link_fails_the_build(tmp_path, link):
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text("site_name: T\nnav:\n  - Home: index.md\n")
    page = tmp_path / "docs" / "index.md"
    page.write_text(f"# Home\n\n{link}\n")
    assert builder.make(tmp_path)
    page.write_text("# Home\n\n[a](#home)\n")
    config = "site_name: T\ntheme: {font: false}\nextra: {generator: false}\n"
    (tmp_path / "mkdocs.yml").write_text(config + "nav:\n  - Home: index.md\n")
    assert builder.make(tmp_path) == []


def test_a_page_without_a_place_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text("nav:\n  - Home: index.md\n  - Gone: gone.md\n")
    for name in ("index", "more"):
        (tmp_path / "docs" / f"{name}.md").write_text("# A page\n")
    assert [line.split(":")[0] for line in builder.make(tmp_path)] == ["more.md", "gone.md"]


def test_a_built_page_is_searched_for_what_it_must_not_have(tmp_path):
    (tmp_path / "a.html").write_text("<p id=here><a href=b.html#there>b</a><q,>")
    (tmp_path / "b.html").write_text(
        '<a href="a.html#here">a</a><a href="c.html">c</a><a href="https://example.org">d</a>'
        '<script src="https://example.org/e.js"></script><img src="//example.org/f.png">'
    )
    (tmp_path / "g.css").write_text("@font-face{src:url(https://example.org/h.woff)}")
    assert checker.check(tmp_path) == [
        "a.html: <q,> is no tag",
        "a.html: b.html#there names no place of that page",
        "b.html: loads https://example.org/e.js",
        "b.html: loads //example.org/f.png",
        "b.html: c.html leads nowhere",
        "g.css: loads from another host",
    ]


@pytest.fixture
def address(site):
    """The site, served on this machine."""
    handler = partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_a_browser_shows_it(address):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    requests, errors = [], []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in (1280, 390):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.on("request", lambda request: requests.append(request.url))
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
            for name in ("index", "own-kernel", "kernels", "reference/kernels", "reference/table"):
                page.goto(f"{address}/{name}.html", wait_until="networkidle")
                wide = "document.documentElement.scrollWidth > window.innerWidth"
                assert not page.evaluate(wide), (name, width)
            page.close()
        browser.close()
    assert not errors
    assert requests
    assert not [url for url in requests if not re.match(rf"{address}/|data:|blob:", url)]
