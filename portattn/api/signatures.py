"""Functions generated from a public operation's signature and row: its body, and its arguments in row order.

`exec` makes them once, as for dataclasses: `inspect.Signature.bind` takes longer than the rest of a cached call. A
parameter that stands for several tensors is expanded (`expansions` of schema/ops.py).
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

import portattn
from portattn.api.argument_errors import OPERATIONS, register, short_traceback, wrong_arguments
from portattn.api.call import first_call, try_cached
from portattn.api.execute import lookup, run_request
from portattn.api.page_table import PageTable
from portattn.api.request import Request, checked_request, settings_for
from portattn.api.torch_ops import WRITING, arguments_of
from portattn.api.transform_checks import are_dispatched, are_transformed, check_has_storage
from portattn.errors import ArgumentError
from portattn.schema.ops import ROWS, load_function
from portattn.schema.tensors import POINTER_ALIGNMENT
from portattn.validate.checks import check_dense
from portattn.validate.values import reads


def write(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Run a call that fills tensors: from the launch cache, or by planning it. Arguments as of `call.try_cached`."""
    if torch.compiler.is_dynamo_compiling():
        by_operator(op, tensors, values)
        return
    if lookup(op, tensors, values, ()) is not None:
        return
    with short_traceback:
        carry_out(checked_request(op, tensors, values, ()))


def carry_out(request: Request) -> None:
    """Run a request by its plan; a recorded or transformed request by the torch operator."""
    tensors, values, _ = request.parts
    if are_transformed(tensors) or are_dispatched(tensors) or torch._C._are_functorch_transforms_active():
        by_operator(request.op, tensors, values)
        return
    check_has_storage(request.op, request.named_tensors)
    run_request(request)


def nowhere(request: Request) -> None:
    """Take a request's slots or its memory for the result away, so that the same launches write nothing."""
    result = request.tensors.get("result")
    if isinstance(result, torch.Tensor):
        request.tensors["result"] = torch.empty_strided(
            result.shape, result.stride(), dtype=result.dtype, device=result.device
        )
    for name in ("slots", "seqlens_k") if result is None else ():
        tensor = request.tensors.get(name)
        if isinstance(tensor, torch.Tensor):
            before = 0 if tensor.is_meta else tensor.data_ptr() % POINTER_ALIGNMENT // tensor.element_size()
            with torch.inference_mode(tensor.is_inference()):  # the launch cache distinguishes inference tensors
                memory = torch.full((before + tensor.numel(),), -1, dtype=tensor.dtype, device=tensor.device)
                request.tensors[name] = memory[before:].view(tensor.shape)


def by_operator(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Call the torch operator. Traced by dynamo: plain Python alone."""
    getattr(torch.ops.portattn, op)(*arguments_of(op, tensors, values, (), WRITING))


F = TypeVar("F", bound=Callable[..., Any])
Parts = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]  # tensors, values, lengths

_CALL = """\
found = try_cached({op!r}, tensors, values, lengths)
if found is None:
    with short_traceback:
        return first_call({op!r}, tensors, values, lengths)
return found"""
_WRITE = "write({op!r}, tensors, values)"


def operation(function: F) -> F:
    """Make a public operation from a signature and a docstring; its body follows from its row in schema/ops.py.

    A function without a row keeps its own body. The operation takes any keyword and position, which its signature does
    not show (argument_errors.py)."""
    register(function)
    row = ROWS.get(function.__name__)
    if row is not None:
        line = function.__code__.co_firstlineno + 1  # after the decorator's
        end = _WRITE if row.writes else _CALL
        if row.allocates:
            end += "\nreturn " + (f"returns({_names(load_function(row.returns))})" if row.returns else "out")
        made: Any = _made(function, line, end)
        made.__doc__, made.__annotations__ = function.__doc__, function.__annotations__
        made.__module__ = function.__module__
        OPERATIONS[function.__name__] = function = made
    return function


@functools.cache
def arguments_as_parts(op: str) -> Callable[..., Parts]:
    """Return a function of an operation's arguments that returns (tensors, values, lengths) in the order of its row.

    `backend` and `validate` are the last values. Tensors replace a parameter that stands for several (a PageTable). It
    raises the TypeError or UnknownArgument that the operation raises."""
    function: Any = getattr(portattn, op)  # imports portattn.api.ops, where operations are registered
    return _made(function, function.__code__.co_firstlineno, "return tensors, values, lengths")


def request_of(op: str, *args: Any, **kwargs: Any) -> Request:
    return checked_request(op, *arguments_as_parts(op)(*args, **kwargs))


def _made(function: Any, line: int, end: str) -> Any:
    """Return a function with an operation's parameters that makes tensors, values and lengths, and then runs `end`.
    Tracebacks show the file and `line` of the operation's definition."""
    op = function.__name__
    row, parameters = ROWS[op], inspect.signature(function).parameters
    words = [f"{name}=None" for name in parameters]  # the defaults themselves are set below
    words.insert(sum(p.kind is not p.KEYWORD_ONLY for p in parameters.values()), "*excess")
    names: dict[str, Any] = {each.__name__: each for each in (wrong_arguments, try_cached, first_call, write)}
    names |= {"short_traceback": short_traceback, "Tensor": torch.Tensor, "op": op}
    lines = [f"if excess or unknown: raise wrong_arguments({op!r}, excess, unknown)"]
    known = set(parameters)
    for i, expansion in enumerate(row.expansions):
        names[f"expand_{i}"] = expand = load_function(expansion.function)
        given, results = expansion.parameter, ", ".join(expansion.results)
        test = f"{given} is not None" + f" and not isinstance({given}, Tensor)" * expansion.or_tensor
        lines += [f"{name} = None" for name in expansion.results if name not in known]
        known.update(expansion.results)
        lines += [f"if {test}: {results} = expand_{i}({_names(expand)})"]
    if row.allocates:
        names["allocate"] = allocate = load_function(row.allocates)
        lines += [f"if out is None: out = allocate({_names(allocate)})"]
    if row.returns:
        names["returns"] = load_function(row.returns)
    groups = {"tensors": row.parameters, "values": (*row.fixed, "backend", "validate"), "lengths": row.lengths}
    lines += [f"{group} = ({''.join(f'{name}, ' for name in listed)})" for group, listed in groups.items()]
    lines += end.format(op=op).splitlines()
    inner = "\n".join(f"        {line}" for line in lines)
    text = f"def make({', '.join(names)}):\n    def {op}({', '.join(words)}, **unknown):\n{inner}\n    return {op}"
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr, ast.arg, ast.keyword)):
            node.lineno = node.end_lineno = line
    scope: dict[str, Any] = {}
    exec(compile(tree, function.__code__.co_filename, "exec", dont_inherit=True), function.__globals__, scope)
    made = scope["make"](**names)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__signature__, made.__qualname__ = inspect.signature(function), function.__qualname__
    return made


def _names(function: Callable[..., Any]) -> str:
    return ", ".join(inspect.signature(function).parameters)


Table = tuple[Any, torch.Tensor | None]  # page ids, lengths


def paged_table(page_table: Any, seqlens_k: Any, k_pages: Any, page_layout: Any, backend: Any, validate: Any) -> Table:
    return _table_tensors("paged_attention", page_table, seqlens_k, k_pages, page_layout, backend, validate)


def latent_table(page_table: Any, seqlens_k: Any, kv_pages: Any, backend: Any, validate: Any) -> Table:
    return _table_tensors("mla_attention", page_table, seqlens_k, kv_pages, "phd", backend, validate)


def indexer_table(page_table: Any, seqlens_k: Any, k: Any, backend: Any, validate: Any) -> Table:
    return _table_tensors("indexer_logits", page_table, seqlens_k, k, "phd", backend, validate)


def sparse_table(page_table: Any, seqlens_k: Any, k_cache: Any, page_layout: Any, backend: Any, validate: Any) -> Table:
    return _table_tensors("sparse_attention", page_table, seqlens_k, k_cache, page_layout, backend, validate)


def _table_tensors(
    op: str, table: Any, seqlens_k: Any, pages: Any, page_layout: Any, backend: Any, validate: Any
) -> Table:
    """Return page ids and lengths; a PageTable's lengths follow from the size of the pages."""
    if not isinstance(table, PageTable):
        return table, seqlens_k
    if seqlens_k is not None:
        check_dense(op, "seqlens_k", seqlens_k)
        given = tuple(seqlens_k.shape) if isinstance(seqlens_k, torch.Tensor) else seqlens_k
        raise ArgumentError(op, "seqlens_k", given, "goes with a tensor of page ids; a PageTable has its own")
    if not isinstance(pages, torch.Tensor) or pages.is_nested or pages.ndim < 3:
        return table.pages, None  # validation raises
    page_size = pages.shape[2 if page_layout == "hpd" else 1]
    # Dynamo cannot trace the read of a context variable; recorded tensors have no values to read.
    if not torch.compiler.is_dynamo_compiling() and reads(settings_for(op, backend, validate), table.counts):
        table.check(op, page_size)
    return table.pages, table.seqlens(page_size)


def magicpig_tensors(magicpig: Any, counts: Any) -> tuple[tuple[int, int] | None, Any, Any]:
    """Return MagicPIG's K and L as (two integers, None, None) or as (None, tensor, tensor)."""
    bits, tables = _magicpig("sparse_attention", magicpig, counts)
    if isinstance(bits, torch.Tensor) or isinstance(tables, torch.Tensor):
        return None, bits, tables
    return (bits, tables), None, None


def _magicpig(op: str, magicpig: Any, counts: Any) -> tuple[Any, Any]:
    if not isinstance(magicpig, (tuple, list)) or len(magicpig) != 2:
        raise ArgumentError(op, "magicpig", magicpig, "must be (K, L), bits a hash table and number of tables")
    for name, value, least in (("K", magicpig[0], 1), ("L", magicpig[1], 2)):
        if isinstance(value, torch.Tensor):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**15:
            limit = f"must be an integer in {least}..{2**15 - 1}, or (Hq,) int32"
            raise ArgumentError(op, f"magicpig's {name}", value, limit)
    tensor = next((value for value in magicpig if isinstance(value, torch.Tensor)), None)
    if tensor is None or all(isinstance(value, torch.Tensor) for value in magicpig):
        return magicpig[0], magicpig[1]
    for name, value in (("counts", counts), ("magicpig's K", magicpig[0]), ("magicpig's L", magicpig[1])):
        check_dense(op, name, value)
    if isinstance(counts, torch.Tensor) and counts.ndim == 2:
        heads = counts.shape[1]
        magicpig = tuple(
            t if isinstance(t, torch.Tensor) else tensor.new_full((heads,), t, dtype=torch.int32) for t in magicpig
        )
    return magicpig[0], magicpig[1]
