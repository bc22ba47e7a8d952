"""Settings: from the environment, from blocks, and per thread."""

import contextvars
import threading
import warnings
from pathlib import Path

import pytest

import portattn
from portattn import config
from portattn.config import ENVIRONMENT, Settings, current, environment_settings, from_environment, unknown_variables


def test_defaults() -> None:
    assert from_environment({}) == Settings()
    assert Settings().backend == "auto"
    assert Settings().fallback == "warn"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PORTATTN_BACKEND", "reference"), ("PORTATTN_FALLBACK", "error"),
        ("PORTATTN_QUIRKS", "-cuda-0012-serialised-wgmma"), ("PORTATTN_ISOLATE", "never"),
        ("PORTATTN_CANARY", "always"), ("PORTATTN_CACHE_DIR", "/somewhere"), ("PORTATTN_VALIDATE", "always"),
        ("PORTATTN_INVARIANT", "1"),
    ],
)  # fmt: skip
def test_each_variable_sets_its_setting(variable: str, value: str) -> None:
    assert len(ENVIRONMENT) <= 10
    found = getattr(from_environment({variable: value}), ENVIRONMENT[variable])
    assert found == value or (found is True and value == "1")
    assert from_environment({variable: ""}) == Settings()


KUBERNETES = ("PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP")


@pytest.mark.parametrize(
    ("variable", "described"),
    [
        ("PORTATTN_BACKND", "PORTATTN_BACKND (did you mean PORTATTN_BACKEND?)"),
        ("PORTATTN_FALL_BACK", "PORTATTN_FALL_BACK (did you mean PORTATTN_FALLBACK?)"),
        ("PORTATTN_CACHEDIR", "PORTATTN_CACHEDIR (did you mean PORTATTN_CACHE_DIR?)"),
        ("PORTATTN_LOGLEVEL", "PORTATTN_LOGLEVEL"),
        ("PORTATTN_", "PORTATTN_"),
        *((f"PORTATTN_{name}", f"PORTATTN_{name}") for name in KUBERNETES),
        ("PORTATTN_BACKEND_SERVICE_HOST", "PORTATTN_BACKEND_SERVICE_HOST"),
        ("PORTATTN_CANARY_PORT", "PORTATTN_CANARY_PORT"),
    ],
)
def test_an_unknown_variable_sets_nothing_and_names_its_nearest(variable: str, described: str) -> None:
    environ = {variable: "tcp://10.0.0.1:8000", "OTHER": "1", "PORTATTN_FALLBACK": "error"}
    assert unknown_variables(environ) == [described]
    assert from_environment(environ) == Settings(fallback="error")


def test_unknown_variables_warn_once_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(config, "_warned", set())
    q = torch.zeros(1, 1, 2, 4)

    def warned_in_a_call() -> list[str]:
        environment_settings.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert portattn.attention(q, q, q).shape == q.shape
        assert all(one.filename == __file__ for one in caught)
        return [str(one.message) for one in caught]

    assert warned_in_a_call() == []
    for name in KUBERNETES:
        monkeypatch.setenv(f"PORTATTN_{name}", "10.0.0.1")
    (text,) = warned_in_a_call()
    assert all(f"PORTATTN_{name}" in text for name in KUBERNETES)
    assert "did you mean" not in text
    assert warned_in_a_call() == [], "once a process"
    monkeypatch.setenv("PORTATTN_BACKND", "reference")
    (text,) = warned_in_a_call()
    assert "PORTATTN_BACKND (did you mean PORTATTN_BACKEND?)" in text, "another set of variables"


@pytest.mark.parametrize(
    "variable",
    [
        "PORTATTN_FALLBACK", "PORTATTN_ISOLATE", "PORTATTN_CANARY", "PORTATTN_VALIDATE", "PORTATTN_MONITOR",
        "PORTATTN_GRAPHS",
    ],
)  # fmt: skip
def test_a_bad_value_is_an_error_that_lists_the_good(variable: str) -> None:
    with pytest.raises(portattn.SettingError, match=variable) as error:
        from_environment({"PORTATTN_AAA": "1", variable: "maybe", "PORTATTN_PORT": "1"})
    assert "'maybe'" in str(error.value)
    assert "must be one of" in str(error.value)


def test_a_bad_value_stops_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("PORTATTN_FALLBACK", "maybe")
    environment_settings.cache_clear()
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(portattn.SettingError, match="PORTATTN_FALLBACK"):
        portattn.attention(q, q, q)


@pytest.mark.parametrize("name", Settings.__struct_fields__)
def test_none_in_a_block_is_the_default(name: str) -> None:
    others = {"backend": "reference", "quirks": "-x", "cache_dir": "/somewhere", "compile_seconds": 3}
    others |= {"deterministic": True, "invariant": True}
    default = getattr(Settings(), name)
    changed = others.get(name) or next(value for value in config._VOCABULARY[name] if value != default)
    with portattn.settings(**{name: changed}), portattn.settings(**{name: None}) as now:
        assert getattr(now, name) == default


def test_blocks_nest_and_end() -> None:
    before = current()
    with portattn.settings(fallback="error") as outer:
        assert current() is outer
        with portattn.settings(isolate="never"):
            assert (current().fallback, current().isolate) == ("error", "never")
        assert current() is outer
    assert current() == before
    with pytest.raises(RuntimeError), portattn.settings(fallback="silent"):
        raise RuntimeError
    assert current() == before


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"fall_back": "warn"}, ["unknown setting 'fall_back'", "fallback"]),
        ({"fallback": "never"}, ["setting fallback is 'never'", "warn, error, silent"]),
        ({"isolate": True}, ["setting isolate is True", "auto, always, never"]),
        ({"backend": 3}, ["setting backend is 3", "string"]),
        ({"cache_dir": 3}, ["setting cache_dir is 3", "string"]),
        ({"compile_seconds": 0}, ["setting compile_seconds is 0", "positive"]),
        ({"compile_seconds": float("nan")}, ["setting compile_seconds is nan", "positive"]),
        ({"compile_seconds": "60"}, ["setting compile_seconds is '60'", "positive"]),
        ({"compile_seconds": True}, ["setting compile_seconds is True", "positive"]),
        ({"deterministic": 1}, ["setting deterministic is 1", "True or False"]),
    ],
)
def test_bad_blocks_are_errors(changes: dict, parts: list[str]) -> None:
    with pytest.raises(portattn.SettingError) as error, portattn.settings(**changes):
        pass
    for part in parts:
        assert part in str(error.value)


def test_a_block_is_its_own_threads_alone() -> None:
    seen: list[str] = []
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait(10)
        seen.append(current().fallback)
        with portattn.settings(fallback="silent"):
            done.set()
            seen.append(current().fallback)

    thread = threading.Thread(target=other)
    thread.start()
    with portattn.settings(fallback="error"):
        inside.set()
        done.wait(10)
        thread.join(10)
        assert current().fallback == "error"
    assert seen == ["warn", "silent"]


def test_a_copied_context_keeps_its_block() -> None:
    with portattn.settings(fallback="error"):
        context = contextvars.copy_context()
    assert current().fallback == "warn"
    assert context.run(current).fallback == "error"


def test_quirk_overrides_must_exist() -> None:
    import torch

    q = torch.zeros(1, 1, 2, 4)
    p = portattn.Problem(batch=1, heads_q=1, heads_k=1, seq_q=2, seq_k=2, head_dim=16)
    target = portattn.target("cuda:sm_90", "triton==3.6.0")
    with portattn.settings(quirks="-cuda-9999-no-such"), pytest.raises(portattn.SettingError, match="cuda-9999"):
        portattn.plan(p, target)
    assert portattn.attention(q, q, q).shape == q.shape


@pytest.mark.parametrize("path", ["a\0b", "a\n", "\x7f", "\0"])
def test_a_cache_folder_with_control_characters_is_an_error(path: str) -> None:
    with pytest.raises(portattn.SettingError, match=r"PORTATTN_CACHE_DIR is .*without control characters"):
        from_environment({"PORTATTN_CACHE_DIR": path})
    with (
        pytest.raises(portattn.SettingError, match=r"setting cache_dir is .*without control characters"),
        portattn.settings(cache_dir=path),
    ):
        pass


def test_a_cache_folders_path_means_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative: to the working folder as it is now. `~`: the home folder, where no shell reads the value."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/of-a-user")
    with portattn.settings(cache_dir="cache/é") as now:
        monkeypatch.chdir("/")
        assert now.cache_dir == str(tmp_path / "cache" / "é")
    assert from_environment({"PORTATTN_CACHE_DIR": "~/cache"}).cache_dir == "/home/of-a-user/cache"
    with portattn.settings(cache_dir="") as now:
        assert now.cache_dir == ""
    with pytest.raises(portattn.SettingError, match=r"~no-such-user/x.*that home folder is not known"):
        from_environment({"PORTATTN_CACHE_DIR": "~no-such-user/x"})
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(portattn.SettingError, match=r"variable PORTATTN_CACHE_DIR is 'a', but .*does not exist"):
        from_environment({"PORTATTN_CACHE_DIR": "a"})
    with pytest.raises(portattn.SettingError, match="cache_dir is 'a'"), portattn.settings(cache_dir="a"):
        pass


def test_calls_go_on_where_the_cache_folder_is_a_file(tmp_path: Path) -> None:
    import torch

    (tmp_path / "file").write_text("")
    q = torch.randn(1, 1, 4, 16)
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with portattn.settings(cache_dir=str(place)):
            assert torch.isfinite(portattn.attention(q, q, q)).all()
    assert (tmp_path / "file").read_text() == ""
