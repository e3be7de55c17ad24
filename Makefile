.PHONY: install demo demo-network test test-fast test-gpu test-pacs test-s3 test-web check check-deploy wheels openapi web lock sbom clean
PYTHON ?= python3
BIN := .venv/bin
# Where an environment forbids to keep bytecode, every process that is started would compile Locum anew.
export PYTHONDONTWRITEBYTECODE :=

# Reinstalled only when the pins or the dependencies change. Without Debian's python3-venv an environment is made
# that has no pip: what was made here is deleted, since the next try would take it for a whole one.
.venv/.installed: pyproject.toml constraints.txt
	@echo "Installing into .venv: up to 3 GB to download, and several minutes. pip names each package when it comes."
	@test -d .venv || $(PYTHON) -m venv .venv || { \
		rm -rf .venv; echo "Python 3.11 or newer with venv is needed: on Debian and Ubuntu, apt install python3-venv"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null || { echo ".venv has no pip: delete it, and start again"; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check --use-pep517 --constraint constraints.txt --editable '.[dev]'
	touch $@

install: .venv/.installed

demo: install
	$(BIN)/python -m locum.demo --train

# Three hospitals as processes of their own, with certificates, on loopback.
demo-network: install
	$(BIN)/python -m locum.demo.network

# In the order of the folders: the long tests of tests/e2e start first, not last. Four processes keep two cores busy,
# since tests wait for the processes that they start; six take as long, and half as much memory again.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --quiet

# Unit tests without processes, for every save.
test-fast: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -m "not process" --numprocesses 2 --dist loadfile --quiet

# On a machine with an NVIDIA GPU. Fails where torch or onnxruntime cannot use it, and where there is none.
test-gpu: install
	$(BIN)/python -m service doctor
	test -e /dev/nvidia0 -o -e /dev/dxg || { echo "no NVIDIA device: make test runs on the pretended one"; exit 1; }
	$(BIN)/python -m pytest -m gpu --quiet -rs

# With a real PACS and independent readers of DICOM: Debian's Orthanc with its DICOMweb plugin, dciodvfy of dicom3tools,
# dcmqi, and dcmrtstruct2nii and rt-utils, which need another pydicom. The other targets skip the tests of those that are
# missing.
test-pacs: install
	command -v Orthanc >/dev/null && command -v dciodvfy >/dev/null || \
		apt-get install --yes --no-install-recommends orthanc orthanc-dicomweb dicom3tools
	test -x $(BIN)/segimage2itkimage || $(BIN)/python -m pip install --quiet dcmqi==1.5.7
	test -x .rtstruct-readers/bin/python || ($(PYTHON) -m venv .rtstruct-readers && \
		.rtstruct-readers/bin/python -m pip install --quiet dcmrtstruct2nii==5 rt-utils==1.2.7 'pydicom<3')
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet tests/unit/service/pacs tests/unit/service/dicom_node \
		tests/integration/service/pacs tests/integration/service/dicom_node tests/integration/service/routes/test_segment_dicom.py \
		tests/unit/service/prediction/test_dicom_rtstruct.py

# Stores and files in buckets of Ceph's gateway, which checks signatures; the other targets use moto's server.
test-s3: install
	command -v radosgw ceph-osd ceph-mon ceph >/dev/null || \
		apt-get install --yes --no-install-recommends ceph-mon ceph-osd ceph-common radosgw
	LOCUM_TEST_S3=ceph OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet tests/unit/model_store tests/unit/service/files \
		tests/integration/service/catalog

# The page in a real Chromium, which the other targets skip if it is missing.
test-web: install
	command -v chromium >/dev/null || apt-get install --yes --no-install-recommends chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/e2e/page --quiet

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/hadolint Dockerfile

# compose.yaml and the Helm chart, by validators that uv installs apart from Locum's packages (380 MB).
check-deploy: install
	$(BIN)/uv run --quiet --script tools/check-deploy

# The three distributions, into dist/: the same commit gives the same bytes.
wheels: install
	tools/build-wheels

openapi: install
	$(BIN)/python -m service.openapi > openapi.yaml

web/node_modules/.installed: web/package.json web/package-lock.json
	cd web && npm ci --no-audit --no-fund
	touch $@

# The page, from web/ into service/static; needs Node 20. What it makes is committed, so that users need no Node.
web: install web/node_modules/.installed
	mkdir -p build && $(BIN)/python -m tests.helpers.web subset > build/page-api.json
	cd web && npx openapi-typescript ../build/page-api.json --output src/api/schema.d.ts
	$(BIN)/python -m tests.helpers.web sign
	cd web && npx tsc --noEmit && npx vite build
	$(BIN)/python -m tests.helpers.web stamp

# The images' packages by hash. For torch's CPU builds: UV_INDEX=https://download.pytorch.org/whl/cpu make lock
lock: install
	$(BIN)/uv pip compile --quiet pyproject.toml --constraint constraints.txt --extra image \
		--generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header \
		--output-file requirements.lock
	$(BIN)/uv pip compile --quiet service/pyproject.toml --constraint constraints.txt --extra image \
		--generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header \
		--output-file requirements-serve.lock

# The bill of materials of the installed packages: CycloneDX, for a scanner of vulnerabilities.
sbom: install
	$(BIN)/uv tool run --from cyclonedx-bom==7.5.0 cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --output-file sbom.json $(BIN)/python

clean:
	rm -rf .venv .locum .mypy_cache .ruff_cache .pytest_cache *.egg-info
