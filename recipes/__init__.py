"""Scripts for the commands, and the configuration files that they read."""
