"""What the gateway knows of the cluster: members, their reports, and the state shared through Redis."""
