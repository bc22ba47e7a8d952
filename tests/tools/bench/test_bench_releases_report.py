"""`portattn bench report` of a releases.json: what the run showed, its files, and errors of files that are none."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchfakes import a_result, figures, made
from test_bench_cli import bench

from portattn.cli import benchreport
from portattn.tools.bench import comparison, plots
from portattn.tools.bench.cases import SETS


def whole(*, peers: bool = True, backwards: bool = False, sets: tuple[str, ...] = ("decode",)) -> comparison.Comparison:
    """Two releases that ran, the second with twice the times of the first, and one that did not start."""
    results = {}
    for release, slow in (("3.6.0", 1.0), ("3.8.0", 2.0)):
        rows = [
            made(name, case, figures("portattn", slow, path="triton"), *([figures("sdpa", 3.0)] if peers else []))
            for name in sets
            for case in SETS[name][:: -1 if backwards else 1]
        ]
        results[release] = a_result(*rows, toolchain=f"triton=={release}")
    return comparison.comparison(results, {"3.9.0": "no such symbol"})


def saved(path: Path, document: Any) -> Path:
    path.write_bytes(msgspec.json.encode(document))
    return path


def changed(**fields: Any) -> dict[str, Any]:
    """A file's document with other fields; those that are `...` are left out."""
    document = msgspec.to_builtins(whole()) | fields
    return {name: value for name, value in document.items() if value is not ...}


@pytest.mark.parametrize("name", ["releases.json", "new-releases.json", "of-may.json"])
def test_text_is_that_of_the_run(tmp_path, monkeypatch, capsys, name):
    monkeypatch.delenv("COLUMNS", raising=False)  # a row is a line
    benchreport.show_comparison(whole(), [])
    shown = capsys.readouterr().out
    assert bench("report", str(saved(tmp_path / name, whole())), exits=0).stdout == shown
    assert "3.6.0: triton==3.6.0, a chip" in shown
    assert "3.9.0: did not start: no such symbol" in shown
    assert "1000.0 µs (3.00), 1.00, triton  2000.0 µs (1.50), 0.50, triton  3.6.0" in shown


def test_a_folders_comparison_comes_before_a_run_that_lies_beside_it(tmp_path):
    (tmp_path / "bench.json").write_text("not read")
    (tmp_path / "rows.jsonl").write_text("not read")
    saved(tmp_path / "releases.json", whole())
    called = bench("report", str(tmp_path), "--json", exits=0)
    assert json.loads(called.stdout) == msgspec.to_builtins(whole()) | {"written": []}


def test_files_of_before_chips_were_kept(tmp_path):
    runs = [
        {name: value for name, value in run.items() if name != "chip"}
        for run in msgspec.to_builtins(whole())["releases"]
    ]
    older = changed(goals=[{"goal": "decode", "releases": {}}], releases=runs)  # a field of older files
    called = bench("report", str(saved(tmp_path / "releases.json", older)), exits=0)
    assert called.stdout.startswith("3.6.0: triton==3.6.0\n")


def test_markdown(tmp_path):
    file = saved(tmp_path / "releases.json", whole())
    markdown = tmp_path / "new" / "a.md"
    called = bench("report", str(file), "--markdown", str(markdown), "--json", exits=0)
    assert json.loads(called.stdout)["written"] == [str(markdown)]
    assert markdown.read_text() == comparison.as_markdown(whole())
    assert markdown.read_text().startswith(
        "- a chip, triton==3.6.0\n- a chip, triton==3.8.0\n- triton==3.9.0: no such symbol\n\n## Sets\n"
    )


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (b'{"schema": 1, "rel', "truncated"), (b"\xff\xfe", "no comparison of releases"),
        (b"[" * 100_000, "no comparison of releases"), (b"[]", "Expected `object`, got `array`"),
        (changed(schema=2), "schema version 2; this portattn reads version 1"),
        *((changed(**{name: ...}), f"missing required field `{name}`") for name in ("schema", "sets", "cases")),
        (changed(releases=...), "missing required field `releases`"),
        (changed(cases=[{"set": "decode"}]), "missing required field `case` - at `$.cases[0]`"),
        (changed(releases=[]), "3.6.0 is no release that `releases` lists as started"),
        (changed(releases=[*whole().releases, whole().releases[0]]), "`releases` lists 3.6.0 twice"),
        (changed(cases=[msgspec.structs.replace(whole().cases[0], set="../x")]), "'../x' is no name of a set"),
        (changed(cases=[msgspec.structs.replace(whole().cases[0], best="3.9.0")]), "3.9.0 is no release"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_one_error(tmp_path, document, problem):
    file = tmp_path / "releases.json"
    file.write_bytes(document if isinstance(document, bytes) else msgspec.json.encode(document))
    out = [tmp_path / name for name in ("a.md", "plots")]
    called = bench("report", str(file), "--markdown", str(out[0]), "--plots", str(out[1]))
    assert called.exit_code == 2
    assert isinstance(called.exception, SystemExit)
    assert called.stderr.startswith(f"portattn: {file}: ")
    assert problem in called.stderr
    assert len(called.stderr.splitlines()) == 1
    assert not any(path.exists() for path in out)


def test_a_file_that_cannot_be_read_is_named_and_another_json_is_read_as_a_runs_results(tmp_path):
    (tmp_path / "releases.json").mkdir()
    (tmp_path / "of-may.json").write_text('{"schema": 3}')
    refused = {"": "releases.json: cannot be read: Is a directory", "of-may.json": "no results of portattn bench"}
    for name, said in refused.items():
        assert said in bench("report", str(tmp_path / name), exits=2).stderr


def test_portattns_own_cases_are_drawn_in_order_and_without_peers_against_the_best_release():
    found = whole()
    prepared = msgspec.structs.replace(found.cases[0], contender="portattn prepared")
    others = msgspec.structs.replace(found, cases=[prepared, *found.cases])
    assert plots.of_sets(others) == {"decode": found.cases}
    assert plots.release_series(whole().cases[:2], ["3.6.0", "3.8.0"]) == (
        "ratio", {"3.6.0": [3.0] * 2, "3.8.0": [1.5] * 2},
    )  # fmt: skip
    alone = whole(peers=False).cases[:2]
    assert plots.release_series(alone, ["3.8.0", "3.9.0"]) == ("of_best", {"3.8.0": [0.5] * 2, "3.9.0": [None] * 2})


def test_labels_leave_out_what_all_names_have():
    assert plots.labels(["dense D=64 S=1", "dense D=64 S=2 causal"]) == ("dense D=64", ["S=1", "S=2 causal"])
    assert plots.labels(["seed", "seed decode"]) == ("", ["seed", "seed decode"])
    assert plots.labels(["a b", "b a"]) == ("", ["a b", "b a"])
    for cases in SETS.values():
        names = [case.name for case in cases]
        assert len(set(plots.labels(names)[1])) == len(set(names))


def test_every_release_has_a_colour_and_a_mark_of_its_own():
    assert len(set(plots.COLOURS)) == len(plots.COLOURS) == 7
    assert len(set(plots.MARKS)) == len(plots.MARKS)
    looks = [(plots.COLOURS[i % len(plots.COLOURS)], plots.MARKS[i % len(plots.MARKS)]) for i in range(50)]
    assert len(set(looks)) == 50


def test_plots(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found = whole(sets=("decode", "dense18", "prefill"))
    cases = [case for case in found.cases if case.case != SETS["prefill"][0].name]  # one of two: no figure
    file = saved(tmp_path / "releases.json", msgspec.structs.replace(found, cases=cases))
    called = bench("report", str(file), "--plots", str(tmp_path / "a"), "--json", exits=0)
    names = [f"releases-{name}.svg" for name in ("decode", "dense18")]
    assert json.loads(called.stdout)["written"] == [str(tmp_path / "a" / name) for name in names]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(names)
    assert bench("report", str(file), "--plots", str(tmp_path / "b")).exit_code == 0
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    svg = (tmp_path / "a" / "releases-dense18.svg").read_text()
    for text in ("dense18, releases of Triton: a chip, 2026-01-02", "D=64 S=1024 causal", "case; all are dense bf16"):
        assert f"<!-- {text} -->" in svg
    assert all(colour.lower() in svg for colour in plots.COLOURS[:2])
    assert plots.COLOURS[2].lower() not in svg  # 3.9.0 has no figures


def drawn(monkeypatch, folder: Path, found: comparison.Comparison) -> list[Any]:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figures_: dict[int, Any] = {}
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda shown, *_, **__: figures_.update({id(shown): shown}))
    plots.draw_releases(found, folder)
    return [axes for shown in figures_.values() for axes in shown.axes]


def test_marks_are_at_their_cases(monkeypatch, tmp_path):
    found = whole()
    refused = msgspec.structs.replace(
        found.cases[1], releases=found.cases[1].releases | {"3.8.0": comparison.OfRelease(refused="wrong")}
    )
    unmatched = msgspec.structs.replace(
        found.cases[2],
        releases={name: msgspec.structs.replace(of, ratio=None) for name, of in found.cases[2].releases.items()},
    )
    found = msgspec.structs.replace(found, cases=[found.cases[0], refused, unmatched, *found.cases[3:]])
    (axes,) = drawn(monkeypatch, tmp_path, found)
    level, first, second = axes.lines[:3]
    assert set(level.get_ydata()) == {1.0}
    assert [(round(x), y) for x, y in first.get_xydata()] == [(x, 3.0) for x in (0, 1, 3, 4, 5)]
    assert [(round(x), y) for x, y in second.get_xydata()] == [(x, 1.5) for x in (0, 3, 4, 5)]
    assert not set(first.get_xdata()) & set(second.get_xdata())
    low, high = axes.get_ylim()
    assert low < 1.0 < 3.0 < high
    assert [(text.get_text(), text.get_position()[0]) for text in axes.texts] == [("no peer", 2)]
    assert axes.get_ylabel() == "best peer’s time over portattn’s;\nabove 1 is faster"
    assert axes.get_xticklabels()[0].get_text() == SETS["decode"][0].name.removeprefix("decode ")
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["3.6.0", "3.8.0"]


def test_a_figure_without_peers_says_so_and_where_nothing_was_timed_there_is_none(monkeypatch, tmp_path):
    (axes,) = drawn(monkeypatch, tmp_path, whole(peers=False))
    assert axes.get_ylabel().startswith("best release’s time over this one’s")
    assert set(axes.lines[2].get_ydata()) == {0.5}
    found = whole()
    nothing = {"3.6.0": comparison.OfRelease(refused="wrong")}
    cases = [msgspec.structs.replace(case, best="", releases=nothing) for case in found.cases]
    assert drawn(monkeypatch, tmp_path, msgspec.structs.replace(found, cases=cases)) == []


def test_names_are_no_formulas(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found = whole()
    cases = [msgspec.structs.replace(case, case=f"{case.case} $\\frac$") for case in found.cases]
    cases[0] = msgspec.structs.replace(cases[0], case="$\\no")
    assert len(plots.draw_releases(msgspec.structs.replace(found, cases=cases), tmp_path)) == 2


def test_cases_are_in_the_order_of_their_set():
    names = [case.name for case in SETS["decode"]]
    found = whole(backwards=True).cases
    assert [case.case for case in found] == names
    stranger = msgspec.structs.replace(found[0], case="decode of another day")
    mixed = [stranger, *reversed(found)]
    assert sorted(mixed, key=comparison._place(mixed)) == [*found, stranger], "what a set lacks comes last"


@pytest.mark.parametrize("command", ["compare", "join"])
def test_a_comparison_is_no_run(tmp_path, command):
    file = saved(tmp_path / "releases.json", whole())
    more = ["--out", str(tmp_path / "out")] if command == "join" else []
    called = bench(command, str(file), str(file), *more, exits=2)
    assert "compares releases of Triton: name the folder of one of them" in called.stderr
    assert not (tmp_path / "out").exists()


def test_the_results_are_not_written_over(tmp_path):
    file = saved(tmp_path / "releases.json", whole())
    before = file.read_bytes()
    called = bench("report", str(file), "--markdown", str(file))
    assert called.exit_code == 2
    assert "must be another file than that of" in called.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["releases.json"]
    assert file.read_bytes() == before


def test_without_matplotlib_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = saved(tmp_path / "releases.json", whole())
    called = bench("report", str(file), "--markdown", str(tmp_path / "r.md"), "--plots", str(tmp_path / "plots"))
    assert called.exit_code == 2
    assert "needs matplotlib" in called.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["releases.json"]


def test_the_best_release_is_that_of_the_least_median_and_refused_cells_do_not_count():
    first, second = SETS["decode"][:2]
    times = {"3.6.0": (1.0, 9.0, 9.0), "3.8.0": (5.0, 5.0, 5.0)}
    results = {
        release: a_result(
            made("decode", first, figures("portattn", *ms)),
            made("decode", second, figures("portattn", *(ms if release == "3.6.0" else ()), refused="planted")),
            toolchain=f"triton=={release}",
        )
        for release, ms in times.items()
    }
    found = comparison.comparison(results, {})
    assert found.cases[0].best == "3.8.0"
    assert {one.release: (one.cells, one.of) for one in found.sets} == {"3.6.0": (2, 2), "3.8.0": (1, 2)}
