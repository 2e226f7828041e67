"""Look at built pages in a headless browser: each is loaded in a frame of a given width
and measured there. `python tests/browser.py _docs imvu/chapter.html ...` prints how many
screens of 900 pixels each page takes at 1400, and their sum.
"""

import fcntl
import functools
import http.server
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
HARNESS = Path(__file__).with_name("measure.html")


class Handler(http.server.SimpleHTTPRequestHandler):
    "Files of the site, and the measuring page at an address of its own."

    def do_GET(self):
        if not self.path.startswith("/measure.html"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(HARNESS.read_bytes())

    def log_message(self, *_):
        pass


@contextmanager
def served(folder):
    "A folder on a port of this machine; its address."
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Tab:
    """A page that gets clicks and keys, over the pipe of Chrome's DevTools protocol.

    `with Tab() as tab`: `tab.open(address)`, `tab.js(expression)`, `tab.press(key)`; an
    answer that takes longer than `seconds` is an error.
    """

    def __init__(self, seconds=120):
        self.seconds, self.sent, self.rest, self.events = seconds, 0, b"", []

    def __enter__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self.out = os.pipe()
        self.into, answers = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs, answers)]
        self.process = subprocess.Popen(
            [
                *(BROWSER, *FLAGS, f"--user-data-dir={self.profile.name}"),
                *("--remote-debugging-pipe", "about:blank"),
            ],
            preexec_fn=lambda: [os.dup2(end, 3 + i) for i, end in enumerate(ends)],
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (*ends, theirs, answers):
            os.close(end)
        self.session = None
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        session = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self.session = session["sessionId"]
        self.do("Page.enable")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)
        self.profile.cleanup()

    def _next(self):
        "The next message of the browser."
        while b"\0" not in self.rest:
            if not select.select([self.into], [], [], self.seconds)[0]:
                raise TimeoutError(f"the browser says nothing for {self.seconds} s")
            self.rest += os.read(self.into, 1 << 20)
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def do(self, method, **params):
        "A command of the protocol; its result."
        self.sent += 1
        asked = dict(id=self.sent, method=method, params=params)
        asked |= {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps(asked).encode() + b"\0")
        while (found := self._next()).get("id") != self.sent:
            self.events.append(found.get("method"))
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']}")
        return found["result"]

    def open(self, address):
        "Load a page to its end."
        self.events.clear()
        self.do("Page.navigate", url=address)
        while "Page.loadEventFired" not in self.events:
            self.events.append(self._next().get("method"))

    def js(self, expression):
        "The value of an expression on the page."
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']['text']}")
        return found["result"].get("value")

    def press(self, key):
        "A key, as 'Enter' or 'Escape'."
        codes = dict(Enter=13, Escape=27, Tab=9)
        more = dict(text="\r") if key == "Enter" else {}
        known = dict(key=key, code=key, windowsVirtualKeyCode=codes[key])
        self.do("Input.dispatchKeyEvent", type="keyDown", **known, **more)
        self.do("Input.dispatchKeyEvent", type="keyUp", **known)

    def click(self, selector):
        "The left button on the middle of an element, once it is in view."
        at = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        where = dict(x=at[0], y=at[1], button="left", clickCount=1)
        for kind in ("mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, **where)


def dump(address, seconds=120):
    "The page as the browser has it once its scripts have run."
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                BROWSER,
                *FLAGS,
                f"--user-data-dir={profile}",
                f"--virtual-time-budget={1000 * seconds}",
                "--dump-dom",
                address,
            ],
            capture_output=True,
            text=True,
            timeout=10 * seconds,
        )
    return done.stdout


def measure(folder, pages, width):
    """What every page looks like at a width: {page: {slides, cut, foreign, screens}}.

    slides: pixels that the page is wider than its window; cut: what is wider than its
    box and cannot be scrolled to; foreign: addresses that are asked elsewhere; screens: its
    height over 900 pixels, with what is folded closed.
    """
    found = {}
    with served(folder) as address:
        for start in range(0, len(pages), 12):
            asked = ",".join(map(str, pages[start : start + 12]))
            text = dump(f"{address}/measure.html?width={width}&pages={asked}")
            answer = re.search(r"<pre id=\"answer\">(.*?)</pre>", text, re.S)
            if not answer:
                raise RuntimeError(f"the browser gave no answer for {asked}")
            shown = answer[1].replace("&lt;", "<").replace("&gt;", ">")
            found |= json.loads(shown.replace("&amp;", "&"))
    return found


if __name__ == "__main__":
    site, *pages = sys.argv[1:]
    heights = {
        page: found["screens"] for page, found in measure(site, pages, 1400).items()
    }
    for page, screens in (
        heights | {"in all": round(sum(heights.values()), 1)}
    ).items():
        print(f"{screens:6.1f}  {page}")
