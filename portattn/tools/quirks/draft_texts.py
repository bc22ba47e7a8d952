"""The texts of a draft: the entry in TOML, the program that fails as the log did, and the report for a tracker."""

import json
import pprint
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomlkit

from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema import compilers
from portattn.schema.lowering import OF_ROWS, Launch
from portattn.schema.ops import FEATURES
from portattn.schema.quirk import STAGES
from portattn.schema.target import Target
from portattn.tools.quirks.failure_facts import Facts
from portattn.tools.quirks.failure_log import patterns
from portattn.tools.quirks.probe_plans import Specialisation

# A key of this kind is none of the schema's: "the table has the unknown key `FILL-IN-effect`", with file and line.
MARK = "FILL-IN-"
_STAGE = {"unknown": "", "load": "", "launch": " at the launch", "parse": " in the front end"}
LONGEST_QUOTE = 400  # characters of a line of a log
_COLUMN = 44  # where comments beside values stand
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}: ")  # of a node in LLVM's memory, another in each run
_QUOTING = ("ptxas-line", "ptxas-fatal")
_QUOTED = re.compile(r"'([\w.]{1,24})'")
_FLAGS = ("gqa", "paged", "packed", "window", "chunk", *FEATURES)


def tracker_of(compiler: str) -> str:
    brought = compilers.find(compiler)
    return patterns().trackers.get(compiler, "") or (brought.tracker if brought else "")


def title_of(facts: Facts) -> str:
    """Return a clause from the compiler's words, to be rewritten by a person."""
    failure = facts.failure
    clause = patterns().symptoms[failure.symptom]["what"] + _STAGE.get(failure.stage, f" at stage {failure.stage}")
    told = _ADDRESS.sub("", failure.cause)
    cause = told if len(told) <= 110 else told[:109].rsplit(" ", 1)[0] + " …"
    return f"{clause}: {cause}"


def words_of(facts: Facts) -> str:
    """Return an id's words: kind of failure, stage and function; for an assembler's error its first quotation."""
    quoted = _QUOTED.search(facts.failure.cause) if facts.failure.kind in _QUOTING else None
    parts = [facts.failure.kind, facts.failure.stage, facts.function if facts.kernels else ""]
    parts += [quoted.group(1)] if quoted else []
    words = [re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts if part and part != "unknown"]
    return "-".join(dict.fromkeys(word for word in words if word))


def entry(facts: Facts, quirk_id: str, title: str, probe: str, program: str) -> str:
    """Return the file's text; `program` is the probe program's name under the folder of the draft."""
    failure, what = facts.failure, facts.specialised
    line = (facts.log.splitlines()[facts.at - 1 : facts.at] or [""])[0].strip()
    quote = (line if re.search(failure.signature, line) else failure.cause)[:LONGEST_QUOTE]
    seen = ", ".join(facts.arches) or facts.backend
    also = f"; the same in {', '.join(facts.alike)}" if facts.alike else ""
    on = f"{seen} with {facts.compiler}" if facts.compiler else seen
    return render_template(
        "draft_entry.jinja", facts=facts, failure=failure, mark=MARK, id=quirk_id, title=title, probe=probe,
        program=program, told_arch=_told(facts, "arch"), told_function=_told(facts, "function"), known_stages=STAGES,
        compiler=tuple(facts.compiler.split("==")), known=", ".join(kernel.name for kernel in CORES.values()),
        usual=Registry.load().backends[facts.backend].compiler,
        conditions=_conditions(what, facts) if what else [],
        stages=max(_launch(what, facts).num_stages - 1, 1) if what else 0,
        quote=quote if re.search(failure.signature, quote) else "",
        source=f"{facts.origin}, {facts.date}: {failure.symptom} at {failure.stage} on {on}{also}",
    )  # fmt: skip


def open_lines(text: str) -> list[tuple[int, str]]:
    """Return (line number, open question) of a draft."""
    return [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.startswith(MARK)]


def _text(value: str) -> str:
    literal = "\\" in value and "'" not in value and value.isprintable()
    return f"'{value}'" if literal else str(tomlkit.item(value).as_string())


def _list(values: Iterable[str]) -> str:
    return "[" + ", ".join(_text(value) for value in values) + "]"


def _beside(line: str, comment: str) -> str:
    return f"{line:<{_COLUMN - 1}} # {comment}" if comment else line


def _told(facts: Facts, name: str) -> str:
    return f"told by: {facts.told[name][:70]}" if facts.told.get(name) else ""


def _conditions(what: Specialisation, facts: Facts) -> list[str]:
    p = what.problem
    features = p.features()
    shown = [f"dtype={p.dtype}", f"head_dim={p.head_dim}"]
    shown += [f"head_dim_v={p.head_dim_v}"] if p.head_dim_v != p.head_dim else []
    shown += [f"causal_align={p.causal}"] if p.causal != "none" else []
    shown += [name for name in _FLAGS if features[name]]
    lowering = {name: getattr(what.lowering, name) for name in CORES[p.op].choices}
    failed = _launch(what, facts)
    launch = {name: failed.get(name) for name in OF_ROWS} | dict(failed.options)
    wrapped = textwrap.wrap(_table(lowering), 110, initial_indent="# lowering = ", subsequent_indent="#   ")
    return [f"# features = {_list(shown)}", *wrapped, f"# launch   = {_table(launch)}"]


# Of the failed function: an entry's conditions are about any one of a plan's kernels.
def _launch(what: Specialisation, facts: Facts) -> Launch:
    own = CORES[what.problem.op].of_rows
    return what.launch.of_rows() if own and facts.function == own else what.launch


def _table(values: Mapping[str, object]) -> str:
    parts = (f"{name} = {_text(v) if isinstance(v, str) else str(v).lower()}" for name, v in values.items())
    return "{ " + ", ".join(parts) + " }"


BEFORE, AFTER = 12, 28  # lines of the log round the cause


def issue(facts: Facts, title: str, program: str, saved: str, reproduced: str) -> str:
    """Return the report in Markdown; program, saved: names of files beside it; reproduced: the program's result."""
    failure, compiler = facts.failure, facts.compiler.partition("==")[0]
    rows = [
        ("compiler", facts.compiler or "FILL IN: version of the compiler"),
        ("chip", ", ".join(facts.arches) or facts.chip or "FILL IN: chip"), *sorted(facts.components.items()),
        ("kernel", facts.function or "FILL IN"), ("stage", failure.stage),
    ]  # fmt: skip
    named = " and ".join(f"`{name}`" for name in (program, saved) if name)
    how = f"{named}, attached; no accelerator is needed."
    if form_of(facts) == "missing":
        how = f"FILL IN: {named}, attached, lacks the kernel: the log holds no program."
    elif failure.symptom == "wrong-result" or failure.stage == "launch":
        how = f"{named}, attached, on the chip itself."
    text = render_template(
        "draft_report.jinja", title=title, tracker=tracker_of(compiler), rows=rows, stage=failure.stage,
        symptom=failure.symptom.capitalize(), cause=failure.cause, how=how, program=program, reproduced=reproduced,
        module=_without_portattn(facts, saved), expected=patterns().symptoms[failure.symptom]["expected"],
        log=excerpt(facts.log, facts.at), command=facts.command,
    )  # fmt: skip
    return private(text)


def render_template(template: str, **values: Any) -> str:
    import jinja2

    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(
        loader=folder, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    made.filters |= {"fenced": _fenced, "text": _text, "texts": _list, "beside": _beside}
    return made.get_template(template).render(values)


def _without_portattn(facts: Facts, saved: str) -> str:
    """Return a program that needs Triton alone; "" where the saved module is not the failing stage's input."""
    if form_of(facts) != "specialisation" or not saved.endswith(".ttir") or facts.signature is None or not facts.arches:
        return ""
    where = Registry.load()
    target = where.backends[facts.backend].triton_target(where.arches[facts.backend][facts.arches[0]])
    arguments = f"target=GPUTarget{target!r}, options={facts.signature['options']!r}"
    imports = "from triton.backends.compiler import GPUTarget\nimport triton"
    return f'{imports}\n\ntriton.compile("{saved}", {arguments})'


def excerpt(log: str, line: int) -> str:
    lines = log.rstrip("\n").splitlines()
    first, last = max(line - 1 - BEFORE, 0), min(line + AFTER, len(lines))
    tail = max(last, len(lines) - 4)
    cut = [f"… {tail - last} lines …"] if tail > last else []
    return "\n".join([*(["…"] if first else []), *lines[first:last], *cut, *lines[tail:]])


def _fenced(text: str) -> str:
    longest = max((len(found) for found in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * max(longest + 1, 3)
    return f"{fence}\n{text}\n{fence}"


def private(text: str) -> str:
    """Replace the user's home folder by ~: reports are public."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


Form = Literal["specialisation", "numbers", "text", "ptx", "missing"]


def form_of(facts: Facts) -> Form:
    if facts.failure.symptom == "wrong-result":
        return "numbers" if facts.specialised is not None else "missing"
    if facts.signature is not None:
        return "specialisation"
    if facts.program is None:
        return "missing"
    return "ptx" if facts.program.kind == "ptx" else "text"


def program(facts: Facts, name: str, title: str, target: Target | None) -> str:
    """Return the program of a draft, a probe that fails as the log did."""
    form = form_of(facts)
    where = f"{facts.backend}:{facts.arches[0]}" if facts.arches else f"{facts.backend}:FILL-IN"
    data: list[str] = []
    limit = form == "specialisation" and facts.failure.stage == "load" and target is not None
    if form == "specialisation":
        assert facts.signature is not None
        data = _signature_data(facts.signature, facts.env)
    if limit and target is not None:
        data += [f"LIMIT, KIND = {target.arch.scratchpad_bytes}, {target.arch.scratchpad_kind!r}"]
    if form == "numbers":
        data = _assigned("REQUEST", _numbers_request(facts, where), ": dict[str, Any]")
    if form == "text":
        data = _assigned("OPTIONS", _options(facts), ": dict[str, Any]")
    suffix = facts.program.suffix if facts.program else ""
    return render_template(
        "draft_program.jinja", form=form, suffix=suffix, title=_plain(title), about=_plain(about(facts)), name=name,
        data=data, target=json.dumps(where), limit=limit, cause=_plain(f"fails: {facts.failure.cause[:100]}"),
    )  # fmt: skip


def about(facts: Facts) -> str:
    chips = ", ".join(f"{facts.backend}:{arch}" for arch in facts.arches) or f"{facts.backend}, chip not known"
    with_ = f" with {facts.compiler}" if facts.compiler else ", compiler not known"
    failed = f"{facts.failure.symptom} at stage {facts.failure.stage}"
    text = f"Seen on {chips}{with_}: {failed}. Drafted from {facts.origin}."
    return textwrap.fill(text, 116, break_on_hyphens=False)


def _plain(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _assigned(name: str, value: object, kind: str = "") -> list[str]:
    line = f"{name}{kind} = {value!r}"
    parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
    if isinstance(parts, list) and all(str(part).split() == [str(part)] for part in parts):
        wrapped = textwrap.wrap(line, 116, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
        return ["\n".join(wrapped)]
    return [f"{name}{kind} = {pprint.pformat(value, width=116 - len(name) - len(kind), sort_dicts=False)}"]


def _signature_data(signature: dict[str, Any], env: dict[str, str]) -> list[str]:
    lines = [f"MODULE, FUNCTION = {signature['module']!r}, {signature['function']!r}"]
    for name, kind in (
        ("types", ""),
        ("constants", ": dict[str, Any]"),
        ("divisible", ""),
        ("options", ": dict[str, Any]"),
    ):
        lines += _assigned(name.upper(), signature[name], kind)
    return lines + _assigned("ENV", dict(env), ": dict[str, str]")


def _options(facts: Facts) -> dict[str, Any]:
    text, passes = (facts.program.text, facts.program.passes) if facts.program else ("", "")
    found = {"num_warps": re.search(r"num-warps\"? = (\d+)", text)}
    found["num_stages"] = re.search(r"num[-_]stages=(\d+)", passes)
    return {name: int(match[1]) for name, match in found.items() if match}


def _numbers_request(facts: Facts, target: str) -> dict[str, Any]:
    what = facts.specialised
    assert what is not None
    parts = {name: msgspec.to_builtins(getattr(what, name)) for name in ("problem", "lowering", "launch", "env")}
    device = Registry.load().backends[facts.backend].device_type
    return {**parts, "path": "triton", "target": target, "device": device, "kernel": what.kernel, "seed": 0}
