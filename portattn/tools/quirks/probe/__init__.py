"""Probes of quirks: does the bug still exist, and does its work-around still help?

results.py   what an arm ended as, and the verdict on three of them
programs.py  an arm of a program under quirks/probes/
plans.py     an arm of a planned problem: our own kernels with the quirk switched off and on
running.py   the arms of one quirk on one toolchain; what can be run here
many.py      many of them, several at a time
ranges.py    the range that a verdict asks for, as a diff of the quirk's file
record.py    [[verified]] tables written into the quirk's file
"""

from portattn.tools.quirks.probe.results import RED, Arm, ProbeOutcome, ProbeResult, probe_outcome
from portattn.tools.quirks.probe.running import ProbeError, off, place, run

__all__ = ["RED", "Arm", "ProbeError", "ProbeOutcome", "ProbeResult", "off", "place", "probe_outcome", "run"]
