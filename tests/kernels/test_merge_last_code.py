"""merge = "last" in PTX: what all threads have stored comes before the atomic, and what others have stored after it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import fakedriver
import msgspec
import pytest
from kernel_cases import problem
from packaging.version import Version

from portattn import Target
from portattn.compiling import compile_in
from portattn.launch import kernel_calls, meta_call
from portattn.planner import plan
from portattn.worker.client import Worker

TRITONS = fakedriver.triton_folders()
LOOKED_AT = list(
    dict.fromkeys([*list(TRITONS)[:1], *sorted(TRITONS, key=Version)[:1], *sorted(TRITONS, key=Version)[-1:]])
)
pytestmark = [pytest.mark.compiles, pytest.mark.skipif(not TRITONS, reason="Triton is not installed")]
# What orders memory, or reads or writes that of the device, from the atomic on or before it.
ORDER = re.compile(r"^\s*(?:@%p\d+\s+)?(bar\.sync|barrier\.sync|atom\.\S+|st\.global\S*|ld\.global\S*)", re.MULTILINE)


@pytest.fixture(scope="module", params=LOOKED_AT)
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Worker]]:
    """A compiling child process of each Triton."""
    site: Path = tmp_path_factory.mktemp("site")
    (site / "triton").symlink_to(TRITONS[request.param])
    # The child has this Python's packages; of Triton it finds this one first.
    with Worker(environment={"PYTHONPATH": str(site), "TRITON_CACHE_DIR": str(site / "cache")}) as made:
        yield request.param, made


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["decode", "paged", "sparse"])
def test_the_atomic_orders_what_is_stored_and_what_is_merged(worker: tuple[str, Worker], name: str, arch: str) -> None:
    version, child = worker
    if arch == "sm_100" and Version(version) < Version("3.3"):
        pytest.skip("Triton 3.2 does not know it")
    target = Target.parse(f"cuda:{arch}", f"triton=={version}")
    small = problem(name, dtype="bf16", head_dim=64, seq_k=4096, num_splits=5)
    made = plan(small, target)
    lowering, launch = made.specialised
    merging = msgspec.structs.replace(made, lowering=msgspec.structs.replace(lowering, merge="last"), launch=launch)
    (only,) = kernel_calls(merging, meta_call(small), target.arch.cores)[0]
    reply = compile_in(child, only, merging, target, 120.0, "text")
    assert reply.outcome == "ok", reply
    assert reply.toolchain == version
    seen = [match.group(1) for match in ORDER.finditer(str(reply.facts["ptx"]))]
    (atomic,) = [index for index, what in enumerate(seen) if what.startswith("atom")]
    assert {"acq_rel", "gpu", "add"} <= set(seen[atomic].split("."))
    before, after = seen[:atomic], seen[atomic + 1 :]
    # All threads have come to a barrier since the last of them stored a partial result, and only then one counts.
    assert before[-1].startswith("bar")
    stored = [what for what in before if what.startswith("st.global")]
    assert len(stored) >= 2, "partial results and their LSEs"
    # All wait for that one, which sets the counter back, and what is merged comes from where all have stored it.
    assert after[0].startswith("bar")
    loads = [what for what in after if what.startswith("ld.global")]
    assert loads
    assert all(".cg" in what for what in loads), loads
    assert after[1].startswith("st.global"), "the counter"
