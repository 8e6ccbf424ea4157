# The README's two commands in an image, with a GPU (--gpus all) or without one:
#
#   docker build --tag hf_favorpp .
#   docker run --rm --gpus all hf_favorpp           the quickstart
#   docker run --rm --gpus all hf_favorpp pytest    the tests
#
# What changes rarely comes first: a change of the code repeats the last COPY, one of the dependencies the installs too.

# The tag for readers, the digest for the engine. PyTorch's wheels bring their CUDA 13 libraries, so "base" is enough.
FROM nvidia/cuda:13.0.3-base-ubuntu24.04@sha256:7c7413a56200486f71f181cad9310f6fd31b6bb21816ade15fc9c1e1e927a5c1

# Ubuntu 24.04 has Python 3.12. Triton and torch.compile need a compiler and Python's headers when they run. Ubuntu keeps
# only the newest build of a package, so a version that is pinned here is soon not to be had.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# A number, which whoever runs the image can tell from root's without asking it.
RUN useradd --create-home --uid 1001 favorpp \
    && install --directory --owner=1001 --group=1001 /home/favorpp/hf_favorpp
USER 1001
WORKDIR /home/favorpp/hf_favorpp

# The environment is active from here on.
ENV PATH=/home/favorpp/hf_favorpp/.venv/bin:$PATH \
    VIRTUAL_ENV=/home/favorpp/hf_favorpp/.venv \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1
RUN python3 -m venv .venv && pip install torch==2.13.0

# All that the names and versions of the dependencies depend on. The package is installed as a link to this folder.
COPY --chown=1001:1001 pyproject.toml LICENSE ./
COPY --chown=1001:1001 hf_favorpp/__init__.py hf_favorpp/
RUN touch README.md && pip install -e ".[quickstart]" && pip install -e ".[test]"

COPY --chown=1001:1001 . .

CMD ["accelerate", "launch", "--num_processes", "1", "recipes/glue.py", "--config", "configs/glue/quickstart.yaml"]
