"""Settings that are wrong before there is a call: what adapters ask at an engine's start."""

from __future__ import annotations

import pytest

from portattn import config
from portattn.errors import ArgumentError, PortattnError
from portattn.planning.registry import parse_target
from portattn.planning.requested_backend import check_path, check_settings, wrong_settings

WRONG = {
    "PORTATTN_BACKEND": ("tritton", "a: PORTATTN_BACKEND is 'tritton', but must be one of auto, vendor, reference"),
    "PORTATTN_FALLBACK": ("maybe", "environment variable PORTATTN_FALLBACK is 'maybe', but must be one of warn"),
    "PORTATTN_VALIDATE": ("yes", "environment variable PORTATTN_VALIDATE is 'yes', but must be one of auto"),
    "PORTATTN_QUIRKS": ("-no-such-quirk", "no-such-quirk"),
}


@pytest.mark.parametrize("variable", WRONG)
def test_of_the_environment(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_settings("a") == ""
    value, text = WRONG[variable]
    monkeypatch.setenv(variable, value)
    config.environment_settings.cache_clear()
    assert text in wrong_settings("a")
    with pytest.raises(PortattnError):
        check_settings("a", parse_target("cuda:sm_90"))


def test_an_unknown_variable_is_no_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_warned", set())
    monkeypatch.setenv("PORTATTN_SERVICE_HOST", "10.0.0.1")
    config.environment_settings.cache_clear()
    with pytest.warns(UserWarning, match="PORTATTN_SERVICE_HOST"):
        assert wrong_settings("a") == ""
    check_settings("a", parse_target("cuda:sm_90"))


@pytest.mark.parametrize("path", ["auto", "vendor", "reference", "triton", "interpreter", "sdpa", "gluon_forward"])
def test_names_of_some_device(path: str) -> None:
    check_path("register", "backend", path)


def test_names_of_the_device_that_is_known() -> None:
    check_path("register", "backend", "gluon_forward", parse_target("cuda:sm_90"))
    with pytest.raises(ArgumentError, match=r"^register: backend is 'gluon_forward', but must be one of auto, vendor"):
        check_path("register", "backend", "gluon_forward", parse_target("rocm:gfx942"))
