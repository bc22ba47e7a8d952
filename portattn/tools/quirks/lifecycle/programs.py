"""The program of a draft: a probe that fails as the log did, from what the log or the incident holds.

Four kinds: a specialisation of our own kernels; one whose numbers are wrong, run on a device; a text that a compiler
takes (TTIR, PTX); and, where there is neither, a skeleton that says what is missing.
"""

from __future__ import annotations

import json
import pprint
import re
import textwrap
from typing import Any, Literal

import msgspec

from portattn.planning.registry import Registry
from portattn.schema.target import Target
from portattn.tools.quirks.lifecycle.failure_report import Facts

Form = Literal["specialisation", "numbers", "text", "ptx", "missing"]

_HEAD = '''\
"""{title}

{about}

    python {name}.py off    {cause}
    python {name}.py on     the same with WORKAROUND, which is empty until somebody finds one
"""

from __future__ import annotations
{imports}
import triton
import triton.language as tl

from portattn.worker.probe import Bench, {names}

TARGET = {target}
{data}

@triton.jit
def copy(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, tl.load(x + n))


def probe(arm: str, bench: Bench) -> None:
    """One arm: returns where the compiler does its work, raises what it raises."""
    if arm == "control":
        bench.compile(copy, {{"x": "*fp32", "out": "*fp32"}}, {{"N": 64}})
        return
{body}

if __name__ == "__main__":
    main(probe, TARGET, __doc__)
'''

_SPECIALISATION = """\
    kernel = getattr(importlib.import_module(MODULE), FUNCTION)
    change = WORKAROUND if arm == "on" else {}
    {code}bench.compile(
        kernel,
        TYPES,
        CONSTANTS | change.get("constants", {}),
        DIVISIBLE,
        OPTIONS | change.get("options", {}),
        ENV | change.get("env", {}),
    )
"""
_FITS = """\
    used = int(code.facts["scratchpad_bytes"])
    if used > LIMIT:
        raise Seen(f"out of resource: {KIND}, required {used} bytes, {bench.name.partition(':')[2]} has {LIMIT}")
"""
_NUMBERS = """\
    from portattn.worker import interpret

    change = WORKAROUND if arm == "on" else {}
    request = {name: REQUEST[name] | change.get(name, {}) if name in change else REQUEST[name] for name in REQUEST}
    seen = interpret.compare(request)["facts"]
    bench.level = RUNS
    off = seen["error"] > seen["budget"] or seen.get("lse_error", 0) > seen.get("lse_budget", 0)
    if off or seen["wrong"]:
        raise Seen(f"wrong numbers: {seen}")
"""
_TEXT = """\
    options = OPTIONS | (WORKAROUND if arm == "on" else {})
    try:
        bench.compile_file(PROGRAM, options)
    except Exception as error:
        # Without CANN the front half of triton-ascend is all that can be compiled: that it ends is what is asked.
        if "ASCEND_HOME_PATH is not set" not in str(error):
            raise
"""
_PTX = """\
    text = PROGRAM.read_text()
    for old, new in WORKAROUND.items() if arm == "on" else ():
        text = text.replace(old, new)
    resources.ptxas_report(text, bench.target[1])
"""
_MISSING = """\
    raise NotImplementedError("to be filled in: the kernel that fails, by bench.compile(kernel, types, constants)")
"""


def form_of(facts: Facts) -> Form:
    """Which kind of program can be made."""
    if facts.failure.symptom == "wrong-result":
        return "numbers" if facts.specialised is not None else "missing"
    if facts.signature is not None:
        return "specialisation"
    program = facts.program
    if program is None:
        return "missing"
    return "ptx" if program.kind == "ptx" else "text"


def program(facts: Facts, name: str, title: str, target: Target | None) -> str:
    """The program's text. `name` is its file's without suffix; a text that it reads lies beside it under that name."""
    form = form_of(facts)
    imports: list[str] = []
    names = ["main"]
    data: list[str] = []
    where = f"{facts.backend}:{facts.arches[0]}" if facts.arches else f"{facts.backend}:FILL-IN"
    if form == "specialisation":
        assert facts.signature is not None
        imports, body = ["import importlib", "from typing import Any"], _SPECIALISATION
        data = _signature_data(facts.signature, facts.env)
        limit = facts.failure.stage == "load" and target is not None
        body = body.replace("{code}", "code = " if limit else "") + (_FITS if limit else "")
        if limit and target is not None:
            names.insert(0, "Seen")
            data += [f"LIMIT, KIND = {target.arch.scratchpad_bytes}, {target.arch.scratchpad_kind!r}"]
        data.append("WORKAROUND: dict[str, dict[str, Any]] = {}  # of constants, options and env: what to change")
    elif form == "numbers":
        imports, names, body = ["from typing import Any"], ["RUNS", "Seen", "main"], _NUMBERS
        data = _assigned("REQUEST", _numbers_request(facts, where), ": dict[str, Any]")
        data.append("WORKAROUND: dict[str, dict[str, Any]] = {}  # of lowering, launch and env: what to change")
    elif form == "text":
        imports = ["from pathlib import Path", "from typing import Any"]
        data = [
            f'PROGRAM = Path(__file__).with_name("{name}.ttir")',
            *_assigned("OPTIONS", _options(facts), ": dict[str, Any]"),
        ]
        data.append("WORKAROUND: dict[str, Any] = {}  # compiler options to change")
        body = _TEXT
    elif form == "ptx":
        imports = ["from pathlib import Path"]
        data = [f'PROGRAM = Path(__file__).with_name("{name}.ptx")']
        data.append("WORKAROUND: dict[str, str] = {}  # text of the PTX -> what to write instead")
        body = _PTX
    else:
        data, body = ["WORKAROUND: dict[str, object] = {}"], _MISSING
    text = _HEAD.format(
        title=_plain(title), about=_plain(about(facts)), name=name, cause=_plain(f"fails: {facts.failure.cause[:100]}"),
        imports="".join(f"\n{line}" for line in imports) + ("\n" if imports else ""), names=", ".join(names),
        target=json.dumps(where), data="\n".join(data) + "\n", body=body,
    )  # fmt: skip
    if form == "ptx":
        text = text.replace(
            "from portattn.worker.probe", "from portattn.worker import resources\nfrom portattn.worker.probe", 1
        )
    return text


def about(facts: Facts) -> str:
    """Where the failure was seen, in two lines at most."""
    chips = ", ".join(f"{facts.backend}:{arch}" for arch in facts.arches) or f"{facts.backend}, chip not known"
    with_ = f" with {facts.compiler}" if facts.compiler else ", compiler not known"
    text = (
        f"Seen on {chips}{with_}: {facts.failure.symptom} at stage {facts.failure.stage}. Drafted from {facts.origin}."
    )
    return textwrap.fill(text, 116, break_on_hyphens=False)


def _plain(text: str) -> str:
    """Text for a docstring."""
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _assigned(name: str, value: object, kind: str = "") -> list[str]:
    """An assignment, wrapped where that breaks no string."""
    line = f"{name}{kind} = {value!r}"
    parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
    if isinstance(parts, list) and all(str(part).split() == [str(part)] for part in parts):
        wrapped = textwrap.wrap(line, 116, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
        return ["\n".join(wrapped)]
    return [f"{name}{kind} = {pprint.pformat(value, width=116 - len(name) - len(kind), sort_dicts=False)}"]


def _signature_data(signature: dict[str, Any], env: dict[str, str]) -> list[str]:
    lines = [f"MODULE, FUNCTION = {signature['module']!r}, {signature['function']!r}"]
    lines += _assigned("TYPES", dict(signature["types"]))
    lines += _assigned("CONSTANTS", dict(signature["constants"]), ": dict[str, Any]")
    lines += _assigned("DIVISIBLE", list(signature["divisible"]))
    lines += _assigned("OPTIONS", dict(signature["options"]), ": dict[str, Any]")
    return lines + _assigned("ENV", dict(env), ": dict[str, str]")


def _options(facts: Facts) -> dict[str, Any]:
    """Compiler options of a text: what its module says of itself."""
    program = facts.program
    text = program.text if program else ""
    found: dict[str, Any] = {}
    warps = re.search(r"num-warps\"? = (\d+)", text)
    if warps:
        found["num_warps"] = int(warps[1])
    stages = re.search(r"num[-_]stages=(\d+)", program.passes if program else "")
    if stages:
        found["num_stages"] = int(stages[1])
    return found


def _numbers_request(facts: Facts, target: str) -> dict[str, Any]:
    """As testing/run_plan.py takes it."""
    what = facts.specialised
    assert what is not None
    return {
        "problem": msgspec.to_builtins(what.problem),
        "path": "triton",
        "target": target,
        "device": Registry.load().backends[facts.backend].device_type,
        "kernel": what.kernel,
        "lowering": msgspec.to_builtins(what.lowering),
        "launch": msgspec.to_builtins(what.launch),
        "env": dict(what.env),
        "seed": 0,
    }
