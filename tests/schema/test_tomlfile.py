"""Data files: every complaint names the file, the line and the key."""

import datetime
import fnmatch
import re

import msgspec
import pytest
from places import tables
from support import problem

from portattn import DataError, Registry
from portattn.planning.data_files import load_tuning
from portattn.planning.kernel_specs import CORES, KERNEL_NAMES
from portattn.schema import conditions
from portattn.schema.problem import Problem
from portattn.schema.toml_reader import convert, line_of, read
from portattn.schema.toolchain import Toolchain

TABLES = tables(__file__)

TEXT = TABLES["text"]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (("title",), 1), (("when",), 2), (("when", "arch"), 3), (("when", "toolchain"), 4),
        (("when", "toolchain", "triton"), 5),
        (("when", "toolchain", "ptxas"), 4),  # the innermost that is there
        (("verified", "0", "level"), 8), (("verified", "1", "level"), 10), (("nothing",), None), (("verified",), None),
        (("verified", "0"), 7),
    ],
)  # fmt: skip
def test_line_of(keys, line):
    assert line_of(TEXT, *keys) == line


def test_line_of_dotted_key_and_comment():
    text = '# id = 1\nwhen.backend = "cuda"\n[effect] # one\n"path" = "vendor"\ntitle_long = 1\ntitle = 2\n'
    keys = (("when", "backend"), ("effect", "path"), ("effect", "title"), ("id",))
    assert [line_of(text, *key) for key in keys] == [2, 4, 6, None]


def write(folder, data):
    path = folder / "data.toml"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize(
    ("data", "line", "part"),
    [
        ("a = 1\nb = = 2\n", 2, "not TOML"), ("a = 1\na = 2\n", 2, "not TOML"), ("a = [1,\n\n", 2, "not TOML"),
        (b"a = 1\nb = '\xff'\n", 2, "not UTF-8"),
    ],
)  # fmt: skip
def test_broken_files_are_reported_with_their_line(tmp_path, data, line, part):
    path = write(tmp_path, data)
    with pytest.raises(DataError) as error:
        read(path)
    assert abs(error.value.line - line) <= 1  # parsers differ about where a statement that never ends goes wrong
    assert str(path) in str(error.value)
    assert part in str(error.value)


def test_reading_gives_data_and_text(tmp_path):
    data, text = read(write(tmp_path, TEXT))
    assert (data["when"]["toolchain"], text) == ({"triton": "<3"}, TEXT)


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    level: str
    count: int = 0


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    date: datetime.date | None = None
    verified: tuple[Inner, ...] = ()
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("title = 1\n", 1, ["'title'", "str", "int"]),
        ('title = "x"\ntitel = "y"\n', 2, ["'titel'", "unknown key"]),
        ('title = "x"\n[inner]\ncount = 2\n', 2, ["'inner'", "lacks the key", "level"]),
        ('title = "x"\n[[verified]]\nlevel = "a"\n[[verified]]\nlevel = 2\n', 5, ["verified", "level"]),
        ('title = "x"\n[inner]\nlevel = "a"\ncnt = 2\n', 4, ["inner.cnt", "unknown key"]),
        ('title = "x"\ndate = 3\n', 2, ["'date'"]),
    ],
)
def test_departures_from_the_schema(tmp_path, text, line, parts):
    path = write(tmp_path, text)
    data, text = read(path)
    with pytest.raises(DataError) as error:
        convert(data, Shape, path, text)
    assert error.value.line == line
    assert str(error.value).startswith(f"{path}:{line}: ")
    for part in parts:
        assert part in str(error.value)


def test_a_prefix_names_the_table(tmp_path):
    path = write(tmp_path, '[one]\nlevel = "a"\n[two]\nlevel = 1\n')
    data, text = read(path)
    assert convert(data["one"], Inner, path, text, "one").level == "a"
    with pytest.raises(DataError, match=r"two\.level") as error:
        convert(data["two"], Inner, path, text, "two")
    assert error.value.line == 4


DAMAGED = {
    "deep": ("x = " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    "a long integer": (f"x = {'9' * 5000}", "not TOML"),
}


@pytest.mark.parametrize(("text", "said"), DAMAGED.values(), ids=DAMAGED)
def test_what_python_cannot_take_is_an_error_with_the_file(tmp_path, text, said):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"x\.toml.*{said}"):
        read(path)


# Conditions on a problem: what parses, what each one decides, and what is refused.
PROBLEM = Problem(batch=2, heads_q=8, heads_k=2, seq_q=100, seq_k=300, head_dim=96, dtype="bf16", causal="top_left")
FEATURES = PROBLEM.features() | {"programs": 7}


PAGED = Problem(
    op="paged_attention", batch=2, heads_q=8, heads_k=2, seq_q=4, seq_k=96, head_dim=64, page_size=48,
    page_layout="hpd", total_q=6, window_left=9, sinks=True,
).features()  # fmt: skip
DENSE_HOLDS = (
    "causal", "!seqlens_k", "gqa", "head_dim=96", "head_dim<=96", "head_dim>95", "head_dim=64|96|128",
    "head_dim!=64|128", "dtype=bf16", "dtype=fp16|bf16", "dtype!=fp32", "causal_align=top_left", "group=4",
    "programs<8", " seq_k >= 300 ",
)  # fmt: skip
DENSE_NOT = (
    "!causal", "seqlens_k", "head_dim!=96", "head_dim<96", "head_dim>=97", "head_dim=64|128", "head_dim!=64|96",
    "dtype!=fp16|bf16",
)  # fmt: skip
PAGED_HOLDS = (
    "paged", "packed", "window", "sinks", "!softcap", "!mask", "page_size=48", "page_layout=hpd", "rows=12", "featured",
)  # fmt: skip
PAGED_NOT = ("alibi_slopes", "bias", "magicpig", "log_weights", "page_size>=64", "tokens>0", "page_layout!=hpd|phd")


@pytest.mark.parametrize(
    ("texts", "features", "holds"),
    [(DENSE_HOLDS, FEATURES, 1), (DENSE_NOT, FEATURES, 0), (PAGED_HOLDS, PAGED, 1), (PAGED_NOT, PAGED, 0)],
)
def test_decides(texts, features, holds):
    assert [text for text in texts if conditions.parse(text).holds(features) != holds] == []


def test_all_must_hold():
    parsed = [conditions.parse(t) for t in ("causal", "head_dim>64")]
    assert conditions.all_hold(parsed, FEATURES)
    assert not conditions.all_hold([*parsed, conditions.parse("dtype=fp32")], FEATURES)
    assert conditions.all_hold([], FEATURES)


@pytest.mark.parametrize(("text", "complaint"), TABLES["refuses"])
def test_refuses(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        conditions.parse(text)


def known(text):
    with pytest.raises(ValueError, match="condition") as caught:
        conditions.parse(text)
    return re.split("known: |compared by = or != with ", str(caught.value))[1]


def test_a_complaint_lists_what_is_known():
    assert known("casual") == ", ".join(sorted(conditions.FLAGS))
    assert known("headdim>3") == ", ".join(sorted({*conditions.NUMBERS, *conditions.WORDS}))
    assert known("dtype=fp64") == "bf16, fp16, fp32"


@pytest.mark.parametrize("text", ["causal", "!gqa", "head_dim>=64", "dtype=fp16|bf16"])
def test_a_condition_knows_its_own_text(text):
    assert conditions.parse(text).text == text


def test_vocabulary_is_what_problems_have():
    """A name that conditions take and a problem lacks would raise KeyError in the middle of a plan."""
    vocabulary = conditions.FLAGS | conditions.NUMBERS | set(conditions.WORDS)
    assert vocabulary == set(FEATURES)


# Tuning files: the first entry that holds is taken; what is outside the schema is an error with its line.
HEAD = """\
[provenance]
chip = "test"
toolchain = "triton==3.6.0"
date = 2026-11-01
measured = false
"""
TIMED = HEAD.replace("measured = false", "measured = true")
TRITON = Toolchain.parse("triton==3.6.0")
ENTRIES = """
[[entry]]
kernel = "dense_forward"
when = ["head_dim>=128", "causal"]
launch = { block_m = 128, waves_per_eu = 2 }
lowering = { load = "descriptor" }

[[entry]]
kernel = "dense_forward"
launch = { block_m = 32 }
"""

TWO = """
[[entry]]
kernel = "dense_backward"
launch = { block_m = 128, rows_m = 64 }
"""


def load(folder, text):
    path = folder / "chip.toml"
    path.write_text(text)
    return load_tuning(path, "rocm")


def features(**fields):
    return problem(**fields).features()


def test_the_first_entry_that_holds(tmp_path):
    tuning = load(tmp_path, HEAD + ENTRIES)
    wide = tuning.find("dense_forward", features(head_dim=128, causal="top_left"), TRITON)
    assert wide.lowering == {"load": "descriptor"}
    assert tuning.find("dense_forward", features(head_dim=128), TRITON).launch == {"block_m": 32}
    assert tuning.find("decode_split", features(), TRITON) is None


RANGES = TABLES["ranges"]


@pytest.mark.parametrize(
    ("toolchain", "rows"),
    [
        ("triton==3.6.0", 32),  # the version of ptxas is not known
        ("triton==3.6.0,ptxas==13.1", 16),
        ("triton==3.8.0", 64),
        ("triton==3.9.0", 64),
        ("triton-ascend==3.8.0", 32),
    ],
)
def test_an_entry_for_a_range_of_compilers(tmp_path, toolchain, rows):
    entry = load(tmp_path, HEAD + RANGES).find("dense_forward", features(), Toolchain.parse(toolchain))
    assert entry.launch == {"block_m": rows}


def test_problems_are_left_to_the_core_for_the_compilers_of_the_entry_alone(tmp_path):
    text = '\n[[entry]]\nkernel = "gluon_forward"\nwhen = []\ncore = true\nnote = "the core is faster"\n'
    tuning = load(tmp_path, HEAD + text + 'toolchain = { triton = "<3.8" }\n')
    for release, said in (("3.6.0", "the core is faster"), ("3.8.0", "")):
        assert tuning.left_to_core("gluon_forward", features(), Toolchain.parse(f"triton=={release}")) == said


def test_a_range_that_leaves_out_what_the_choice_was_timed_with(tmp_path):
    """Of a file that was timed with 3.6.0; an entry that was only compiled may be for any."""
    with pytest.raises(DataError, match=r"leaves out 'triton==3\.6\.0', which its choice was timed with"):
        load(tmp_path, TIMED + RANGES)
    load(tmp_path, TIMED + RANGES.replace('">=3.8" }', '">=3.8" }\ntimed = false'))


def test_values_of_the_kernel_of_rows(tmp_path):
    for pattern in ("dense_backward", "*_backward"):
        tuning = load(tmp_path, HEAD + TWO.replace("dense_backward", pattern))
        entry = tuning.find("dense_backward", features(op="attention_backward", return_lse=False), TRITON)
        assert entry.launch == {"block_m": 128, "rows_m": 64}


def test_what_a_choice_may_spill(tmp_path):
    """Nothing but with the compiler that it was timed with, and there as much as every timed choice, or its record."""
    tuning = load(tmp_path, TIMED + ENTRIES.replace("launch", "spills = 512\nlaunch", 1))
    recorded, other = tuning.entry
    assert [tuning.most_spilled(entry, TRITON) for entry in (recorded, other, None)] == [512, 256, 0]
    assert tuning.most_spilled(recorded, Toolchain.parse("triton==3.8.0")) == 0
    compiled = load(tmp_path, TIMED + ENTRIES.replace("launch", "timed = false\nlaunch"))
    assert [compiled.most_spilled(entry, TRITON) for entry in compiled.entry] == [0, 0]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (HEAD + RANGES.replace("ptxas", "assembler"), ["assembler", "unknown", "ptxas"]),
        (HEAD + RANGES.replace(">=3.8", "3.8 on"), ["'3.8 on'", "PEP 440"]),
        (ENTRIES, ["provenance"]),
        (HEAD + ENTRIES.replace("when", "where", 1), ["where", "unknown key"]),
        (HEAD + ENTRIES.replace("head_dim>=128", "head_dims>=128"), ["head_dims", "unknown name"]),
        (HEAD + ENTRIES.replace('"causal"', '"casual"'), ["casual", "unknown flag"]),
        (HEAD + ENTRIES.replace("block_m = 128", "block_m = 100"), ["block_m", "100", "power of two"]),
        (HEAD + ENTRIES.replace("block_m = 128", "block_m = 0"), ["block_m", "≥ 1"]),
        (HEAD + ENTRIES.replace("block_m = 128", 'block_m = "128"'), ["block_m", "'128'", "integer"]),
        (HEAD + ENTRIES.replace("block_m = 128", "block_q = 128"), ["block_q", "unknown launch value"]),
        (HEAD + ENTRIES.replace("waves_per_eu = 2", "waves_per_eu = true"), ["waves_per_eu", "type int"]),
        (HEAD + ENTRIES.replace("waves_per_eu", "maxnreg"), ["maxnreg", "an option of cuda, and not of rocm"]),
        (HEAD + ENTRIES.replace("waves_per_eu", "splits"), ["splits", "computed from the sizes"]),
        (HEAD + ENTRIES.replace("waves_per_eu", "rows_m"), ["rows_m", "gradients alone", "block_m"]),
        (HEAD + TWO.replace("dense_backward", "dense_*"), ["rows_m", "gradients alone"]),
        (HEAD + TWO.replace("rows_m = 64", "rows_m = 48"), ["rows_m", "48", "power of two"]),
        (HEAD + TWO.replace("rows_m = 64", "rows_warps = 3"), ["rows_warps", "3", "power of two"]),
        (HEAD + TWO.replace("rows_m = 64", "rows_stages = 0"), ["rows_stages", "≥ 1"]),
        (HEAD + TWO.replace("rows_m = 64", "rows_k = 64"), ["rows_k", "unknown launch value", "rows_stages"]),
        (HEAD + ENTRIES.replace("head_dim>=128", "programs<64"), ["programs<64", "follows from the entry's launch"]),
        (HEAD + ENTRIES.replace('"descriptor"', '"tma"'), ["load", "'tma'", "descriptor"]),
        (HEAD + ENTRIES.replace("load =", "loads ="), ["loads", "outside"]),
        (HEAD + ENTRIES.replace("dense_forward", "*_forward").replace("lowering", "flags"), ["flags", "'*_forward'"]),
        (HEAD + ENTRIES.replace('lowering = { load = "descriptor" }', "core = true"), ["core", "note"]),
        (HEAD.replace("2026-11-01", '"soon"') + ENTRIES, ["provenance.date"]),
        (TIMED + ENTRIES.replace("launch", "spills = 300\nlaunch", 1), ["spills", "multiple of 256"]),
        (TIMED + ENTRIES.replace("launch", "spills = 256\nlaunch", 1), ["spills", "and more"]),
        (HEAD + ENTRIES.replace("launch", "spills = 512\nlaunch", 1), ["spills = 512", "that was timed"]),
    ],
)
def test_errors_name_file_line_and_value(tmp_path, text, parts):
    with pytest.raises(DataError) as error:
        load(tmp_path, text)
    assert "chip.toml" in str(error.value)
    for part in parts:
        assert part in str(error.value)
    if "provenance" not in parts:
        assert error.value.line is not None


def test_shipped_files_are_read_and_name_kernels_that_exist():
    registry = Registry.load()
    found = 0
    for backend, tunings in registry.tunings.items():
        known = {arch.tuning or name for name, arch in registry.arches[backend].items()}
        for name, tuning in tunings.items():
            assert name in known, f"{backend}/tuning/{name}.toml belongs to no arch"
            for entry in tuning.entry:
                variants = [variant.name for variant in registry.backends[backend].variants]
                assert fnmatch.filter((*KERNEL_NAMES, *variants), entry.kernel), entry.kernel
                assert not entry.flags or entry.kernel in variants, entry.kernel
                found += 1
    assert found


def test_shipped_entries_are_all_reachable():
    """Of an entry that comes after one of the same kernel which holds wherever it does, nothing would be taken."""
    for tunings in Registry.load().tunings.values():
        for name, tuning in tunings.items():
            for index, entry in enumerate(tuning.entry):
                reached = [
                    kernel
                    for kernel in fnmatch.filter(KERNEL_NAMES, entry.kernel) or [entry.kernel]  # a variant
                    if not any(
                        fnmatch.fnmatchcase(kernel, other.kernel)
                        and set(other.when) <= set(entry.when)
                        and other.toolchain in ({}, entry.toolchain)
                        for other in tuning.entry[:index]
                    )
                ]
                assert reached, f"{name}: entry {index}, {entry.kernel} when {entry.when}, is never taken"


def test_every_choice_of_a_shipped_entry_is_read_by_its_kernel():
    choices = {kernel.name: kernel.choices for kernel in CORES.values()}
    for tunings in Registry.load().tunings.values():
        for name, tuning in tunings.items():
            for entry in tuning.entry:
                for kernel in fnmatch.filter(KERNEL_NAMES, entry.kernel):
                    assert set(entry.lowering) <= set(choices[kernel]), (name, kernel)
