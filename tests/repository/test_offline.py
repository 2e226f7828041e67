"""The bare machine of `pytest`: network calls are refused in every process,
loopback is not, and home and data are empty.
"""

import os
import socket
import threading

from checkout import python
from conftest import OFFLINE, bare
from tables import tabled

CALLS = {
    "connect": "socket.create_connection(('192.0.2.1', 80), 5)",
    "connect_ex": "socket.socket().connect_ex(('192.0.2.1', 80))",
    "a name": "socket.getaddrinfo('example.org', 80)",
    "a page": "urllib.request.urlopen('http://example.org')",
    "a named host": "socket.socket().connect(('example.org', 80))",
}


def alone(code: str):
    "Run code in a process of its own on a bare machine."
    return python(
        "-c",
        f"import os, socket, urllib.request\n{code}",
        env={"PYTHONPATH": str(OFFLINE)},
    )


@tabled("call", CALLS)
def test_network_calls_are_refused(call):
    done = alone(CALLS[call])
    assert done.returncode and "network calls are refused in this test" in done.stderr


def test_loopback_and_sockets_of_this_machine_are_not(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(
            target=lambda: server.accept()[0].sendall(b"here"), daemon=True
        ).start()
        done = alone(
            f"print(socket.create_connection(('localhost', {server.getsockname()[1]}),"
            " 5).recv(9))"
        )
    assert done.stdout.strip() == "b'here'", done.stderr
    done = alone(
        "a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1)); s ="
        f" socket.socket(socket.AF_UNIX); s.bind({str(tmp_path / 's')!r}); s.listen();"
        f" socket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r})"
    )
    assert done.stdout.strip() == "b'x'" and not done.returncode, done.stderr


def test_a_bare_machine_has_an_empty_home_and_no_data(tmp_path):
    before = {
        "DPCOMM_DATA": "/data",
        "HOME": "/somewhere",
        "https_proxy": "http://127.0.0.1:1",
        "PYTHONPATH": "/lib",
        "PATH": os.environ["PATH"],
    }
    after = bare(before, tmp_path)
    assert (
        not {"DPCOMM_DATA", "https_proxy"} & set(after)
        and after["PATH"] == before["PATH"]
    )
    assert (
        after["HOME"] == str(tmp_path)
        and after["XDG_CACHE_HOME"].startswith(str(tmp_path))
        and not list(tmp_path.iterdir())
    )
    assert after["PYTHONPATH"].split(os.pathsep) == [str(OFFLINE), "/lib"]
