"""What launchers, loggers and collectors put before a line, as data. normalise.py takes it away.

A pattern matches at the begin of a line and takes the one blank that ends the prefix: what is left has the indentation
that the program gave it. Its group `stream` says whose line it is: a rank, a process.
"""

from __future__ import annotations

import re
from functools import cached_property

import msgspec


class Prefix(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One form of a prefix.

    on_every_line  the form is so plain that it counts only where nearly all lines of a log have it
    """

    name: str
    pattern: str
    source: str
    on_every_line: bool = False

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern)


_DAY = r"\d{4}-\d\d-\d\d"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_SHARD = r"(?:TP|DP|PP|EP)\d+"
_LEVEL = r"(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)"

# The longer forms first. They are taken away one after the other, as long as one matches.
PREFIXES: tuple[Prefix, ...] = (
    Prefix(
        name="journal, ISO time",
        pattern=rf"{_DAY}T{_CLOCK}(?:Z|[+-]\d\d:?\d\d) \S+ [\w.@/-]+\[(?P<stream>\d+)\]: ?",
        source="journalctl -o short-iso",
    ),
    Prefix(
        name="RFC 3339 time",
        pattern=rf"{_DAY}T{_CLOCK}(?:Z|[+-]\d\d:?\d\d)(?: std(?:out|err) (?P<part>[FP]))?(?: |$)",
        source="docker logs -t, kubectl logs --timestamps, Kubernetes' log files, GitHub Actions",
    ),
    Prefix(
        name="journal",
        pattern=rf"[A-Z][a-z]{{2}} [ \d]\d {_CLOCK} \S+ [\w.@/-]+\[(?P<stream>\d+)\]: ?",
        source="journalctl, syslog",
    ),
    Prefix(
        name="process",
        pattern=r"\([A-Za-z_][^\n]{0,120}?\bpid=(?P<stream>\d+)(?:, ip=[\d.:a-f]+)?\)(?: |$)",
        source="Ray (ray-project/ray#52377), vLLM (vllm-project/vllm-ascend#8037)",
    ),
    Prefix(
        name="rank",
        pattern=r"\[(?:rank|default|local_rank|Rank )(?P<stream>\d+)\]:(?: |(?=\S)|$)",
        source="torchrun, torch's own exceptions (huggingface/nanoVLM#61, mlcommons/training#826)",
    ),
    Prefix(name="MPI", pattern=r"\[\d+,(?P<stream>\d+)\]<std(?:out|err)>:", source="mpirun --tag-output"),
    Prefix(name="pod", pattern=r"\[pod/[\w.-]+/(?P<stream>[\w.-]+)\] ?", source="kubectl logs --prefix"),
    Prefix(name="step", pattern=r"\d{4}-steps/(?P<stream>\d+)(?: |$)", source="mlcommons/training#826"),
    Prefix(
        name="vLLM's logger",
        pattern=rf"{_LEVEL} +\d\d-\d\d {_CLOCK} \[?[\w./]+:\d+\](?: |$)",
        source="vllm-project/vllm#12498, vllm-project/vllm-ascend#8037",
    ),
    Prefix(
        name="glog",
        pattern=r"[EWIF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ [^\]\n]{1,200}\](?: \[\d+/\d+(?:_\d+)?\])?(?: |$)",
        source="torch's compiler: huggingface/nanoVLM#61, karpathy/nanochat#502",
    ),
    Prefix(
        name="Ray's logger",
        pattern=rf"\[{_DAY} {_CLOCK} [EWIF] \d+ \d+\] [\w.]+:\d+: ?",
        source="LiveCodeBench/LiveCodeBench#14",
    ),
    Prefix(
        name="time in brackets",
        pattern=rf"\[{_DAY} {_CLOCK}(?: (?P<stream>{_SHARD}(?: {_SHARD})*))?\](?: {_LEVEL}:?)?(?: |$)",
        source="SGLang's logger",
    ),
    Prefix(
        name="clock in brackets",
        pattern=rf"\[{_CLOCK}\](?: \w+/{_LEVEL}(?: |$))?(?: |$)",
        source="FlashML-org/FreeToken#246",
    ),
    Prefix(
        name="Python's logging",
        pattern=rf"{_DAY} {_CLOCK} - (?:[\w.]+ - )?{_LEVEL} -(?: [\w.]+:\d+ -)?(?: |$)",
        source="logging.basicConfig, InternLM/lmdeploy#3410",
    ),
    Prefix(name="pytest", pattern=r"E(?: {3}|$)", source="pytest; flagos-ai/FlagTree#304"),
    Prefix(
        name="Slurm",
        pattern=r" *(?P<stream>\d{1,5}):(?: |$)",
        source="srun --label",
        on_every_line=True,
    ),
    Prefix(
        name="compose",
        pattern=r"(?P<stream>[\w.-]+?-\d+) +\|(?: |$)",
        source="docker compose logs",
        on_every_line=True,
    ),
    Prefix(name="quotation", pattern=r">(?: |$)", source="a report that was answered by mail", on_every_line=True),
)
# What is put behind a line: by Ray for lines that it leaves out (ray-project/ray#53825), by vLLM behind an exception
# that it quotes (vllm-project/vllm#17581).
SUFFIX = re.compile(r" \[repeated \d+x across cluster\]$|', please check the stack trace above for the root cause$")
