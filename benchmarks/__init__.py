"""Commands that compare the apps with other programs."""
