"""The ranks of one replica: what their schedulers decide by, what they agree on, how they find and lose each other."""
