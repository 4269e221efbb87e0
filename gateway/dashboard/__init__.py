"""A page that shows the cluster as this gateway knows it, and the one stream that it is made from."""
