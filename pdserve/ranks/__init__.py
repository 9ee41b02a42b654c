"""The ranks of one replica: a leader that decides, and followers that compute and copy what it orders."""
