"""The logs of this folder: NAME.log as it was written, and NAME.toml, which says where it is from and what it tells.

source   the thread it was seen in, as owner/repository#number; `Real:` of one that was made here; `made after …` where
         no real text was found, or the lines round it are not real
named    options of `quirks new`, for what the log does not say
refused  the option that `quirks new` asks for without them; then only what is recognised is told
failure  each failure, as far as it is told: what must be recognised, and the entries that it `is` or `looks like`"""

from pathlib import Path
from typing import Any

from portattn.planning.registry import Registry
from portattn.schema.toml_reader import tomllib
from portattn.tools.quirks import failure_facts
from portattn.tools.quirks.failure_facts import Facts
from portattn.tools.quirks.failure_log import decode_text

FOLDER = Path(__file__).parent / "logs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.log"))


CASES: dict[str, list[list[str]]] = tomllib.loads(Path(__file__).with_name("cases.toml").read_text(encoding="utf-8"))


def read(name: str) -> str:
    return decode_text((FOLDER / f"{name}.log").read_bytes())


def told(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def facts_of(name: str, registry: Registry, **named: str) -> Facts:
    """Of a log with one failure. What is not named here counts as the log's own."""
    [found] = failure_facts.from_log(read(name), f"{name}.log", registry, **named)
    return found
