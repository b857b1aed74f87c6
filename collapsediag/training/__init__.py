"""What every live adapter needs and no trainer knows: patched instances, a window between logs, one monitor per job."""
