"""Finds what is wrong with a data set. Apps and tools import it, each in one place; `common` does not."""

import os

os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # else it prints a line for each bad image
