"""Class names that programs often cannot draw."""

HOSTILE_NAMES = (
    "$5_$10",
    "$$",
    "a_$x^$",
    "\\frac{",
    "_background_",
    "_",
    "%s{}",
    "two\nlines",
    "\x1b[31m",
    "\0",
)
