"""The browser that opens HTML reports in tests."""

from __future__ import annotations

import shutil

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
"""Path of a browser based on Chromium; empty if none is on the PATH."""
