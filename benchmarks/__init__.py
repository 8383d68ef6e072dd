"""Commands that are not part of an app."""
