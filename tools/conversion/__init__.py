"""The parts of tools/convert.py: readers and writers of formats, and scaling of images."""
