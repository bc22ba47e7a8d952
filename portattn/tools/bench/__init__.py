"""Benchmarks: named sets of cases, peers found at run time, and a correctness gate before any timing."""
