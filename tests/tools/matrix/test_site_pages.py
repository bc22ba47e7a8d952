"""The site as files: complete, linked, safe whatever results hold, and written whole."""

import html.parser
import os
import re
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import msgspec
import pytest
from sites import KNOWN, SCRIPT, UNKNOWN, run_of_every_kind

from portattn.errors import ArgumentError
from portattn.files import replace_folder
from portattn.planning.registry import Registry
from portattn.tools.compare.changes import history
from portattn.tools.matrix import site
from portattn.tools.matrix.cells import snapshot


class Page(html.parser.HTMLParser):
    """A page's tags, in order, the targets of its links, its ids and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.links, self.ids, self.text, self.inside = [], [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self.links += [found[name] for name in ("href", "src") if found.get(name)]
        self.ids += [found["id"]] if "id" in found else []

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def made(cell, run_of):
    return run_of_every_kind(cell, run_of)


@pytest.fixture
def files(made):
    return dict(site.pages(*made, {}))


def pages_of(files):
    return {path: Page(data.decode()) for path, data in files.items() if path.endswith(".html")}


def test_each_cell_and_each_quirk_has_a_page_and_no_link_is_dead(made, files):
    _, cells = made
    assert {f"cells/{cell.id}.html" for cell in cells} | {f"quirks/{q}.html" for q in (KNOWN, UNKNOWN)} <= set(files)
    assert len(files) == site.count(cells)
    pages = pages_of(files)
    for path, page in pages.items():
        for link in page.links:
            if link.startswith(("https://", "data:")):
                continue
            place, _, anchor = link.partition("#")
            place = os.path.normpath(os.path.join(os.path.dirname(path), place.partition("?")[0])) if place else path
            assert place in files, (path, link)
            assert not anchor or anchor in pages[place].ids, (path, link)
    assert all(f"cells/{cell.id}.html" in pages["index.html"].links for cell in cells)


def test_nothing_that_a_run_recorded_is_markup_or_loaded(files):
    for path, page in pages_of(files).items():
        assert page.tags.count("script") == (path == "index.html"), path
        assert "img" not in page.tags, path
    shown = [path for path, page in pages_of(files).items() if "window.hurt" in page.text]
    assert len(shown) >= 6  # the text itself is not lost
    assert SCRIPT not in files["style.css"].decode() + files["badge.svg"].decode()
    # And nothing is loaded from elsewhere.
    for path, page in pages_of(files).items():
        loaded = [link for link in page.links if link.endswith((".js", ".css"))]
        assert all("//" not in link for link in loaded), path
    assert not re.search(rb"url\(|@import", files["style.css"])


def test_a_cells_page_says_what_was_seen_and_what_was_not(made, files):
    run, cells = made
    of = {cell.target: files[f"cells/{cell.id}.html"].decode() for cell in reversed(cells)}
    text = Page(of["cuda:sm_80"]).text
    for told in (
        "not gluon_forward", "needs sm_90", "use an H100", "interpreter seen", "emulated not seen",
        "on the chip not seen", run.identity.code(), "made <b>by hand</b>", "168 registers",
    ):  # fmt: skip
        assert told in " ".join(text.split()), told  # fmt: skip
    assert "interpreter not seen" in " ".join(Page(of["cuda:sm_90"]).text.split())
    assert "reference numbers on this CPU, not a chip's" in Page(of["cpu:generic"]).text
    fills = "portattn matrix run --targets ascend:ascend910b2 --toolchain triton-ascend==3.2.0 --create"
    assert fills in Page(of["ascend:ascend910b2"]).text
    assert fills in Page(files["index.html"].decode()).text


def test_a_quirks_page_has_its_entry_and_its_cells(made, files):
    text = " ".join(Page(files[f"quirks/{KNOWN}.html"].decode()).text.split())
    quirk = Registry.load().quirks[KNOWN]
    for told in (quirk.title, quirk.symptom, "triton >=3.4", "head_dim<=64", "num_warps = 8", "ptxas C7511", "2 cells"):
        assert told in text, told
    page = Page(files[f"quirks/{UNKNOWN}.html"].decode())
    assert "has no such entry" in page.text
    assert "https://example.org/1" in page.links
    assert "2 cells of this run" in page.text


def test_a_cells_history_is_on_its_page(made):
    run, cells = made
    before = [msgspec.structs.replace(c, level="compiles") if c.target == "rocm:gfx942" else c for c in cells]
    earlier = msgspec.structs.replace(run, date=run.date.replace(day=20))
    seen = history([snapshot(earlier, before, "monday"), snapshot(run, cells, "tuesday")], "*")
    places = {}
    for one in seen:
        places.setdefault((one.target, one.name), []).append(one)
    files = dict(site.pages(run, cells, places))
    changed = next(cell for cell in cells if cell.target == "rocm:gfx942")
    page = Page(files[f"cells/{changed.id}.html"].decode())
    assert "Over time" in page.text
    assert "won: compiles → emulated" in page.text
    alone = dict(site.pages(run, cells, {place: seen[1:] for place, seen in places.items()}))
    assert "Over time" not in alone[f"cells/{changed.id}.html"].decode()


def test_the_badge_counts_chips_alone(made):
    run, cells = made
    found = site.counts(run, cells)
    by_hand = {"green": 15, "amber": 3, "red": 2}  # 2 NOT_RUN and a place without a cell; the CPU's 2 count nowhere
    assert msgspec.structs.asdict(found) == by_hand
    assert site.endpoint(found) == {
        "schemaVersion": 1, "label": "portattn matrix", "message": "15 green, 3 amber, 2 red", "color": "red",
        "isError": True,
    }  # fmt: skip
    picture = ElementTree.fromstring(site.svg(found))
    texts = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["portattn matrix", "15", "3", "2"]
    assert site.endpoint(site.counts(run, [c for c in cells if c.level == "emulated"]))["color"] == "yellow"
    only = [cell for cell in cells if cell.target == "rocm:gfx942"]
    whole = msgspec.structs.replace(run, cells=tuple(cell.id for cell in only))
    assert site.endpoint(site.counts(whole, only))["color"] == "brightgreen"
    nothing = site.counts(msgspec.structs.replace(run, cells=()), [])
    assert (nothing.colour, site.endpoint(nothing)["message"]) == ("grey", "no cells")


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "a" * 200])
def test_an_id_that_is_no_name_of_a_file_is_refused(made, name):
    run, cells = made
    with pytest.raises(ArgumentError, match="id of a cell"):
        list(site.pages(run, [msgspec.structs.replace(cells[0], id=name)], {}))
    note = msgspec.structs.replace(cells[0].footnotes[0], id=name)
    with pytest.raises(ArgumentError, match="id of a quirk"):
        list(site.pages(run, [msgspec.structs.replace(cells[0], footnotes=(note,))], {}))


def test_only_a_site_is_written_over(files, tmp_path):
    place = tmp_path / "site"
    for change in (lambda: None, place.mkdir, lambda: replace_folder(place, files.items())):
        change()
        assert site.foreign(place) == ""
    (place / "CNAME").write_text("mine")
    assert site.foreign(place) == "it holds CNAME, which is not of the site"
    (place / "CNAME").unlink()
    for marker in ('{"generator": "x"}', "{"):
        (place / site.MARKER).write_text(marker)
        assert "is not of this command" in site.foreign(place)
    (place / site.MARKER).unlink()
    assert "it is not empty" in site.foreign(place)
    (tmp_path / "file").write_text("")
    assert site.foreign(tmp_path / "file") == "it is not a folder"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["ctrl-c", "disk"])
def test_what_breaks_off_leaves_the_old_folder_and_nothing_else(tmp_path, error):
    place = tmp_path / "site"
    replace_folder(place, [("index.html", b"old"), ("cells/a.html", b"a")])

    def broken():
        yield "index.html", b"new"
        raise error

    with pytest.raises(type(error)):
        replace_folder(place, broken())
    assert (place / "index.html").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]
    assert replace_folder(place, [("index.html", b"new")]) == 1
    assert [path.name for path in place.iterdir()] == ["index.html"]


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    place = tmp_path / "site"
    replace_folder(place, [("index.html", b"old")])
    real = type(place).rename

    def rename(self, target):
        if self.name == "new":
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(type(place), "rename", rename)
    with pytest.raises(OSError, match="Input/output error"):
        replace_folder(place, [("index.html", b"new")])
    assert (place / "index.html").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_of_two_writers_at_once_one_is_told_and_the_other_is_whole(tmp_path):
    place = tmp_path / "site"
    replace_folder(place, [("index.html", b"old")])
    real = type(place).rename

    def rename(self, target):
        found = real(self, target)
        if target.parent.name == "old":  # the other one's is there, before ours is
            patch.undo()
            replace_folder(place, [("index.html", b"other")])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(place), "rename", rename)
        with pytest.raises(OSError, match="another process writes it"):
            replace_folder(place, [("index.html", b"ours")])
    assert (place / "index.html").read_bytes() == b"other"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


KILLED = """
import os, pathlib, signal
from portattn.files import replace_folder
real = pathlib.Path.rename
def rename(self, target):
    found = real(self, target)
    if target.parent.name == "old":
        os.kill(os.getpid(), signal.SIGKILL)
    return found
pathlib.Path.rename = rename
replace_folder(pathlib.Path("site"), [("index.html", b"new")])
"""


@pytest.mark.parametrize("hours", [0, 2], ids=["at once", "hours later"])
def test_a_process_killed_between_its_renames_costs_no_site(tmp_path, hours):
    """Whatever the next one does, for this site or another beside it: it fails, or is interrupted, or succeeds."""
    place = tmp_path / "site"
    replace_folder(place, [("index.html", b"old")])
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    assert left.name.endswith(".part")
    when = time.time() - hours * 3600
    os.utime(left, (when, when))

    def broken():
        raise OSError(28, "No space left on device")
        yield

    with pytest.raises(OSError, match="No space"):
        replace_folder(tmp_path / "another", broken())
    assert (place / "index.html").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir() if path != left] == ["site"]
    assert replace_folder(place, [("index.html", b"newer")]) == 1
    assert (place / "index.html").read_bytes() == b"newer"
