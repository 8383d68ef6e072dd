"""Sends image files to the model `detect` on a Triton server, and prints the detections.

    python client.py photo.jpg other.png
    TRITON=host:8000 python client.py photo.jpg

Each request has one image, because all rows of a request's array have the same length.
"""

import json
import os
import sys

import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient(os.environ.get("TRITON", "localhost:8000"))
parameters = client.get_model_config("detect")["parameters"]
names = json.loads(parameters["class_names"]["string_value"])
for path in sys.argv[1:]:
    encoded = np.fromfile(path, np.uint8)[np.newaxis]  # (1, bytes)
    image = triton.InferInput("image", encoded.shape, "UINT8")
    image.set_data_from_numpy(encoded)
    result = client.infer("detect", [image])
    boxes, scores, classes, count = map(result.as_numpy, ("boxes", "scores", "classes", "count"))
    for i in range(count[0, 0]):
        if scores[0, i] >= 0.3:
            print(path, names[classes[0, i]], f"{scores[0, i]:.2f}", boxes[0, i].round(1))
