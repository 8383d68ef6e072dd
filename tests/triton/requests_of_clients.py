"""Sends requests to a Triton server, in the environment of `make triton`, and prints what it answers as JSON.

python requests_of_clients.py REPOSITORY HTTP_PORT GRPC_PORT IMAGE ...
"""

import concurrent.futures
import json
import pathlib
import sys
import time

import numpy as np
import tritonclient.grpc
import tritonclient.http
from google.protobuf import text_format
from PIL import Image
from tritonclient.grpc import model_config_pb2

NUM_REQUESTS, NUM_CLIENTS, DAMAGED_EVERY = 200, 8, 10
OUTPUTS = ("boxes", "scores", "classes", "count")
REPOSITORY, HTTP_PORT, GRPC_PORT, *FILES = sys.argv[1:]
ENCODED = [np.fromfile(file, np.uint8) for file in FILES]


def infer(protocol, client, model: str, **arrays: np.ndarray) -> list:
    """Returns the detections of each image, as [left, top, right, bottom, score, class]."""
    types = {"uint8": "UINT8", "int32": "INT32"}
    inputs = [protocol.InferInput(name, x.shape, types[str(x.dtype)]) for name, x in arrays.items()]
    for each, array in zip(inputs, arrays.values(), strict=True):
        each.set_data_from_numpy(array)
    boxes, scores, classes, count = map(client.infer(model, inputs).as_numpy, OUTPUTS)
    rows = np.concatenate([boxes, scores[..., None], classes[..., None]], axis=2)
    return [row[: count[i, 0]].tolist() for i, row in enumerate(rows)]


def http() -> tritonclient.http.InferenceServerClient:
    return tritonclient.http.InferenceServerClient(f"127.0.0.1:{HTTP_PORT}")


def padded(images: list[np.ndarray]) -> np.ndarray:
    """Returns encoded images as one array, with zeros after their ends."""
    rows = np.zeros((len(images), max(map(len, images))), np.uint8)
    for row, image in zip(rows, images, strict=True):
        row[: len(image)] = image
    return rows


def read_configs() -> dict[str, str]:
    """Returns what the server makes of each config.pbtxt, after Triton's own protobuf parsed it."""
    for file in pathlib.Path(REPOSITORY).glob("*/config.pbtxt"):
        text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
    return {name: http().get_model_config(name) for name in ("preprocess", "detector", "detect")}


def measure(num_requests: int, send) -> tuple[list, dict[str, float]]:
    """Sends requests from several clients. Returns the answers, and their speed."""
    numbers = [range(start, num_requests, NUM_CLIENTS) for start in range(NUM_CLIENTS)]

    def run(numbers: range) -> list:
        client, answers = http(), []
        for number in numbers:
            start = time.monotonic()
            try:
                answer = send(client, number)
            except tritonclient.http.InferenceServerException as error:
                answer = str(error)
            answers.append((number, answer, time.monotonic() - start))
        return answers

    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = sorted(each for part in pool.map(run, numbers) for each in part)
    seconds = time.monotonic() - start
    times = [seconds for *_, seconds in answers]
    speed = {"images_per_second": num_requests / seconds, "median_ms": 1000 * float(np.median(times))}
    return [answer for _, answer, _ in answers], speed


def send_files(client, number: int) -> list:
    """Every tenth image is cut off."""
    image = ENCODED[number % len(FILES)]
    is_damaged = number % DAMAGED_EVERY == 0
    return infer(tritonclient.http, client, "detect", image=image[None, : 1000 if is_damaged else None])[0]


def send_pixels(client, number: int) -> list:
    """The client decodes and resizes the image with Pillow."""
    height, width, _ = SHAPE
    picture = Image.open(FILES[number % len(FILES)]).convert("RGB")
    scale = min(width / picture.width, height / picture.height)
    size = (int(picture.width * scale + 0.5), int(picture.height * scale + 0.5))
    images = np.zeros((1, height, width, 3), np.uint8)
    images[0, : size[1], : size[0]] = picture.resize(size, Image.Resampling.BILINEAR)
    sizes = np.array([[picture.height, picture.width]], np.int32)
    return infer(tritonclient.http, client, "detector", images=images, image_sizes=sizes)[0]


CONFIGS = read_configs()
SHAPE = list(map(int, CONFIGS["detector"]["input"][0]["dims"]))
grpc = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{GRPC_PORT}")
report = {
    "configs": CONFIGS,
    "http": [infer(tritonclient.http, http(), "detect", image=image[None])[0] for image in ENCODED],
    "grpc": [infer(tritonclient.grpc, grpc, "detect", image=image[None])[0] for image in ENCODED],
    "batch": infer(tritonclient.grpc, grpc, "detect", image=padded(ENCODED)),
}
report["answers"], report["speed"] = measure(NUM_REQUESTS, send_files)
report["statistics"] = http().get_inference_statistics("detector")["model_stats"][0]
_, report["speed_with_pixels"] = measure(NUM_REQUESTS // 4, send_pixels)
print(json.dumps(report))
