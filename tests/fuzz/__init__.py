"""Fuzzers of the public operations.

    PYTHONPATH=tests python -m fuzz values --seconds 60     random calls against the float64 oracle
    PYTHONPATH=tests python -m fuzz shapes --seconds 60     many shapes of a few kinds, in turn in one process

values.py draws and judges single calls; shapes.py compares what a process computes after many other shapes with what
it computes after none; recorded.py lets it do so without a device; running.py shares cases out to processes."""
