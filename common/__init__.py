"""The code that both apps share, from reading data sets to training and evaluation."""

__version__ = "0.1.0"  # equals pyproject.toml's; repeated here for copies of common/ without that file
