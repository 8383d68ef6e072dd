"""Tests the request to TensorFlow Serving in docs/export.md."""

import http.server
import json
import re
import shlex
import sys
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from efficientdet import detector
from tests.commands import run
from tests.conftest import ROOT
from tests.small_apps import eagerly

IMAGE = ROOT / "examples" / "shapes" / "000004.jpg"
PAGE = (ROOT / "docs/export.md").read_text()


class Handler(http.server.BaseHTTPRequestHandler):
    """Calls a signature with the values of a request, converted to the dtypes of the signature's inputs.

    This follows https://www.tensorflow.org/tfx/serving/api_rest for requests with `inputs`.
    """

    server: "Server"

    def do_POST(self):
        assert self.path == "/v1/models/shapes:predict"
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        specs = self.server.signature.structured_input_signature[1]
        inputs = {name: tf.constant(content["inputs"][name], spec.dtype) for name, spec in specs.items()}
        outputs = {name: value.numpy().tolist() for name, value in self.server.signature(**inputs).items()}
        body = json.dumps({"outputs": outputs}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    signature: Any  # a function of TensorFlow


@pytest.mark.slow
def test_request_of_the_page_calls_the_signature_of_the_exported_model(tmp_path, monkeypatch, capsys):
    (command,) = re.findall(r"python (efficientdet/export\.py .*) --output=runs/serving/shapes/1", PAGE)
    run(sys.executable, *shlex.split(command), f"--output={tmp_path}/shapes/1", f"--verify_images={IMAGE}")
    (code,) = re.findall(r"```python needs: the server\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(ROOT)
    with Server(("127.0.0.1", 0), Handler) as server:
        model = tf.saved_model.load(str(tmp_path / "shapes" / "1"))
        server.signature = model.signatures["serving_default"]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        exec(code.replace("localhost:8501", f"127.0.0.1:{server.server_port}"), {})
        server.shutdown()
    rows = [re.findall(r"-?[\d.]+(?:e-\d+)?", line) for line in capsys.readouterr().out.splitlines()]
    with eagerly():
        detect = detector.load("efficientdet/demo.weights.h5", hparams="nms_method=hard")
        boxes_px, scores, class_names = detect(IMAGE)[0]
    for row, box, score, name in zip(rows, boxes_px, scores, class_names, strict=False):
        assert detect.class_names[int(row[0])] == name
        np.testing.assert_allclose(float(row[1]), score, atol=0.02)
        np.testing.assert_allclose(np.array(row[2:], float), box, atol=2)  # TensorFlow resizes, not DALI
    assert len(rows) >= len(scores) > 1
