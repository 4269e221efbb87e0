"""How long a running vLLM instance takes for its steps, measured over its OpenAI API, for the simulator."""
