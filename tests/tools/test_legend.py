"""What is said of names in schedules and tables, below what prints them."""

import click.testing
import msgspec
import pytest
from places import ROOT

from portattn.cli import main
from portattn.config import Settings
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, parse_target
from portattn.tools import display_text
from portattn.tools.matrix.problems import dense, full

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
VARIANTS = [variant for backend in Registry.load().backends.values() for variant in backend.variants]
SIZES = ("--q", "1,8,4096,128", "--kv", "1,8,4096,128", "--dtype", "bf16")


def called(*arguments: str) -> str:
    result = click.testing.CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def schedules() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for variant in VARIANTS:
        settings = Settings(backend=variant.name)
        for named in full():
            if named.problem.op in variant.ops and variant.rejects(named.problem, SM_90) is None:
                found.setdefault(variant.name, set()).update(plan(named.problem, SM_90, settings=settings).schedule)
    return found


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_says_what_the_names_in_its_schedules_mean(variant, schedules) -> None:
    assert set(variant.legend) == schedules[variant.name]
    tuning = Registry.load().tuning(SM_90)
    for entry in tuning.entry:
        assert entry.kernel != variant.name or set(entry.flags) <= set(variant.legend)
    if variant.name == "gluon_forward":
        page = (ROOT / "docs" / "performance" / "hopper-forward.md").read_text(encoding="utf-8")
        assert [name for name in variant.legend if f"`{name}`" not in page] == []


def test_plans_are_followed_by_what_the_names_mean_where_that_is_asked_for_but_for_json() -> None:
    line = ("plan", "attention", "--target", "h100", "--toolchain", "triton==3.6.0", *SIZES)
    told = called(*line)
    assert told.endswith("\n  --legend says what the names in a schedule mean\n")
    assert "columns that heads" not in told
    said = " ".join(called(*line, "--legend").split())
    assert "--legend" not in said
    assert "gluon_forward: width: columns that heads are padded to; groups: warp groups" in said
    assert "columns that heads" not in called(*line, "--legend", "--json")
    for more in ((), ("--legend",)):
        plain = called(*line, "--backend", "triton", *more)  # which has no schedule
        assert "--legend" not in plain
        assert "columns that heads" not in plain
        assert plain.endswith("  docs/lowering.md explains the fields of a lowering\n") is bool(more)


def test_plans_of_several_chips_have_it_once_and_lines_are_no_wider_than_a_terminal() -> None:
    made = plan(dense(dtype="fp16", head_dim=64).problem, SM_90)
    assert display_text.of_plans([made, made]) == display_text.of_plans([made])
    few = msgspec.structs.replace(made, schedule={"keys": 128, "unknown": 1})
    assert display_text.of_plans([few]) == ["gluon_forward: keys: keys of a tile"]
    assert display_text.of_plans([msgspec.structs.replace(made, schedule={})]) == []
    lines = display_text.of_kernels(["dense_forward", "gluon_forward", "decode_split"])
    assert lines.count(display_text.TILES) == 1
    assert max(map(len, lines)) <= display_text.COLUMNS


def test_what_would_be_tuned_is_followed_by_it_but_for_json() -> None:
    problem = "attention q=4,16,4096,128 kv=4,16,4096,128 dtype=bf16 causal"
    line = ("tune", "--target", "h100", "--toolchain", "triton==3.6.0", "--problem", problem, "--dry-run")
    for more, told in (((), True), (("--kernel", "dense_forward"), True), (("--json",), False)):
        assert ("128×64 w4 s2: block_m × block_n" in called(*line, *more)) is told
    assert "groups: warp groups" in " ".join(called(*line, "--kernel", "gluon_forward").split())
    assert "groups: warp groups" not in called(*line, "--kernel", "dense_forward")
