"""The protocol of a backend, whose package registers an instance under the entry-point group `portattn.backends`, and
checks that reject paths of vendors' libraries."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from portattn.errors import PortattnError, warn_caller
from portattn.schema.ops import COMMON

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from portattn.schema.call import Call
    from portattn.schema.lowering import StepLauncher
    from portattn.schema.plan import Rejection
    from portattn.schema.problem import Problem
    from portattn.schema.target import Arch, Target
    from portattn.schema.toolchain import Toolchain


Check = tuple[bool, str, str]  # (holds, reason with value and limit, hint)

# Demands of a call beyond shapes, lengths and a causal mask, by the names of the public operations.
_FEATURES = ("window", *COMMON)


class PathRejection(Exception):
    """A path cannot be taken, for the rejection's reason. Never leaves the planner."""

    def __init__(self, rejection: Rejection) -> None:
        self.rejection = rejection
        super().__init__(rejection.reason)


def first_refusal(path: str, *checks: Check) -> Rejection | None:
    """Return the first check that holds as the rejection of `path`, or None."""
    from portattn.schema.plan import Rejection  # the planner's registry imports the backends

    for holds, reason, hint in checks:
        if holds:
            return Rejection(path=path, reason=reason, hint=hint)
    return None


def undeclared_demand(path: str, problem: Problem, ops: Collection[str], takes: Collection[str]) -> Rejection | None:
    """Return the rejection of a path that does not declare the op or a demand (Problem.demands), or None."""
    from portattn.schema.plan import Rejection

    if problem.op not in ops:
        return Rejection(path=path, reason=f"is declared for {', '.join(ops) or 'no op'}, and this is {problem.op}")
    lacking = [name for name in problem.demands() if name not in takes]
    if not lacking:
        return None
    hint = "" if path == "reference" else "backend='reference'"  # no path is left where it is the one
    reason = f"does not declare that it takes {', '.join(lacking)}"
    if "invariant" in lacking:
        reason += ": it cannot keep the order of keys (invariant=True)"
    return Rejection(path=path, reason=reason, hint=hint)


def op_check(path: str, p: Problem, takes: Collection[str], why: str, hint: str = "backend='reference'") -> Check:
    """Return a check that holds for an op that `path` does not take."""
    return p.op not in takes, f"op is {p.op}, and {path} {why}", hint


def features_check(path: str, p: Problem, how: str = "has none", takes: Collection[str] = ()) -> Check:
    """Return a check that holds if a feature is asked for that `path` does not take; `how` is for the reason."""
    words = {"window": f"window ({p.window_left}, {p.window_right})"}
    asked = [words.get(name, name) for name in _FEATURES if getattr(p, name) and name not in takes]
    return bool(asked), f"{', '.join(asked)} asked for, and {path} {how}", "backend='reference'"


def dropout_check(path: str, p: Problem) -> Check:
    """Return a check that holds for dropout: dropped probabilities must follow from the seed, alike on every path."""
    reason = f"dropout_p > 0, and {path} drops by random numbers of its own, not by dropout_seed"
    return p.dropout, reason, "dropout_p=0.0, or backend='reference'"


def splits_check(path: str, p: Problem) -> Check:
    """Return a check that holds if the caller sets the number of splits, which a library does not promise."""
    reason = f"num_splits is {p.num_splits}, and {path} splits keys as it sees fit"
    return p.num_splits > 0, reason, "num_splits=None, or backend='reference'"


ENTRY_POINT_GROUP = "portattn.backends"
INTERFACES = (1, 2)  # of this module, that packages may be written for; 2 has compilers and compile adapters


_warned_of: set[str] = set()  # devices without an arch of their own


class VendorPath:
    """A vendor library's attention, as one candidate path of a plan.

    Attributes:
        name: path name in plans, warnings and `backend=`
        ops: the ops that it runs
        takes: demands that it meets beyond plain attention: names of Problem.demands. A problem with any other demand
            is rejected before `rejects` is asked, so that a later feature is never silently ignored
    """

    name: str
    ops: tuple[str, ...] = ()
    takes: frozenset[str] = frozenset()

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        """Return why this library cannot run the problem, or None. Pure: the machine may be absent."""
        raise NotImplementedError

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return out (B,Hq,Sq,Dv) in q's dtype, and LSE (B,Hq,Sq) in float32 or None."""
        raise NotImplementedError

    def repeated(self, call: Call) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | None:
        """Return a function that runs further calls of this call key and these sizes on a CPU, or None.

        It takes tensors in the caller's layout and the operation's order, returns results in that layout, and decides
        nothing anew."""
        return None


class Variant:
    """Another kernel for some ops, explicitly scheduled for one chip: a candidate that comes before the core.

    Attributes:
        name: path name in plans, warnings and `backend=`
        ops: its ops
        takes: demands that it meets beyond plain attention, as for a VendorPath
        arches: its chips; plans for others do not mention it
        needs: its requirements, in a few words, for people
        legend: meanings of the names in its schedules, in a few words each, for people
        canaries: problems of its own that its canary runs; empty: its ops' canaries that it takes
            (portattn.testing.canary)
        formats: query formats that it takes (Problem.q_format); plans for others do not mention it. Empty: any
        probabilities: format to which it rounds probabilities before the product, one of Problem.kv_format's; as_q: of
            16 bits at least. Results are judged by it
    """

    name: str
    ops: tuple[str, ...]
    arches: tuple[str, ...]
    takes: frozenset[str] = frozenset()
    needs: str = ""
    legend: Mapping[str, str] = MappingProxyType({})
    canaries: tuple[Problem, ...] = ()
    formats: tuple[str, ...] = ()
    probabilities: str = "as_q"

    def for_toolchain(self, toolchain: Toolchain) -> Variant:
        """Return this variant with its schedules for a compiler; itself if all compilers share them. Pure."""
        return self

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        """Return why it cannot run the problem, or None. Pure. The core kernel then runs: that is no fall-back."""
        raise NotImplementedError

    def describe(self, problem: Problem) -> dict[str, Any]:
        """Return the schedule of a problem that it takes, as names and values for plans. Pure."""
        return {}

    def sizes(self, problem: Problem) -> dict[str, Any]:
        """Return numbers that follow from the problem's sizes, for plans; the compiled code has none. Pure."""
        return {}

    def owns_invariant_rows(self, problem: Problem, target: Target) -> bool:
        """Return whether no other path may run a problem under invariant=True, as its bits are others. Pure."""
        return False

    def defers_to_core(self, problem: Problem) -> str:
        """Return why the core is better for a problem that it takes, unless the caller names it; else empty. Pure."""
        return ""

    def timed_with(self, problem: Problem) -> str:
        """Return the compiler, NAME==VERSION, that the schedule was timed with, spills included; else empty."""
        return ""

    def launcher(self, call: Call) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that runs calls like this one, on tensors by the Call's names, `out` and `lse` included."""
        raise NotImplementedError

    def described(self, call: Call) -> StepLauncher:
        """Return the launches of calls like this one as Steps, from which they are compiled beforehand.

        The call's tensors have no data. If `launcher` gives no StepLauncher (it makes tensors anew, say), this
        describes the same kernels."""
        return cast("StepLauncher", self.launcher(call))

    def views(self, problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors that a launcher takes, from a Request's, with `out` and `lse` in the caller's layout."""
        raise NotImplementedError


class Backend:
    """One family of accelerators.

    Attributes:
        name: the backend's name in targets and quirks
        device_type: torch's device type of its tensors
        folder: folder of its arches/ (or arches.toml) and tuning/
        vendor: the vendor library's paths, in order of preference
        variants: kernels of portattn's own that are for some of its chips only, in order of preference
        title: its name for people; `name` when empty
        default_toolchain: toolchain of plans if none is named and this machine's Triton is not asked; empty: this
            machine's
        compiler_folders: folders of its compiler, as paths in a compiler's log have them
        compiler_words: log formats whose failures are its compilers' alone (tools/quirks/patterns.toml)
        compiler_says: words that only its compilers print, whatever the failure
        device_words: words in drivers' names of its devices that do not tell the chip (maker, memory, form), in lower
            case, as glob patterns: of `NVIDIA H100 80GB HBM3` all but the second
        options: options of its compiler that a launch may have: name -> bool, int or str
        compilers: compilers that have this chip's backend, the usual one first; empty when any may. Distributions other
            than portattn's own are described in the folder's compilers.toml (portattn/schema/compilers.py)
        adapter: function that compiles for its chips, in the child: `package.module:function`, or `FILE.py:function` of
            a file in the folder, found under every compiler's Python (portattn/worker/compilers.py); empty if Triton's
            own GPU targets serve
        interface: entry of INTERFACES that the class is written for
        core_path: name of the path that runs the core kernels; empty if it is not offered by itself
    """

    name: str
    device_type: str
    folder: Path
    vendor: tuple[VendorPath, ...] = ()
    variants: tuple[Variant, ...] = ()
    title: str = ""
    default_toolchain: str = ""
    compiler_folders: tuple[str, ...] = ()
    compiler_words: tuple[str, ...] = ()
    compiler_says: tuple[str, ...] = ()
    device_words: tuple[str, ...] = ()
    options: Mapping[str, type] = MappingProxyType({})
    compilers: tuple[str, ...] = ()
    adapter: str = ""
    interface: int = 1
    core_path: str = "triton"

    @property
    def compiler(self) -> str:
        """Return the default compiler for its chips: the first of `compilers`, or community Triton."""
        return self.compilers[0] if self.compilers else "triton"

    def compile_adapter(self) -> str:
        """Return `adapter` with a file's whole path, for a child; raise PortattnError if it is malformed."""
        place, colon, function = self.adapter.rpartition(":")
        if not self.adapter:
            return ""
        file = self.folder / place if place.endswith(".py") else None
        if not (colon and function.isidentifier() and place) or (file is not None and not file.is_file()):
            limit = "must be `package.module:function`, or `FILE.py:function` of a file in the backend's folder"
            raise PortattnError(f"{type(self).__name__}.adapter is {self.adapter!r}, but {limit}")
        return f"{file.resolve()}:{function}" if file is not None else self.adapter

    def detect(self, index: int | None = None) -> str | None:
        """Return the arch name of device `index` (None: the current one), or None without a device. Never raises."""
        raise NotImplementedError

    def arch_of(self, device: str) -> str | None:
        """Return the arch whose `devices` name a device, else the arch whose `relatives` match it, or None.

        Warns once of a device that has no arch of its own."""
        from portattn.planning.data_files import load_arches

        arches = load_arches(self.folder)
        own = next((name for name, arch in arches.items() if arch.is_device(device)), None)
        if own is not None:
            return own
        relative = next((name for name, arch in arches.items() if arch.is_relative(device)), None)
        if relative is not None and device not in _warned_of:
            _warned_of.add(device)
            warn_caller(f"{device} is no chip that portattn knows: it is planned as {relative}, a chip of its family")
        return relative

    def describe(self, index: int | None = None) -> str:
        """Return device `index` in words, or an empty string. Never raises."""
        return ""

    def trouble(self, index: int | None = None) -> str:
        """Return the error that keeps device `index`, or all, from being detected, or an empty string. Never raises."""
        return ""

    def components(self, arch: Arch, toolchain: Toolchain) -> dict[str, str]:
        """Return the known versions of compilers beside Triton for this arch under this toolchain (ptxas, …)."""
        return {}

    def machine_components(self) -> dict[str, str]:
        """Return versions of this machine's drivers and run-time libraries. Never raises."""
        return {}

    def triton_target(self, arch: Arch) -> tuple[str, str | int, int]:
        """Return (backend, arch, warp size) as Triton's GPUTarget takes them."""
        if arch.compiler_target is None:
            raise NotImplementedError(f"{self.name}:{arch.name} has no compiler_target: Triton has no name for it here")
        return arch.compiler_target

    def lacks_option(self, name: str, toolchain: Toolchain) -> str:
        """Return why a launch goes without one of `options` under a compiler's release; empty if it has it. Pure."""
        return ""

    def tunables(self, arch: str) -> Sequence[Any]:
        """Return the tunables of its variants that run on an arch, for `portattn tune` (tools/tune/tunable.py)."""
        return ()

    def executors(self, seconds: float, here: Sequence[Target] = ()) -> tuple[Any, ...]:
        """Return the executors of these chips' compiled code, each a portattn.testing.executor.Executor.

        Args:
            seconds: time limit of each compile, and of each run
            here: targets that are devices of this machine

        Only tools call it: import their requirements in here, so that a serving process does without.
        """
        return ()

    def quirk_folder(self) -> Path | None:
        """Return the folder of this backend's own quirk files, <id>.toml; None for a backend of portattn's."""
        return None
