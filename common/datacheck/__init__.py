"""Checks data sets for errors. Apps and tools import this package; the rest of `common` does not."""

import os

os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # else nvImageCodec prints a line for each bad image
