"""Functions in threads of their own."""

import threading
from collections.abc import Callable


def run_threads(*functions: Callable[[], object]) -> None:
    """Run each function in a thread, all at once; return when all have ended."""
    threads = [threading.Thread(target=one) for one in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
