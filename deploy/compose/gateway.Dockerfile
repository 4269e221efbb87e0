# The gateway alone: no torch, no vLLM. Built from the repository's root (see compose.yaml).
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
RUN pip install --no-cache-dir .

WORKDIR /
ENV PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8080
CMD ["kvferry", "serve"]
