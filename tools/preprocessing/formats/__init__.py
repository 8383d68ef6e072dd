"""The kinds of sources that image_source.py opens."""
