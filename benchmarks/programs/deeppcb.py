"""Converts the annotations of DeepPCB in peers/ to COCO json. Lines: left top right bottom class (pixels)."""

import json
import pathlib

root = pathlib.Path("peers/DeepPCB/PCBData")
names = ("open", "short", "mousebite", "spur", "copper", "pin-hole")
categories = [{"id": i, "name": name} for i, name in enumerate(names, start=1)]
for split, file in (("train", "trainval.txt"), ("eval", "test.txt")):
    images, annotations = [], []
    for line in (root / file).read_text().splitlines():
        image, text = line.split()
        images.append(
            {
                "id": len(images) + 1,
                "file_name": image.replace(".jpg", "_test.jpg"),
                "width": 640,
                "height": 640,
            }
        )
        for row in (root / text).read_text().splitlines():
            left, top, right, bottom, category = map(int, row.split())
            bbox = [left, top, right - left, bottom - top]
            annotations.append(
                {"id": len(annotations) + 1, "image_id": len(images), "category_id": category, "bbox": bbox}
            )
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / f"instances_{split}.json").write_text(json.dumps(content))
