"""Triton-ascend's linalg on a CPU: executed through MLIR 19, compared with the oracle, and read by lints.

tools.py      the programs of MLIR and LLVM 19, and the C compiler
text.py       a lowered kernel's text: its name and arguments, and what upstream MLIR does not know taken out of it
build.py      from text to a shared library
runtime.c     what the compiled code calls, and the guards around its memory
program.py    one launch: a call for each program
execute.py    a plan's launches on a random call, judged; child process only
executor.py   the parent's side: compile in one child, execute in another
"""
