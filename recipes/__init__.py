"""The scripts to launch, one a file, and the configurations that they read."""
