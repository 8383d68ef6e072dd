"""Finds what is wrong with a data set. Apps and tools import it, each in one place; `common` does not."""

import os

os.environ.setdefault(
    "PYNVIMGCODEC_VERBOSITY", "0"
)  # nvImageCodec would print its own line for each bad image
