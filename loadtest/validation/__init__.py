"""Does the simulator tell the truth: the same small trace on two real vLLM servers, and simulated."""
