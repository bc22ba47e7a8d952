"""A row of the table: one kind of failure, how it is worded, and where that wording was seen."""

from __future__ import annotations

import re
from functools import cached_property

import msgspec

from portattn.schema.quirk import Symptom

LINE = r"[^\n]{1,400}"
# What NVIDIA's assembler calls itself. Triton has two of them: 3.9.0 sends sm_90 and newer to `ptxas-blackwell`.
PTXAS = r"\b(?:ptxas-blackwell|ptxas)"
# The name that MLIR puts before a diagnostic: a place in a file, or a `loc(…)` of one.
PLACE = r"(?:loc\([^\n]{1,600}?\)|<unknown>:0:0|(?:[A-Za-z]:)?[^\s:\"'()]{1,300}:\d+:\d+): "


class Recogniser(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One kind of failure.

    name, family   for reports; the family says whose wording it is
    pattern        regular expression with the group `cause`: the words that say what went wrong and that a signature is
                   made of. `^` and `$` stand for lines
    symptom, stage as quirks and incidents name them; the stage is empty where the surrounding text has to tell
    signature      the regular expression to put into an entry, with <group> for a group of the pattern made general;
                   empty where it is made from `cause` alone
    not_a_bug      for what is no compiler's failure: what to do about it
    passes_on      the words follow from an earlier failure: asked only where nothing else is recognised
    source         where the wording was seen
    """

    name: str
    family: str
    pattern: str
    symptom: Symptom
    stage: str = ""
    signature: str = ""
    passes_on: bool = False
    not_a_bug: str = ""
    source: str

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.MULTILINE)
