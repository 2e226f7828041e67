"Peak memory of every encode and decode, in a process of its own: a line of JSON each."

import ctypes
import json
from pathlib import Path

from dpcomm.bench import suite as bench


def told(name):
    "A line of this process's status, MiB."
    text = Path("/proc/self/status").read_text()
    return int(text.partition(name)[2].split()[0]) / 1024


if __name__ == "__main__":
    libc = ctypes.CDLL(None)
    libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: no pages of 2 MiB
    for part, call in bench.mechanism_calls(bench.HELD).items():
        if part.endswith("simulate"):
            continue
        call()
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = told("VmRSS:")
        call()
        print(json.dumps([part, told("VmHWM:") - before]), flush=True)
