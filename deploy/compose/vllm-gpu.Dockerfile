# The stock image of the vLLM version that the plugin is made for, and the plugin on top. Not tested on a GPU yet.
FROM vllm/vllm-openai:v0.32.0

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY vllm_plugin vllm_plugin
# Its needs are vLLM's too, within the same ranges: what the image has stays.
RUN uv pip install --system --no-cache .
COPY deploy/compose/claim_gpu.py /usr/local/bin/claim_gpu.py

# New volumes take the owner of the directories that they are mounted over.
RUN useradd --uid 10001 --create-home kvferry \
    && install --directory --owner kvferry /models /run/kvferry
WORKDIR /home/kvferry
ENV PYTHONUNBUFFERED=1
USER kvferry
