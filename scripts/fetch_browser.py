#!/usr/bin/env python3
"""Fetch a headless Chromium into `.browser/`, for the tests that open the page of `megatron report`.

It comes from the npm registry: `@sparticuz/chromium` holds a Chromium for x86-64 Linux, with the few libraries that a
plain system lacks, and needs no rights of an administrator. Checked against its sha256 sum. On other machines nothing
is fetched: the tests take a Chromium or Chrome on PATH, and skip where there is none.
"""

from __future__ import annotations

import io
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from fetch_material import FetchError, all_good, npm_pack, place, read_tar

PACKAGE = "@sparticuz/chromium@153.0.0"
PACKAGE_SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
CHROMIUM = {"chromium": "53a15d6c3a3d27dfb54c4ba60278b1683136f70cf1e67e989da7dfbd3d451ef0"}
ADVICE = "Install Node.js (it brings npm) and run `make browser` again."
# Node reads brotli; Python's standard library does not.
UNPACK = """
const { createBrotliDecompress } = require('node:zlib');
process.stdin.pipe(createBrotliDecompress()).pipe(process.stdout);
"""


def main() -> int:
    """Fetch what is missing; return 0, or 1 after one message that says what to do."""
    root = Path(__file__).resolve().parent.parent / ".browser"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print(f"browser: none for {platform.system()} {platform.machine()}; tests take one on PATH, or skip")
        return 0
    try:
        changed = make_browser(root)
    except FetchError as error:
        print(f"browser: {error}", file=sys.stderr)
        return 1
    print(f"browser: {'fetched into' if changed else 'already complete in'} {root}")
    return 0


def make_browser(root: Path) -> bool:
    """Put `chromium`, `lib/` and `fonts/` in place; return whether anything was fetched."""
    if all_good(root, CHROMIUM):
        return False
    root.mkdir(exist_ok=True)
    archive = npm_pack(PACKAGE, PACKAGE_SHA256)
    for name in ("al2023", "fonts"):  # libraries of NSS and one typeface: a bare container has neither
        packed = unpacked(read_tar(archive, f"package/bin/{name}.tar.br"))
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(root, filter="data")
    place(root, "chromium", unpacked(read_tar(archive, "package/bin/chromium.br")), CHROMIUM["chromium"])
    (root / "chromium").chmod(0o755)  # last: with it the browser is complete
    return True


def unpacked(packed: bytes) -> bytes:
    """What brotli has packed."""
    node = shutil.which("node")
    if node is None:
        raise FetchError(f"node was not found, and the browser is packed with brotli.\n{ADVICE}")
    done = subprocess.run([node, "-e", UNPACK], input=packed, capture_output=True, check=False)
    if done.returncode:
        raise FetchError(f"node could not unpack the browser: {done.stderr.decode()[-300:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
