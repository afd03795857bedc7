"""Looks at every page of the built site in a browser, at two widths: does anything stick out?

The site is served from this machine. One page of our own shows the others in frames of 400 and of
1280 pixels, one after the other, and measures in each of them what is wider than its place: the
page as a whole (never allowed), blocks of code that are cut, and tables that have to be scrolled.

    mkdocs build --strict --site-dir /tmp/site
    python docs/figures/pages.py /tmp/site                # exit code 1 if a page or code is cut
    python docs/figures/pages.py /tmp/site --shots DIR    # also writes pictures of every page
    python docs/figures/pages.py /tmp/site --shots DIR --dark --only index.html
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WIDTHS = (400, 1280)
TOGETHER = 8
"""Pages that one start of the browser measures."""
TALLEST = 2600
"""Pixels of a page that a picture shows; the measurement is of all of it."""
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HARNESS = """<!doctype html><meta charset="utf-8"><title>pages</title>
<style>body{margin:0;background:#888}
iframe{border:0;background:#fff;display:inline-block;vertical-align:top}</style>
<body><script>
const pages = PAGES, width = WIDTH, tallest = TALLEST, dark = DARK, keep = KEEP, found = {};
if (dark) localStorage.setItem("/.__palette",
  JSON.stringify({index: 1, color: {media: "", scheme: "slate", primary: "teal", accent: "teal"}}));
function name(element) { return element.textContent.trim().replace(/\\s+/g, " ").slice(0, 60); }
function measure(doc) {
  const wide = list => [...list].filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1);
  const root = doc.scrollingElement;
  return {
    height: root.scrollHeight,
    page: root.scrollWidth > width ? root.scrollWidth : 0,
    code: wide(doc.querySelectorAll("pre, pre > code")).map(e => [e.scrollWidth, name(e)]),
    tables: wide(doc.querySelectorAll(".md-typeset__scrollwrap")).map(
      e => [e.scrollWidth, name(e)]),
  };
}
function show(page) {
  return new Promise(done => {
    const frame = document.createElement("iframe");
    frame.style.width = width + "px";
    frame.style.height = "1000px";
    frame.onload = () => setTimeout(() => {
      found[page] = measure(frame.contentDocument);
      if (keep) frame.style.height = Math.min(found[page].height, tallest) + "px";
      else frame.remove();
      done();
    }, 300);
    frame.src = page;
    document.body.append(frame);
  });
}
(async () => {
  for (const page of pages) await show(page);
  const out = document.createElement("script");
  out.type = "application/json";
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
</script></body>"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *args: object) -> None:
        """Nothing is written."""


def browser() -> str:
    """The browser of this machine."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise SystemExit("no chromium here: apt-get install chromium")


def browse(address: str, *options: str) -> str:
    """Opens a page of ours and waits until it has measured all pages; returns its HTML."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser(), *FLAGS, f"--user-data-dir={profile}", *options, "--dump-dom", address]
        # Its time passes only while nothing is loaded, so slow machines measure the same.
        command.insert(1, "--virtual-time-budget=600000")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def look(site: Path, pages: list[str], width: int, shot: Path | None, dark: bool) -> dict:
    """Measures these pages at a width; with `shot`, also writes a picture of them side by side."""
    values = {
        "PAGES": json.dumps(pages),
        "WIDTH": str(width),
        "TALLEST": str(TALLEST),
        "DARK": json.dumps(dark),
        "KEEP": json.dumps(shot is not None),
    }
    text = re.sub("|".join(values), lambda match: values[match[0]], HARNESS)
    (site / "_pages.html").write_text(text)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        options = [] if shot is None else [f"--screenshot={shot}"]
        options.append(f"--window-size={width * len(pages) + 20},{TALLEST}")
        text = browse(f"http://127.0.0.1:{server.server_port}/_pages.html", *options)
    finally:
        server.shutdown()
        server.server_close()
        (site / "_pages.html").unlink()
    found = re.search(r'id="found">(.*?)</script>', text, re.DOTALL)
    if found is None:
        raise RuntimeError(f"the browser has not measured {pages}")
    return json.loads(found[1])


def main() -> int:
    """Measures all pages; returns 1 if one of them is cut."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path, help="what mkdocs has built")
    parser.add_argument("--shots", type=Path, help="a directory for pictures")
    parser.add_argument("--dark", action="store_true", help="in dark mode")
    parser.add_argument("--only", nargs="+", help="these pages")
    args = parser.parse_args()
    pages = args.only or sorted(
        str(path.relative_to(args.site))
        for path in args.site.rglob("*.html")
        if path.name not in ("404.html", "_pages.html")
    )
    cut = 0
    for width in WIDTHS:
        size = (6 if width < 1000 else 3) if args.shots else TOGETHER
        for first in range(0, len(pages), size):
            part = pages[first : first + size]
            shot = args.shots / f"{width}-{first:03}.png" if args.shots else None
            for page, found in look(args.site, part, width, shot, args.dark).items():
                for what in ("page", "code", "tables"):
                    if found[what]:
                        print(f"{width} px: {page}: {what}: {found[what]}")
                        cut += what != "tables"
    print(f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} px: {cut} cut")
    return 1 if cut else 0


if __name__ == "__main__":
    sys.exit(main())
