"""Cost of a call over several ranks as data and as text, and the machine's rates behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's rates per second. The defaults are an H200's; link rates are their makers' figures.

    Attributes:
        forward: operations of attention, forward: docs/performance/results.json has 633 to 661 TFLOP/s at D = 128 and
            64k to 128k tokens
        backward: the same, backward: docs/performance/training.md has 583 and 598 TFLOP/s at D = 128 and 16k
        memory: bytes read by decoding: docs/performance/results.json has 4.2 to 4.5 TB/s of long caches
        link: bytes that a GPU sends to another of its host while it receives as many: two H100s over NVLink 4 have 300
            GB/s (docs/performance/context-parallel.md); the maker's figure is 450
        network: bytes that a GPU sends to other hosts: one adapter of 400 Gb/s, not measured here
        latency: seconds until a message begins to arrive: assumed
        per_host: GPUs of one host; ranks are numbered host by host

    Examples:
        >>> from portattn.distributed import Rates
        >>> Rates(link=300e9).link
        300000000000.0
    """

    forward: float = 640e12
    backward: float = 590e12
    memory: float = 4.3e12
    link: float = 300e9
    network: float = 50e9
    latency: float = 10e-6
    per_host: int = 8

    def bandwidth(self, rank: int, other: int) -> float:
        return self.link if rank // self.per_host == other // self.per_host else self.network


class LocalCall(msgspec.Struct, frozen=True, kw_only=True):
    """A local call of one rank, and how often: query rows over keys, with the operation's window."""

    rows: int
    keys: int
    heads_q: int
    heads_k: int
    window: tuple[int | None, int | None]
    count: int


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One pass of the busiest rank; `exposed` counts its seconds without computation."""

    flop: float  # the rank's operations
    flop_mean: float  # mean of all ranks
    sent: int  # bytes to other ranks
    messages: int  # a collective counts as one
    compute: float  # seconds by itself
    communication: float  # seconds by itself
    seconds: float  # with computation and communication overlapped
    one: float  # seconds of the whole call on one GPU

    @property
    def exposed(self) -> float:
        return max(0.0, self.seconds - self.compute)

    @property
    def hidden(self) -> bool:
        """Whether all but a hundredth of the pass is computation."""
        return self.exposed <= 0.01 * self.seconds

    @property
    def speedup(self) -> float:
        return self.one / self.seconds if self.seconds else float("nan")


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `context_parallel_cost` and `decode_parallel_cost`.

    Attributes:
        method: "ring", "ulysses", "ring of ulysses" or "decode"
        ranks: number of ranks; `inner`: of each Ulysses group
        calls: local calls of the busiest rank's forward
        causal, window: the mask of the whole call
        memory: bytes of a rank's forward beyond its q, k, v and out: blocks in flight, messages, float32 partial
            results. A backward takes more: see docs/context-parallel.md
        forward, backward: a Phase each; backward is None without gradients

    Examples:
        >>> from portattn.distributed import context_parallel_cost
        >>> found = context_parallel_cost((1, 8, 4096, 64), (1, 2, 4096, 64), ranks=4, causal=True, backward=False)
        >>> found.method, found.forward.messages, found.backward
        ('ring', 3, None)
    """

    method: str
    layout: str
    ranks: int
    inner: int
    q: tuple[int, ...]
    kv: tuple[int, ...]
    dtype: str
    rates: Rates
    calls: tuple[LocalCall, ...]
    memory: int
    forward: Phase
    backward: Phase | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)

    def data(self) -> dict[str, Any]:
        """Return all fields and derived figures as plain numbers and texts: the command line's --json."""
        found = msgspec.to_builtins(self)
        for name, phase in (("forward", self.forward), ("backward", self.backward)):
            if phase is not None:
                found[name] |= {"exposed": phase.exposed, "hidden": phase.hidden, "speedup": phase.speedup}
        return found

    def explain(self) -> str:
        """Return the text of `portattn context-parallel`."""
        by = "" if self.inner in (1, self.ranks) else f", {self.ranks // self.inner} × {self.inner}"
        lines = [f"{self.method} over {self.ranks} ranks{by}, {self.layout}: q {_shape(self.q)} kv {_shape(self.kv)} "
                 f"{self.dtype}{self._mask()}"]  # fmt: skip
        for call in self.calls:
            seen = "" if call.window == (None, None) else f" window {call.window}"
            heads = f"{call.heads_q}/{call.heads_k} heads"
            lines.append(f"  a rank   {call.count} × ({heads}) {call.rows} rows × {call.keys} keys{seen}")
        lines.append(f"  memory   {_bytes(self.memory)} of a forward pass beyond a rank's own q, k, v and out")
        for name, phase in (("forward", self.forward), ("backward", self.backward)):
            if phase is not None:
                lines += _explained(name, phase)
        lines.append("  a model: " + ", ".join(
            f"{name} {value:.3g}" for name, value in msgspec.structs.asdict(self.rates).items()
        ))  # fmt: skip
        return "\n".join(lines)

    def _mask(self) -> str:
        if self.method == "decode":
            return ""
        window = [] if self.window == (None, None) else [f"window {self.window}"]
        return "".join(f", {word}" for word in [*(["causal"] if self.causal else []), *window] or ["no mask"])


def _explained(name: str, phase: Phase) -> list[str]:
    even = phase.flop / phase.flop_mean if phase.flop_mean else 1.0
    lines = [f"  {name:<8} {phase.flop:.3g} FLOP a rank ({even:.2f} × the mean), {_bytes(phase.sent)} sent in "
             f"{phase.messages} message{'' if phase.messages == 1 else 's'}"]  # fmt: skip
    said = "hidden" if phase.hidden else f"{_time(phase.exposed)} of it not hidden"
    if not phase.communication:
        said = "nothing to send"
    sending = f"{_time(phase.communication)} ({said})"
    lines.append(f"           {_time(phase.seconds)}: computing {_time(phase.compute)}, sending {sending}; "
                 f"{phase.speedup:.2f} × one GPU's {_time(phase.one)}")  # fmt: skip
    return lines


def _shape(sizes: Sequence[int]) -> str:
    return f"({','.join(map(str, sizes))})"


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _bytes(count: int) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    place = min(max(count.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{count / 1024**place:.4g} {units[place]}"
