"""Plots: what a panel holds, that every set with lengths has its files, and the error where matplotlib is not here."""

import sys

import pytest
from benchfakes import LIMITS, a_result, figures, made

from portattn.errors import PortattnError
from portattn.tools.bench import plots
from portattn.tools.bench.cases import SETS
from portattn.tools.bench.peers import PEERS


def rows(name, ms=1.0):
    return [
        made(
            name, case, figures("portattn", ms * (i + 1)), figures("fa3/vllm", 1.5),
            figures("fa3/vllm, schedule given", 1.2), figures("sdpa-cudnn", 2.0), figures("sdpa-math", 9.0),
            figures("unheard of", 3.0),
        )
        for i, case in enumerate(SETS[name])
    ]  # fmt: skip


def test_a_line_is_a_library_with_its_fastest_way_and_a_panel_a_head_dim_and_mask():
    found = rows("decode")
    shown = plots.lines(found)
    assert list(shown) == ["fa3", "sdpa-cudnn", "unheard of", "portattn"]
    assert shown["fa3"] == {
        (row.case.seq_k, row.case.batch, 1): pytest.approx(row.read_bytes / 1.2 / 1e9) for row in found
    }
    assert len(shown["portattn"]) == 6
    assert set(plots.panels(rows("dense18"))) == {
        (facet, dim) for facet in ("bf16, full", "bf16, causal") for dim in (64, 128, 256)
    }
    assert set(plots.panels(rows("paged"))) == {
        (f"bf16, pages of {page}", dim) for page in (16, 64, 256) for dim in (64, 128)
    }
    dense = plots.lines(plots.panels(rows("dense18"))[("bf16, full", 64)])
    assert list(dense["portattn"]) == [(1024, 16, 1024), (4096, 4, 4096), (16384, 1, 16384)]


def test_every_library_has_a_colour_and_mark_of_its_own():
    looks = [style[:2] for style in plots.styles().values()]
    assert len(set(looks)) == len(looks)
    known = {name.partition("/")[0] for name in plots.styles()}
    assert {"fa3", "flashmla", "flashinfer", "flex", "flash_attn"} <= known
    assert set(PEERS) - {"torch", "flash_attn_interface"} <= known


def test_files(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    one = made("dense-short-q", SETS["dense-short-q"][0], figures("portattn", 1.0))
    result = a_result(*rows("dense18"), *rows("decode"), one)
    written = plots.draw(result, tmp_path / "new")
    assert sorted(path.name for path in written) == ["decode.svg", "dense18.svg"]
    svg = (tmp_path / "new" / "dense18.svg").read_text()
    assert svg.count('<g id="axes_') == 6
    assert plots.styles()["fa3"][0].lower() in svg
    again = plots.draw(result, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PortattnError, match=r"needs matplotlib .*pip install -e '\.\[bench\]' in the checkout"):
        plots.draw(a_result(*rows("decode")), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_nothing_is_drawn_beyond_the_axes(monkeypatch, tmp_path):
    """Panels share an axis: the first one's values must not be its end."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    ends = []

    def kept(shown, path, **_):
        ends.extend((axes.get_ylim(), [v for line in axes.lines for v in line.get_ydata()]) for axes in shown.axes)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", kept)
    plots.draw(a_result(*rows("decode", ms=0.02)), tmp_path)
    assert ends
    for (low, high), values in ends:
        assert low == 0
        assert max(values) <= high


def test_decoding_tells_its_batch_and_a_ceiling_is_the_runs_own():
    row = rows("decode")[0]
    assert plots._ceiling(row, a_result(row)) == ("copy rate", LIMITS.copy_tbs)
    assert plots._ceiling(row, a_result(row, ceilings=None)) is None
    assert plots._batch_varies(plots.panels(rows("paged")).values())
    assert not plots._batch_varies(plots.panels(rows("dense18")).values())
    assert plots._tick((32768, 16, 1), True) == "32k\nB=16"
    assert plots._tick((32000, 1, 1), False) == "32000"
