"""Writes a Markdown table of the instructions that kernels use, the model knows and the tests execute.

    python -m portattn.backends.rocm.emulator.amdgpu.coverage FOLDER [TESTED.txt]

FOLDER holds assembly texts (*.s, *.amdgcn); TESTED.txt has a mnemonic a line. Exits 1 if a kernel needs more.
"""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from portattn.backends.rocm.emulator.amdgpu.assembly import parse
from portattn.backends.rocm.emulator.amdgpu.decode import FAMILIES, family

COLUMNS = 118  # of a line of the table


def count_mnemonics(texts: Iterable[str]) -> dict[str, Counter[str]]:
    """Count arch → mnemonic in the texts. Raise BadProgram on another text."""
    found: dict[str, Counter[str]] = {}
    for text in texts:
        assembly = parse(text)
        counts = found.setdefault(assembly.arch.name, Counter())
        for instruction in assembly.instructions:
            for part in (instruction, instruction.second):
                if part is not None:
                    counts[part.mnemonic] += 1
    return found


def table(counts: Mapping[str, Iterable[str]], tested: Mapping[str, set[str]]) -> str:
    """Return Markdown of mnemonics used, modelled and tested per family and arch, and the missing names."""
    arches = sorted(counts)
    lines = ["| family | " + " | ".join(arches) + " |", "| --- |" + " --- |" * len(arches)]
    for name in FAMILIES:
        cells = []
        for arch in arches:
            names = {m for m in counts[arch] if family(m) == name}
            cells.append(f"{len(names)} / {len(names)} / {len(names & tested.get(arch, set()))}" if names else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    missing = sorted({m for arch in arches for m in counts[arch] if family(m) is None})
    lines += ["", f"Used / modelled / tested, by mnemonic as written. Not modelled: {', '.join(missing) or 'none'}."]
    known = {arch: sorted(m for m in counts[arch] if family(m) is not None) for arch in arches}
    elsewhere = set().union(*tested.values()) if tested else set()
    untested = sorted({m for arch in arches for m in known[arch] if m not in elsewhere})
    if tested:
        words = f"Tested on no arch: {', '.join(untested) or 'none'}."
        lines += ["", *textwrap.wrap(words, COLUMNS, break_long_words=False)]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2 or not Path(arguments[0]).is_dir():
        print("usage: python -m portattn.backends.rocm.emulator.amdgpu.coverage FOLDER [TESTED.txt]", file=sys.stderr)
        return 2
    files = sorted(path for path in Path(arguments[0]).rglob("*") if path.suffix in (".s", ".amdgcn"))
    tested = set(Path(arguments[1]).read_text().split()) if len(arguments) > 1 else set()
    counts = count_mnemonics(path.read_text() for path in files)
    print(table(counts, dict.fromkeys(counts, tested) if tested else {}))
    return int(any(family(m) is None for names in counts.values() for m in names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
