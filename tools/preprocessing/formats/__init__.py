"""What stands behind image_source.py: one module a kind of source."""
