"""Checks data sets for errors. Apps and tools import this package; other modules of `common` do not."""

import os

os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # nvImageCodec would print a line for each bad image
