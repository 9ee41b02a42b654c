"""Kubernetes service discovery: workers are the pods that carry given labels."""
