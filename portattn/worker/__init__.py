"""Child processes that compile: aborts, crashes and hangs happen there.

serve.py and compilers.py run in the child and need only Triton (any version, triton-ascend too);
client.py and child.py run in the parent.
"""
