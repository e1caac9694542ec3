"""The page in a real browser: nothing is asked for, nothing fails, and everything works."""

import shutil

import pytest
from inspect_reports import HOSTILE, make

from mercer import inspect

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("there is no chromium on this machine", allow_module_level=True)
VIEWS = ("heads", "rows", "tokens", "training")
# The contrast of each colour of text with what may be under it, as WCAG 2 defines it.
CONTRAST = """() => {
  const light = (c) => c.match(/[0-9.]+/g).slice(0, 3).map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, n) => sum + x * [0.2126, 0.7152, 0.0722][n], 0);
  const probe = document.body.appendChild(document.createElement('i'));
  const value = (name) => {
    probe.style.color = `var(--${name})`;
    return light(getComputedStyle(probe).color);
  };
  const names = ['ink', 'soft', 'accent', 'warm', 's0', 's1', 's2', 's3'];
  return names.flatMap((name) => ['paper', 'card'].map((under) => {
    const [a, b] = [value(name), value(under)].sort((x, y) => y - x);
    return [name, under, (a + 0.05) / (b + 0.05)];
  }));
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as all_browsers:
        # A container has no user namespaces for the sandbox.
        found = all_browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("pages")
    several = inspect.name_apart([make(seed=n, layers=1) for n in range(3)])
    pages = {
        "usual": [make()],
        "one head": [make(layers=1, heads=1, size=5)],
        "many heads": [make(layers=3, heads=64, places=5)],
        "empty text": [make(text=0, places=0)],
        "compare": several,
        "images": [
            inspect.Report(
                title="images",
                heads=make().heads,
                curves=make().curves,
                unit="patches",
                first="class token",
            )
        ],
    }
    found = {}
    for name, reports in pages.items():
        apart = inspect.distances_between(reports) if len(reports) > 1 else None
        found[name] = inspect.write_page(reports, place / f"{name.replace(' ', '-')}.html", apart)
    return found


@pytest.fixture
def visit(browser, files):
    """Open a page at a view; whatever it asks for or complains about fails the test."""
    wrong, opened = [], []

    def go(name="usual", view="heads", width=1280, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        opened.append(page)
        url = files[name].as_uri()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda asked: asked.url.startswith(url) or wrong.append(asked.url))
        page.goto(f"{url}#{view}")
        page.wait_for_selector("#view")
        return page

    yield go
    for page in opened:
        page.close()
    assert wrong == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["usual", "one head", "many heads", "empty text", "compare"])
def test_every_view_fits_its_width(visit, name, width):
    page = visit(name, width=width)
    for tab in page.query_selector_all("[role=tab]"):
        tab.click()
        page.wait_for_timeout(30)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.inner_text("#view").strip()
        assert "undefined" not in page.inner_text("#view")
        # Attributes, too; the packed data may have these letters by chance.
        assert "NaN" not in page.inner_html("#view")


def test_hostile_tokens_stand_as_text(visit):
    page = visit(view="rows")
    assert page.title() == "a model · Mercer"
    shown = page.text_content(".text")
    for word in HOSTILE[:5]:
        assert word in shown
    assert "U+202Eright to leftU+202C" in shown
    assert "\u2400" in shown
    page.click("#tab-tokens")
    assert page.title() == "a model · Mercer"
    assert page.query_selector_all("#view img") == []
    assert len(page.query_selector_all("script")) == 2


def test_a_head_is_chosen_by_mouse_and_keyboard(visit):
    page = visit()
    page.click("[data-head='4']")
    assert page.inner_text(".detail h3") == "blocks.1.attention, head 1"
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".detail h3") == "blocks.1.attention, head 2"
    assert page.evaluate("document.activeElement.dataset.head") == "5"
    page.click("#view table tbody tr:nth-child(2) button")
    assert page.inner_text(".detail h3") == "blocks.0.attention, head 1"
    page.select_option("#view select", label="Mean distance")
    assert "Mean distance" in page.get_attribute("[data-head='0']", "aria-label")


def test_a_table_sorts_by_every_column(visit):
    page = visit()
    for n in range(len(page.query_selector_all("#view thead th"))):
        button = page.query_selector(f"#view thead th:nth-child({n + 1}) button")
        if button is None:
            continue
        button.click()
        header = page.query_selector(f"#view thead th:nth-child({n + 1})")
        first = header.get_attribute("aria-sort")
        cells = page.eval_on_selector_all(
            f"#view tbody tr > :nth-child({n + 1})", "all => all.map(one => one.innerText)"
        )
        button.click()
        assert {first, header.get_attribute("aria-sort")} == {"ascending", "descending"}
        if first == "descending":
            numbers = [float(cell.replace(",", "")) for cell in cells]
            assert numbers == sorted(numbers, reverse=True)


def test_a_token_shows_what_it_looks_at(visit):
    page = visit(view="rows")
    page.click("[data-place='45']")
    assert "token 45" in page.inner_text(".answer")
    weights = page.eval_on_selector_all(
        ".answer tbody td:nth-child(3)", "all => all.map(one => Number(one.innerText))"
    )
    assert weights == pytest.approx([0.6 * 0.5**n for n in range(8)], rel=0.01)
    assert "0.1" in page.inner_text(".answer p.unit")
    assert page.eval_on_selector_all(".t.seen", "all => all.length") == 8
    page.keyboard.press("ArrowLeft")
    assert "token 44" in page.inner_text(".answer")
    assert page.evaluate("document.activeElement.dataset.place") == "44"
    page.keyboard.press("Home")
    assert "token 40" in page.inner_text(".answer")
    page.select_option("#view select", label="blocks.1.attention")
    assert "blocks.1.attention, head 0" in page.inner_text(".answer")
    page.click(".map .cell:nth-child(3)")
    assert "blocks.1.attention, head 2" in page.inner_text(".answer")


def test_tokens_are_searched_and_chosen_by_their_part_of_speech(visit):
    page = visit(view="tokens")
    page.fill("input[type=search]", "WORD3")
    words = page.eval_on_selector_all(
        "#view .table >> nth=1 >> tbody th", "all => all.map(one => one.innerText)"
    )
    assert words
    assert all("word3" in word for word in words)
    page.fill("input[type=search]", "")
    page.select_option("#view select", label="NOUN")
    cells = page.eval_on_selector_all(
        "#view .table >> nth=1 >> tbody td:nth-child(4)", "all => all.map(one => one.innerText)"
    )
    assert set(cells) == {"NOUN"}
    page.fill("input[type=search]", "there is no such token")
    assert "No row." in page.inner_text("#view")


def test_views_are_reached_by_the_keyboard_and_have_names(visit):
    page = visit()
    page.focus("#tab-heads")
    for view in VIEWS[1:]:
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == f"tab-{view}"
        assert page.get_attribute("#view", "aria-labelledby") == f"tab-{view}"
        unnamed = page.evaluate(
            "[...document.querySelectorAll('button, select, input, [role=img], [role=region]')]"
            ".filter(one => !(one.getAttribute('aria-label') || one.innerText || one.labels?.length"
            " || one.textContent)).length"
        )
        assert unnamed == 0


def test_models_stand_beside_each_other(visit):
    page = visit("compare", view="compare")
    assert page.inner_text("h1") == "3 models side by side"
    assert page.query_selector_all("#view svg path.line")[1]
    page.click("#tab-heads")
    page.select_option("#header select", label="a model (3)")
    assert page.inner_text("h1") == "a model (3)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_readers_need(visit, scheme):
    page = visit(color_scheme=scheme)
    found = page.evaluate(CONTRAST)
    assert len(found) == 16
    assert [one for one in found if one[2] < 4.5] == []


def test_it_is_printed_in_the_colours_of_paper(visit):
    light, dark = visit(), visit(color_scheme="dark")
    before = dark.evaluate(CONTRAST)
    for page in (light, dark):
        page.emulate_media(media="print")
    assert dark.evaluate(CONTRAST) == light.evaluate(CONTRAST) != before


def test_a_model_of_images_has_patches_and_no_views_of_a_text(visit):
    page = visit("images")
    assert page.locator("[role=tab]").all_inner_texts() == ["Heads", "Training"]
    page.locator("details.explain summary").click()
    text = page.locator("#view").inner_text()
    assert "Weight on the class token" in text
    assert "distance in patches" in text
    assert "tokens" not in text
    assert "nats per image" in visit("images", "training").locator("#view").inner_text()
    # An address with a view that is not there shows the first one.
    tab = visit("images", "rows").locator("[role=tab][aria-selected=true]")
    assert tab.inner_text() == "Heads"
