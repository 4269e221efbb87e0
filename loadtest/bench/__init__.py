"""`make bench-migration`: what a move costs the client, beside the two cruder ways to move a request."""
