"""The leader: one gateway at a time decides for the cluster, and carries it out."""
