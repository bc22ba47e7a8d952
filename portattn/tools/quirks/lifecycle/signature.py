"""Making a signature: the regular expression that another run's text of the same failure matches, and few others do."""

from __future__ import annotations

import re

LONGEST = 180  # characters of a cause that go into a signature: its end is often a whole type or a list of users

# What differs between two runs of one failure, and what stands for it. In order: the first that matches is taken.
_VARIABLE: tuple[tuple[str, str], ...] = (
    (r"<<UNKNOWN SSA VALUE>>", r"<<UNKNOWN SSA VALUE>>"),
    (r"%[\w#]+", r"%[\w#]+"),  # SSA names
    (r"0x[0-9a-fA-F]+", r"0x[0-9a-fA-F]+"),
    (r"/tmp/[^\s:'\"`]+", r"\S+"),
    (r"(?<![\w.])(?:[A-Za-z]:)?(?:/[\w.+@~-]+)+/(?=[\w.+-]+)", r"\S*"),  # folders: the file's name is kept
    (r"(?<![\w.])\d+(?:x\d+)*(?=x[a-z!?])", r"[\dx]+"),  # shapes, as in tensor<1x16xi32>; not the 32 of i32
    (r"(?<![\w.])\d+(?![\w])", r"\d+"),
)
_ANY = re.compile("|".join(f"(?P<v{index}>{found})" for index, (found, _) in enumerate(_VARIABLE)))
_PLAIN = "-#&~"  # escaped by re.escape for the verbose mode, or inside brackets, alone


def generalise(cause: str) -> str:
    """A regular expression for a line: SSA names, addresses, folders, sizes and shapes may differ.

    It always matches the line that it was made of.
    """
    text = cause.strip()
    if len(text) > LONGEST:
        text = text[:LONGEST].rpartition(" ")[0] or text[:LONGEST]
    parts, at = [], 0
    for match in _ANY.finditer(text):
        parts.append(_escape(text[at : match.start()]))
        parts.append(
            next(_VARIABLE[int(name[1:])][1] for name, value in match.groupdict().items() if value is not None)
        )
        at = match.end()
    parts.append(_escape(text[at:]))
    return "".join(parts)


def _escape(text: str) -> str:
    """re.escape without the backslashes that only make a quirk file hard to read; any run of blanks matches another."""
    parts = re.split(r"(\s+)", text)
    return "".join(" " if part == " " else r"\s+" if part.isspace() else _word(part) for part in parts)


def _word(text: str) -> str:
    return "".join(char if char in _PLAIN else re.escape(char) for char in text)
