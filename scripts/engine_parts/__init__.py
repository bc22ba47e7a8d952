"""Parts of engine_times.py, one engine each."""
