"""Checks data sets for errors. Apps and tools import this package; other modules of `common` do not."""

import os

os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # stops nvImageCodec's line for each bad image
