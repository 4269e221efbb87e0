"""The load test: what its users send, what they hold against a stream, and the report. See loadtest/locustfile.py."""
