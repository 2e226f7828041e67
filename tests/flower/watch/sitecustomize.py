"Write down every foreign name or address that a Python process asks for."

import os
import sys

NEAR = ("", "localhost", "0.0.0.0", "::", "::1", "*")
LIST = os.environ.get("DPCOMM_LOOKUPS")


def watch(event, args):
    if event not in ("socket.getaddrinfo", "socket.gethostbyname", "socket.connect"):
        return
    host = args[1] if event == "socket.connect" else args[0]
    if event == "socket.connect":
        if not isinstance(host, tuple):  # a socket in the file system
            return
        host = host[0]
    host = host.decode() if isinstance(host, bytes) else str(host or "")
    if host not in NEAR and not host.startswith("127."):
        with open(LIST, "a") as out:
            out.write(f"{event} {host}\n")


if LIST:
    sys.addaudithook(watch)
    with open(f"{LIST}.watched", "a") as out:
        out.write(f"{os.getpid()} {' '.join(sys.argv)}\n")
