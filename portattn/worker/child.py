"""One child process: started in a group of its own, with a folder of its own, and ended with both."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence

from portattn.worker.transport import Pipes

END_SECONDS = 10.0  # how long a killed process is waited for: one in an uninterruptible system call ends when it can


class Child:
    """A started process. Raises OSError where the system has no process, no descriptor or no folder for it.

    folder  for its temporary files: nothing is left of a child that is killed
    idle    whether it has answered all that it was asked; it must be ended otherwise, not asked again
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.folder = tempfile.mkdtemp(prefix="portattn-worker-")
        self._remove = weakref.finalize(self, _remove, self.folder)
        self._ending = threading.RLock()
        self.idle = True
        try:
            with contextlib.ExitStack() as opened:
                ours, theirs = socket.socketpair()
                opened.callback(ours.close)
                with theirs:
                    # A parent that is killed removes nothing: its child does, when nothing more can be asked.
                    # A process group of its own: a compiler's children (ptxas, linkers) end with it.
                    self.process = subprocess.Popen(
                        [*command, f"--folder={self.folder}"],
                        stdin=theirs.fileno(),
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        bufsize=0,
                        env={"TMPDIR": self.folder, **environment},
                        start_new_session=True,
                    )
                assert self.process.stdout is not None
                assert self.process.stderr is not None
                self.pipes = Pipes(ours, self.process.stdout, self.process.stderr)
                opened.pop_all()
        except BaseException:
            self._remove()
            raise

    @property
    def usable(self) -> bool:
        """Whether it takes a request: it runs, owes no answer, and its folder still exists."""
        return self.idle and not self.ended() and os.path.isdir(self.folder)

    def ended(self) -> bool:
        """Whether the process has ended. It is not reaped: its number stays its own until `end`."""
        with self._ending:
            if self.process.returncode is not None:
                return True
            try:
                return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            except ChildProcessError:  # reaped by somebody who waits for every process
                self.process.poll()
                return True

    def end(self) -> int | None:
        """Kill the process's whole group, reap it, and say its return code; None where it has not ended even so."""
        with self._ending:
            self.ended()
            if self.process.returncode is None:  # as long as it is not reaped no other process has its number
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_SECONDS)
            return self.process.returncode

    def close(self) -> None:
        """Close the streams and remove the folder. Not while another thread uses the streams."""
        self.pipes.close()
        self._remove()

    def forget(self) -> None:
        """In a process that was just forked: the child and its folder are the parent's.

        The copies of descriptors are closed: the child must see its parent end even while this process lives.
        """
        self._ending = threading.RLock()
        self._remove.detach()
        self.pipes.close()


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)  # an empty one needs no descriptor, of which there may be none
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
