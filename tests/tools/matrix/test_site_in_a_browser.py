"""The site in a real browser: filters, deep links, sizes of screens, and what is left without JavaScript."""

import functools
import http.server
import threading
from urllib.parse import parse_qs, urlsplit

import browsers
import pytest
from handmade import make_cell, make_run
from sites import KNOWN, run_of_every_kind

from portattn.files import replace_folder
from portattn.tools.matrix import site
from portattn.tools.matrix.site import render

pytestmark = pytest.mark.skipif(bool(browsers.missing()), reason=browsers.missing() or "there is a browser")
SCREENS = (1400, 390)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run, cells = run_of_every_kind(make_cell, make_run)
    place = tmp_path_factory.mktemp("served") / "sub" / "path"
    replace_folder(place, site.pages(run, cells, {}))
    (place.parent / "report.html").write_text(render(run, cells), encoding="utf-8")
    return place, cells


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browsers.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def served(made):

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(made[0].parents[1]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/sub/path"
        server.shutdown()


@pytest.fixture(params=["file", "http"])
def root(request, made):
    return made[0].as_uri() if request.param == "file" else request.getfixturevalue("served")


@pytest.fixture(autouse=True)
def _wide_and_clean(driver):
    browsers.sized(driver, SCREENS[0])
    browsers.errors(driver)
    yield
    assert browsers.errors(driver) == []
    assert driver.execute_script("return window.hurt") is None


def choose(driver, name, value):
    script = "const f = document.forms[0].elements[arguments[0]]; f.value = arguments[1];"
    driver.execute_script(script + "f.dispatchEvent(new Event('change', {bubbles: true}))", name, value)


def left(driver):
    """(target, op) of the cells that a reader sees."""
    script = """return [...document.querySelectorAll("td.cell")].filter(
      (cell) => cell.checkVisibility() && cell.firstElementChild.checkVisibility({visibilityProperty: true})
    ).map((cell) => [cell.dataset.target, cell.dataset.op])"""
    return [tuple(pair) for pair in driver.execute_script(script)]


def asked(driver):
    return {name: values[0] for name, values in parse_qs(urlsplit(driver.current_url).query).items()}


def test_filters_narrow_the_table_and_are_in_the_address(driver, root, made):
    driver.get(f"{root}/index.html")
    everything = left(driver)
    assert len(everything) == 22
    choose(driver, "target", "cuda:sm_90")
    assert set(left(driver)) == {("cuda:sm_90", "attention"), ("cuda:sm_90", "decode_attention")}
    choose(driver, "op", "attention")
    assert left(driver) == [("cuda:sm_90", "attention")]
    assert asked(driver) == {"target": "cuda:sm_90", "op": "attention"}
    assert driver.find_element("id", "shown").text == "1 of 21 cells: target cuda:sm_90, op attention"
    driver.refresh()  # a link is as good as the clicks
    assert left(driver) == [("cuda:sm_90", "attention")]
    driver.back()
    assert len(left(driver)) == 2
    driver.find_element("css selector", "#filters button").click()
    assert left(driver) == everything
    assert asked(driver) == {}


@pytest.mark.parametrize(
    ("query", "targets"),
    [
        (f"quirk={KNOWN}", {"cuda:sm_90"}), ("status=reference", {"cpu:generic"}),
        ("status=NOT_RUN", {"ascend:ascend910b2"}), ("status=FAIL", {"rocm:gfx90a"}),
        ("path=gluon_forward", {"cuda:sm_90"}), ("toolchain=triton-ascend%3D%3D3.2.0", {"ascend:ascend910b2"}),
        ("target=cuda:sm_999", set()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("width", SCREENS)
def test_deep_links(driver, made, query, targets, width):
    browsers.sized(driver, width)
    driver.get(f"{made[0].as_uri()}/index.html?{query}")
    assert {target for target, _ in left(driver)} == targets
    name, value = next((name, values[0]) for name, values in parse_qs(query).items())
    assert driver.find_element("id", "shown").text == f"{2 * len(targets)} of 21 cells: {name} {value}"


def test_a_cells_page_opens_from_the_table_and_leads_back(driver, root):
    driver.get(f"{root}/index.html?op=attention")
    driver.find_element("css selector", 'td[data-target="cuda:sm_90"] a.tile').click()
    assert "/cells/" in driver.current_url
    assert driver.find_element("css selector", ".lead").text == "cuda:sm_90 with triton==3.6.0"
    driver.find_element("link text", KNOWN).click()
    assert driver.current_url.endswith(f"/quirks/{KNOWN}.html")
    driver.find_element("link text", "its cells in the table").click()
    assert {target for target, _ in left(driver)} == {"cuda:sm_90"}


@pytest.mark.parametrize("width", SCREENS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_is_out_of_sight(driver, made, width, dark):
    place, cells = made
    browsers.sized(driver, width)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    pages = ["index.html", *(f"cells/{cell.id}.html" for cell in cells[::4]), f"quirks/{KNOWN}.html"]
    for page in pages:
        driver.get(f"{place.as_uri()}/{page}")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width, page
        background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(int(part) for part in background[4:-1].split(",")) < 384) == dark
    driver.get(f"{place.as_uri()}/index.html")
    beyond = """return [...document.querySelectorAll(
      ".tile, .command, .legend li:not(.none), .scroll"
    )].filter((one) => {
      const box = one.getBoundingClientRect();
      return box.width === 0 || box.left < 0 || box.right > innerWidth || one.scrollWidth > one.clientWidth + 1;
    }).map((one) => one.outerHTML.slice(0, 200))"""
    assert driver.execute_script(beyond) == []


def test_an_empty_cell_shows_its_reason_and_the_legend_its_command(driver, made):
    driver.get(f"{made[0].as_uri()}/index.html")
    [first, _] = driver.find_elements("css selector", ".tile.k-NOT_RUN")
    assert first.text.split("\n") == ["not run", "triton-ascend==3.2.0 is not in the lab"]
    gap = driver.find_element("css selector", ".tile.empty")
    assert gap.text.split("\n") == ["not asked", "not in this run"]
    commands = [one.text for one in driver.find_elements("css selector", "#empty .command")]
    assert len(commands) == 2
    assert "portattn matrix run --targets ascend:ascend910b2 --toolchain triton-ascend==3.2.0 --create" in commands


def test_without_javascript_the_table_and_the_pages_are_there(driver, made):
    place, cells = made
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.get(f"{place.as_uri()}/index.html?target=cuda:sm_90")
        assert not driver.find_element("id", "filters").is_displayed()
        tiles = driver.find_elements("css selector", "a.tile")
        assert len(tiles) == len(cells)
        assert all(tile.is_displayed() for tile in tiles)
        tiles[0].click()
        assert "/cells/" in driver.current_url
        assert cells[0].name in driver.find_element("tag name", "h1").text
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("width", SCREENS)
def test_a_screen_reader_finds_a_table_and_the_keyboard_its_cells(driver, made, width):
    browsers.sized(driver, width)
    driver.get(f"{made[0].as_uri()}/index.html")
    tree = driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    seen = [(node.get("role", {}).get("value"), node.get("name", {}).get("value", "")) for node in tree]
    roles = [role for role, _ in seen]
    assert roles.count("table") == 2  # bands
    assert roles.count("rowheader") == 2 * 4
    links = [name for role, name in seen if role == "link" and " on " in name]
    assert len(links) == len(made[1])
    assert any(name.endswith("on cuda:sm_80: compiles, interpreted numbers pass") for name in links)
    assert any(name.endswith("on cuda:sm_90: compiles, recorded on hardware: measured") for name in links)
    driver.find_element("css selector", ".skip").send_keys("\n")
    script = "return document.activeElement.tagName === 'BODY' || document.activeElement.id === 'main'"
    assert driver.execute_script(script)
    assert driver.current_url.endswith("#main")


def test_the_page_of_a_run_has_filters_and_a_phone_shows_chips_by_their_names(driver, made):
    browsers.sized(driver, SCREENS[1])
    driver.get((made[0].parent / "report.html").as_uri())
    choose(driver, "target", "cuda:sm_90")
    assert set(left(driver)) == {("cuda:sm_90", "attention"), ("cuda:sm_90", "decode_attention")}
    tile = driver.find_element("css selector", 'td[data-target="cuda:sm_90"] .tile')
    assert tile.text.split("\n")[0].startswith("H100")
    choose(driver, "target", "")


@pytest.mark.parametrize("width", SCREENS)
def test_the_page_of_a_run_fits_too_and_its_cards_open(driver, made, width):
    place, cells = made
    browsers.sized(driver, width)
    driver.get((place.parent / "report.html").as_uri())
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    empty = driver.find_element("css selector", "button.tile.k-NOT_RUN .brief")
    assert empty.text == "triton-ascend==3.2.0 is not in the lab"
    card = driver.find_element("css selector", "article")
    assert not card.is_displayed()
    driver.find_element("css selector", "button.tile").click()
    assert card.is_displayed()
    assert cells[0].name in card.text
