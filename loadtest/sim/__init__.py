"""A model of a vLLM engine without a clock of its own: simulated in virtual time, or behind HTTP as a fake instance."""
