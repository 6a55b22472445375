"""What Headway exports for Prometheus: the catalogue, the sources of its figures, the way through Ray."""
