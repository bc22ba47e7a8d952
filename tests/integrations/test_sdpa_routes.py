"""Which way a call takes is told; the block serves torch's name, and restores it."""

import subprocess
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sdpa_cases import path
from threads import run_threads
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as imported_before

import portattn
from portattn.integrations import sdpa, sdpa_mapping
from portattn.schema.target import Target

SEED = torch.Generator().manual_seed(0)
Q, K = torch.randn(2, 4, 3, 8, generator=SEED), torch.randn(2, 4, 5, 8, generator=SEED)
ours = sdpa.scaled_dot_product_attention


def test_a_call_of_torchs_warns_once_a_cause() -> None:
    double = Q.double()
    with pytest.warns(portattn.FallbackWarning, match="runs on torch's own kernels, not portattn: query is torch.fl"):
        ours(double, double, double)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(double, double, double, is_causal=True)  # the same cause
    with pytest.warns(portattn.FallbackWarning, match="dropout_p is 1.0") as caught:
        ours(Q, K, K, dropout_p=1.0)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("given", [
    {"scale": torch.tensor(0.5)}, {"dropout_p": torch.tensor(0.0), "scale": 0.5}, {"is_causal": np.False_, "scale": 0.5}
])  # fmt: skip
def test_numbers_of_other_types_are_read_as_attention_reads_them(given: dict[str, Any]) -> None:
    with portattn.settings(fallback="error"):
        torch.testing.assert_close(ours(Q, K, K, **given), imported_before(Q, K, K, scale=0.5))
        assert path() == "portattn"
        for wrong in ({"scale": True}, {"scale": torch.ones(2)}, {"is_causal": 1}):
            with pytest.raises(portattn.PathUnavailable, match=f"portattn: {next(iter(wrong))} is "):
                ours(Q, K, K, **wrong)


def test_settings_decide_what_a_fall_back_does() -> None:
    double = Q.double()
    with portattn.settings(fallback="silent"), warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(double, double, double)
    assert path() == "torch"  # told all the same
    with portattn.settings(fallback="error"), pytest.raises(portattn.PathUnavailable, match="fallback='error'") as a:
        ours(double, double, double)
    assert a.value.rejected[0].path == "portattn"
    assert "torch.float64" in a.value.rejected[0].reason
    with portattn.settings(backend="reference"):
        ours(Q, K, K)
        with pytest.raises(portattn.PathUnavailable, match="backend='reference' forbids"):
            ours(double, double, double)
        with pytest.raises(RuntimeError, match="same dtype"):  # bad input is bad input whatever is set
            ours(double, K, K)


def test_route_and_explain_tell_beforehand_what_happens() -> None:
    calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = [
        ((Q, K, K), {"is_causal": True}), ((Q, K, K), {"dropout_p": 1.0}), ((Q.double(), K.double(), K.double()), {}),
        ((torch.randn(1, 1, 3, 640),) * 3, {}),
    ]  # fmt: skip
    for args, kwargs in calls:
        told = sdpa.route(*args, **kwargs)
        with portattn.settings(fallback="silent"):
            ours(*args, **kwargs)
        done = sdpa.last_route()
        assert (told.path, told.reason) == (done.path, done.reason)
        assert (told.plan is None, told.reason == "") == (told.path == "torch", told.path == "portattn")
        assert sdpa.explain(*args, **kwargs) == told.explain()
    assert sdpa.explain(Q, K, K).splitlines()[1] == "attention q (2,4,3,8) kv (2,4,5,8) fp32"
    assert sdpa.route(*calls[3][0]).reason == "query or value has no columns, or more than portattn's 576"
    assert sdpa.route(Q, K.half(), K).reason == "query, key and value have several dtypes, which torch refuses"


def test_a_plan_that_is_told_is_the_one_that_runs() -> None:
    mask = torch.randn(3, 5) > 0
    told = sdpa.route(Q, K, K, mask).plan
    ours(Q, K, K, mask)
    assert told == portattn.last_plan()


def test_the_block_serves_torchs_name() -> None:
    for _ in range(2):
        sdpa_mapping.note(None)
        with sdpa.replacement():
            assert functional.scaled_dot_product_attention is ours
            out = functional.scaled_dot_product_attention(Q, K, K, is_causal=True)
            assert path() == "portattn"
            sdpa_mapping.note(None)
            torch.testing.assert_close(out, imported_before(Q, K, K, is_causal=True))
            assert path() == "none"  # a name that was imported before is torch's own
        assert functional.scaled_dot_product_attention is imported_before
    with pytest.warns(DeprecationWarning, match="replacement"):
        assert sdpa.replaced is sdpa.replacement


def test_the_block_restores_after_errors_and_nests() -> None:
    def fail() -> None:
        with sdpa.replacement():
            with sdpa.replacement():
                functional.scaled_dot_product_attention(Q, K, K)
            with pytest.raises(RuntimeError, match="same dtype"):
                functional.scaled_dot_product_attention(Q.half(), K, K)
            assert (
                functional.scaled_dot_product_attention is ours
            )  # an error inside does not end it, nor an inner block
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert functional.scaled_dot_product_attention is imported_before


def test_blocks_that_overlap_in_two_threads() -> None:
    """The first to begin is the first to end; the last to end restores."""
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    found = []

    def first() -> None:
        with sdpa.replacement():
            first_in.set()
            second_in.wait(30)
        first_out.set()

    def second() -> None:
        first_in.wait(30)
        with sdpa.replacement():
            second_in.set()
            first_out.wait(30)
            found.append(functional.scaled_dot_product_attention is ours)

    run_threads(first, second)
    assert found == [True]
    assert functional.scaled_dot_product_attention is imported_before


def test_another_function_put_there_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", imported_before)  # which the test's end restores
    with sdpa.replacement():
        functional.scaled_dot_product_attention = print
    assert functional.scaled_dot_product_attention is print


def test_many_threads_at_once() -> None:
    right = imported_before(Q, K, K, is_causal=True)
    wrong: list[Any] = []

    def many() -> None:
        with sdpa.replacement():
            for _ in range(20):
                out = functional.scaled_dot_product_attention(Q, K, K, is_causal=True)
                if path() != "portattn" or not torch.allclose(out, right, atol=1e-5):
                    wrong.append((path(), out))

    run_threads(*[many] * 4)
    assert wrong == []
    assert functional.scaled_dot_product_attention is imported_before


@pytest.mark.interpreter  # a real accelerator's kernels would be planned for CPU tensors
def test_a_vendor_path_that_calls_torchs_own_is_not_served_again(sm_90: Target) -> None:
    """What needs gradients is planned as torch's SDPA on an H100, which the block would catch once more."""
    given = [tensor.clone().requires_grad_() for tensor in (Q, K, K)]
    with portattn.settings(fallback="silent"), sdpa.replacement():
        out = functional.scaled_dot_product_attention(*given, is_causal=True)
    assert portattn.last_plan().path == "sdpa"
    torch.testing.assert_close(out, imported_before(*given, is_causal=True))


def test_checkpointing_computes_again_by_the_same_way() -> None:
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    q = Q.clone().requires_grad_()
    (right,) = torch.autograd.grad(ours(q, K, K, is_causal=True).square().sum(), q)
    with sdpa.replacement(), set_checkpoint_early_stop(False):
        out = checkpoint(lambda q: functional.scaled_dot_product_attention(q, K, K, is_causal=True), q,
            use_reentrant=False)  # fmt: skip
        sdpa_mapping.note(None)
        out.square().sum().backward()
    assert path() == "portattn"
    torch.testing.assert_close(q.grad, right)


def test_subclasses_know_themselves_what_sdpa_is() -> None:
    class Loud(torch.Tensor):
        heard = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is imported_before:
                cls.heard += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    loud = Q.as_subclass(Loud)
    with portattn.settings(fallback="silent"), sdpa.replacement():
        out = functional.scaled_dot_product_attention(loud, K, K)
    assert Loud.heard == 1
    assert type(out) is Loud
    assert sdpa.route(loud, K, K).reason == "query is a Loud, and portattn takes plain tensors"


def test_importing_changes_nothing_of_torchs() -> None:
    program = """
import torch
before = torch.nn.functional.scaled_dot_product_attention, torch.nn.attention.list_flash_attention_impls()
import portattn
import portattn.integrations.sdpa
after = torch.nn.functional.scaled_dot_product_attention, torch.nn.attention.list_flash_attention_impls()
print(before == after, torch.nn.attention.current_flash_attention_impl())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "True None", done.stderr
