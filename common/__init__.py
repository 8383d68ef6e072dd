"""Parts that both apps need and that have one right answer."""

__version__ = "0.1.0"  # of the project, as in pyproject.toml: a copy of common/ alone has no other
