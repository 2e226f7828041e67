"""The bare machine of `pytest`: network calls are refused in every process, loopback is
not, and home and data are empty.
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
}


def alone(code: str):
    "Run code in a process of its own on a bare machine."
    code, env = f"import socket, urllib.request\n{code}", {"PYTHONPATH": str(OFFLINE)}
    return python("-c", code, env=env)


@tabled("call", CALLS)
def test_network_calls_are_refused(call):
    done = alone(CALLS[call])
    assert done.returncode and "network calls are refused in this test" in done.stderr


def test_loopback_is_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = threading.Thread(target=lambda: server.accept()[0].send(b"here"))
        answer.start()
        port = server.getsockname()[1]
        code = f"print(socket.create_connection(('localhost', {port}), 5).recv(9))"
        done = alone(code)
        answer.join()
    assert done.stdout.strip() == "b'here'", done.stderr


def test_a_bare_machine_has_an_empty_home_and_no_data(tmp_path):
    lib = dict(DPCOMM_DATA="/data", HOME="/x", https_proxy="x", PYTHONPATH="/lib")
    after = bare(lib, tmp_path)
    assert not {"DPCOMM_DATA", "https_proxy"} & {*after}
    assert after["HOME"] == str(tmp_path) and not [*tmp_path.iterdir()]
    assert after["PYTHONPATH"].split(os.pathsep) == [str(OFFLINE), "/lib"]
