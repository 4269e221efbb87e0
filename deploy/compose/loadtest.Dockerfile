# The load test and the fake vLLM servers: no torch, no vLLM. Built from the repository's root (see compose.yaml).
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY loadtest loadtest
COPY vllm_plugin vllm_plugin
RUN pip install --no-cache-dir ".[loadtest]"

# A new volume takes the owner of the directory that it is mounted over.
RUN useradd --uid 10001 --create-home kvferry && install --directory --owner kvferry /reports
WORKDIR /home/kvferry
ENV PYTHONUNBUFFERED=1
USER kvferry
