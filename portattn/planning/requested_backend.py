"""What can be said of the settings before there is a call: for adapters, whose engines ask at their start."""

from __future__ import annotations

from portattn.config import current
from portattn.errors import ArgumentError, PortattnError
from portattn.planning.paths import known_names
from portattn.planning.registry import Registry
from portattn.schema.target import Target


def check_path(who: str, argument: str, path: str, target: Target | None = None) -> None:
    """Refuse a `backend=` that no call could take.

    who       the function that is told it
    argument  what it calls it
    target    the device's; None where it is not known yet: then a name of any device's counts

    Returns nothing. Raises ArgumentError with the names that are known.
    """
    backends = Registry.load().backends
    asked = list(backends.values()) if target is None else [backends[target.backend]]
    known = dict.fromkeys(name for backend in asked for name in known_names(backend))
    if path not in known:
        raise ArgumentError(who, argument, path, f"must be one of {', '.join(known)}")


def check_settings(who: str, target: Target | None = None) -> None:
    """Refuse settings that every call would refuse: the environment's are otherwise read at the first call.

    who, target  as in check_path

    Raises SettingError on an unknown variable, a bad value, or an override that names no quirk, and ArgumentError on an
    unknown path.
    """
    settings = current()
    Registry.load().overrides(settings.quirks)
    check_path(who, "PORTATTN_BACKEND", settings.backend, target)


def wrong_settings(who: str, target: Target | None = None) -> str:
    """Return the text of the error that check_settings raises, or an empty one."""
    try:
        check_settings(who, target)
    except PortattnError as error:
        return str(error)
    return ""
