"""Draws the picture of a report that the README shows.

    python docs/picture.py pt/report.html docs/report.png

Needs chromium. The picture is that of the page's upper part on a screen of 1,100 pixels, in 256 colours.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

WIDTH, HEIGHT = 1100, 1560


def main(report: str, picture: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.png"
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        flags += "--disable-component-update --disable-sync --hide-scrollbars"
        own = [f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={page}"]
        command = ["chromium", *flags.split(), *own, Path(report).resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        with Image.open(page) as image:
            image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                picture, optimize=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
