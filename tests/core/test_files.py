"""files: whole or not at all, damage noticed before use, several writers, a full disk,
a folder that is none.
"""

import errno
import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import python
from tables import tabled

from dpcomm.core import files

CONTENT = bytes(range(256)) * 3


@tabled("content", [b"", b"x", CONTENT, files.SEAL, files.add_checksum(b"twice")])
def test_what_is_sealed_comes_back(content, tmp_path):
    path = files.atomic_write(tmp_path / "deep" / "a.bin", files.add_checksum(content))
    assert files.read_sealed(path) == content
    assert os.listdir(path.parent) == ["a.bin"]
    assert path.stat().st_mode & 0o777 == 0o644


@tabled("code", [None, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_lock_is_held_let_go_and_leaves_no_file(code, tmp_path, monkeypatch):
    "On a file system without locks too, which gets another one."

    def flock(*_):
        raise OSError(code, "no locks here")

    if code:
        monkeypatch.setattr("fcntl.flock", flock)
    path = tmp_path / "deep" / ".a.lock"
    with files.locked(path):
        with pytest.raises(BlockingIOError, match=".a.lock is held by another process"):
            with files.locked(path, wait=False):
                raise AssertionError("two hold one lock")
    with pytest.raises(KeyError), files.locked(path, wait=False):
        raise KeyError("inside")
    with files.locked(path, wait=False):
        pass
    assert os.listdir(path.parent) == []


COUNTS = """import sys
from pathlib import Path
from dpcomm.core.files import locked
count, lock = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(50):
    with locked(lock):
        count.write_text(str(int(count.read_text()) + 1))
"""


def test_processes_that_take_turns_lose_no_count(tmp_path):
    "The lock's file goes and comes again all the while."
    count = tmp_path / "count"
    count.write_text("0")
    words = [sys.executable, "-c", COUNTS, str(count), str(tmp_path / "lock")]
    running = [subprocess.Popen(words) for _ in range(4)]
    assert [process.wait(300) for process in running] == [0] * 4
    assert count.read_text() == "200" and os.listdir(tmp_path) == ["count"]


WITHOUT = """import sys
sys.modules.update(fcntl=None, resource=None)
import dpcomm.cli, dpcomm.evidence.verdicts, dpcomm.experiments.run.sweep
import dpcomm.datasets.scattering
from dpcomm.experiments.run import runs
assert runs._peak_bytes() is None
sys.exit(dpcomm.cli.main(["list"]))
"""


def test_the_command_starts_on_a_system_without_fcntl_and_resource():
    "As Windows is; filelock has another way there, which is faked by leaving it out."
    filelock = "import filelock\n"
    done = python("-c", filelock + WITHOUT)
    assert done.returncode == 0, done.stderr


def test_every_damage_is_refused_with_one_sentence(tmp_path):
    whole, rng = files.add_checksum(CONTENT), random.Random(0)
    damaged = [whole[:n] for n in range(len(whole))]
    damaged += [whole + b"\0", b"PK" + whole, files.add_checksum(b"x")[:-1]]
    damaged += [whole.replace(b"version 1", b"version 2", 1)]
    for at in rng.sample(range(8 * len(whole)), 1500):
        i, bit = divmod(at, 8)
        damaged.append(whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :])
    says = r"^run.pt is damaged \([^()]+\): delete it, or run without resume$"
    path = tmp_path / "run.pt"
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=says):
            files.read_sealed(path)


def _write(folder, i):
    for j in range(100):
        content = files.add_checksum(bytes([i]) * (50 + j))
        files.atomic_write(Path(folder) / "shared.json", content)


def test_eight_writers_of_one_file_leave_one_of_theirs_and_nothing_else(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, i)) for i in range(8)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if (tmp_path / "shared.json").exists():
            assert len(set(files.read_sealed(tmp_path / "shared.json"))) == 1
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 8
    assert os.listdir(tmp_path) == ["shared.json"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(step, tmp_path, monkeypatch):
    path = files.atomic_write(tmp_path / "a.pt", b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if step == "write":
        monkeypatch.setattr(os, "fdopen", lambda *a: (os.close(a[0]), full()))
    else:
        monkeypatch.setattr(os, step, full)
    says = "a.pt cannot be written .No space left on device.: free .*another folder"
    with pytest.raises(OSError, match=says):
        files.atomic_write(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.pt"]
