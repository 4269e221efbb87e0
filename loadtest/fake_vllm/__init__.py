"""Fake vLLM servers with their llumlets: HTTP around the engine model of ``loadtest.sim``, hundreds in one process."""
