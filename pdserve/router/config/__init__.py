"""Configuration of the router and its flags."""
