"""The TOML of a draft: what is known as keys, what is not as lines that the loader refuses until they are gone."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

import tomlkit

from portattn.planning.kernel_specs import CORES
from portattn.schema.features import FEATURES
from portattn.schema.lowering import OF_ROWS, Launch
from portattn.schema.quirk import STAGES
from portattn.tools.quirks.lifecycle.failure_report import Facts
from portattn.tools.quirks.lifecycle.specialised import Specialisation

# A key of this kind is none of the schema's: "the table has the unknown key `FILL-IN-effect`", with file and line.
MARK = "FILL-IN-"
_WHAT = {
    "compile-error": "the compiler refuses",
    "compiler-crash": "the compiler dies",
    "hang": "the compiler does not end",
    "wrong-result": "the numbers are wrong",
    "slow": "the code is slow",
    "resource-limit": "the kernel does not fit",
}
_STAGE = {"unknown": "", "load": "", "launch": " at the launch", "parse": " in the front end"}
LONGEST_QUOTE = 400  # characters of a line of a log
_COLUMN = 44  # where comments beside values stand
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}: ")  # of a node in LLVM's memory, another in each run
_QUOTING = ("ptxas-line", "ptxas-fatal")
_QUOTED = re.compile(r"'([\w.]{1,24})'")
_FLAGS = ("gqa", "paged", "packed", "window", "chunk", *FEATURES)


def title_of(facts: Facts) -> str:
    """A clause, from what the compiler said. To be said in better words by who knows more."""
    failure = facts.failure
    clause = _WHAT[failure.symptom] + _STAGE.get(failure.stage, f" at stage {failure.stage}")
    told = _ADDRESS.sub("", failure.cause)
    cause = told if len(told) <= 110 else told[:109].rsplit(" ", 1)[0] + " …"
    return f"{clause}: {cause}"


def words_of(facts: Facts) -> str:
    """The words of an id: what kind of failure it is, where, and of which function.

    What an assembler refuses is what it quotes first: an instruction or a name, where kind and stage say too little.
    """
    quoted = _QUOTED.search(facts.failure.cause) if facts.failure.kind in _QUOTING else None
    parts = [facts.failure.kind, facts.failure.stage, facts.function if facts.kernels else ""]
    parts += [quoted.group(1)] if quoted else []
    words = [re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts if part and part != "unknown"]
    return "-".join(dict.fromkeys(word for word in words if word))


def entry(facts: Facts, quirk_id: str, title: str, probe: str, program: str) -> str:
    """The file's text. `program` is the probe program's name under the folder of the draft."""
    failure = facts.failure
    lines = [
        f"# A draft by `portattn quirks new` of {facts.date}, from {facts.origin}.",
        f"# {MARK}… are what nothing tells: the loader refuses the file until those lines are gone.",
        f"id      = {_text(quirk_id)}",
        f"title   = {_text(title)}",
        f"symptom = {_text(failure.symptom)}",
        'kind    = "workaround"',
        "",
        "[when]",
        f"backend   = {_text(facts.backend)}",
        *_arch(facts),
        *_toolchain(facts),
        *_kernels(facts),
        *_conditions(facts),
        "",
        "[effect]",
        *_effect(facts),
        "",
        "[evidence]",
        *(_words_seen(facts) if failure.signature else []),
        f"probe     = {_text(probe)}",
        *([] if program in probe else [f"# {program} fails in the same way, without planning: for the report"]),
    ]
    if failure.symptom == "wrong-result":
        lines.append(f"needs     = {_text(f'{facts.backend}:{facts.arches[0]}' if facts.arches else '')}")
    lines += ['upstream  = "unreported"', f"source    = {_text(_source(facts))}"]
    if facts.compiler:
        lines.append(f"last_seen = {_text(facts.compiler)}")
    return "\n".join(lines) + "\n"


def _words_seen(facts: Facts) -> list[str]:
    """The signature, the stage that printed it, and the line that it is the signature of."""
    failure = facts.failure
    line = (facts.log.splitlines()[facts.at - 1 : facts.at] or [""])[0].strip()
    quote = line if re.search(failure.signature, line) else failure.cause
    return [
        f"signature = {_text(failure.signature)}",
        *([f"stage     = {_text(failure.stage)}"] if failure.stage in STAGES else []),
        *(
            [f"quotes    = [{_text(quote[:LONGEST_QUOTE])}]"]
            if re.search(failure.signature, quote[:LONGEST_QUOTE])
            else []
        ),
    ]


def open_lines(text: str) -> list[tuple[int, str]]:
    """(line number, what is to be filled in) of a draft."""
    return [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.startswith(MARK)]


def _text(value: str) -> str:
    """A TOML string, a literal one where that spares backslashes."""
    literal = "\\" in value and "'" not in value and value.isprintable()
    return f"'{value}'" if literal else str(tomlkit.item(value).as_string())


def _list(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(_text(value) for value in values) + "]"


def _beside(line: str, comment: str) -> str:
    return f"{line:<{_COLUMN}}# {comment}" if comment else line


def _said(facts: Facts, *names: str) -> str:
    words = next((facts.told[name] for name in names if name in facts.told), "")
    return f"told by: {words[:70]}" if words else ""


def _arch(facts: Facts) -> list[str]:
    if facts.arches:
        return [_beside(f"arch      = {_list(facts.arches)}", _said(facts, "arch"))]
    if facts.chip:
        unknown = f"the log names {facts.chip}, which is no arch here: add its file (CONTRIBUTING.md), or name others"
        return [f"{MARK}arch = {_text(unknown)}"]
    return [f"{MARK}arch = {_text('chips that have the bug, as arch = [...]; the log names none')}"]


def _toolchain(facts: Facts) -> list[str]:
    if not facts.compiler:
        hint = 'the compiler that it was seen on, as toolchain = { triton = "==3.6.0" }; the log does not say'
        return [f"{MARK}toolchain = {_text(hint)}"]
    name, _, version = facts.compiler.partition("==")
    line = f'toolchain = {{ {name} = "=={version}" }}'
    return [_beside(line, "no wider than what was seen: `quirks bisect` finds its ends")]


def _kernels(facts: Facts) -> list[str]:
    if facts.kernels:
        return [_beside(f"kernels   = {_list(facts.kernels)}", _said(facts, "function"))]
    which = f"the log names {facts.function}, which is none of" if facts.function else "the log names none of"
    known = ", ".join(kernel.name for kernel in CORES.values())
    ask = "which have the bug? --kernel names one of a backend's own too, such as a plan's path"
    return [f"{MARK}kernels = {_text(f'{which} {known}: {ask}')}"]


def _conditions(facts: Facts) -> list[str]:
    """What the entry may depend on. Which of it matters is not known before it is reduced."""
    what = facts.specialised
    hint = "which of these it takes (`portattn quirks reduce` finds out), or nothing: then delete this line"
    if what is None:
        bare = "features, lowering or launch that it takes, or nothing: then delete this line"
        return [f"{MARK}conditions = {_text(bare)}"]
    p = what.problem
    features = p.features()
    shown = [f"dtype={p.dtype}", f"head_dim={p.head_dim}"]
    shown += [f"head_dim_v={p.head_dim_v}"] if p.head_dim_v != p.head_dim else []
    shown += [f"causal_align={p.causal}"] if p.causal != "none" else []
    shown += [name for name in _FLAGS if features[name]]
    lowering = {name: getattr(what.lowering, name) for name in CORES[p.op].choices}
    failed = _launch(what, facts)
    launch = {name: failed.get(name) for name in OF_ROWS} | dict(failed.options)
    return [
        f"{MARK}conditions = {_text(hint)}",
        f"# features = {_list(tuple(shown))}",
        *textwrap.wrap(_table(lowering), 110, initial_indent="# lowering = ", subsequent_indent="#   "),
        f"# launch   = {_table(launch)}",
    ]


def _launch(what: Specialisation, facts: Facts) -> Launch:
    """The launch of the function that failed: an entry asks about the values of any one of a plan's kernels."""
    own = CORES[what.problem.op].of_rows
    return what.launch.of_rows() if own and facts.function == own else what.launch


def _table(values: Mapping[str, object]) -> str:
    parts = (f"{name} = {_text(v) if isinstance(v, str) else str(v).lower()}" for name, v in values.items())
    return "{ " + ", ".join(parts) + " }"


def _effect(facts: Facts) -> list[str]:
    hint = "the smallest change that helps: exactly one of lowering, launch, env, path and note (docs/quirks.md)"
    lines = [f"{MARK}effect = {_text(hint)}"]
    if facts.specialised is not None:
        launch = _launch(facts.specialised, facts)
        lines.append(f"# launch = {{ num_stages = {max(launch.num_stages - 1, 1)} }}")
    return [*lines, '# path = "vendor"', '# cost = "…"']


def _source(facts: Facts) -> str:
    seen = ", ".join(facts.arches) or facts.backend
    also = f"; the same in {', '.join(facts.alike)}" if facts.alike else ""
    compiler = f" with {facts.compiler}" if facts.compiler else ""
    return f"{facts.origin}, {facts.date}: {facts.failure.symptom} at {facts.failure.stage} on {seen}{compiler}{also}"
