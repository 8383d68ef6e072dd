"""What stands behind convert.py: other formats in, COCO json out."""
