"""The dashboard page and its data."""
