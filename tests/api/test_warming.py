"""warmup's specs and report, and the command, on a CPU; what it spares a first call is in test_hot_path.py."""

import gc
import json
import logging
import re
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from opcalls import pretend_accelerator

import portattn
from portattn.api import monitor, warmup
from portattn.api.call import perform
from portattn.api.monitor import nearest
from portattn.api.ops import make_request
from portattn.cli import main
from portattn.integrations.engine_warmup import compile_calls
from portattn.schema.tensors import POINTER_ALIGNMENT

SMALL = {"op": "attention", **dict.fromkeys("qkv", "fp32[1,2,8,16]")}


@pytest.fixture(autouse=True)
def _armed_by_none(monkeypatch):
    monkeypatch.setattr(monitor, "_armed", False)


def test_a_tensor_is_described_given_or_meta():
    calls: list[tuple[Any, ...]] = []
    q = torch.full((1, 2, 8, 16), 3.0)
    meta = torch.empty(1, 2, 16, 8, device="meta").transpose(2, 3)
    report = portattn.warmup(
        [SMALL | {"q": q, "k": meta, "v": "fp32[1,2,8,16]:0,128,16,1"}], device="cpu", say=calls.append
    )
    (one,) = report.specs
    assert (one.spec, one.path, one.key, one.way, one.compiled, one.cached, one.failed) == (
        0, "sdpa", "", "", False, False, "",
    )  # fmt: skip
    assert (one.call, report.failed) == ("attention q (1,2,8,16) kv (1,2,8,16) fp32", ())
    assert report.seconds >= one.seconds >= 0
    assert calls == ["planning 1 of 1", f"running 1 of 1: {one.call}"]
    assert bool((q == 3.0).all()), "a given tensor is only read"


@pytest.mark.parametrize(
    ("text", "shape", "strides", "dtype"),
    [
        ("bf16[8,32,1,128]", (8, 32, 1, 128), (4096, 128, 128, 1), torch.bfloat16), ("i32[5]", (5,), (1,), torch.int32),
        ("bool[2, 0, 3]", (2, 0, 3), (3, 3, 1), torch.bool), ("fp16[4,6]:0,1", (4, 6), (0, 1), torch.float16),
        ("fp32[4,6]:1,4", (4, 6), (1, 4), torch.float32),
    ],
)  # fmt: skip
def test_words_for_a_tensor(text, shape, strides, dtype):
    made = warmup._argument("q", "q", text).allocate(torch.device("cpu"), {})
    assert (tuple(made.shape), made.stride(), made.dtype) == (shape, strides, dtype)
    assert not made.any()
    assert made.untyped_storage().nbytes() <= 4096 * 9 * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([SMALL | {"q": "fp33[1,2,8,16]"}], r"specs\[0\].q is 'fp33\[1,2,8,16\]', but must be of a type among fp16"),
        ([SMALL, SMALL | {"k": "fp32[1,2,"}], r"specs\[1\].k is 'fp32\[1,2,', but describes a tensor"),
        ([SMALL, SMALL | {"k": "fp32[1,,2,8,16]"}], r"specs\[1\].k is 'fp32\[1,,2,8,16\]', but describes a tensor"),
        ([SMALL | {"v": "fp32[1,2,8,16]:1,1"}], r"specs\[0\].v .* must have as many strides as its 4 axes"),
        ([{"op": "attend"}], r"specs\[0\].op is 'attend', but must be one of attention"),
        (["attention"], r"specs\[0\] is 'attention', but must be a mapping"),
        ([SMALL | {"casual": True}], r"specs\[0\] is .*casual.*, but attention has no argument 'casual': did you mean"),
        ([{"op": "attention", "q": "fp32[1,2,8,16]"}], r"missing 2 required positional arguments"),
        ([SMALL | {"q": "fp32[1,2,S,16]"}], r"specs\[0\].q's size is 'S', but must be a number or one of the"),
        ([SMALL | {"sizes": {"S": [1]}}], r"specs\[0\].sizes is 'S', but must be the size of a tensor, or an argument"),
        ([SMALL | {"sizes": "1..2"}], r"specs\[0\].sizes is '1..2', but must be a mapping of names to sizes"),
        ([SMALL | {"sizes": {"1": [1]}}], r"specs\[0\].sizes's name is '1', but must be a letter"),
        ([SMALL | {"sizes": {"S": "2..1"}}], r"specs\[0\].sizes.S is '2..1', but must be a range, as"),
        ([SMALL | {"sizes": {"S": "1-2"}}], r"specs\[0\].sizes.S is '1-2', but must be a range, as"),
        ([SMALL | {"sizes": {"S": []}}], r"specs\[0\].sizes.S is \[\], but must be integers from 0 on, or a range"),
        ([SMALL | {"sizes": {"S": [1, -1]}}], r"specs\[0\].sizes.S is \[1, -1\], but must be integers from 0 on"),
        ([SMALL | {"sizes": {"S": [True]}}], r"specs\[0\].sizes.S is \[True\], but must be integers from 0 on"),
        ([SMALL | {"sizes": {"S": 5}}], r"specs\[0\].sizes.S is 5, but must be integers from 0 on, or a range"),
        ([SMALL | {"sizes": {"S": [2**31]}}], r"specs\[0\].sizes.S is \[2147483648\], .* up to 2147483647"),
        ([SMALL | {"sizes": {"S": torch.ones(2)}}], r"specs\[0\].sizes.S is .*, but must be a vector of int64"),
        ([SMALL | {"sizes": {"S": torch.arange(2), "B": torch.arange(3)}}], "B is .* as long as the others, 2"),
        ([SMALL | {"scale": "S", "sizes": {"S": [1]}}], r"specs\[0\].scale is 'S', but must not vary"),
        ([SMALL | {"q": 5}], r"specs\[0\].q is 'int', but must be a torch.Tensor"),
        ([SMALL | {"sizes": {"S": "1..9999999"}}], r"specs\[0\].sizes.S is range.*, but must be at most 4194304 sizes"),
        ([SMALL | {"sizes": {"S": "1..2300", "B": "1..2300"}}],
         r"specs\[0\].sizes is 5290000, but must be at most 4194304 combinations"),
        ([SMALL, SMALL | {"k": "fp32[1,3,8,16]"}], r"warmup: specs\[1\].v's heads is 2, but must be k's, 3"),
    ],
)  # fmt: skip
def test_a_spec_that_is_none_is_named_before_anything_runs(given, said, monkeypatch):
    monkeypatch.setattr(warmup._Warming, "run", lambda self: pytest.fail("something ran"))
    with pytest.raises(portattn.ArgumentError, match=said):
        portattn.warmup(given, device="cpu")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"jobs": 0}, "warmup: jobs is 0, but must be None or an integer from 1 on"),
        ({"jobs": -1}, "warmup: jobs is -1, but must be None or an integer from 1 on"),
        ({"specs": None}, "warmup: specs is None, but must be a list of mappings"),
        ({"specs": "[]"}, "warmup: specs is '[]', but must be a list of mappings"),
        ({"jobs": 2.0}, "warmup: jobs is 2.0, but must be None or an integer from 1 on"),
        ({"device": "gpu"}, "warmup: device is 'gpu', but must be a device of torch's: "),
        ({"device": "cuda:99"}, "warmup: device is 'cuda:99', but must be a device of torch's: "),
        ({"device": "meta"}, "warmup: device is 'meta', but must be a device that computes"),
        ({"device": 1.5}, "warmup: device is 1.5, but must be a device of torch's: "),
    ],
)
def test_what_is_no_device_or_no_count_is_named(given, said):
    with pytest.raises(portattn.ArgumentError, match=re.escape(said)):
        portattn.warmup(**{"specs": [SMALL]} | given)


def test_sizes_that_vary_are_one_call_where_nothing_is_kept():
    """On a CPU: the largest sizes, lists in any order, and a length that is an argument."""
    told: list[str] = []
    described = dict.fromkeys(("q", "k", "v"), "fp32[T,2,16]") | dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k"), "i32[3]"
    )
    spec = {"op": "varlen_attention", "max_seqlen_q": "M", "max_seqlen_k": "M", **described}
    report = portattn.warmup([spec | {"sizes": {"T": [8, 2, 4], "M": "1..5"}}], device="cpu", say=told.append)
    (one,) = report.specs
    assert one.call == "varlen_attention q (8,2,16) kv (8,2,16) fp32 2 sequences; T = 8, M = 5"
    assert (one.path, one.cached, one.failed) == ("sdpa", False, "")
    assert len(told) == 2


def test_a_range_has_both_ends_and_a_list_each_value_once():
    read = warmup.Spec(0, SMALL | {"q": "fp32[B,2,S,16]", "k": "i32[B+1]", "sizes": {"B": (3, 1, 3), "S": " 4 .. 6 "}})
    assert read.sizes == {"B": (1, 3), "S": (4, 5, 6)}
    assert (len(read.points), read.largest) == (6, {"B": 3, "S": 6})
    assert [read.at(point) for point in read.points[:2].tolist()] == [{"B": 1, "S": 4}, {"B": 1, "S": 5}]
    given = read.arguments(torch.device("meta"), {"B": 3, "S": 5})
    made = given["q"]
    assert (tuple(made.shape), made.device.type, given["k"].shape[0]) == ((3, 2, 5, 16), "meta", 4)
    pairs = {"B": torch.tensor([1, 5, 2]), "S": torch.tensor([4, 1, 9])}
    together = warmup.Spec(0, SMALL | {"q": "fp32[B,2,S,16]", "sizes": pairs})
    assert together.points.tolist() == [[1, 4], [5, 1], [2, 9]]


def test_what_cannot_run_is_reported_and_the_rest_is_warmed_up():
    with pytest.warns(portattn.CompileWarning, match=r"specs\[0\].*triton"):
        report = portattn.warmup([SMALL | {"backend": "triton"}, SMALL | {"window": [3, 0]}], device="cpu")
    bad, good = report.specs
    assert "triton" in bad.failed
    assert report.failed == (bad,)
    assert (good.failed, good.path) == ("", "sdpa")
    assert "window (3,0)" in good.call


def test_a_start_goes_on_whatever_cannot_be_compiled(caplog, monkeypatch):
    log, device = logging.getLogger("an engine"), torch.device("cpu")
    assert compile_calls(lambda: [{"op": "attend"}], device, log) is None
    assert "nothing was compiled before the first request: warmup: specs[0].op is 'attend'" in caplog.text
    frozen, allocate = list[int](), warmup.TensorSpec.allocate
    count = lambda *given: frozen.append(gc.get_freeze_count()) or allocate(*given)  # noqa: E731
    monkeypatch.setattr(warmup.TensorSpec, "allocate", count)
    with pytest.warns(portattn.CompileWarning):
        report = compile_calls(lambda: [SMALL, dict(SMALL), SMALL | {"backend": "triton"}], device, log)
    assert min(frozen) > 0 == gc.get_freeze_count(), "no garbage collection looks at an engine's objects meanwhile"
    assert [bool(one.failed) for one in report.specs] == [False, True], "equal calls are one"
    assert "no kernel of portattn's runs, but sdpa" in caplog.text


def test_what_does_not_fit_says_how_it_would(monkeypatch):
    def full(self, device, sizes):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(warmup.TensorSpec, "allocate", full)
    with pytest.warns(portattn.CompileWarning, match="Tried to allocate 9 GiB; give tensors that are there already"):
        assert portattn.warmup([SMALL], device="cpu").failed


def test_it_arms_the_monitor(monkeypatch):
    assert not monitor.should_warn(portattn.config.current())
    portattn.warmup([SMALL], device="cpu")
    settings = portattn.config.current()
    assert monitor.should_warn(settings)
    with monitor.silence():
        assert not monitor.should_warn(settings)
    with portattn.settings(monitor="never") as changed:
        assert not monitor.should_warn(changed)
    monkeypatch.setattr(monitor, "specialisations", lambda: {*monitor._at_arming, ("attend", "a key")})
    assert portattn.monitor(False) == ("attend",)
    assert not monitor.should_warn(settings)
    with portattn.settings(monitor="always") as changed:
        assert monitor.should_warn(changed)


def test_the_nearest_kept_call_is_the_one_that_differs_in_least(device, monkeypatch):
    pretend_accelerator(monkeypatch)
    memory = torch.zeros(300)

    def call(first, rows, dtype=torch.float32, **values):
        q = memory[first : first + rows * 8].view(1, 1, rows, 8).to(dtype)
        return make_request("plan", "attention", (q, q, q), values)

    assert nearest(call(0, 4)) is None
    perform(call(0, 4, causal=True, scale=2.0))
    perform(call(0, 4))
    assert nearest(call(0, 4)) == []
    assert nearest(call(0, 5)) == [f"{name}'s shape: (1, 1, 5, 8) instead of (1, 1, 4, 8)" for name in "qkv"]
    shifted = f"address modulo {POINTER_ALIGNMENT}: {(memory.data_ptr() + 4) % 16} instead of {memory.data_ptr() % 16}"
    assert nearest(call(1, 4)) == [f"{name}'s {shifted}" for name in "qkv"]
    assert nearest(call(0, 4, torch.float16))[0] == "q's type: torch.float16 instead of torch.float32"
    assert nearest(call(0, 4, causal=1)) == ["causal: 1 instead of False"]
    assert nearest(call(0, 4, sinks=torch.zeros(1))) == ["sinks is given"]
    with portattn.settings(fallback="error"):
        assert nearest(call(0, 4)) == ["the setting fallback: 'error' instead of 'warn'"]


def test_what_differs_is_named_as_the_caller_does(device, monkeypatch):
    pretend_accelerator(monkeypatch)

    def call(keys):
        cache = torch.zeros(1, 1, keys, 16)
        return make_request("plan", "decode_attention", (torch.zeros(1, 1, 1, 16), cache, cache, None), {})

    perform(call(4))
    found = nearest(call(5))
    assert found == [f"{name}'s shape: (1, 1, 5, 16) instead of (1, 1, 4, 16)" for name in ("k_cache", "v_cache")]


def test_the_command(tmp_path):
    path = tmp_path / "specs.json"
    path.write_text(json.dumps([SMALL, SMALL | {"causal": True}]))
    called = CliRunner().invoke(main, ["warmup", str(path), "--device", "cpu", "--json"])
    assert called.exit_code == 0, called.output
    assert [one["path"] for one in json.loads(called.stdout)["specs"]] == ["sdpa", "sdpa"]
    assert "running 2 of 2" in called.stderr
    assert "2 calls in" in CliRunner().invoke(main, ["warmup", str(path), "--device", "cpu"]).stdout
    path.write_text(json.dumps([SMALL | {"backend": "triton"}]))
    failed = CliRunner().invoke(main, ["warmup", str(path), "--device", "cpu"])
    assert failed.exit_code == 1
    assert "failed: " in failed.stdout
    path.write_text("[]")
    empty = CliRunner().invoke(main, ["warmup", str(path), "--device", "cpu"])
    assert empty.exit_code == 3
    assert f"portattn: nothing was warmed up: {path} has no call" in empty.stderr
    path.write_text('{"op": "attention"}')
    refused = CliRunner().invoke(main, ["warmup", str(path), "--device", "cpu"])
    assert refused.exit_code == 2
    assert "must be a list of calls" in refused.stderr
