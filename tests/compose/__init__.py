"""Tests with a Docker engine: `make test-compose`."""
