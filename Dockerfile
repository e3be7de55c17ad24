# Two images: the whole (API, worker, training), and by `--target serve` what serves on a CPU, without torch.
# compose.yaml says which part runs which.
#
# tools/build-image builds them without a Docker engine. So both were built and started, the whole with torch's CPU packages.
#
# GPU: the default wheels bring CUDA themselves (torch's own, which onnxruntime-gpu loads too), so that a slim base will
# do; the host needs the NVIDIA driver (580 or newer) and its container toolkit, and the container `--gpus all` or one
# device, since the image by itself asks for none. Without a GPU the same image runs on the CPU. For a CPU-only image of a fraction of the size, lock torch's CPU builds first (`make lock` says how)
# and name their index: docker build --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .

# Pin it by its digest before a release: docker.io/library/python:3.11-slim@sha256:...
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/locum
WORKDIR /src
# The packages first: a change of the code alone installs none of them again. Each must have the hash in the lock.
COPY requirements.lock ./
RUN /opt/locum/bin/pip install --require-hashes --requirement requirements.lock
COPY pyproject.toml README.md ./
COPY model_store model_store
COPY personalization personalization
COPY service service
COPY training training
COPY locum locum
RUN /opt/locum/bin/pip install --no-deps --no-build-isolation .

# The same for the distribution locum-serve.
FROM ${BASE} AS build-serve
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/locum
WORKDIR /src
COPY requirements-serve.lock ./
RUN /opt/locum/bin/pip install --require-hashes --requirement requirements-serve.lock
COPY model_store model_store
COPY personalization personalization
COPY service service
COPY locum locum
RUN /opt/locum/bin/pip install --no-deps --no-build-isolation ./service

FROM ${BASE} AS run
# A user without a shell or a password; its number is fixed, so that volumes can be given to it beforehand.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin locum \
    && install --directory --owner=locum --mode=0755 /var/lib/locum /var/lib/locum/store \
    && install --directory --owner=locum --mode=0700 /var/lib/locum/state
ENV PATH=/opt/locum/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    LOCUM_STORE=/var/lib/locum/store \
    LOCUM_STATE_DIR=/var/lib/locum/state \
    LOCUM_AUTH=keys \
    LOCUM_HOST=0.0.0.0 \
    NVIDIA_VISIBLE_DEVICES=void \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /var/lib/locum
EXPOSE 8000
# Live, not ready: a database that is away for a moment is no reason to kill the process.
# It names an allowed host, because the service answers 421 for others.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD \
    ["python", "-c", "import os, urllib.request as r; \
host = (os.environ.get('LOCUM_ALLOWED_HOSTS') or 'localhost').split(',')[0].strip(); \
r.urlopen(r.Request('http://127.0.0.1:8000/health/live', headers={'Host': host}), timeout=2)"]
# All interfaces of the container (LOCUM_HOST), so callers need a key; compose.yaml publishes the port on the host's
# loopback only. The command `locum demo --serve` serves the trained store that Locum carries.
CMD ["python", "-m", "service", "--no-worker"]

FROM run AS serve
COPY --from=build-serve /opt/locum /opt/locum

# The last one is what `docker build` makes without --target.
FROM run AS whole
COPY --from=build /opt/locum /opt/locum
