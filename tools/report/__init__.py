"""What stands behind check_data.py: numbers, anchors, tables and pages."""
