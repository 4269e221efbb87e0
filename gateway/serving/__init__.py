"""Serving requests. Begin with serve.py."""
