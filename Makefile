# Each target is a short list of commands. `make demo` and `make test` first set up everything that they need.
PYTHON ?=
WITH_GPU ?=
VENV := .venv
RUN := $(VENV)/bin/python
TORCH := $(VENV)/torch
TRITON := $(VENV)/triton
TRACKERS := $(VENV)/trackers
DOCS := $(VENV)/docs
SITE := build/site
DEMO := runs/demo-efficientdet
DEMO_SMALL_EFFICIENTDET := runs/demo-small-efficientdet
DEMO_YOLOV4 := runs/demo-yolov4
DEMO_DATA := runs/demo-data
DEMO_IMAGES := 600
DEMO_EVAL_IMAGES := 100
DEMO_FLAGS :=
BENCH := runs/bench
BENCH_FLAGS := --rounds=3
PICTURES := runs/pictures
BCCD := runs/accuracy/data/bccd
BENCH_GPU_FLAGS := --rounds=1
NEWEST := runs/newest
JOBS ?= 2
# Without --no-loadscope-reorder, the files with the most tests would always start first. Tests run `make` themselves: it
# must not wait for the jobs of this one.
PYTEST := MAKEFLAGS= $(RUN) -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder --durations=10
PYTEST_FLAGS :=
CHECKS := tests/test_files_of_0_1_0.py tests/apps/test_determinism.py tests/distributed/test_stop_and_resume.py \
  tests/test_structure.py
APPS := efficientdet yolov4

.PHONY: help setup horovod torch triton trackers docs docs-serve demo demo-small-efficientdet demo-yolov4 demo-data demo-clean check test test-long test-all test-gpu try-newest bench bench-gpu soak pictures docker docker-test lint format clean

help:  ## lists all targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 25

setup: $(VENV)/.ready  ## creates the virtual environment with every pinned package (about 4 GB); WITH_GPU=1 adds CUDA on a host without a GPU

# A GPU that the last set-up did not find, or WITH_GPU=1. In an image, nobody can write the environment.
ifeq ($(wildcard $(VENV)/.gpu),)
NEW_GPU := $(shell [ -w $(VENV)/.ready ] && { [ "$(WITH_GPU)" ] || nvidia-smi -L >/dev/null 2>&1; } && echo new-gpu)
.PHONY: new-gpu
endif

$(VENV)/.ready: pyproject.toml docker/setup_env.sh $(wildcard docker/locks/*.txt) $(NEW_GPU)
	@PYTHON="$(PYTHON)" docker/setup_env.sh $(VENV) dev export faster-coco $(if $(WITH_GPU),gpu)
	@touch $@

horovod: $(VENV)/.horovod  ## installs Horovod for many processes: compiled once (two minutes on two cores), then cached

# MAKEFLAGS also has the variables of the command line. With them alone, Horovod would compile one file at a time.
$(VENV)/.horovod: $(VENV)/.ready docker/build_horovod.sh docker/patch_horovod.sh
	@MAKEFLAGS="$(filter -j%,$(MAKEFLAGS))" docker/build_horovod.sh $(VENV)
	@touch $@

torch: $(TORCH)/.ready  ## creates another environment with PyTorch and DALI, for examples/pytorch_loader.py (2 GB on CPUs, a minute)

$(TORCH)/.ready: pyproject.toml | setup
	$(RUN) -m venv $(TORCH)
	$(RUN) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*p["dependencies"], *p["optional-dependencies"]["torch"], sep="\n")' >$(TORCH)/pins.txt
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(TORCH)/pins.txt \
	  nvidia-dali-cuda120 numpy pillow torch
	@touch $@

triton: $(TRITON)/.ready  ## creates another environment with a Triton server, for the tests of export.py --format=triton (1.5 GB, a minute)

# The server's Python backend returns empty arrays with NumPy 2.
$(TRITON)/.ready: pyproject.toml | setup
	$(RUN) -m venv $(TRITON)
	$(RUN) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = p["optional-dependencies"]; \
	  print(*extras["triton"], *(pin for pin in p["dependencies"] + extras["export"] \
	    if pin.startswith(("nvidia-dali", "onnxruntime", "pillow"))), "numpy<2", sep="\n")' >$(TRITON)/pins.txt
	$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(TRITON)/pins.txt
	@touch $@

trackers: $(TRACKERS)/.ready  ## creates another environment with MLflow and Weights & Biases, for examples/track_run.py

$(TRACKERS)/.ready: pyproject.toml | setup
	$(RUN) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check $$($(RUN) -c 'import tomllib; \
	  p = tomllib.load(open("pyproject.toml", "rb"))["project"]; pins = [*p["optional-dependencies"]["trackers"]]; \
	  print(*pins, *(pin for pin in p["dependencies"] if pin.startswith("pillow")))')
	@touch $@

# With --quiet, --strict would let broken links pass.
docs: $(DOCS)/.ready  ## builds the web site of docs/ in build/site, in another environment without TensorFlow; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --site-dir=$(abspath $(SITE))

docs-serve: $(DOCS)/.ready  ## shows this web site at http://127.0.0.1:8000, and builds it again after each change; Ctrl-C ends it
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs serve

$(DOCS)/.ready: pyproject.toml
	$(or $(PYTHON),$(wildcard $(RUN)),python3) -m venv $(DOCS)
	$(DOCS)/bin/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*p["optional-dependencies"]["docs"], sep="\n")' >$(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(DOCS)/requirements.txt
	@touch $@

# $(1): app, $(2): recipe, $(3): directory of the run. Trains, or resumes a run, unless another version of the code made it.
define run_demo
	@version=$$(cat tools/synthetic.py $(1)/*.py $(1)/flags/$(2).txt | cksum); overwrite=false; \
	if [ -e "$(3)/run.json" ] && [ "$$version" != "$$(cat "$(3)/.version" 2>/dev/null)" ]; then \
	  echo "$(3) contains a run of another version: starting again"; overwrite=true; \
	fi; \
	mkdir -p "$(3)" && echo "$$version" >"$(3)/.version" && \
	$(RUN) $(1)/train.py --flagfile=$(1)/flags/$(2).txt --output_dir="$(3)" --overwrite=$$overwrite $(DEMO_FLAGS)
	$(RUN) $(1)/eval.py --weights="$(3)" --eval_images=$(DEMO_DATA)/eval/images \
	  --eval_annotations=$(DEMO_DATA)/eval/instances.json
	$(RUN) $(1)/infer.py --weights="$(3)" --images=$(DEMO_DATA)/eval/images \
	  --annotations=$(DEMO_DATA)/eval/instances.json --output_dir="$(3)/pictures" --score_threshold=0.3
endef

demo: demo-data  ## trains efficientdet-nano on synthetic images, evaluates it, draws its detections (6 minutes on two cores)
	$(call run_demo,efficientdet,demo,$(DEMO))

demo-small-efficientdet: demo-data  ## does the same as `make demo`, with EfficientDet's backbone, anchors and losses
	$(call run_demo,efficientdet,small_efficientdet_demo,$(DEMO_SMALL_EFFICIENTDET))

demo-yolov4: demo-data  ## does the same as `make demo`, with yolov4-nano
	$(call run_demo,yolov4,demo,$(DEMO_YOLOV4))

demo-data: setup $(DEMO_DATA)/train/instances.json $(DEMO_DATA)/eval/instances.json

$(DEMO_DATA)/train/instances.json: Makefile tools/synthetic.py | setup
	$(RUN) tools/synthetic.py --output_dir=$(DEMO_DATA)/train --num_images=$(DEMO_IMAGES) --seed=1

$(DEMO_DATA)/eval/instances.json: Makefile tools/synthetic.py | setup
	$(RUN) tools/synthetic.py --output_dir=$(DEMO_DATA)/eval --num_images=$(DEMO_EVAL_IMAGES) --seed=2

pictures: setup $(DEMO_DATA)/eval/instances.json  ## draws the pictures of docs/ again (docs/accuracy.md has the commands that create the BCCD directory)
	$(RUN) efficientdet/train.py --model_name=efficientdet-nano --image_size=256x320 --batch_size=8 --epochs=43 --seed=1 \
	  --train_images=$(BCCD)/images/train2017 --train_annotations=$(BCCD)/annotations/instances_train2017.json \
	  --eval_images=$(BCCD)/images/val2017 --eval_annotations=$(BCCD)/annotations/instances_val2017.json --eval_every=4 \
	  --output_dir=$(PICTURES)/bccd --overwrite
	$(RUN) efficientdet/infer.py --weights=$(PICTURES)/bccd --images=$(BCCD)/images/val2017 \
	  --annotations=$(BCCD)/annotations/instances_val2017.json --output_dir=$(PICTURES)/detections
	$(RUN) tools/check_data.py --images=$(DEMO_DATA)/eval/images --annotations=$(DEMO_DATA)/eval/instances.json \
	  --report=$(PICTURES)/report.html
	$(RUN) examples/preprocessing/operators.py --input=examples/shapes/000012.jpg --output=docs/preprocess.jpg
	$(RUN) efficientdet/infer.py --weights=efficientdet/demo.weights.h5 --images='$(DEMO_DATA)/eval/images/0000[23][1268].jpg' \
	  --annotations=$(DEMO_DATA)/eval/instances.json --output_dir=$(PICTURES)/demo --score_threshold=0.3
	$(RUN) -c 'import base64, io, re, sys; import numpy as np; from PIL import Image, ImageOps; \
	  pngs = map(base64.b64decode, re.findall("image/png;base64,([^\"]+)", open(sys.argv[1]).read())); \
	  parts = [np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) for png in pngs]; \
	  ImageOps.contain(Image.fromarray(np.concatenate(parts)), (1000, 2000)).save(sys.argv[2])' $(PICTURES)/report.html docs/report.jpg
	$(RUN) -c 'import sys; from PIL import Image; [Image.open(a).convert("RGB").save(b, quality=85) for a, b in zip(sys.argv[1::2], sys.argv[2::2])]' \
	  $(PICTURES)/detections/contact_sheet.png docs/detections.jpg $(PICTURES)/demo/contact_sheet.png docs/demo.jpg \
	  $(PICTURES)/bccd/loss_curves.png docs/loss_curves.jpg $(PICTURES)/bccd/first_batch.png docs/first_batch.jpg

demo-clean:  ## deletes the demos' data and runs, so that the next demo starts from the beginning
	rm -rf $(DEMO) $(DEMO_SMALL_EFFICIENTDET) $(DEMO_YOLOV4) $(DEMO_DATA)

check: horovod  ## tests what a change must not break: resuming, bit-identical results, two ranks, files of 0.1.0 (7 minutes on two shared cores)
	$(RUN) -m pytest $(CHECKS) -k 'not killed or yolov4'

test: lint horovod  ## runs lint, then all tests except the long ones, in JOBS=2 processes of up to 3 GB each
	CUDA_VISIBLE_DEVICES= $(PYTEST) -m 'not slow' $(PYTEST_FLAGS)

test-long: horovod torch triton trackers $(DOCS)/.ready  ## runs only the long tests: the commands of the pages, comparisons of runs
	CUDA_VISIBLE_DEVICES= $(PYTEST) -m slow

test-all: test test-long  ## runs all tests

test-gpu: setup  ## runs the tests that need a GPU, each file in a process of its own (takes hours; never ran)
	-@! nvidia-smi -L >/dev/null 2>&1 || $(MAKE) --no-print-directory horovod
	$(RUN) tests/gpu/run.py

try-newest: setup  ## tests the newest TensorFlow, Keras and DALI that pip finds, in environments of 4 GB each
	$(RUN) -m tests.try_newest $(NEWEST)

bench: setup  ## measures loaders, training steps and both together, and each stage of a loader (15 minutes on two cores)
	$(RUN) tools/bench.py efficientdet --batch_size=8 --json=$(BENCH)/efficientdet.json $(BENCH_FLAGS)
	$(RUN) tools/bench.py yolov4 --image_size=416 --batch_size=4 --json=$(BENCH)/yolov4.json $(BENCH_FLAGS)

bench-gpu: setup  ## measures on a GPU which flags to change; an interrupted measurement continues (an hour; never ran)
	$(RUN) tools/bench.py gpu --json=$(BENCH)/gpu.json $(BENCH_GPU_FLAGS)

soak: setup horovod  ## kills runs at random steps and starts them again, and interrupts saves (about two hours)
	$(RUN) -m tests.soak.soak_kills --app=efficientdet --ranks=1 --rounds=20
	$(RUN) -m tests.soak.soak_kills --app=efficientdet --ranks=2 --rounds=20
	$(RUN) -m tests.soak.soak_kills --app=yolov4 --ranks=1 --rounds=20
	$(RUN) -m tests.soak.soak_kills --app=yolov4 --ranks=2 --rounds=20
	$(RUN) -m tests.common.training.soak_saves --rounds=100

docker:  ## builds the images dali-detection:cpu and dali-detection (needs Docker)
	docker build -f docker/Dockerfile.cpu -t dali-detection:cpu .
	docker build -f docker/Dockerfile -t dali-detection .

docker-test:  ## builds the CPU image without Docker and tests it (root; apt: buildah debootstrap; half an hour)
	docker/build_without_docker.sh

lint: setup  ## runs ruff, mypy, codespell, shellcheck and hadolint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell $(APPS) common tools benchmarks tests examples docker docs *.md Makefile
	$(VENV)/bin/shellcheck docker/*.sh .ci/run
	$(VENV)/bin/hadolint docker/Dockerfile docker/Dockerfile.cpu

format: setup  ## applies ruff's formatting and safe fixes
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: demo-clean  ## deletes the demos, the virtual environment and the caches; other runs stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
