"""Child processes that compile: what may abort, crash or hang does so there.

serve.py, compilers.py, resources.py run in the child and need only Triton (any version, triton-ascend too).
client.py is the parent's side.
"""
