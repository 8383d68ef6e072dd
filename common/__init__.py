"""The code that both apps share, from reading data sets to training and evaluation."""

__version__ = "0.1.0"  # as in pyproject.toml, which copies of common/ may lack
