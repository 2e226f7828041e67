"""Look at built pages in a headless browser. `python tests/browser.py _docs
imvu/chapter.html ...` prints how many screens of 900 pixels each page takes at 1400.
"""

import fcntl
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
MEASURE = Path(__file__).with_name("measure.js")


@contextmanager
def served(folder):
    "A folder on a port of this machine; its address."
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    handler.func.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-sync"
    " --disable-background-networking --disable-component-update"
    " --remote-debugging-pipe"
).split() + ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]


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
            [BROWSER, *FLAGS, f"--user-data-dir={self.profile.name}", "about:blank"],
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
        while (answer := self._next()).get("id") != self.sent:
            self.events.append(answer.get("method"))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, address):
        "Load a page to its end."
        self.events.clear()
        self.do("Page.navigate", url=address)
        while "Page.loadEventFired" not in self.events:
            self.events.append(self._next().get("method"))

    def js(self, expression):
        "The value of an expression on the page, or what it promises."
        how = dict(returnByValue=True, awaitPromise=True)
        answer = self.do("Runtime.evaluate", expression=expression, **how)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    def wide(self, width):
        "Give the page a width."
        how = dict(height=900, deviceScaleFactor=1, mobile=False)
        self.do("Emulation.setDeviceMetricsOverride", width=width, **how)

    def press(self, key):
        "A key, as 'Enter' or 'Escape'."
        code = dict(Enter=13, Escape=27)[key]
        how = dict(key=key, code=key, windowsVirtualKeyCode=code)
        how |= dict(text="\r") if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, **how)

    def click(self, selector):
        "The left button on the middle of an element, once it is in view."
        x, y = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        where = dict(x=x, y=y, button="left", clickCount=1)
        for kind in ("mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, **where)


def measure(folder, pages, width):
    """What every page looks like at a width: {page: {slides, cut, foreign, screens}}.

    slides: pixels that the page is wider than its window; cut: what is wider than its
    box and cannot be scrolled to; foreign: addresses that are asked elsewhere; screens: its
    height over 900 pixels, with what is folded closed.
    """
    settled, looks = "new Promise(done => setTimeout(done, 300))", {}
    with served(folder) as address, Tab() as tab:
        tab.wide(width)
        for page in map(str, pages):
            tab.open(f"{address}/{page}")
            tab.js(settled)
            looks[page] = tab.js(MEASURE.read_text())
    return looks


if __name__ == "__main__":
    site, *pages = sys.argv[1:]
    for page, look in measure(site, pages, 1400).items():
        print(f"{look['screens']:6.1f}  {page}")
