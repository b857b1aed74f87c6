"""Room: metrics. One family a file; importing the package registers them all."""
