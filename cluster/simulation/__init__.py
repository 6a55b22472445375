"""The cluster on virtual time: production code around replicas whose steps only say how long they take."""
