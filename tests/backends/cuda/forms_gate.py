"""Every form of the Hopper variants, compiled for sm_90 with one release of Triton: registers, spills, and what is new.

    make forms RELEASE=triton==3.9.0
    python tests/backends/cuda/forms_gate.py --release triton==3.9.0 [--jobs 2] [--only TEXT] [--json] [--write]

The release is the installed one, or the lab's. gluon_spills.toml has what each release spilled in each form; --write
puts there what this run found, also of a run that Ctrl-C ends. Each form takes some seconds.

Exit status 1 where a form spills more bytes than the file says, does not compile, has its products serialised, or does
not fit; 2 for bad input; 130 after Ctrl-C."""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
import test_gluon_backward as backward
import test_gluon_forms as forward
import test_gluon_indexer as indexer
import test_gluon_mla as latent
import test_gluon_narrow as narrow
import test_gluon_wide as wide
import tomlkit

from portattn import Problem
from portattn.errors import PortattnError
from portattn.files import write_whole
from portattn.planning.backend import Variant
from portattn.planning.registry import parse_target
from portattn.schema import toml_reader
from portattn.schema.plan import Plan
from portattn.schema.target import Target
from portattn.schema.toolchain import installed_toolchain
from portattn.testing import findings
from portattn.testing.findings import KernelFacts
from portattn.tools import lab
from portattn.worker.client import Worker

BASELINE = Path(__file__).with_name("gluon_spills.toml")
SECONDS = 240.0  # limit of a compile
HEAD = """\
# Bytes a thread that the kernels of each form of the Hopper variants spill for sm_90, by release of Triton. Written by
# forms_gate.py --write (`make forms WRITE=1`). That gate is red where a form spills more; a form that is not named was
# not compiled with that release, and is not judged.
"""


Spills = dict[str, dict[str, int]]  # one release's: bytes by form and kernel, of the forms that were compiled


class Form(msgspec.Struct, frozen=True):
    """One form: a variant's problem."""

    name: str
    variant: Variant
    problem: Problem


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a form. facts: of each kernel, registers, spills and scratchpad_bytes; wrong: why it is red."""

    form: str
    facts: dict[str, dict[str, int]]
    wrong: tuple[str, ...]
    seconds: float


def forms() -> list[Form]:
    """Every form, the forward's first."""
    found = [
        Form(f"gluon_forward: {form} D={dim} {causal}", forward.VARIANT, forward.problem(form, dim, causal))
        for form, dim, causal in forward.ALL
    ]
    for kind, form, dim, causal in narrow.ALL:
        variant = narrow.VARIANT if kind == "e4m3" else narrow.INT8
        found.append(Form(f"{variant.name}: {form} D={dim} {causal}", variant, narrow.problem(form, dim, causal, kind)))
    found += [Form(f"gluon_backward: {name}", backward.VARIANT, p) for name, p in backward.FORMS.items()]
    return found + [
        Form(f"{of.VARIANT.name}: {name}", of.VARIANT, of.problem(**fields))
        for of in (wide, latent, indexer)
        for name, fields in of.FORMS.items()
    ]


def baseline(path: Path = BASELINE) -> dict[str, Spills]:
    """Each release's spills; none where there is no file. Raises DataError (file, line) on a damaged one."""
    if not path.exists():
        return {}
    data, text = toml_reader.read(path)
    found: dict[str, Spills] = toml_reader.convert(data, dict[str, Spills], path, text)
    return found


def allowed(known: Spills | None, form: str, kernel: str) -> int | None:
    """Bytes that a kernel of a form may spill; None where the release has no figures of the form."""
    return None if known is None or form not in known else known[form].get(kernel, 0)


def judged(
    form: Form, target: Target, kernels: Sequence[KernelFacts], known: Spills | None
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """A form's facts by kernel, and why it is red."""
    facts = {
        kernel.function: {name: int(kernel.facts[name]) for name in ("registers", "spills", "scratchpad_bytes")}
        for kernel in kernels
    }
    wrong = []
    for kernel in kernels:
        most, spilled = allowed(known, form.name, kernel.function), facts[kernel.function]["spills"]
        if most is not None and spilled > most:
            wrong.append(f"{kernel.function} spills {spilled} bytes, and {most} are known")
        if "serialized_wgmma" in kernel.facts:
            wrong.append(f"{kernel.function}: ptxas serialises its products")
    # Spills are judged by the file: `check` knows only those of the release that a schedule was timed with.
    gates = findings.check_variant(form.variant, form.problem, target, tuple(kernels))
    wrong += findings.broken_gates(tuple(gate for gate in gates if "spill" not in gate.name))
    return facts, wrong


def measured(form: Form, target: Target, worker: Worker, known: Spills | None) -> Found:
    """Compile one form."""
    begun = time.monotonic()
    name = form.variant.name
    made = Plan(
        problem=form.problem, target=target.name, toolchain=str(target.toolchain), requested=name, path=name
    )  # fmt: skip
    kernels, failed, function = findings.compile_variant(form.variant, made, target, worker, SECONDS)
    facts, wrong = judged(form, target, kernels, known)
    if failed is not None:
        wrong.append(f"{function} does not compile: {(failed.message or failed.kind).splitlines()[0]}")
    return Found(form=form.name, facts=facts, wrong=tuple(wrong), seconds=round(time.monotonic() - begun, 1))


def run(
    chosen: Sequence[Form], release: str, jobs: int, known: Spills | None, say: Callable[[Found], None]
) -> list[Found]:
    """Compile forms in so many children; `say` gets each as it is done. Raises PortattnError where the lab has none."""
    target = parse_target("cuda:sm_90", release)
    own = str(target.toolchain) == str(installed_toolchain())
    here, workers, lock = threading.local(), list[Worker](), threading.Lock()

    def one(form: Form) -> Found:
        if not hasattr(here, "worker"):
            here.worker = Worker() if own else lab.worker(str(target.toolchain))
            with lock:
                workers.append(here.worker)
        return measured(form, target, here.worker, known)

    if not own:
        lab.need(str(target.toolchain))
    found = {}
    pool = ThreadPoolExecutor(jobs)
    try:
        for done in as_completed(pool.submit(one, form) for form in chosen):
            result = done.result()
            found[result.form] = result
            say(result)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in list(workers):
            worker.close()
    return [found[form.name] for form in chosen]


def written(release: str, found: Sequence[Found], path: Path = BASELINE) -> None:
    """Put a release's spills into the file, in place of those of the same forms. What else is there stays, and
    everything where the disk is full."""
    releases = baseline(path)
    own = releases.setdefault(release, {})
    own |= {one.form: {kernel: facts["spills"] for kernel, facts in one.facts.items()} for one in found if one.facts}
    document = tomlkit.document()
    for name in sorted(releases):
        rows = tomlkit.table()
        for form, kernels in releases[name].items():
            row = tomlkit.inline_table()
            row.update(kernels)
            rows[form] = row
        document[name] = rows
    write_whole(path, (HEAD + "\n" + tomlkit.dumps(document)).encode())


def lines(found: Sequence[Found]) -> Iterator[str]:
    """A line a kernel: form, kernel, registers, bytes spilled; and what is red."""
    yield f"{'form':<58} {'kernel':<20} {'registers':>9} {'spills':>7}"
    for one in found:
        for kernel, facts in one.facts.items():
            yield f"{one.form:<58} {kernel:<20} {facts['registers']:>9} {facts['spills']:>7}"
    for one in found:
        for why in one.wrong:
            yield f"RED {one.form}: {why}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--release", default=str(installed_toolchain()), metavar="triton==VERSION")
    parser.add_argument("--jobs", type=int, default=2, help="child processes")
    parser.add_argument("--only", default="", metavar="TEXT", help="only forms whose name holds this text")
    parser.add_argument("--write", action="store_true", help=f"put the spills into {BASELINE.name}")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    given = parser.parse_args(arguments)
    release = given.release if "==" in given.release else f"triton=={given.release}"
    chosen = [form for form in forms() if given.only in form.name]
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}, but must be 1 or more")
    if not chosen:
        parser.error(f"--only is {given.only!r}, but must match a form")
    begun, done = time.monotonic(), list[Found]()

    def say(one: Found) -> None:
        done.append(one)
        word = "; ".join(one.wrong) or ", ".join(f"{f['spills']} bytes" for f in one.facts.values() if f["spills"])
        seconds = time.monotonic() - begun
        print(f"[{len(done)}/{len(chosen)}] {seconds:5.0f} s  {one.form}: {word or 'no spills'}", file=sys.stderr)

    try:
        # A file that is written anew is not what its run is judged by.
        known = None if given.write else baseline().get(release)
        found = run(chosen, release, given.jobs, known, say)
        if given.write:
            written(release, found)
    except (PortattnError, ValueError, OSError) as error:
        print(f"forms_gate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if given.write and done:
            written(release, done)
        print(f"forms_gate: interrupted after {len(done)} forms", file=sys.stderr)
        return 130
    if given.json:
        red = [one.form for one in found if one.wrong]
        told: dict[str, Any] = {"release": release, "judged": known is not None, "red": red, "forms": found}
        print(json.dumps(msgspec.to_builtins(told), indent=2))
    else:
        print("\n".join(lines(found)))
        unknown = [one.form for one in found if known is None or one.form not in known]
        if unknown and not given.write:
            print(f"{BASELINE.name} has no figures of {len(unknown)} of these forms with {release}: not judged")
    return 1 if any(one.wrong for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
