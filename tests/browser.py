"""Look at built pages in a headless browser: each is loaded in a frame of a given width
and measured there. `python tests/browser.py _docs papers/imvu.html ...` prints how many
screens of 900 pixels each page takes at 1400, and their sum.
"""

import functools
import http.server
import json
import re
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


def dump(address, seconds=120):
    "The page as the browser has it once its scripts have run."
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
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
