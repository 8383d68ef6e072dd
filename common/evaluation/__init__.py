"""From detections to COCO's numbers and pictures."""
