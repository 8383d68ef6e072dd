"""The code of convert.py: reads other formats and writes COCO json or TFRecords."""
