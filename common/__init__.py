"""The code that both apps share, from reading data sets to training and evaluation."""

__version__ = "0.1.0"  # the same as in pyproject.toml; a copy of common/ may have no pyproject.toml
