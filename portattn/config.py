"""The settings: ten environment variables, and the same names in a `settings(...)` block."""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal, get_args

import msgspec

from portattn.errors import SettingError, warn_caller

Fallback = Literal["warn", "error", "silent"]
Isolate = Literal["auto", "always", "never"]
Canary = Literal["auto", "always", "never"]
Monitor = Literal["auto", "always", "never"]
Graphs = Literal["auto", "never"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one call.

    Attributes:
        backend: `auto`, or a path that every call must take (see `portattn.attention`)
        fallback: reaction to a planned or recorded fall-back: `warn` once, raise an `error`, or stay `silent`
        quirks: overrides, "+id,-id": + applies a quirk whose conditions do not hold, - switches one off
        isolate: whether a first compile runs in a child process: `auto` does so for kernels without a compile record
        canary: whether a kernel family must first have given right numbers here: `auto` asks for that on chips and
            toolchains without a run of the tests
        cache_dir: folder of records and incidents; empty for the platform's cache directory. `~` is the home folder; a
            relative path is read against the working folder as a block is entered, or as the first call reads the
            environment
        validate: `auto` reads lengths back to check them only where that needs no device synchronisation (CPU); the
            transformers adapter still reads a mask of several queries back, once a forward, and generation 2's
            flash_attn_with_kvcache the longest of `cache_seqlens` beside a `block_table`, as flash_attn does
        monitor: whether a call that compiles a kernel warns: `auto` once `warmup` or `monitor` was called
        graphs: whether repeated launches of several kernels are a CUDA graph: `never` launches each kernel by itself,
            as in calls that were launched 16 times or less
        compile_seconds: time limit of one compile in a child process
        deterministic: whether portattn's kernels repeat the bits of an eager call's gradients; they do so in every call
            under torch.use_deterministic_algorithms(True), which alone decides about gradients that torch computes
        invariant: whether each row's keys are summed in one order, whatever else the call holds: the same bits alone
            and in any batch, from prefill, chunks and decoding; gradients repeat, and do not depend on the batch
    """

    backend: str = "auto"
    fallback: Fallback = "warn"
    quirks: str = ""
    isolate: Isolate = "auto"
    canary: Canary = "auto"
    cache_dir: str = ""
    validate: Literal["auto", "always", "never"] = "auto"
    monitor: Monitor = "auto"
    graphs: Graphs = "auto"
    compile_seconds: float = 120.0
    deterministic: bool = False
    invariant: bool = False


_DEFAULTS = Settings()
ENVIRONMENT: Mapping[str, str] = {
    "PORTATTN_BACKEND": "backend",
    "PORTATTN_FALLBACK": "fallback",
    "PORTATTN_QUIRKS": "quirks",
    "PORTATTN_ISOLATE": "isolate",
    "PORTATTN_CANARY": "canary",
    "PORTATTN_CACHE_DIR": "cache_dir",
    "PORTATTN_VALIDATE": "validate",
    "PORTATTN_MONITOR": "monitor",
    "PORTATTN_GRAPHS": "graphs",
    "PORTATTN_INVARIANT": "invariant",
}
_SWITCHES = ("deterministic", "invariant")
_SWITCH = {"1": True, "true": True, "0": False, "false": False}  # their values in the environment
_VOCABULARY = {
    "fallback": get_args(Fallback),
    "isolate": get_args(Isolate),
    "canary": get_args(Canary),
    "validate": ("auto", "always", "never"),
    "monitor": get_args(Monitor),
    "graphs": get_args(Graphs),
}


def _check(name: str, value: Any, origin: str) -> None:
    allowed = _VOCABULARY.get(name)
    if allowed and value not in allowed:
        raise SettingError(f"{origin} is {value!r}, but must be one of {', '.join(allowed)}")
    seconds = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    if name == "compile_seconds" and not seconds:
        raise SettingError(f"{origin} is {value!r}, but must be a positive number of seconds")
    if name in _SWITCHES and not isinstance(value, bool):
        raise SettingError(f"{origin} is {value!r}, but must be True or False")
    if name not in (*_VOCABULARY, *_SWITCHES, "compile_seconds") and not isinstance(value, str):
        raise SettingError(f"{origin} is {value!r}, but must be a string")
    if name == "cache_dir" and any(character < " " or character == "\x7f" for character in value):
        raise SettingError(f"{origin} is {value!r}, but must be a folder's path without control characters")


def _absolute(path: str, origin: str) -> str:
    """Return a cache folder's absolute path; empty stays empty. No shell expands `~` in a Dockerfile or a unit file."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise SettingError(f"{origin} is {path!r}, but must be a folder's path: that home folder is not known")
    try:
        return os.path.abspath(expanded) if expanded else ""
    except FileNotFoundError:
        limit = "must be an absolute path: the working folder, which it is relative to, does not exist any more"
        raise SettingError(f"{origin} is {path!r}, but {limit}") from None


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Return the settings of the environment; raise SettingError on a bad value."""
    values: dict[str, Any] = {}
    for variable, name in ENVIRONMENT.items():
        value: Any = environ.get(variable, "")
        if value:
            value = _SWITCH.get(value.lower(), value) if name in _SWITCHES else value
            _check(name, value, f"environment variable {variable}")
            values[name] = _absolute(value, f"environment variable {variable}") if name == "cache_dir" else value
    return Settings(**values)


_PREFIX = "PORTATTN_"
# PORTATTN_SERVICE_HOST, PORTATTN_PORT_8000_TCP_ADDR and so on, also of services named portattn-SOMETHING.
_KUBERNETES = re.compile(r"PORTATTN(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the PORTATTN_* variables that set nothing, sorted, each with the nearest known name if one is near."""
    found = []
    for variable in sorted(environ):
        if not variable.startswith(_PREFIX) or variable in ENVIRONMENT:
            continue
        nearest = None if _KUBERNETES.fullmatch(variable) else _nearest(variable)
        found.append(f"{variable} (did you mean {nearest}?)" if nearest else variable)
    return found


def _nearest(variable: str) -> str | None:
    # Without the prefix, which all of them share.
    known = [name.removeprefix(_PREFIX) for name in ENVIRONMENT]
    near = difflib.get_close_matches(variable.removeprefix(_PREFIX), known, n=1)
    return _PREFIX + near[0] if near else None


IGNORED = "environment variables that set nothing in portattn"
_warned: set[tuple[str, ...]] = set()


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Warn once of each set of unknown variables. No error: Kubernetes sets such names for a service named portattn."""
    unknown = tuple(unknown_variables(environ))
    if unknown and unknown not in _warned:
        _warned.add(unknown)
        warn_caller(f"{IGNORED}: {', '.join(unknown)}; known: {', '.join(ENVIRONMENT)}")


BLOCK: ContextVar[Settings | None] = ContextVar("portattn_settings", default=None)


@functools.lru_cache(maxsize=1)
def environment_settings() -> Settings:
    """Return the environment's settings, read once, at the first call."""
    _warn_of_unknown(os.environ)
    return from_environment(os.environ)


def available_cores() -> int:
    """Return the cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2


def current() -> Settings:
    """Return the settings of the innermost `settings(...)` block, or else the environment's."""
    return BLOCK.get() or environment_settings()


@contextlib.contextmanager
def using(chosen: Settings) -> Iterator[None]:
    """Use a call's settings inside the block, for example in another thread that works for it."""
    token = BLOCK.set(chosen)
    try:
        yield
    finally:
        BLOCK.reset(token)


@contextlib.contextmanager
def settings(**changes: Any) -> Iterator[Settings]:
    """Change settings inside a block, in this thread or task only.

    Args:
        **changes: settings by name, as the fields of Settings: backend, fallback, quirks, isolate, canary, cache_dir,
            validate, monitor, graphs, compile_seconds, deterministic, invariant. None stands for the setting's default,
            "auto" of `backend`

    Blocks nest: a block keeps the settings that it does not name.

    Returns:
        A context manager, which yields the Settings inside the block.

    Raises:
        SettingError: A name or a value is unknown, as the block is entered.

    Examples:
        >>> import torch, portattn
        >>> q = torch.randn(1, 2, 5, 16)
        >>> with portattn.settings(backend="reference", fallback="error") as now:
        ...     out = portattn.attention(q, q, q)
        >>> portattn.last_plan().requested, now.fallback
        ('reference', 'error')
    """
    known = Settings.__struct_fields__
    for name, value in changes.items():
        if name not in known:
            raise SettingError(f"unknown setting {name!r}; known: {', '.join(known)}")
        if value is None:
            changes[name] = value = getattr(_DEFAULTS, name)
        _check(name, value, f"setting {name}")
    if "cache_dir" in changes:
        changes["cache_dir"] = _absolute(changes["cache_dir"], "setting cache_dir")
    chosen = msgspec.structs.replace(current(), **changes)
    token = BLOCK.set(chosen)
    try:
        yield chosen
    finally:
        BLOCK.reset(token)
