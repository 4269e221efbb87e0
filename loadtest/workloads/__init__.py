"""Who asks for how much, and when: the paper's traces, made from their distributions, and real traces from files."""
