"""Every shipped quirk, planned: where it applies the plan shows its effect, and where one condition fails it does not.
The cases are derived from the entries (portattn.tools.quirks.examples), one inside each entry's range and one beyond
each of its conditions; the other quirks are switched off, so that a case says something about its own entry."""

import msgspec
import pytest
from quirk_files import DECODE, PROBLEM, active, without_variants

from portattn.config import Settings
from portattn.errors import PathUnavailable
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.quirk import Quirk
from portattn.tools.quirks import examples

SHIPPED = Registry.load()
QUIRKS = sorted(SHIPPED.quirks.values(), key=lambda quirk: quirk.id)
# What an entry about the core's kernels says is seen where no variant comes before them.
CORE_ONLY = msgspec.structs.replace(SHIPPED, backends=without_variants(SHIPPED.backends))
OUTSIDE = [(quirk, point) for quirk in QUIRKS for point in examples.outside(quirk, SHIPPED)]


def planned(quirk: Quirk, point: examples.QuirkExample) -> Plan | PathUnavailable:
    """The plan at a point with this quirk only, or the refusal where the path that was asked for cannot be had."""
    known, target = point.place(registry_for(quirk))
    others = ",".join(f"-{other}" for other in known.quirks if other != quirk.id)
    requested = "interpreter" if target.backend == "cpu" else "auto"
    try:
        return plan(point.problem, target, known, settings=Settings(quirks=others, backend=requested))
    except PathUnavailable as refused:
        return refused


def registry_for(quirk: Quirk) -> Registry:
    return CORE_ONLY if examples.kernels_of(quirk) else SHIPPED


def applied(made: Plan | PathUnavailable) -> set[str]:
    if isinstance(made, PathUnavailable):
        return {rejection.quirk for rejection in made.rejected if rejection.quirk}
    return active(made)


@pytest.mark.parametrize("quirk", QUIRKS, ids=lambda quirk: quirk.id)
def test_applies_in_its_range(quirk: Quirk) -> None:
    point = examples.find(quirk, SHIPPED)
    made = planned(quirk, point)
    assert applied(made) == {quirk.id}
    if quirk.effect.path == "core":
        assert isinstance(made, Plan)
        assert (made.path, made.fell_back, made.rejected) == ("triton", False, ())
        assert any(quirk.title in note and quirk.id in note for note in made.notes)
        assert (quirk.id if quirk.effect.kind == "note" else quirk.title) in made.explain()
        return
    if quirk.effect.kind == "path":
        rejected = made.rejected
        assert (rejected[0].quirk, rejected[0].reason) == (quirk.id, quirk.title)
        if isinstance(made, Plan):
            assert made.path not in ("triton", "interpreter")
        return
    assert isinstance(made, Plan)
    assert (quirk.id if quirk.effect.kind == "note" else quirk.title) in made.explain()
    if not examples.kernels_of(quirk):  # a caution about a variant, which runs all the same
        assert (made.path, quirk.effect.kind) == (point.kernel, "note")
        return
    assert made.path == ("interpreter" if quirk.when.backend == "cpu" else "triton")
    lowering, launch = made.specialised
    seen = {
        "lowering": {name: getattr(lowering, name) for name in quirk.effect.sets if hasattr(lowering, name)},
        "launch": {name: launch.get(name) for name in quirk.effect.sets}, "env": made.env, "note": {},
    }  # fmt: skip
    assert seen[quirk.effect.kind] == quirk.effect.sets


@pytest.mark.parametrize("quirk", QUIRKS, ids=lambda quirk: quirk.id)
def test_changes_the_plan(quirk: Quirk) -> None:
    """Without the quirk the same point is planned otherwise: no entry sets what would have been taken anyway."""
    point = examples.find(quirk, SHIPPED)
    known, target = point.place(registry_for(quirk))
    everything_off = ",".join(f"-{other}" for other in known.quirks)
    requested = "interpreter" if target.backend == "cpu" else "auto"
    without = plan(point.problem, target, known, settings=Settings(quirks=everything_off, backend=requested))
    made = planned(quirk, point)
    if quirk.effect.path == "core":
        assert (without.path, made.path) == (point.kernel, "triton")
        return
    if not examples.kernels_of(quirk):
        assert isinstance(made, Plan)
        assert (made.path, made.schedule) == (without.path, without.schedule)
        assert active(without) == set()
        return
    assert without.path in ("triton", "interpreter")
    if isinstance(made, Plan) and made.path == without.path:
        same = (made.specialised, made.env) == (without.specialised, without.env)
        assert same is (quirk.effect.kind == "note")


@pytest.mark.parametrize(("quirk", "point"), OUTSIDE, ids=[f"{q.id}: {p.broken}" for q, p in OUTSIDE])
def test_does_not_apply_outside(quirk: Quirk, point: examples.QuirkExample) -> None:
    assert applied(planned(quirk, point)) == set()


def test_every_condition_has_an_outside() -> None:
    """Each entry is bounded by something; one that names a version is bounded by one."""
    for quirk in QUIRKS:
        broken = {point.broken for quirk_, point in OUTSIDE if quirk_ is quirk}
        assert broken, f"{quirk.id} applies everywhere"
        assert {f"toolchain {name}" for name in quirk.when.toolchain} <= broken


def test_three_backends_are_covered() -> None:
    by_backend = {b: sum(q.when.backend == b for q in QUIRKS) for b in ("cuda", "rocm", "ascend")}
    assert all(count >= 5 for count in by_backend.values()), by_backend
    assert len(QUIRKS) >= 26


@pytest.mark.parametrize(
    ("op", "features"), [("attention", {}), ("attention", {"seqlens_k": True}), ("decode_attention", {})]
)
def test_old_ascend_compiler_gives_way_to_the_vendor(op: str, features: dict[str, bool]) -> None:
    """Prefill, padded prefill and decode were all slower than plain torch with triton-ascend before 3.2.0."""
    from quirk_files import PROBLEM

    problem = msgspec.structs.replace(PROBLEM if op == "attention" else DECODE, **features)
    old = plan(problem, SHIPPED.target("ascend:ascend910b2", "triton-ascend==3.1.0"), SHIPPED)
    new = plan(problem, SHIPPED.target("ascend:ascend910b2", "triton-ascend==3.2.0"), SHIPPED)
    assert old.path != "triton"
    assert old.rejected[0].quirk.startswith("ascend-")
    assert new.path == "triton"


@pytest.mark.parametrize(
    ("toolchain", "applies"),
    [
        ("triton==3.2.0", True), ("triton==3.8.0", True), ("triton==3.9.0", False),
        ("triton==3.8.0,ptxas==13.3.33", False),
    ],
)  # fmt: skip
def test_hopper_caution_follows_ptxas(toolchain: str, applies: bool) -> None:
    """What assembles for sm_90 is the wheel's own ptxas, or the one that was put in its place."""
    made = plan(PROBLEM, SHIPPED.target("cuda:sm_90", toolchain), CORE_ONLY)
    assert ("cuda-0001-register-a-wgmma" in active(made)) is applies
    assert made.path == "triton"
