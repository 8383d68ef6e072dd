"""Checks data sets for errors. Other modules of `common` do not import this package."""

import os

os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # nvImageCodec would print a line for each bad image
