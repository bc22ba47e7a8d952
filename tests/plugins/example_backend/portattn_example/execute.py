"""The model of Example One. Runs in a child of portattn's own Python, under Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import triton_example

# Of one block, which the model has whole: what finds its elements does nothing.
NOTHING = ("tt_func", "tt_make_range", "tt_splat", "tt_addptr", "arith_constant", "tt_return")


def compare(request: dict[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Check each launch's code, run the plan, and compare it with the oracle: {"facts": …} as portattn judges."""
    from portattn.testing.verdict import compare as run

    enter("check")
    for piece in request["texts"]:
        name = triton_example.check(piece["code"])
        if name != piece["kernel"]:
            raise triton_example.Refused(f"the code is of {name}, and {piece['kernel']} is launched")
    return run(request | {"path": "interpreter"}, enter)


def run_code(request: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a probe's kernel. The chip has an accumulator for a block: it loads the next input, adds the accumulator to
    itself, and stores to the next output."""
    code = request["texts"]["code"]
    triton_example.check(code)
    inputs = iter([name for name in request["types"] if name not in request["outputs"]])
    outputs = iter(request["outputs"])
    held = None
    for word in code.splitlines()[1:]:
        if word == "tt_load":
            held = arguments[next(inputs)].clone()
        elif word == "arith_addf" and held is not None:
            held = held + held
        elif word == "tt_store":
            arguments[next(outputs)].copy_(held)
        elif word not in NOTHING:
            return {"missing": f"the model does not know {word}"}
    return {"strays": []}
