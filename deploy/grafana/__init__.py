"""Dashboards and alerts as code, and their way into Grafana and Prometheus."""
