"""kvferry's gateway: one OpenAI-compatible endpoint in front of a fleet of vLLM servers."""
