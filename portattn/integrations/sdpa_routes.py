"""Which way a call of SDPA took, and what is said where torch's own kernels ran it: an error, or a warning."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass

from portattn.api.dynamo_disabled import called_while_traced
from portattn.config import current
from portattn.errors import FallbackWarning, PathUnavailable, warn_caller
from portattn.integrations.sdpa_mapping import RefusedCall
from portattn.schema.plan import Plan, Rejection

WHO = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class Route:
    """Which way a call takes, and why.

    path    "portattn", or "torch" for torch's own kernels
    reason  why it is torch's; empty for portattn
    plan    how portattn would run it: a Plan of `attention`; None for torch, of `last_route`, and inside of transforms
    """

    path: str
    reason: str = ""
    plan: Plan | None = None

    def explain(self) -> str:
        """The way in words, with portattn's plan where there is one."""
        if self.path == "torch":
            return f"{WHO}: torch's own, because {self.reason}"
        return f"{WHO}: portattn" + ("" if self.plan is None else f"\n{self.plan.explain()}")


class Serving(threading.local):
    """Whether this thread is inside a call that is being served: what that calls in turn is torch's own."""

    now = False


OURS = Route("portattn")
_last: ContextVar[Route | None] = ContextVar("portattn_sdpa_route", default=None)
_warned: set[tuple[str, str]] = set()


def note(route: Route | None) -> None:
    """Remember the way that a call took."""
    _last.set(route)


def last_route() -> Route | None:
    """The way that the last call in this thread or task took; None before any.

    portattn.last_plan() says how portattn ran it. What torch.compile or torch.export made of a call runs without
    noting a route.

    Returns a Route without its plan.

    Raises nothing.

    >>> import torch
    >>> from portattn.integrations import sdpa
    >>> q = torch.randn(1, 2, 5, 16)
    >>> out = sdpa.scaled_dot_product_attention(q, q, q)
    >>> sdpa.last_route().path
    'portattn'
    """
    return _last.get()


def check_allowed(op: str, refused: RefusedCall) -> None:
    """Raise PathUnavailable where the settings forbid that torch runs what portattn cannot take."""
    settings = current()
    if settings.fallback == "error" or settings.backend != "auto":
        cause = "fallback='error'" if settings.fallback == "error" else f"backend={settings.backend!r}"
        raise PathUnavailable(
            f"{op}: portattn cannot take this call, and {cause} forbids that torch runs it",
            [Rejection(path="portattn", reason=refused.reason)],
        )


def torch_ran(op: str, refused: RefusedCall) -> None:
    """Remember that torch ran a call, and warn of it once a cause."""
    note(Route("torch", refused.reason))
    key = (op, refused.kind)
    if current().fallback == "warn" and key not in _warned:
        _warned.add(key)
        warn_caller(f"{op} runs on torch's own kernels, not portattn: {refused.reason}", FallbackWarning)


@called_while_traced
def note_while_tracing() -> bool:
    """Remember that the graph that dynamo is making has portattn's operator. Dynamo calls it, as below."""
    note(OURS)
    return True


@called_while_traced
def tell_while_tracing(op: str, kind: str, reason: str, invalid: bool) -> bool:
    """Tell, as torch_ran does, that the graph that dynamo is making has torch's operator. Dynamo calls it, and keeps
    what it returns: whether the settings of that moment allow it."""
    refused = RefusedCall(kind, reason, invalid)
    if not refused.invalid:
        try:
            check_allowed(op, refused)
        except PathUnavailable:
            return False
    torch_ran(op, refused)
    return True


def forget_warnings() -> None:
    """Warn of every cause once more."""
    _warned.clear()
