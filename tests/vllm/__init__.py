CORRUPT_VARIABLE = "KVFERRY_TEST_CORRUPT"
"""Names the file whose presence makes both servers write zeros instead of copied blocks (``corrupting.py``)."""
