"""What compilers print when they fail, as data: one row a kind of failure.

row.py says what a row is, table.py puts them in order. The others have the rows: missing.py (something is not
installed), resources.py (it does not fit), ptxas.py, ascend.py, mlir.py (MLIR and LLVM), python.py, processes.py.
"""
