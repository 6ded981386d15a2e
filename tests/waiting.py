"""Other processes, for which no test waits without end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

MINUTE, HOUR = 60.0, 3600.0


def read_line(process: subprocess.Popen[str], seconds: float = MINUTE) -> str:
    """The next line of a process; one that says nothing for so long is killed, and its line is empty."""
    assert process.stdout is not None
    end = threading.Timer(seconds, process.kill)
    end.start()
    try:
        return process.stdout.readline()
    finally:
        end.cancel()


def run_group(
    command: Sequence[str | Path], seconds: float, variables: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that starts processes of its own; if it takes longer, all of them are killed."""
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(MINUTE)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
