"""What runs kvferry for people and tests: the local stack, the demo and the test model."""
