"""The OpenAI formats, pure: what is read from a body, the framing of event streams, error bodies."""
