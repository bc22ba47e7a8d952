"""The protocol of a backend: small, so that another package can add a chip.

A package registers an instance under the entry-point group `portattn.backends`. What a backend must say:
which device is here, which arches it knows (arches/), how Triton names them, and what the vendor's own
library can run.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from portattn.errors import PortattnError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from portattn.schema.call import Call
    from portattn.schema.kernel_step import StepLauncher
    from portattn.schema.plan import Rejection
    from portattn.schema.problem import Problem
    from portattn.schema.target import Arch, Target
    from portattn.schema.toolchain import Toolchain

ENTRY_POINT_GROUP = "portattn.backends"
INTERFACES = (1, 2)  # of this module, that packages may be written for; 2 has compilers and compile adapters


class VendorPath:
    """A vendor library's attention, as one candidate path of a plan.

    name   path name in plans, warnings and `backend=`
    ops    the ops that it runs
    takes  what it can do beyond plain attention: names of Problem.demands. A problem that asks for anything else is
           rejected before `rejects` is asked, so that a feature which comes later is not run without
    """

    name: str
    ops: tuple[str, ...] = ()
    takes: frozenset[str] = frozenset()

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        """Why this library cannot run the problem; None when it can. Pure: asked about machines that are not here."""
        raise NotImplementedError

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the call: (out (B,Hq,Sq,Dv) in q's dtype, LSE (B,Hq,Sq) float32 or None)."""
        raise NotImplementedError

    def repeated(self, call: Call) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | None:
        """Return a function that runs other calls of the same call key and sizes on a CPU, or None. It takes tensors in
        the caller's layout and the operation's order, returns results in that layout, and decides nothing anew."""
        return None


class Variant:
    """Another kernel for some ops, explicitly scheduled for one chip: a candidate that comes before the core.

    name  path name in plans, warnings and `backend=`
    ops   its ops
    takes  demands that it meets beyond plain attention, as for a VendorPath
    arches  its chips; plans for others do not mention it
    needs  its requirements, in a few words, for people
    legend  meanings of the names in its schedules, in a few words each, for people
    canaries  problems of its own that its canary runs; empty: its ops' canaries that it takes (portattn.testing.canary)
    formats  query formats that it takes (Problem.q_format); plans for others do not mention it. Empty: any
    probabilities  format to which it rounds probabilities before the product, one of Problem.kv_format's; as_q: of 16
                   bits at least. Results are judged by it
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
        """This variant with the schedules that it has for a compiler. Itself where they are the same for all. Pure."""
        return self

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        """Why it cannot run the problem; None when it can. Pure. The core kernel then runs: that is no fall-back."""
        raise NotImplementedError

    def describe(self, problem: Problem) -> dict[str, Any]:
        """How a problem that it takes is scheduled: names and values that a plan shows. Pure."""
        return {}

    def sizes(self, problem: Problem) -> dict[str, Any]:
        """Return numbers that follow from the problem's sizes, for plans; the compiled code has none. Pure."""
        return {}

    def defers_to_core(self, problem: Problem) -> str:
        """Why a problem that it takes is better left to the core unless somebody asks for it; else empty. Pure."""
        return ""

    def timed_with(self, problem: Problem) -> str:
        """The compiler that the schedule was timed with on the chip, NAME==VERSION: spills that it may have are then in
        its time. Empty where nobody timed it."""
        return ""

    def launcher(self, call: Call) -> Callable[[Mapping[str, Any]], None]:
        """What runs this call and others like it: given tensors by the Call's names, and `out` and `lse` to fill."""
        raise NotImplementedError

    def described(self, call: Call) -> StepLauncher:
        """The launches of calls like this one as Steps, from which they are compiled beforehand.

        The call's tensors have no data. Where `launcher` gives no StepLauncher (it makes tensors anew, say), this
        describes the same kernels.
        """
        return cast("StepLauncher", self.launcher(call))

    def views(self, problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors that a launcher takes, from the caller's by the Request's names, with `out` and `lse` in
        the caller's layout."""
        raise NotImplementedError


class Backend:
    """One family of accelerators.

    name         the backend's name in targets and quirks
    device_type  torch's device type of its tensors
    folder       where its arches/ (or arches.toml) and tuning/ lie
    vendor       the vendor library's paths, in order of preference
    variants     kernels of portattn's own that are for some of its chips only, in order of preference
    title        what people call it; its name when empty
    default_toolchain  toolchain of plans if none is named and this machine's Triton is not asked; empty: this machine's
    compiler_folders  folders of its compiler, as paths in a compiler's log have them
    compiler_words  whose wording of failures is its compilers' alone (tools/quirks/lifecycle/formats/)
    compiler_says  words that only its compilers print, whatever the failure
    device_words  words in drivers' names of its devices that do not tell the chip (maker, memory, form), in lower case,
                 as glob patterns: of `NVIDIA H100 80GB HBM3` all but the second
    options      options of its compiler that a launch may have: name -> bool, int or str
    compilers    compilers that have this chip's backend, the usual one first; empty when any may. Distributions other
                 than portattn's own are described in the folder's compilers.toml (portattn/schema/compilers.py)
    adapter      function that compiles for its chips, in the child: `package.module:function`, or `FILE.py:function` of
                 a file in the folder, found under every compiler's Python (portattn/worker/adapters.py); empty if
                 Triton's own GPU targets serve
    interface    which of INTERFACES the class is written for
    core_path    name of the path that runs the core kernels; empty if it is not offered by itself
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
        """The compiler for its chips where nobody names one: the first of `compilers`, or community Triton."""
        return self.compilers[0] if self.compilers else "triton"

    def compile_adapter(self) -> str:
        """`adapter` as a child is told it, a file by its whole path. Raises PortattnError where it is malformed."""
        place, colon, function = self.adapter.rpartition(":")
        if not self.adapter:
            return ""
        file = self.folder / place if place.endswith(".py") else None
        if not (colon and function.isidentifier() and place) or (file is not None and not file.is_file()):
            limit = "must be `package.module:function`, or `FILE.py:function` of a file in the backend's folder"
            raise PortattnError(f"{type(self).__name__}.adapter is {self.adapter!r}, but {limit}")
        return f"{file.resolve()}:{function}" if file is not None else self.adapter

    def detect(self, index: int | None = None) -> str | None:
        """Arch name of device `index` (the current one when None); None where this machine has none. Never raises."""
        raise NotImplementedError

    def arch_of(self, device: str) -> str | None:
        """The arch whose `devices` name a device; None where none does. For `detect`."""
        from portattn.planning.data_files import load_arches

        return next((name for name, arch in load_arches(self.folder).items() if arch.is_device(device)), None)

    def describe(self, index: int | None = None) -> str:
        """What device `index` is, for people, whether or not its arch is known; empty where nothing is known of it.

        Asked when `detect` gives None. Never raises.
        """
        return ""

    def components(self, arch: Arch, toolchain: Toolchain) -> dict[str, str]:
        """Return the known versions of compilers beside Triton for this arch under this toolchain (ptxas, …)."""
        return {}

    def machine_components(self) -> dict[str, str]:
        """Versions of drivers and run-time libraries of this machine. Never raises."""
        return {}

    def triton_target(self, arch: Arch) -> tuple[str, str | int, int]:
        """(backend, arch, warp size) as Triton's GPUTarget takes them."""
        if arch.compiler_target is None:
            raise NotImplementedError(f"{self.name}:{arch.name} has no compiler_target: Triton has no name for it here")
        return arch.compiler_target

    def tunables(self, arch: str) -> Sequence[Any]:
        """Return the tunables of its variants that run on an arch, for `portattn tune` (tools/tune/tunable.py)."""
        return ()

    def executors(self, seconds: float, here: Sequence[Target] = ()) -> tuple[Any, ...]:
        """Return the executors of these chips' compiled code, each a portattn.testing.executor.Executor.

        seconds  time limit of each compile, and of each run
        here     targets that are devices of this machine

        Only tools call it: import their requirements in here, so that a serving process does without.
        """
        return ()

    def quirk_folder(self) -> Path | None:
        """Folder that holds this backend's quirk files, <id>.toml, itself; None for those that come with portattn."""
        return None
