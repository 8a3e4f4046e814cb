"""What a policy costs, and gains, when a live engine is served with it."""
