"""What runs when: the one loop, what its roles share, and the composition root of a scheduler process."""
