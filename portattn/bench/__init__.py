"""Benchmarks: problem sets, peers found at run time, a correctness gate before any speed. Never part of the tests."""
