"""The parts of each app's bench.py."""
