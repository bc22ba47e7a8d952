"""Drafts: three files or none, nothing overwritten, the next free number, and nothing that was not told."""

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import quirk_files
from lifecycle_logs import FOLDER, NAMES, facts_of, told
from places import tables
from planted_records import incident

from portattn.errors import ArgumentError, DataError
from portattn.planning.quirk_files import check_file, load_quirk
from portattn.planning.registry import Registry, find_backends, shipped_quirks
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem
from portattn.schema.toml_reader import tomllib
from portattn.tools.quirks import audit, draft_texts, drafts, failure_facts
from portattn.tools.quirks.draft_texts import MARK, excerpt, open_lines
from portattn.tools.quirks.failure_facts import excerpts

TABLES = tables(__file__)

# One failure, which is a compiler's; the options are those that the log's own file names.
DRAFTED = [
    name for name in NAMES if len(told(name).get("failure", [])) == 1 and told(name).get("refused") != "--from-log"
]


def draft(name: str, registry: Registry, out: Path, **named: str) -> drafts.Draft:
    backend = {"backend": "cuda"} if told(name).get("refused") else {}
    own = {k: v for k, v in told(name).get("named", {}).items() if k in ("backend", "target")}
    named = named if "target" in named else backend | own | named
    return drafts.make(facts_of(name, registry, **named), registry, out, force=True, replay=False)


@pytest.mark.parametrize("name", DRAFTED)
def test_every_log_gives_a_draft_that_the_loader_refuses(name: str, registry, tmp_path) -> None:
    made = draft(name, registry, tmp_path)
    entry = Path(made.files[-1])
    assert (entry.parent.parent, entry.stem) == (tmp_path, made.id)
    text = entry.read_text()
    parsed = tomllib.loads(text)
    assert parsed["symptom"] == made.failure["symptom"]
    assert made.open
    with pytest.raises(DataError, match=MARK):
        load_quirk(entry, tuple(registry.backends))
    # Filled in, it is an entry: what the log told is within the schema.
    lines = [line for line in text.splitlines() if not line.startswith(MARK)]
    lines.insert(lines.index("[effect]") + 1, 'path = "reference"')
    if "last_seen" not in text:
        lines.append('last_seen = "triton==3.6.0"\nreview_by = 2027-06-01')
    elif "toolchain" not in parsed["when"]:
        lines.append("review_by = 2027-06-01")
    entry.write_text("\n".join(lines) + "\n")
    quirk, errors = check_file(entry, tuple(registry.backends))
    assert errors == []
    assert not quirk.evidence.signature or any(re.search(quirk.evidence.signature, q) for q in quirk.evidence.quotes)
    # What the log says is evidence enough, but where any failure's log says it.
    lacking = [text for keys, text in audit.lacks(quirk) if keys == ("evidence", "signature")]
    died = made.failure["kind"] in ("segmentation-fault", "abort")  # by any of the ways in which that is told
    assert died or all("what any failure has" in text for text in lacking)


@pytest.mark.parametrize("name", DRAFTED)
def test_every_program_and_report_is_whole(name: str, registry, tmp_path) -> None:
    made = draft(name, registry, tmp_path)
    by_suffix = {Path(file).suffix: Path(file) for file in made.files}
    program = by_suffix[".py"].read_text()
    ast.parse(program)
    assert "def probe(arm: str, bench: Bench)" in program
    for module in by_suffix.keys() & {".ttir", ".ttgir", ".ptx"}:
        assert f'with_name("{by_suffix[module].name}")' in program
    assert (".ttgir" in by_suffix) is ("layouts fix num_warps" in program) is ('stage="ttir"' in program)
    report = by_suffix[".md"].read_text()
    for part in ("## Environment", "## To reproduce", "## Expected", "## Log", by_suffix[".py"].name):
        assert part in report
    assert made.failure["cause"].split()[0] in report
    assert report.count("```") % 2 == 0


def test_what_a_draft_does_not_know_is_marked(registry, tmp_path) -> None:
    made = draft("triton-3.2-num-ctas", registry, tmp_path)
    keys = {text.split(" = ")[0] for _, text in made.open}
    assert keys == {f"{MARK}{key}" for key in ("arch", "toolchain", "kernels", "conditions", "effect")}
    found = [one.line for one in audit.load_for_audit(tmp_path)[1] if "is still to be filled in" in one.message]
    assert found == [line for line, _ in made.open]
    known = draft("triton-3.2-num-ctas", registry, tmp_path, target="rocm:gfx942", toolchain="triton==3.2.0")
    assert {text.split(" = ")[0] for _, text in known.open} == keys - {f"{MARK}arch", f"{MARK}toolchain"}
    lines = Path(known.files[-1]).read_text().splitlines()
    assert all(lines[number - 1] == text for number, text in known.open)


def test_a_worker_request_in_a_log_gives_a_program_of_our_kernel(registry, tmp_path) -> None:
    found = facts_of("worker-time-out", registry)
    assert draft_texts.form_of(found) == "specialisation"
    assert found.kernels == ("dense_forward", "varlen_forward")
    text = draft_texts.program(found, "name", "title", None)
    assert "MODULE, FUNCTION = 'portattn.kernels.dense', 'dense_forward'" in text
    assert "'num_stages': 8" in text


def test_numbers_are_the_next_free_ones(registry, tmp_path) -> None:
    highest = max(int(name.split("-")[1]) for name in {**registry.quirks, **registry.retired} if name[:4] == "rocm")
    first, second = (
        draft("triton-3.4-kpack", registry, tmp_path, toolchain=t) for t in ("triton==3.4.0", "triton==3.5.1")
    )
    assert [int(made.id.split("-")[1]) for made in (first, second)] == [highest + 1, highest + 2]
    empty = msgspec.structs.replace(registry, quirks={}, retired={})
    assert drafts.next_number("rocm", tmp_path / "none", empty) == 1
    buried = msgspec.structs.replace(empty, retired={"rocm-0041-old": next(iter(registry.quirks.values()))})
    assert drafts.next_number("rocm", tmp_path / "none", buried) == 42


def test_a_draft_is_of_one_failure_on_one_chip_and_compiler(registry, tmp_path) -> None:
    log, on = "triton-3.6-gfx950-stages", {"toolchain": "triton==3.6.0"}
    made = draft(log, registry, tmp_path, **on)
    assert [Path(file).suffix for file in made.files] == [".ttgir", ".py", ".md", ".toml"], "the entry is written last"
    assert [entry.id for entry in drafts.find_drafts(facts_of(log, registry, **on), tmp_path)] == [made.id]
    later = facts_of(log, registry, toolchain="triton==3.7.1")
    other = facts_of("triton-3.4-kpack", registry, **on)
    assert drafts.find_drafts(later, tmp_path) == drafts.find_drafts(other, tmp_path) == []


@pytest.mark.parametrize("text", ["half a line = ", "evidence = 3\nwhen = 1", "[when]\narch = 3", "\udcff"])
def test_a_draft_that_is_being_written_is_none(registry, tmp_path, text: str) -> None:
    found = facts_of("triton-3.6-gfx950-stages", registry, toolchain="triton==3.6.0")
    (tmp_path / found.backend).mkdir()
    (tmp_path / found.backend / "a.toml").write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / found.backend / "gone.toml").symlink_to(tmp_path / "nowhere")
    assert drafts.find_drafts(found, tmp_path) == []


def test_nothing_is_overwritten(tmp_path) -> None:
    one, two = tmp_path / "a" / "one", tmp_path / "b" / "two"
    two.parent.mkdir()
    two.write_text("mine")
    with pytest.raises(ArgumentError, match="nothing is overwritten"):
        drafts.write_new({one: "1", two: "2"})
    assert two.read_text() == "mine"
    assert not one.exists()
    assert [path.name for path in tmp_path.glob("*/*")] == ["two"]


def test_an_error_leaves_nothing(tmp_path, monkeypatch) -> None:
    real, calls = os.link, []

    def full(source, target):
        calls.append(target)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(ArgumentError, match=r"--out is '.*three', but cannot be written: No space left on device"):
        drafts.write_new({tmp_path / "out" / name: name for name in ("one", "two", "three")})
    assert (len(calls), list(tmp_path.iterdir())) == (3, [])


def test_drafts_are_no_backend_of_a_checkout_and_else_where_portattn_is_called(monkeypatch, portattn, tmp_path) -> None:
    assert drafts.drafts_folder() == shipped_quirks() / "drafts"
    assert "drafts" not in find_backends()
    monkeypatch.setattr(drafts, "shipped_quirks", lambda: tmp_path / "site-packages" / "portattn" / "quirks")
    monkeypatch.chdir(tmp_path)
    assert drafts.drafts_folder() == tmp_path / "quirk-drafts"
    told = " ".join(portattn("quirks", "new", "--help").out.split())
    assert "by default quirks/drafts of a checkout, and ./quirk-drafts of the working folder" in told


def test_a_long_log_is_cut_round_its_cause() -> None:
    shown = excerpt("\n".join(f"line {n}" for n in range(1, 501)), 250)
    assert "line 250\n" in shown
    assert shown.startswith("…\nline 238\n")
    assert shown.endswith("line 500")
    assert "line 400" not in shown
    assert excerpt("one\ntwo", 1) == "one\ntwo"


def test_a_fence_in_a_log_does_not_end_the_reports_and_a_home_folder_stays_private(
    registry, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    found = facts_of("triton-3.4-kpack", registry)
    found = msgspec.structs.replace(found, log=f"{found.log}/home/somebody/secret/kernel.py\n```\nnot code\n````\n")
    made = drafts.make(found, registry, tmp_path, force=True, replay=False)
    report = next(Path(file) for file in made.files if file.endswith(".md")).read_text()
    assert ("`````\n" in report, "~/secret/kernel.py" in report, "somebody" in report) == (True, True, False)


@pytest.mark.compiles
def test_a_real_log_fails_again_under_the_installed_compiler(registry, tmp_path) -> None:
    """The module of a log of Triton 3.6.0 for gfx950, and PTX of another, under that very compiler."""
    from portattn.schema.toolchain import installed_toolchain

    if str(installed_toolchain()) != "triton==3.6.0":
        pytest.skip(f"the logs are of triton==3.6.0, and this is {installed_toolchain()}")
    for name in ("triton-3.6-gfx950-stages", "ptxas-registers"):
        made = drafts.make(facts_of(name, registry, toolchain="triton==3.6.0"), registry, tmp_path, force=True)
        assert made.reproduced is True, made.replay


def test_the_command_line(portattn, registry, tmp_path) -> None:
    log = FOLDER / "triton-3.6-num-ctas.log"
    same = ("quirks", "new", "--from-log", log, "--toolchain", "triton==3.6.0", "--out", tmp_path)
    called = portattn(*same, "--json", exits=0)
    [made] = called.json["failures"]
    assert (called.json["of"], made["number"], made["known"]) == (1, 1, [])
    assert [Path(file).is_file() for file in made["files"]] == [True] * 3
    assert made["replay"].startswith("Not reproduced here: the log holds no program")
    assert f"drafted already, in {made['files'][-1]}" in portattn(*same, exits=1).out
    words = portattn(*same, "--words", "num-ctas", "--force", exits=0)
    assert f"-{int(made['id'].split('-')[1]) + 1:04d}-num-ctas" in words.out
    assert f"{MARK}effect" in words.out


def test_a_replay_that_lacks_the_compiler_says_so(registry, tmp_path) -> None:
    unnamed = facts_of("triton-3.6-gfx950-stages", registry)
    reason = drafts.make(unnamed, registry, tmp_path, force=True).replay
    assert "does not say with which compiler it was written: give --toolchain NAME==VERSION" in reason
    assert "chip" not in reason


def test_the_command_line_says_first_what_is_known(portattn, tmp_path) -> None:
    new = ("quirks", "new", "--from-log", FOLDER / "seed-ascend-sparse.log", "--out", tmp_path)
    known = (*new, "--toolchain", "triton-ascend==3.1.0", "--kernel", "sparse_split")
    called = portattn(*known, exits=1)
    assert called.out.startswith("this is ascend-0014-sparse-reshape-crash: ")
    assert ("in range here" in called.out, "--force" in called.out) == (True, True)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"], "which has the lock: other users hold none there"
    called = portattn(*new, "--toolchain", "triton-ascend==3.2.0", exits=0)  # which only looks like that entry
    assert called.out.startswith("this looks like ascend-0014-sparse-reshape-crash: ")
    assert "(because its signature, stage and chip agree; but its kernels are sparse_split, and the log" in called.out
    assert len(list(tmp_path.glob("ascend/*.toml"))) == 1
    assert "ascend-0014" in portattn(*known, "--force", exits=0).out


def test_of_what_no_plan_avoids_no_work_around_is_missed(portattn, tmp_path) -> None:
    log = tmp_path / "adapter.log"
    log.write_text(
        "triton-adapter-opt: mlir/IR/TypeSupport.h:173: const AbstractType &mlir::TypeStorage::getAbstractType(): "
        'Assertion `abstractType && "Malformed type storage object."\' failed.\n'
    )
    where = ("--target", "ascend:ascend910b2", "--toolchain", "triton-ascend==3.2.0", "--out", str(tmp_path / "out"))
    called = portattn("quirks", "new", "--from-log", str(log), *where, "--kernel", "decode_split", exits=1)
    assert called.out.startswith("this is ascend-0109-adapter-dies: ")
    assert "no plan can avoid it: a compiler that dies is retried once" in called.out
    assert "its work-around should have been applied" not in called.out


@pytest.mark.parametrize("out", ["/proc/x", "/dev/null/x", "a-file/x"])
def test_a_draft_that_cannot_be_written_is_one_clear_error(portattn, tmp_path, monkeypatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("mine")
    log = FOLDER / "triton-3.4-kpack.log"
    called = portattn("quirks", "new", "--from-log", log, "--no-replay", "--force", "--out", out, "--json", exits=2)
    assert called.json["error"]["argument"] == "--out"
    assert called.json["error"]["limit"].startswith("cannot be written: ")
    assert len(called.err.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == {"a-file"}


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ((), "--from-log"), (("--from-log", "x", "--from-incident", "y"), "--from-incident"),
        (("--from-log", "/not/here"), "--from-log"), (("--from-log", FOLDER), "--from-log"),
        (("--from-incident", "x"), "ID"), (("--from-incident", "x", "--target", "cuda:sm_90"), "--target"),
        (("--from-log", FOLDER / "green.log"), "--from-log"),
        (("--from-log", FOLDER / "triton-3.4-kpack.log", "--kernel", "a-b"), "--kernel"),
        (("--from-incident", "x", "--failure", "1"), "--failure"),
        (("--from-incident", "x", "--kernel", "dense_forward"), "--kernel"),
        (("--from-log", FOLDER / "triton-3.4-kpack.log", "--words", "Not OK", "--force"), "--words"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(portattn, tmp_path, arguments, argument) -> None:
    called = portattn("quirks", "new", *arguments, "--out", tmp_path / "out", "--json", exits=2)
    assert called.json["error"]["argument"] == argument
    assert not (tmp_path / "out").exists()


def test_open_lines_are_only_the_marked_ones(tmp_path) -> None:
    assert open_lines(f"# {MARK}x\n{MARK}y = 1\na = '{MARK}'\n") == [(2, f"{MARK}y = 1")]
    assert open_lines(quirk_files.plant(tmp_path, "cuda-0001-x", 'path = "vendor"').read_text()) == []


@pytest.mark.parametrize(("function", "tile"), [("backward_keys", (128, 32)), ("backward_rows", (64, 16))])
def test_a_draft_has_the_values_of_the_kernel_that_failed(registry, function: str, tile: tuple[int, int]) -> None:
    """Of gradients an entry's conditions hold for either kernel: the other one's values would narrow it wrongly."""
    known_fields: dict[str, Any] = {
        "problem": Problem(op="attention_backward", batch=1, heads_q=8, heads_k=8, seq_q=512, seq_k=512, head_dim=64),
        "lowering": Lowering(), "launch": Launch(block_m=128, block_n=32, rows_m=64, rows_n=16, rows_stages=3),
    }  # fmt: skip
    for fields in (known_fields, {}):
        made = incident(kernel=function, symptom="compile-error", message="RuntimeError: boom", log="boom\n", **fields)
        found = failure_facts.from_incident(made, [], registry)
        names = ("dense_backward",) if fields else ("dense_backward", "varlen_backward")
        assert found.kernels == names
        text = draft_texts.entry(found, "cuda-0900-boom", "it fails", "none: planted", "probe.py")
        assert (f"block_m = {tile[0]}, block_n = {tile[1]}," in text) is bool(fields)
        assert "rows_" not in text


REFUSED = """\
ptxas /tmp/q.ptx, line 5; error   : Arguments mismatch for instruction 'cvt'
ptxas fatal   : Ptx assembly aborted due to errors
"""


def test_a_kernel_of_a_backend_s_own_can_be_named(registry, tmp_path) -> None:
    """Its path in plans is its name; the id says what the assembler refused."""
    named = {"target": "cuda:sm_90", "toolchain": "triton==3.8.0"}
    [found] = failure_facts.from_log(REFUSED, "build.log", registry, **named, kernel="gluon_forward")
    made = drafts.make(found, registry, tmp_path, force=True, replay=False)
    assert made.id.endswith("-cubin-cvt")
    assert tomllib.loads(Path(made.files[-1]).read_text())["when"]["kernels"] == ["gluon_forward"]
    [unnamed] = failure_facts.from_log(REFUSED, "build.log", registry, **named)
    draft = Path(drafts.make(unnamed, registry, tmp_path, force=True, replay=False).files[-1]).read_text()
    assert "--kernel names one of a backend's own too" in draft
    [other] = failure_facts.from_log(REFUSED, "build.log", registry, **named, kernel="my_delta")
    draft = Path(drafts.make(other, registry, tmp_path, force=True, replay=False).files[-1]).read_text()
    assert (other.function, tomllib.loads(draft)["when"]["kernels"]) == ("my_delta", ["my_delta"])
    with pytest.raises(ArgumentError, match=r"another package's .* function, or one of dense_forward, .*gluon_forward"):
        failure_facts.from_log(REFUSED, "build.log", registry, **named, kernel="gluon-x")


REQUEST = {
    "version": 1, "task": "compile", "target": ["hip", "gfx942", 64], "env": {},
    "signature": {
        "module": "portattn.kernels.dense", "function": "dense_forward", "types": {"q": "*fp16"}, "constants": {},
        "divisible": [], "small": [], "options": {"num_warps": 4, "num_stages": 8},
    },
}  # fmt: skip


def crafted(env: dict[str, Any] | None = None, **signature: Any) -> str:
    """A log that quotes a request with this environment and these parts of a signature."""
    request = REQUEST | {"env": env or {}, "signature": REQUEST["signature"] | signature}
    return f"triton==3.6.0\ntimeout at ttgir: no answer in 120 s\n{json.dumps(request)}\n"


@pytest.mark.parametrize(("name", "value", "kept"), TABLES["a_replay_has_only_variables_that_are_permitted"])
def test_a_replay_has_only_variables_that_are_permitted(registry, tmp_path, portattn, name, value, kept) -> None:
    [found] = failure_facts.from_log(crafted({name: value}), "build.log", registry)
    assert found.env == ({name: value} if kept else {})
    (tmp_path / "build.log").write_text(crafted({name: value}))
    new = ("quirks", "new", "--from-log", tmp_path / "build.log", "--out", tmp_path)
    called = portattn(*new, "--force", "--no-replay")
    assert (name in next((tmp_path / "probes").glob("*.py")).read_text()) is kept
    assert (f"left out: variable {name}={value!r}: no switch of the compiler's" in called.out) is not kept
    assert ("add it to ENV of the program" in called.out) is not kept


def test_an_incidents_variables_are_as_a_logs(registry) -> None:
    given = incident(
        target="rocm:gfx942", specialisation=REQUEST["signature"], lowering=Lowering(), launch=Launch(), log="",
        problem=Problem(batch=1, heads_q=1, heads_k=1, seq_q=64, seq_k=64, head_dim=64, dtype="fp16"),
        environment_set={"TRITON_PTXAS_PATH": "/tmp/evil", "TRITON_HIP_USE_ASYNC_COPY": "0"},
    )  # fmt: skip
    found = failure_facts.from_incident(given, [], registry)
    assert found.env == found.specialised.env == {"TRITON_HIP_USE_ASYNC_COPY": "0"}
    assert any("TRITON_PTXAS_PATH='/tmp/evil'" in text for text in found.left_out)


@pytest.mark.parametrize(("changed", "why"), TABLES["a_replay_imports_and_evaluates_nothing_of_a_log"])
def test_a_replay_imports_and_evaluates_nothing_of_a_log(registry, changed: dict[str, Any], why: str) -> None:
    """Triton evaluates the layout in a descriptor's type."""
    [found] = failure_facts.from_log(crafted(**changed), "build.log", registry)
    assert found.signature is None
    assert any(why in text for text in found.left_out)
    assert draft_texts.form_of(found) == "missing"


def test_a_replay_has_only_options_that_a_backend_declares(registry) -> None:
    kept = {"num_warps": 4, "waves_per_eu": 2, "schedule_hint": "attention,local-prefetch", "launch_pdl": True}
    wrong = {"kpack": "evil", "num_stages": True, "maxnreg": "x", "multibuffer": 1, "extern_libs": "/tmp/evil.bc"}
    [found] = failure_facts.from_log(crafted(options=kept | wrong), "build.log", registry)
    assert found.signature["options"] == kept
    assert [text.split("=")[0] for text in found.left_out] == [f"compiler option {name}" for name in wrong]
    [found] = failure_facts.from_log(crafted(options={"schedule_hint": "/etc/passwd"}), "build.log", registry)
    assert (found.signature["options"], len(found.left_out)) == ({}, 1)
    assert "schedule_hint='/etc/passwd': must be words" in found.left_out[0]


def test_signatures_of_every_kernel_of_ours_are_permitted(registry) -> None:
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=[])"
    types = {"q": f"tensordesc<fp16[64, 128],{layout}>", "k": "*fp16", "n": "i32", "x": "*kfp8e4nv", "t": "**fp16"}
    for module in ("portattn.kernels.dense", "portattn.backends.cuda.hopper_forward.kernel"):
        [found] = failure_facts.from_log(crafted(module=module, types=types), "build.log", registry)
        assert (found.signature["types"], found.left_out) == (types, ())


def test_a_module_that_a_log_names_is_not_run(portattn, triton, tmp_path, monkeypatch) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'hurt')!r}, 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "build.log").write_text(crafted(module="evil"))
    called = portattn("quirks", "new", "--from-log", str(tmp_path / "build.log"), "--out", str(tmp_path), "--force")
    assert not (tmp_path / "hurt").exists()
    assert "left out: kernel evil:dense_forward" in called.out


def test_a_target_is_text_in_a_program(registry) -> None:
    [found] = failure_facts.from_log(crafted(), "build.log", registry)
    found = msgspec.structs.replace(found, arches=('gfx942"; import os; x="',))
    assert 'gfx942"; import os; x="' in str(
        next(
            node.value.value for node in ast.parse(draft_texts.program(found, "name", "title", None)).body
            if isinstance(node, ast.Assign) and node.targets[0].id == "TARGET"
        )
    )  # fmt: skip


def test_a_file_that_a_log_names_is_read_only_if_it_is_regular(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kernel.ttir")
    assert excerpts(f"reproducer in {tmp_path}/kernel.ttir\n") == []
