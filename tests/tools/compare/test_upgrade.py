"""Upgrading: which entries fall away, stay or newly apply between two compilers, and which plans change."""

import pytest
import quirk_files

from portattn.planning.registry import Registry
from portattn.tools.compare.registry_changes import NO_PLAN, Upgrade, compare
from portattn.tools.compare.sides import Pair, Side
from portattn.tools.matrix.problems import quick


def when(range_: str) -> str:
    return f'toolchain = {{ triton = "{range_}" }}\n'


@pytest.fixture
def known(tmp_path) -> Registry:
    plant = lambda *given, **named: quirk_files.plant(tmp_path, *given, **named)  # noqa: E731
    plant("rocm-0901-fixed", "launch = { num_stages = 1 }", when=when("<3.7"))
    plant("cuda-0901-lost", 'path = "vendor"', when='arch = ["sm_90"]\nfeatures = ["paged"]\n' + when(">=3.8,<3.10"))
    return quirk_files.registry(tmp_path)


def upgraded(known: Registry, before: str, after: str, *targets: str) -> Upgrade:
    return compare([Pair(*(Side(known.target(one, t), known) for t in (before, after))) for one in targets], quick())


def test_a_plan_that_leaves_the_core_kernel_is_lost(known) -> None:
    made = upgraded(known, "triton==3.6.0", "triton==3.9.0", "cuda:sm_90", "cuda:sm_80")
    lost = [one for one in made.moved if one.lost]
    assert {one.targets for one in lost} == {("cuda:sm_90",)}
    assert all("page" in one.problem or "MLA" in one.problem for one in lost)
    assert all(one.before == "triton" and one.after in ("sdpa", "reference") for one in lost)
    for chip in ("cuda:sm_80", "rocm:gfx950"):
        assert not any(one.lost for one in upgraded(known, "triton==3.6.0", "triton==3.9.0", chip).moved)


def test_two_entries_that_contradict_each_other_on_the_new_one_leave_no_plan(tmp_path) -> None:
    quirk_files.plant(tmp_path, "cuda-0901-two", "launch = { num_stages = 2 }", when=when(">=3.9,<3.10"))
    quirk_files.plant(tmp_path, "cuda-0902-one", "launch = { num_stages = 1 }", when=when(">=3.9,<3.10"))
    known = quirk_files.registry(tmp_path)
    made = upgraded(known, "triton==3.6.0", "triton==3.9.0", "cuda:sm_90")
    assert {(one.after, one.lost) for one in made.moved} == {(NO_PLAN, True)}
    assert any("cuda-0901-two and cuda-0902-one" in line for line in made.moved[0].differs)
    assert not any(one.lost for one in upgraded(known, "triton==3.9.0", "triton==3.6.0", "cuda:sm_90").moved)
