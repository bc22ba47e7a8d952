"""What executing lowered code needs, and children to do it in: the code may crash, and its guards catch signals."""

import faulthandler
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from portattn.backends.ascend.linalg.llvm_tools import TOOLCHAIN, missing_reason
from portattn.tools import lab
from portattn.worker.client import Worker


@pytest.fixture(autouse=True)
def _lab_in_reach(real_lab: None) -> None:
    """MLIR's programs may lie in the lab, and nowhere else on the machine. The children below outlive the test that
    starts them, and look for them in its folder."""


@pytest.fixture
def mlir(_lab_in_reach: None) -> None:
    why = missing_reason()
    if why:
        pytest.skip(why)


@pytest.fixture(scope="session")
def ascend_compiler() -> Iterator[Worker]:
    """A child that lowers for Ascend; skips where there is no triton-ascend: the lab's, or PORTATTN_ASCEND_PYTHON's."""
    environment = lab.find(TOOLCHAIN)
    python = environment.python if environment else os.environ.get("PORTATTN_ASCEND_PYTHON", "")
    if not python:
        pytest.skip(f"no {TOOLCHAIN} in the lab, and PORTATTN_ASCEND_PYTHON names no Python that has it")
    with Worker(python=python) as worker:
        yield worker


@pytest.fixture(scope="session")
def runner() -> Iterator[Worker]:
    with Worker(runs="kernels") as worker:
        yield worker


@pytest.fixture
def in_child() -> Callable[..., Any]:
    """Call a function in a forked child: what it returns, or raises. A child that dies is a ChildProcessError."""

    def call(function: Callable[..., Any], *arguments: Any, seconds: float = 60.0) -> Any:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)

        def target() -> None:
            faulthandler.disable()  # a child that dies as it should has nothing to print
            try:
                answer = (True, function(*arguments))
            except BaseException as error:  # noqa: BLE001 - raised again in the parent
                answer = (False, error)
            theirs.send_bytes(pickle.dumps(answer))  # send() would hand tensors over by shared memory

        process = context.Process(target=target)
        process.start()
        theirs.close()
        try:
            if not ours.poll(seconds):
                raise TimeoutError(f"no answer in {seconds:g} s")
            done, value = pickle.loads(ours.recv_bytes())
        except EOFError:
            process.join()
            raise ChildProcessError(f"exit code {process.exitcode}") from None
        finally:
            process.kill()
            process.join()
        if not done:
            raise value
        return value

    return call
