"""Quirks with a planted probe, and a child that ends each of its arms as it is told."""

import sys
from pathlib import Path

from places import tables

from portattn.planning.quirk_files import load_quirk
from portattn.schema.quirk import Quirk
from portattn.worker.client import Worker

TABLES = tables(__file__)

ID = "rocm-0901-planted"
QUIRK = TABLES["quirk"]
# What a child does on each arm: it answers, dies, or is silent. The text `boom` is the planted signature.
CHILD = """\
#!{python}
import json, os, resource, sys, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
ARMS = dict({arms!r})
def say(message):
    print(json.dumps(message | {{"id": request["id"], "version": 2}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    open({seen!r}, "a").write(request["arm"] + "\\n")
    say({{"stage": "ttgir"}})
    end = ARMS[request["arm"]]
    if end == "pass":
        say({{"ok": True, "facts": {{"level": "compiles"}}}})
    elif end == "crash":
        print("Assertion `boom' failed.", file=sys.stderr, flush=True)
        os.abort()
    elif end == "hang":
        time.sleep(600)
    else:
        kind, _, text = end.partition(":")
        say({{"ok": False, "stage": "ttgir", "kind": kind, "message": text, "log": "trace"}})
"""
BOOM, OTHER = "RuntimeError:boom went the pass", "RuntimeError:something else"


def plant(
    folder: Path, symptom: str = "compile-error", range_: str = ">=3.2", effect: str = "launch = { num_stages = 1 }",
    signature: str = "boom", more: str = "", program: str = "", probe: str = "probes/planted.py",
) -> Quirk:  # fmt: skip
    (folder / "probes").mkdir(parents=True, exist_ok=True)
    (folder / "probes" / "planted.py").write_text(program)
    path = folder / "rocm" / f"{ID}.toml"
    path.parent.mkdir(exist_ok=True)
    quotes = '["boom went the pass"]' if signature else "[]"
    text = QUIRK.format(id=ID, symptom=symptom, range=range_, effect=effect, signature=signature, quotes=quotes)
    path.write_text(text.replace("probes/planted.py", probe) + more, encoding="utf-8")
    return load_quirk(path)


def child(folder: Path, control: str = "pass", off: str = "pass", on: str = "pass") -> Worker:
    script = folder / "planted-child"
    arms = {"control": control, "off": off, "on": on}
    script.write_text(CHILD.format(python=sys.executable, arms=arms, seen=str(folder / "arms")))
    script.chmod(0o755)
    (folder / "arms").write_text("")
    return Worker(python=str(script))


def arms_of(folder: Path) -> list[str]:
    return (folder / "arms").read_text().split()
