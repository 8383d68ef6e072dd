"""What stands behind open_data.py and check_data.py: the parsers, and what they look for."""
