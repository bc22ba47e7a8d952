"""Child processes that compile: what may abort, crash or hang does so there.

serve.py, compilers.py, resources.py run in the child and need only Triton (any version, triton-ascend too).
The parent's side: client.py (Worker), child.py (the process), transport.py (its streams), protocol.py (messages),
exit_status.py (how a request ended).
"""
