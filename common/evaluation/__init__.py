"""Computes COCO metrics from detections, and draws pictures."""
