"""What is written into a tuning file, and what of it stays."""

import difflib
import fnmatch

import filelock
import pytest
from faketunable import FILE, OTHER, SMALL, FakeTunable, Made, choice

from portattn.errors import ArgumentError, DataError
from portattn.planning.data_files import load_tuning
from portattn.planning.kernel_specs import KERNEL_NAMES
from portattn.planning.registry import Registry, parse_target
from portattn.schema.toolchain import Toolchain
from portattn.tools.tune import classes as tune_classes
from portattn.tools.tune import records
from portattn.tools.tune.classes import classes, parse, workload
from portattn.tools.tune.core import CoreTunable
from portattn.tools.tune.log import sentence
from portattn.tools.tune.race import Times
from portattn.tools.tune.records import Outcome, ProblemResult, TuningFile
from portattn.tools.tune.run import tunables
from portattn.tools.tune.tunable import Choice

TIMES = Times(least=10.0, median=12.3456, most=20.0)
NEW = choice(128)
TRITON = Toolchain.parse("triton==3.6.0")


def outcome(of, chosen=NEW, measured=True, **changes):
    results = tuple(
        ProblemResult(problem=load.name, times=TIMES, incumbent=14.0, runner_up=13.0, error=1e-3, budget=2e-3)
        if measured
        else ProblemResult(problem=load.name)
        for load in of.workloads
    )  # fmt: skip
    fields = {"choice": chosen, "replaces": chosen != of.incumbent, "measured": measured, "results": results}
    return Outcome(name=of.name, **(fields | {"registers": 168, "spills": 0, "incumbent": of.incumbent} | changes))


@pytest.fixture
def tunable():
    return FakeTunable({64: Made(), 128: Made()})


def added(before: str, after: str) -> list[str]:
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    assert not [line for line in lines if line.startswith("- ")], "a line of the file was lost"
    return [line[2:] for line in lines if line.startswith("+ ")]


def test_a_new_entry_goes_before_todays_and_everything_else_stays(tmp_path, base, class_of, tunable, origin):
    path = tmp_path / "out" / "sm_90.toml"
    of = class_of(tunable)
    assert TuningFile(path, base, origin(of.name), "cuda").put(of, outcome(of, runner_up=choice(32)))
    lines = added(base, path.read_text())
    assert 'kernel = "dense_forward"' in lines
    assert "launch = { block_m = 64, block_n = 128 }" in lines
    tuning = load_tuning(path, "cuda")
    features = of.workloads[0].problem.features()
    entry = tuning.find("dense_forward", features, TRITON)
    assert entry.launch == {"block_m": 64, "block_n": 128}
    assert set(entry.when) >= {"widest<=64", "causal", "dtype!=fp32"}
    assert tuning.find("varlen_forward", features, TRITON).launch["block_n"] == 64
    assert tuning.measured(entry)
    source = tuning.source(entry)
    assert (source.chip, source.ptxas, source.commit) == ("NVIDIA H200", "12.8.93", "1234567")
    assert source.runner_up == str(choice(32))
    (figures,) = source.figures
    assert figures.problem == SMALL
    assert (figures.us, figures.incumbent, figures.runner_up) == (12.35, 14.0, 13.0)


def test_writing_it_again_changes_nothing_and_a_better_one_takes_its_place(tmp_path, base, class_of, tunable, origin):
    path = tmp_path / "sm_90.toml"
    of = class_of(tunable)
    TuningFile(path, base, origin(of.name), "cuda").put(of, outcome(of))
    first = path.read_text()
    file = TuningFile(path, first, origin(of.name), "cuda")
    assert file.put(of, outcome(of))
    assert path.read_text() == first
    assert file.put(of, outcome(of, choice(32)))
    assert path.read_text().count("[[entry]]") == first.count("[[entry]]")
    entry = load_tuning(path, "cuda").find("dense_forward", of.workloads[0].problem.features(), TRITON)
    assert entry.launch["block_n"] == 32


@pytest.mark.parametrize(
    ("release", "its_range", "others"), [("3.8.0", ">=3.8.0", ("3.6.0", "3.7.1")), ("3.4.0", "<3.6.0", ("3.6.0",))]
)
@pytest.mark.parametrize("chosen", [64, 128], ids=["still the best", "no longer the best"])
def test_a_choice_of_another_release_stands_beside_todays(
    tmp_path, base, class_with, tunable, origin, release, its_range, others, chosen
):
    """The file's choices were timed with 3.6.0, for which they stay."""
    path, toolchain = tmp_path / "sm_90.toml", Toolchain.parse(f"triton=={release}")
    of = class_with(toolchain, tunable)
    assert (of.timed_with, of.toolchain) == ("triton==3.6.0", {"triton": its_range})
    made = outcome(of, choice(chosen), timed_with=of.timed_with)
    assert ("no longer is" if chosen == 128 else "still is") in sentence(made)
    assert TuningFile(path, base, origin(of.name, toolchain=str(toolchain)), "cuda").put(of, made)
    added(base, path.read_text())
    features, after = of.workloads[0].problem.features(), load_tuning(path, "cuda")
    entry = after.find("dense_forward", features, toolchain)
    assert (entry.launch["block_n"], after.timed_with(entry)) == (chosen, f"triton=={release}")
    before = load_tuning(tmp_path / "made.toml", "cuda")
    for other in others:
        other = Toolchain.parse(f"triton=={other}")
        assert after.find("dense_forward", features, other) == before.find("dense_forward", features, other)
    first = path.read_text()
    assert not class_with(toolchain, tunable, file=first).timed_with
    assert TuningFile(path, first, origin(of.name, toolchain=str(toolchain)), "cuda").put(of, made)
    assert path.read_text() == first


def dense_file(*entries: str) -> str:
    """A file of one entry for all dense kernels for each of these, in TOML but for its kernel."""
    head, _, _ = FILE.partition("# Narrow")
    return head + "".join(f'[[entry]]\nkernel = "*_forward"\n{entry}\n' for entry in entries)


def timed(toolchain_range: str, block_n: int, release: str) -> str:
    figures = '[{ problem = "p", us = 1.0 }]'
    return (
        f'toolchain = {{ triton = "{toolchain_range}" }}\nlaunch = {{ block_m = 64, block_n = {block_n} }}\n'
        f'provenance = {{ chip = "c", toolchain = "triton=={release}", date = 2026-11-01, measured = true, '
        f"figures = {figures} }}\n"
    )


LATER = timed(">=3.9.0", 16, "3.9.0")
SINCE = timed(">=3.8,<3.9", 32, "3.8.0")
BEFORE = timed("<3.8", 64, "3.6.0")
RELEASES = (
    "3.5.1", "3.6.0", "3.6.0.post1", "3.6.0+unowned", "3.7.0", "3.7.1", "3.8.0", "3.8.1", "3.9.0", "3.10.0", "4.0.0",
)  # fmt: skip


@pytest.mark.parametrize(
    ("release", "its_range", "also"),
    [
        ("3.7.1", ">=3.7.1,<3.8", ()), ("3.7.0", ">=3.7.0,<3.8", ("3.7.1",)), ("3.5.1", "<3.6.0", ()),
        ("3.8.1", ">=3.8.1,<3.9", ()), ("3.10.0", ">=3.10.0", ("4.0.0",)),
        ("3.10.0rc1", ">=3.10.0rc1", ("3.10.0", "4.0.0")), ("3.6.0.post1", "===3.6.0.post1", ()),
        ("3.6.0+unowned", "===3.6.0+unowned", ()), ("3.7.0+git1", "===3.7.0+git1", ()),
        ("3.10.0.dev7", ">=3.10.0.dev7", ("3.10.0", "4.0.0")),
    ],
)  # fmt: skip
def test_a_choice_takes_no_problems_of_releases_that_have_another_entry(
    tmp_path, class_with, tunable, origin, release, its_range, also
):
    """Ranges of its own and of today's entry together; and the release itself is among them."""
    path, toolchain = tmp_path / "sm_90.toml", Toolchain.parse(f"triton=={release}")
    file = dense_file(LATER, SINCE, BEFORE)
    of = class_with(toolchain, tunable, file=file)
    assert of.toolchain == {"triton": its_range}
    before, features = load_tuning(tmp_path / "made.toml", "cuda"), of.workloads[0].problem.features()
    assert TuningFile(path, file, origin(of.name, toolchain=str(toolchain)), "cuda").put(of, outcome(of))
    after = load_tuning(path, "cuda")
    assert after.find("dense_forward", features, toolchain).launch["block_n"] == 128
    for other in {*RELEASES} - {release, *also}:
        other = Toolchain.parse(f"triton=={other}")
        assert after.find("dense_forward", features, other) == before.find("dense_forward", features, other), other


@pytest.mark.parametrize(
    ("release", "of_today", "its_range"),
    [
        ("3.6.0", "3.6.0+unowned", "===3.6.0"), ("3.6.0", "3.6.0.post1", "===3.6.0"),
        ("3.5.0", "3.6.0+unowned", "<3.6.0"), ("3.10.0rc1", "3.10.0", "<3.10.0"), ("3.10.0", "3.10.0rc1", ">=3.10.0"),
        ("3.10.0rc1", "3.10.0rc2", "<3.10.0rc2"),
    ],
)  # fmt: skip
def test_beside_what_was_timed_with_another_build(tmp_path, class_with, tunable, origin, release, of_today, its_range):
    """Each file is one that a reader takes, and by which today's compiler keeps its choice."""
    path, own, other = tmp_path / "sm_90.toml", f"triton=={release}", f"triton=={of_today}"
    file = FILE.replace("triton==3.6.0", other)
    of = class_with(Toolchain.parse(own), tunable, file=file)
    assert of.toolchain == {"triton": its_range}
    assert TuningFile(path, file, origin(of.name, toolchain=own), "cuda").put(of, outcome(of))
    after, features = load_tuning(path, "cuda"), of.workloads[0].problem.features()
    found = [after.find("dense_forward", features, Toolchain.parse(one)).launch["block_n"] for one in (own, other)]
    assert found == [128, 64]


def test_another_compiler_has_a_range_of_its_own_and_what_no_reader_would_take_is_told(class_with, tunable):
    assert class_with(Toolchain.parse("triton==3.6"), tunable).timed_with == "", "spelt otherwise it is the same"
    assert class_with(Toolchain.parse("triton-ascend==3.2.0"), tunable).toolchain == {"triton-ascend": ">=0"}
    with pytest.raises(ArgumentError, match=r"--toolchain is 'unowned==0'.*'unowned' is unknown"):
        class_with(Toolchain(distribution="unowned", version="0"), tunable)
    with pytest.raises(ArgumentError, match="that leaves it out"):
        tune_classes.beside("triton==3.6.0", {"triton": "<3.8"}, Toolchain.parse("triton-ascend==3.2.0"))


def test_an_incumbent_that_stays_is_written_only_where_that_says_something_new(
    tmp_path, base, class_of, tunable, origin
):
    path = tmp_path / "sm_90.toml"
    timed = class_of(tunable)
    assert not TuningFile(path, base, origin(timed.name), "cuda").put(timed, outcome(timed, choice(64)))
    assert not path.exists()
    wide = class_of(tunable, SMALL.replace(",16 ", ",128 "))
    assert not wide.measured
    assert TuningFile(path, base, origin(wide.name), "cuda").put(wide, outcome(wide, wide.incumbent))
    tuning = load_tuning(path, "cuda")
    entry = tuning.find("dense_forward", wide.workloads[0].problem.features(), TRITON)
    assert entry.launch == {"block_m": 32, "block_n": 32}
    assert tuning.measured(entry)


def test_what_was_only_compiled_says_so(tmp_path, class_of, tunable, origin):
    path = tmp_path / "new.toml"
    of = class_of(tunable, file=None)
    assert of.incumbent is None
    made = origin(of.name, measured=False, chip="MI300X, not present", torch="")
    assert TuningFile(path, None, made, "cuda").put(of, outcome(of, measured=False))
    tuning = load_tuning(path, "cuda")
    (entry,) = tuning.entry
    assert (entry.timed, tuning.measured(entry), tuning.provenance.measured) == (False, False, False)
    assert tuning.source(entry).registers == 168


def test_a_choice_by_bounds_is_never_taken_for_a_timed_one(tmp_path, class_of, tunable, origin):
    path = tmp_path / "new.toml"
    of = class_of(tunable, file=None)
    results = tuple(ProblemResult(problem=load.name, bound=80.123, incumbent_bound=100.0) for load in of.workloads)
    chosen = outcome(of, measured=False, by_bound=True, results=results)
    assert "by a bound, never timed" in sentence(chosen)
    assert TuningFile(path, None, origin(of.name, measured=False, torch=""), "cuda").put(of, chosen)
    (entry,) = load_tuning(path, "cuda").entry
    assert (entry.by_bound, entry.timed) == (True, False)
    assert (entry.provenance.figures[0].bound, entry.provenance.figures[0].incumbent_bound) == (80.12, 100.0)
    path.write_text(path.read_text().replace("timed = false\n", "").replace("measured = false", "measured = true"))
    with pytest.raises(DataError, match="by_bound"):
        load_tuning(path, "cuda")


def test_what_no_reader_takes_is_not_written(tmp_path, base, class_of, tunable, origin):
    path = tmp_path / "sm_90.toml"
    path.write_text(base)
    of = class_of(tunable)
    bad = outcome(of, Choice(launch={"block_m": 65}))
    with pytest.raises(DataError, match="power of two"):
        TuningFile(path, base, origin(of.name), "cuda").put(of, bad)
    assert path.read_text() == base
    assert [one.name for one in tmp_path.iterdir() if "sm_90" in one.name and one.suffix != ".lock"] == ["sm_90.toml"]
    file = TuningFile(path, base, origin(of.name), "cuda")
    path.write_text("[[entry")
    with pytest.raises(DataError, match="is no TOML"):
        file.put(of, outcome(of))
    assert path.read_text() == "[[entry", "a file that was broken meanwhile stays"


WIDE = SMALL.replace(",16 ", ",128 ")


def test_two_runs_with_one_file_keep_each_others_entries(tmp_path, base, class_of, tunable, origin):
    """Both begin from the same text, and put their entries in by turns; one that goes on later is no exception."""
    path, narrow, wide = tmp_path / "sm_90.toml", class_of(tunable), class_of(tunable, WIDE)
    one, other = (TuningFile(path, base, origin(narrow.name, wide.name), "cuda") for _ in range(2))
    assert one.put(narrow, outcome(narrow, choice(128)))
    assert other.put(wide, outcome(wide, choice(16)))
    assert one.put(narrow, outcome(narrow, choice(32)))
    assert TuningFile(path, base, origin(narrow.name), "cuda").put(narrow, outcome(narrow, choice(32)))
    added(base, path.read_text())
    after = load_tuning(path, "cuda")
    found = [after.find("dense_forward", of.workloads[0].problem.features(), TRITON) for of in (narrow, wide)]
    assert [entry.launch["block_n"] for entry in found] == [32, 16]


def test_a_file_is_read_and_written_under_a_lock(tmp_path, base, class_of, tunable, origin, monkeypatch):
    """Else the entry that another run puts in between is lost."""
    monkeypatch.setattr(records, "LOCK_S", 0.05)
    path, of = tmp_path / "sm_90.toml", class_of(tunable)
    file = TuningFile(path, base, origin(of.name), "cuda")
    with (
        filelock.FileLock(tmp_path / ".sm_90.toml.lock"),
        pytest.raises(DataError, match=r"another run has held it for 0\.05 s; .* --resume"),
    ):
        file.put(of, outcome(of))
    assert not path.exists()
    assert file.put(of, outcome(of))


def test_runs_try_what_they_write_in_files_of_their_own(tmp_path, base, class_of, tunable, origin, monkeypatch):
    """One of a fixed name would be read, and removed, by the other run."""
    tried = []
    monkeypatch.setattr(records, "load_tuning", lambda path, backend: tried.append(path))
    of = class_of(tunable)
    file = TuningFile(tmp_path / "sm_90.toml", base, origin(of.name), "cuda")
    assert file.put(of, outcome(of))
    assert file.put(of, outcome(of, choice(32)))
    assert len({*tried}) == 2
    assert not any(path.exists() for path in tried)


def test_a_variants_entry_has_flags_and_no_glob_finds_it(tmp_path, base, class_of, target, origin):
    class Variant(FakeTunable):
        name = "gluon_forward"
        ops = ("attention", "varlen_attention")

    of = class_of(Variant({}))
    assert "!packed" in of.when
    assert of.position is None
    path = tmp_path / "sm_90.toml"
    chosen = Choice(flags={"turns": True, "stages": 2})
    TuningFile(path, base, origin(of.name), "cuda").put(of, outcome(of, chosen))
    tuning, features = load_tuning(path, "cuda"), of.workloads[0].problem.features()
    assert tuning.find("gluon_forward", features, TRITON, variant=True).flags == {"turns": True, "stages": 2}
    assert tuning.find("dense_forward", features, TRITON).launch["block_n"] == 64
    again = classes([Variant({})], of.workloads, tuning, target)
    assert (again[0].incumbent, again[0].when) == (chosen, of.when)


@pytest.mark.parametrize(("backend", "arch"), [("cuda", "sm_90"), ("cuda", "sm_80"), ("rocm", "gfx942")])
def test_shipped_files_take_entries_for_every_op_and_stay_readable(tmp_path, backend, arch, origin):
    """In every file every problem finds its new entry, every old entry stays, and none becomes unreachable."""
    registry = Registry.load()
    where = parse_target(f"{backend}:{arch}", "triton==3.6.0")
    path = registry.backends[backend].folder / "tuning" / f"{arch}.toml"
    before, tuning = path.read_text(), load_tuning(path, backend)
    texts = [
        SMALL, OTHER.replace("causal", ""), SMALL.replace("fp16", "fp32"),
        "attention q=1,16,4096,128 kv=1,16,4096,128 causal window=1023,0",
        "varlen_attention q=4,16,1024,64 kv=4,16,1024,64 causal", "decode_attention q=8,32,1,128 kv=8,8,4096,128",
        "paged_attention q=8,32,1,128 kv=8,8,4096,128 page_size=64",
        "decode_attention q=8,32,1,128 kv=8,8,4096,128 kv_format=e4m3 kv_scales=head",
        "decode_attention q=8,32,1,128 kv=8,8,4096,128 kv_format=e4m3 kv_scales=token",
        "decode_attention q=8,32,1,128 kv=8,8,4096,128 kv_format=int8",
        "paged_attention q=8,32,1,128 kv=8,8,4096,128 page_size=64 kv_format=e4m3 kv_scales=token",
        "sparse_attention q=1,32,1,128 kv=1,8,32000,128 tokens=640",
        "mla_attention q=8,128,1,576 kv=8,1,4096,576 head_dim_v=512 page_size=64",
    ]  # fmt: skip
    core = [one for one in tunables(where) if isinstance(one, CoreTunable)]
    found = classes(core, [workload(parse(text)) for text in texts], tuning, where)
    assert len(found) == len(texts)
    file = TuningFile(tmp_path / f"{arch}.toml", before, origin(*(of.name for of in found)), backend)
    for number, of in enumerate(found):
        chosen = Choice(launch={"block_m": 16, "block_n": 16, "num_stages": number + 1})
        assert file.put(of, outcome(of, chosen))
    text = (tmp_path / f"{arch}.toml").read_text()
    added(before, text)
    after = load_tuning(tmp_path / f"{arch}.toml", backend)
    for number, of in enumerate(found):
        for load in of.workloads:
            assert after.find(of.kernel, load.problem.features(), TRITON).launch["num_stages"] == number + 1
    assert [e for e in after.entry if e in tuning.entry] == list(tuning.entry)
    for index, entry in enumerate(after.entry):
        assert any(
            not any(
                (kernel == other.kernel if entry.flags or entry.core else fnmatch.fnmatchcase(kernel, other.kernel))
                and set(other.when) <= set(entry.when)
                and other.toolchain in ({}, entry.toolchain)
                for other in after.entry[:index]
            )
            for kernel in ([entry.kernel] if entry.flags or entry.core else fnmatch.filter(KERNEL_NAMES, entry.kernel))
        ), entry
